"""Measures what each type of weights and KV cache costs: `python -m lab.demo.perplexity`.

The demo model reads held-out conversations on the CPU, loaded as `penstock serve` loads it, once for every choice of
--dtype, --quantize and --kv-dtype, for every checkpoint that `penstock quantize` makes of it, and as GGUF files, which
the `gguf` library writes. Only what the assistant says counts.
"""

from __future__ import annotations

import argparse
import math
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
import torch.nn.functional as F
from tokenizers import Tokenizer

from app import quantize
from app.checkpoint import DEMO_MODEL
from engine.config import LoadOptions
from engine.execution.loaded import LoadedModel
from engine.execution.loader import load_model
from engine.kernels.batch import Batch, blank_batch
from engine.model.checkpoint import read_config
from lab.demo.held_out import MAX_TOKENS, Talk, held_out


@dataclass(frozen=True, slots=True)
class Case:
    """One choice of types."""

    name: str
    options: dict[str, Any] = field(default_factory=dict)
    """Fields of LoadOptions."""
    made: str | None = None
    """The options of `penstock quantize`, which makes the checkpoint; None is the model as it comes."""
    gguf: str | None = None
    """The type of its linear maps in a GGUF file, which is made of it; see `_types`."""


CASES = (
    Case("float32", {"dtype": "float32"}),
    Case("auto"),
    Case("float16", {"dtype": "float16"}),
    Case("bfloat16", {"dtype": "bfloat16"}),
    Case("int8", {"quantize": "int8"}),
    Case("int4, groups of 32", {"quantize": "int4", "quantize_group_size": 32}),
    Case("int4, groups of 64", {"quantize": "int4", "quantize_group_size": 64}),
    Case("int4, groups of 128", {"quantize": "int4", "quantize_group_size": 128}),
    Case("fp8", {"quantize": "fp8"}),
    Case("nf4, groups of 32", {"quantize": "nf4", "quantize_group_size": 32}),
    Case("nf4, groups of 64", {"quantize": "nf4", "quantize_group_size": 64}),
    Case("GGUF, Q8_0", gguf="Q8_0"),
    Case("GGUF, Q5_0", gguf="Q5_0"),
    Case("GGUF, Q4_K", gguf="Q4_K"),
    Case("GGUF, Q4_0", gguf="Q4_0"),
    Case("made: rtn, 8 bits", made="--method rtn --bits 8"),
    Case("made: rtn", made="--method rtn"),
    Case("made: awq", made="--method awq"),
    Case("made: gptq", made="--method gptq"),
    Case("made: gptq, groups of 32", made="--method gptq --group-size 32"),
    Case("made: gptq, groups of 128", made="--method gptq --group-size 128"),
    Case("made: gptq, asymmetric", made="--method gptq --asymmetric"),
    Case("made: gptq, act-order", made="--method gptq --act-order"),
    Case("made: gptq, no layer of 8 bits", made="--method gptq --wide-layers 0"),
    Case("auto, KV cache int8", {"kv_dtype": "int8"}),
    Case("int8, KV cache int8", {"quantize": "int8", "kv_dtype": "int8"}),
    Case("int4, KV cache int8", {"quantize": "int4", "kv_dtype": "int8"}),
    Case("made: gptq, KV cache int8", {"kv_dtype": "int8"}, made="--method gptq"),
)
"""The first is what the others are compared with."""


def load(folder: Path, **options: Any) -> LoadedModel:
    """Loads a checkpoint with a KV cache for one conversation at a time."""
    wanted = LoadOptions(device="cpu", max_num_seqs=1, max_model_len=2 * MAX_TOKENS, **options)
    return load_model(folder, wanted, lambda _: None, lambda *_: None)


def perplexity(model: LoadedModel, talks: Sequence[Talk]) -> float:
    """e to the mean negative log likelihood of a token that the assistant says."""
    total, count = 0.0, 0
    for ids, said in talks:
        batch = _whole(ids, model.options.block_size)
        with torch.inference_mode():
            logits = model.lm_head(model.decoder(batch)).float()
        targets = torch.tensor(ids[1:]).where(torch.tensor(said[1:]), -100)
        total += float(F.cross_entropy(logits[:-1].double(), targets, ignore_index=-100, reduction="sum"))
        count += sum(said[1:])
    return math.exp(total / count)


def _whole(ids: list[int], block_size: int) -> Batch:
    """A step that computes a whole sequence and wants the hidden states of all its tokens."""
    blocks = torch.arange(1, 1 - (-len(ids) // block_size), dtype=torch.int32)
    batch = blank_batch([len(ids)], [len(ids)], blocks.unsqueeze(0))
    batch.token_ids = torch.tensor(ids, dtype=torch.int32)
    batch.sample_rows = torch.arange(len(ids), dtype=torch.int32)
    return batch


def table(folder: Path, talks: Sequence[Talk], cases: Sequence[Case] = CASES) -> Iterator[str]:
    """The lines of a Markdown table, each as soon as it is known."""
    yield "| weights | perplexity | against float32 | weight bytes |"
    yield "|---|---|---|---|"
    first: float | None = None
    for case in cases:
        with _checkpoint(folder, case) as checkpoint:
            model = load(checkpoint, **case.options)
        found = perplexity(model, talks)
        first = first or found
        change = f"{100 * (found / first - 1):+.3f} %"
        yield f"| {case.name} | {found:.5f} | {change} | {model.memory.weights:,} |"


@contextmanager
def _checkpoint(folder: Path, case: Case) -> Iterator[Path]:
    """The checkpoint of a case, which is there until the end; its making is told on stderr."""
    if case.gguf is not None:
        from lab.demo.gguf_files import write_gguf  # not above: it needs gguf, which nothing else here does

        with TemporaryDirectory() as place:
            yield write_gguf(folder, Path(place) / "model.gguf", _types(folder, case.gguf))
        return
    if case.made is None:
        yield folder
        return
    parser = argparse.ArgumentParser()
    quantize.add_arguments(parser)
    with TemporaryDirectory() as place:
        made = Path(place) / "made"
        with redirect_stdout(sys.stderr):
            status = quantize.run(parser.parse_args([str(folder), str(made), *case.made.split()]))
        if status:
            raise SystemExit(status)
        yield made


def _types(folder: Path, wanted: str) -> Callable[[str], str]:
    """The types of a GGUF file's matrices by their names there, as llama.cpp chooses them where rows do not fit.

    Q4_K has blocks of 256 inputs: a matrix whose rows are no multiple of that gets Q5_0. The embedding, which is the
    output head, gets Q8_0; llama.cpp's own mixtures have Q6_K there.
    """
    inner = read_config(folder).intermediate_size

    def of(name: str) -> str:
        if "token_embd" in name:
            return "Q8_0"
        return "Q5_0" if wanted == "Q4_K" and "ffn_down" in name and inner % 256 else wanted

    return of


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m lab.demo.perplexity", description=__doc__)
    parser.add_argument("--count", type=int, default=180, help="conversations")
    parser.add_argument(
        "--only", default="", metavar="TEXT", help="the first case, and those with TEXT in their names"
    )
    arguments = parser.parse_args()
    tokenizer = Tokenizer.from_file(str(DEMO_MODEL / "tokenizer.json"))
    cases = [CASES[0], *(case for case in CASES[1:] if arguments.only in case.name)]
    for line in table(DEMO_MODEL, held_out(tokenizer, arguments.count), cases):
        print(line, flush=True)


if __name__ == "__main__":
    main()
