"""Sequences with any sampling parameters, samplers that hold them, and rows of logits."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from hypothesis import strategies as st
from numpy.typing import ArrayLike, NDArray
from torch import Tensor

from penstock.engine.hashing import split_mix
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.sampling import reference
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.tables import ROW, Choose, Filters, SamplingTables
from tests.engine.sampling import numpy_reference

VOCAB = 40
EOS = 3
CPU = torch.device("cpu")

TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, VOCAB - 1, VOCAB, VOCAB + 9]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.7, 0.0, 0.3]),
        "repetition_penalty": st.sampled_from([0.6, 1.0, 1.3]),
        "logit_bias": st.dictionaries(
            st.integers(-1, VOCAB), st.sampled_from([-100.0, -math.inf, -1.0, 2.0]), max_size=4
        ),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.frozensets(TOKENS, max_size=2),
        "ignore_eos": st.booleans(),
        "num_logprobs": st.sampled_from([None, 0, 3]),
    }
)
ROWS = st.tuples(PARAMS, st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=6))
"""Parameters, prompt, output."""


def make_sequence(
    params: Mapping[str, Any], prompt: Iterable[int] = (), output: Iterable[int] = (), index: int = 0
) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params))
    sequence = Sequence(request, index)
    sequence.token_ids += output
    return sequence


def make_sampler(
    num_seats: int, *, vocab: int = VOCAB, eos: Iterable[int] = (EOS,), choose: Choose = reference.choose
) -> Sampler:
    return Sampler(num_seats, vocab, eos, CPU, choose, max_biases=VOCAB)


def holding(sequences: list[Sequence], **options: Any) -> Sampler:
    """A sampler with the sequences in seats 0, 1, ..."""
    sampler = make_sampler(len(sequences), **options)
    for seat, sequence in enumerate(sequences):
        sampler.assign(seat, sequence)
    return sampler


def make_logits(num_rows: int, seed: int, scale: float = 3.0) -> Tensor:
    """Any floats; every third row is rounded to integers, so that many of its tokens tie."""
    logits = np.random.default_rng(seed).standard_normal((num_rows, VOCAB)) * scale
    logits[::3] = np.round(logits[::3])
    return torch.from_numpy(logits.astype(np.float32))


def sample(
    sampler: Sampler, logits: Tensor, sequences: Mapping[int, Sequence], filters: Filters | None = None
) -> list[int]:
    """One step over sequences by seat, with the filters that they ask for."""
    seats = torch.tensor(list(sequences), dtype=torch.int32)
    numbers = torch.tensor([s.num_output_tokens for s in sequences.values()], dtype=torch.int32)
    filters = sampler.filters(sequences) if filters is None else filters
    token_ids = sampler.sample(logits, seats, numbers, filters)
    assert token_ids.dtype == torch.int32
    return token_ids.tolist()


def choose_next(sequences: list[Sequence], logits: Tensor, **options: Any) -> list[int]:
    """One token for each sequence; a single row of logits [vocab] is for all."""
    sampler = holding(sequences, vocab=logits.shape[-1], **options)
    rows = logits.expand(len(sequences), logits.shape[-1])
    return sample(sampler, rows, dict(enumerate(sequences)))


def assert_by_hand(token_ids: list[int], logits: Tensor, sequences: Iterable[Sequence]) -> None:
    for token_id, row, sequence in zip(token_ids, logits.tolist(), sequences, strict=True):
        assert token_id in numpy_reference.acceptable(row, sequence, frozenset({EOS}))


@lru_cache(maxsize=4)
def states(num: int, index: int = 0) -> NDArray[np.uint64]:
    """Returns the states of choice `index` of the requests with the seeds 0, 1, ..."""
    return np.array([split_mix(seed, index) for seed in range(num)], np.uint64)


def make_tables(vocab: int, state: NDArray[np.uint64], **columns: ArrayLike) -> SamplingTables:
    """A seat for each state; fields of ROW that are not given are off."""
    tables = SamplingTables(len(state), vocab, 0, 0, CPU)
    rows = np.zeros(len(state), ROW)
    off = {"temperature": 1, "top_p": 1, "min_p_depth": np.inf, "repetition": 1, "counts_row": -1}
    for name, column in {**off, "state": state, **columns}.items():
        rows[name] = column
    tables.rows.copy_(torch.from_numpy(rows.view(np.uint8).reshape(len(state), -1)))
    return tables


def draws(
    choose: Choose, logits: Tensor, state: NDArray[np.uint64], numbers: ArrayLike = 0, **columns: ArrayLike
) -> NDArray[np.int64]:
    """[R] one token for each state; `logits` [vocab] are for all, and so are filters that are given as numbers."""
    tables = make_tables(len(logits), state, **columns)
    seats = torch.arange(len(state), dtype=torch.int32)
    at = torch.from_numpy(np.broadcast_to(np.asarray(numbers, np.int32), len(state)).copy())
    filters = Filters("top_k" in columns, bool({"top_p", "min_p_depth"} & columns.keys()))
    token_ids = choose(logits.expand(len(state), -1), tables, seats, at, filters, None)
    return token_ids.numpy().astype(np.int64)
