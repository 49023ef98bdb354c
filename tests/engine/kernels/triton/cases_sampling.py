"""Sampling from the vocabulary of Qwen3 and from an odd one, with every filter and without any, and from parts."""

from __future__ import annotations

import torch

from penstock.engine.kernels.triton.sampling import TritonChoose
from penstock.engine.sampling.tables import GRAPH_FILTERS, Filters, Part, SamplingTables, num_words
from tests.engine.kernels.triton.compiling import META, Case, empty, recorded


def step(vocab: int, dtype: torch.dtype, filters: Filters, *, masked: bool = False) -> list[Case]:
    """The launches of a step, in their order."""
    choose, tables = TritonChoose(4, vocab, META), SamplingTables(4, vocab, 1152, 1, META)
    masks = empty(4, num_words(vocab)) if masked else None
    name = f"{'k' * filters.top_k}{'p' * filters.top_p}{'m' * masked}-{vocab}-{dtype}"
    return recorded(
        name, lambda: choose(empty(4, vocab, dtype=dtype), tables, empty(4), empty(4), filters, masks)
    )


def step_of_rank(vocab: int, rank: int, size: int, *, masked: bool = False) -> list[Case]:
    """The launches of a step on one of several ranks, without filters, which have whole rows."""
    choose, tables = TritonChoose(4, vocab, META), SamplingTables(4, vocab, 1152, 1, META)
    width, free = -(-vocab // size), Filters(top_k=False, top_p=False)
    part, masks = Part(rank * width, lambda own: own.repeat(1, size)), empty(4, num_words(vocab))
    rows = (empty(4, width, dtype=torch.bfloat16), tables, empty(4), empty(4), free)
    name = f"{rank}-of-{size}-{'m' * masked}-{vocab}"
    return recorded(name, lambda: choose(*rows, masks if masked else None, part))


CASES = [
    *(case for filters in GRAPH_FILTERS for case in step(151936, torch.bfloat16, filters)),
    *step(128257, torch.float32, Filters()),
    *step(128257, torch.float32, Filters(), masked=True),
    *step_of_rank(151936, 1, 8),
    *step_of_rank(128257, 2, 3, masked=True),
]
