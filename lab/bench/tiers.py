"""Measures the first token of a long prompt: computed, and read back from host memory, from disk, and after a restart;
and what reading it back costs streams that run meanwhile.

Each prompt is as long as the KV cache is large, so that every other prompt evicts it. Before a server restarts, the
files are synced and dropped from the page cache, so that they come from the disk itself.
"""

from __future__ import annotations

import os
import random
import tempfile
import time
from itertools import pairwise
from pathlib import Path
from statistics import median
from threading import Event, Thread
from typing import Any

from penstock.app.bench.runs import say
from penstock.app.bench.statistics import percentile
from penstock.app.offline.llm import LLM
from penstock.engine.tiers.folder import SUFFIX

Row = dict[str, Any]

_BLOCK_SIZE = 16
_VOCABULARY = 16_000
_PATIENCE_S = 60.0
_STREAMS = 4
_STREAM_TOKENS = 1_600
_WINDOW_S = 6.0
_WINDOWS = "no such request", "prompts in memory", "prompts read from disk"


def measure_tiers(folder: Path, dtype: str, num_tokens: int, num_rounds: int) -> Row:
    """Returns the median seconds to the first token of each way, and the streams' milliseconds between two tokens.

    Args:
        num_tokens: those of a prompt.
    """
    with tempfile.TemporaryDirectory() as place:
        bench = TierBench(folder, dtype, num_tokens, Path(place) / "kv")
        return bench.measure(num_rounds)


class TierBench:
    def __init__(self, folder: Path, dtype: str, num_tokens: int, place: Path) -> None:
        self._folder, self._dtype, self._num_tokens, self._place = folder, dtype, num_tokens, place
        pace = random.Random(1)
        # One token more than whole blocks: the last one is computed in any case.
        self._prompts = [[pace.randrange(1, _VOCABULARY) for _ in range(num_tokens + 1)] for _ in range(2)]

    def measure(self, num_rounds: int) -> Row:
        say(f"prompts of {self._num_tokens:,} tokens: computed, and read back from disk")
        with self._start(kv_disk=self._place) as llm:
            computed = [self._first_token(llm, prompt) for prompt in self._prompts]
            self._settle(llm)
            disk = [self._first_token(llm, prompt) for _ in range(num_rounds) for prompt in self._prompts]
            stats = llm.tiers_use.tiers["disk"]
        say("after a restart, and from host memory")
        restart, host = list[float](), list[float]()
        for _ in range(num_rounds):
            self._drop_from_page_cache()
            with self._start(kv_disk=self._place, kv_host_bytes=8 << 30) as llm:
                restart += [self._first_token(llm, prompt) for prompt in self._prompts]
                host += [self._first_token(llm, prompt) for prompt in self._prompts]
        say("beside streams")
        with self._start(_STREAMS * _STREAM_TOKENS, kv_disk=self._place) as llm:
            gaps = [self._gaps_ms(llm) for _ in range(2 * num_rounds)][1:]
        return {
            "model": self._folder.name,
            "num_tokens": self._num_tokens,
            "bytes_per_token": stats.bytes_read / max(1, stats.num_hits) / _BLOCK_SIZE,
            "computed_s": median(computed),
            "disk_s": median(disk),
            "restart_s": median(restart),
            "host_s": median(host),
            "itl_ms": {
                name: median(each) for name, each in zip(_WINDOWS, zip(*gaps, strict=True), strict=True)
            },
            "itl_ratio": median(read / found for _, found, read in gaps),
            "read_bytes_per_s": stats.bytes_read / max(1e-9, stats.read_seconds),
        }

    def _start(self, num_tokens_beside: int = 0, **settings: Any) -> LLM:
        num_blocks = (self._num_tokens + num_tokens_beside) // _BLOCK_SIZE + 8
        llm = LLM(
            self._folder, device="cpu", dtype=self._dtype, num_blocks=num_blocks, progress=False, **settings
        )
        llm.generate([[1, 2, 3]] * 4, max_tokens=40, ignore_eos=True)  # steps that say what a step takes
        return llm

    @staticmethod
    def _first_token(llm: LLM, prompt: list[int]) -> float:
        started = time.perf_counter()
        llm.generate([prompt], max_tokens=1)
        return time.perf_counter() - started

    def _gaps_ms(self, llm: LLM) -> tuple[float, float, float]:
        """The P99 of the times between two tokens of streams in a window of time each: alone, while a prompt that is in
        memory is asked twice, and while both are read back, one after the other.
        """
        times: list[list[float]] = [[] for _ in range(_STREAMS)]
        warm, over = Event(), Event()

        def read() -> None:
            prompts = [[number + 1] * _BLOCK_SIZE for number in range(_STREAMS)]
            for piece in llm.stream(prompts, max_tokens=_STREAM_TOKENS, ignore_eos=True):
                times[piece.prompt].append(time.perf_counter())
                if len(times[-1]) == _BLOCK_SIZE:
                    warm.set()
                if over.is_set():
                    return

        def beside(*prompts: list[int]) -> float:
            began = time.perf_counter()
            for prompt in prompts:
                self._first_token(llm, prompt)
            time.sleep(max(0.0, began + _WINDOW_S - time.perf_counter()))
            ended = time.perf_counter()
            inside = [[at for at in each if began <= at <= ended] for each in times]
            return percentile([after - at for each in inside for at, after in pairwise(each)], 99) * 1000

        first, second = self._prompts
        self._first_token(llm, second)
        reader = Thread(target=read)
        reader.start()
        warm.wait(_PATIENCE_S)
        gaps = beside(), beside(second, second), beside(first, second)
        over.set()
        reader.join()
        return gaps

    def _settle(self, llm: LLM) -> None:
        """Waits until nothing more is written."""
        before, until_s = -1, time.monotonic() + _PATIENCE_S
        while time.monotonic() < until_s:
            written = sum(tier.bytes_written for tier in llm.tiers_use.tiers.values())
            if written == before:
                return
            before = written
            time.sleep(1.0)

    def _drop_from_page_cache(self) -> None:
        for path in self._place.glob(f"*/*/*{SUFFIX}"):
            descriptor = os.open(path, os.O_RDONLY)
            os.fsync(descriptor)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            os.close(descriptor)


def print_tiers(rows: list[Row]) -> None:
    for row in rows:
        computed_s = row["computed_s"]
        print(f"\n{row['model']}: {row['num_tokens']:,} tokens of {row['bytes_per_token'] / 1024:.0f} KiB")
        print("  first token")
        for name, text in (
            ("computed_s", "computed"),
            ("disk_s", "from disk, evicted a moment ago"),
            ("restart_s", "from disk, after a restart"),
            ("host_s", "from host memory"),
        ):
            print(f"    {text:<32}{row[name]:8.2f} s {computed_s / row[name]:7.1f} times")
        print(
            f"  {_STREAMS} streams, P99 between two tokens, while another request asks for two first tokens"
        )
        for text, value in row["itl_ms"].items():
            print(f"    {text:<32}{value:8.1f} ms")
        print(f"    {'the last two':<32}{row['itl_ratio']:8.2f} times")
        print(f"  a reading thread reads {row['read_bytes_per_s'] / 1e9:.2f} GB/s")
