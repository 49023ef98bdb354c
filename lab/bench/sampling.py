"""Measures what choosing a token costs on this CPU, beside reading its row of logits once.

    python -m lab.bench.sampling [--vocab 151936] [--rows 1,64] [--threads 1,2] [--repeats 50]

Logits are random, normal with a standard deviation of 3, and in the cache if it holds them all. Every figure is the
best of the repeats; what Python costs is in that of choosing, not in that of reading.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Iterator
from functools import partial

import torch

from penstock.app.arguments import count, listed
from penstock.app.measures import measure_reading
from penstock.engine.cores import num_cores
from penstock.engine.kernels.cpu.native import NativeChoose, NativeMostLikely, Team, load_library
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.tables import num_words

SETTINGS = {
    "greedy": SamplingParams(temperature=0.0),
    "no filters": SamplingParams(temperature=0.6),
    "top-k 20, top-p 0.95": SamplingParams(temperature=0.6, top_k=20, top_p=0.95),
    "top-k 1000": SamplingParams(temperature=0.6, top_k=1000),
    "top-p 0.95": SamplingParams(temperature=0.6, top_p=0.95),
    "min-p 0.05": SamplingParams(temperature=0.6, min_p=0.05),
    "penalties": SamplingParams(temperature=0.6, presence_penalty=0.5),
}
MASKS = {
    "mask of every other token": 0x55555555,
    "mask of no token in 32 but the first": 1,
    "mask of a few tokens": 0,
}
"""The words of masks; the last has one word with tokens."""


def main() -> None:
    arguments = _arguments()
    library = load_library(print)
    for threads in arguments.threads:
        team = library.start_team(threads)
        for num_rows in arguments.rows:
            for line in _lines(team, num_rows, arguments.vocab, arguments.repeats):
                print(line, flush=True)


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vocab", type=count, default=151_936)
    parser.add_argument("--rows", type=listed(count), default=[1, 64])
    parser.add_argument("--threads", type=listed(count), default=sorted({1, num_cores()}))
    parser.add_argument("--repeats", type=count, default=50)
    return parser.parse_args()


def _lines(team: Team, num_rows: int, vocab: int, repeats: int) -> Iterator[str]:
    logits = 3 * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(0))
    yield f"{team.num_threads} threads, {num_rows} rows of {vocab}:"
    rows, likely = torch.arange(num_rows, dtype=torch.int32), NativeMostLikely(team)
    steps = {name: _step(team, logits, params) for name, params in SETTINGS.items()}
    steps |= {name: _step(team, logits, SETTINGS["no filters"], word) for name, word in MASKS.items()}
    steps |= {f"{num} most likely": partial(likely, logits, rows, num) for num in (0, 20)}
    for name, step in steps.items():
        reading, chosen = float("inf"), float("inf")
        for _ in range(repeats):  # in turns, so that other processes slow both
            reading = min(reading, measure_reading(team, logits, 1))
            chosen = min(chosen, _seconds(step))
        yield f"  {name:37} {chosen * 1e6:9.0f} us   {chosen / reading:5.2f} x reading ({reading * 1e6:.0f} us)"


def _step(
    team: Team, logits: torch.Tensor, params: SamplingParams, word: int | None = None
) -> Callable[[], object]:
    """`word`: of each row's mask; None for no masks."""
    num_rows, vocab = logits.shape
    sampler = Sampler(num_rows, vocab, (), torch.device("cpu"), NativeChoose(team))
    for seat in range(num_rows):
        sequence = Sequence(Request(request_id=str(seat), prompt_token_ids=(1, 2), sampling=params))
        sampler.assign(seat, sequence)
    seats = torch.arange(num_rows, dtype=torch.int32)
    numbers, filters = torch.zeros_like(seats), sampler.filters(range(num_rows))
    masks = None
    if word is not None:
        masks = torch.full((num_rows, num_words(vocab)), word, dtype=torch.int32)
        masks[:, 7] = 255
    return lambda: sampler.sample(logits, seats, numbers, filters, masks)


def _seconds(call: Callable[[], object]) -> float:
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


if __name__ == "__main__":
    main()
