"""Quantized checkpoints beside `--quantize` of the same width: speed, size, and memory while they are loaded.

All models of a shape are loaded in one process and take their steps in turns, so that other processes slow all of
them, and none finds its weights in a cache; the best step counts. The output head is not in the times: `--quantize`
rounds it, and most of these checkpoints do not.
"""

from __future__ import annotations

import os
import threading
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.checkpoints import MAKERS
from lab.bench.parts import Case, load, make_batch
from penstock.app.bench.checkpoint import HALF_B, LLAMA_135M, LLAMA_TINY
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.heap import trim_heap
from penstock.engine.model.files import open_files
from penstock.engine.program.native import NativeDecoder
from penstock.engine.quant.storages.names import LAYERS

SHAPES = {shape.name: shape for shape in (LLAMA_135M, HALF_B, LLAMA_TINY)}
CASES = (Case("1 row", 1, 1, 64), Case("64 rows", 64, 1, 64))
_POLL_S = 0.001

Row = dict[str, Any]


@dataclass(frozen=True, slots=True)
class Subject:
    """A format, and what `--quantize` makes of a checkpoint in bfloat16 in the same width."""

    format: str
    like: str

    @property
    def name(self) -> str:
        return f"--quantize {self.like}" if self.format == "dense" else self.format


SUBJECTS = (
    Subject("dense", "int8"),
    Subject("Q8_0", "int8"),
    Subject("W8A8", "int8"),
    Subject("dense", "int4"),
    Subject("Q4_0", "int4"),
    Subject("Q4_K", "int4"),
    Subject("GPTQ", "int4"),
    Subject("W4A16", "int4"),
)


class Peak:
    """The most memory that this process had within a block, beside what it had before, in bytes.

    The pages of mapped files do not count: the machine can take them back at any time.
    """

    def __init__(self) -> None:
        self.bytes = 0
        self._ended = threading.Event()
        self._thread = threading.Thread(target=self._watch)

    def __enter__(self) -> Peak:
        trim_heap()
        self._before = _anonymous_bytes()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join()
        trim_heap()
        self.kept = _anonymous_bytes() - self._before
        """The memory that it still had at the end."""

    def _watch(self) -> None:
        is_last = False
        while not is_last:
            is_last = self._ended.wait(_POLL_S)
            self.bytes = max(self.bytes, _anonymous_bytes() - self._before)


def _anonymous_bytes() -> int:
    pages = Path("/proc/self/statm").read_text(encoding="ascii").split()
    return (int(pages[1]) - int(pages[2])) * os.sysconf("SC_PAGE_SIZE")


class NoNativeDecoder(RuntimeError):
    """The model runs in plain torch here, which unpacks formats."""


def measure(shape_name: str, seconds: float, threads: int, root: Path | None = None) -> list[Row]:
    """A row for each subject; `seconds` are those of the steps of each case."""
    shape, rows, models = SHAPES[shape_name], [], []
    for subject in SUBJECTS:
        path = MAKERS[subject.format](shape, root)
        quantize = subject.like if subject.format == "dense" else None
        with Peak() as peak:
            models.append(load(path, {"quantize": quantize, "keep_quantized": False}, threads))
        names = {"shape": shape.name, "name": subject.name, "like": f"--quantize {subject.like}"}
        rows.append(names | _sizes(path, models[-1]) | {"beside": max(0, peak.bytes - peak.kept)})
    seconds_of = {case.name: _best_steps(models, case, seconds) for case in CASES}
    return [
        row | {"seconds": {case: best[i] for case, best in seconds_of.items()}} for i, row in enumerate(rows)
    ]


def _sizes(path: Path, model: LoadedModel) -> dict[str, int]:
    """Bytes of the layers in the file, in memory, and of one of them in the file."""
    if not isinstance(model.decoder, NativeDecoder):
        raise NoNativeDecoder("formats are compared with the native CPU kernels only")
    entries = open_files(path).entries
    stored = sum(entry.num_bytes for name, entry in entries.items() if name.startswith(LAYERS))
    packed = sum(linear.num_bytes for layer in model.decoder.linears for linear in layer.values())
    return {"stored": stored, "packed": packed, "layer": stored // model.config.num_layers}


def _best_steps(models: list[LoadedModel], case: Case, seconds: float) -> list[float]:
    """The seconds of the best step of each model."""
    batch, best = make_batch(models[0].config, case), [float("inf")] * len(models)
    end = time.perf_counter() + seconds
    while time.perf_counter() < end or float("inf") in best:
        for i, model in enumerate(models):
            started = time.perf_counter()
            model.decoder(batch)
            best[i] = min(best[i], time.perf_counter() - started)
    return best
