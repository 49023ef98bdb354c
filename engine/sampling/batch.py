"""The sampling parameters of one step's R rows as arrays, how they are made, and what came of them.

The random number for output token t of choice i is output t of a SplitMix64 generator whose state is output i of the
SplitMix64 generator seeded with the request's seed (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). Any output of SplitMix64 can be had without those before it, so nothing is stored that a
preemption, a fork or another batch could change.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from typing import TypeVar

import numpy as np
from numpy.typing import NDArray

from engine.planning.request import Sequence

F32 = NDArray[np.float32]
F64 = NDArray[np.float64]
I32 = NDArray[np.int32]
U64 = NDArray[np.uint64]
Scalar = TypeVar("Scalar", bound=np.generic)

_MASK = (1 << 64) - 1
_GAMMA = 0x9E3779B97F4A7C15
_MIX_1, _MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB

_MAX_REMEMBERED = 1024
"""Sequences remembered beyond those of a step; the rest have ended, or are rebuilt when they come back."""


@dataclass(slots=True)
class SamplingBatch:
    """How to choose one token from each of R rows of logits.

    In this order: the raw log probabilities are noted; `bias` is added; repetition, then frequency and presence
    penalties are applied to the tokens already seen; temperature; top-k; top-p over what top-k left, renormalised;
    min-p relative to the most likely token; then the token is found by inverting the cumulative distribution, in
    order of token id, at `uniform`. Temperature 0 is the first largest logit after the penalties.
    """

    temperature: F32
    top_k: I32
    """0 is off."""
    top_p: F32
    min_p: F32
    uniform: F64
    """[R] in [0, 1): a counter-based random number for (seed, choice, number of the output token)."""
    repetition: F32
    presence: F32
    frequency: F32
    bias_starts: I32
    """[R + 1] row r's biases are entries bias_starts[r] to bias_starts[r + 1] of the two below."""
    bias_ids: I32
    bias_values: F32
    """-inf bans a token."""
    seen_starts: I32
    """[R + 1], as above; a row without penalties has no entries."""
    seen_ids: I32
    seen_counts: I32
    """Times the token is in the output; 0 if only in the prompt (then only repetition applies to it)."""
    wants_logprobs: bool = True
    """Some row asks for log probabilities; without it, SampledRows.logprobs holds NaN or anything else."""


@dataclass(slots=True)
class SampledRows:
    token_ids: I32
    """[R]; -1 where the row's logits were not finite."""
    logprobs: F32
    """[R] raw log probability of the chosen token (log-softmax of the untouched logits)."""


class SamplingState:
    """Makes each step's SamplingBatch; remembers of each sequence what need not be worked out again.

    Token counts grow by the tokens that a sequence gained since the last step, whatever happened in between.
    """

    def __init__(self, vocab_size: int, eos_token_ids: Iterable[int]) -> None:
        self._vocab_size = vocab_size
        self._eos_token_ids = frozenset(eos_token_ids)
        self._rows: dict[Sequence, _Row] = {}
        self._last_rows: list[_Row] = []
        self._params: F32 = np.zeros((7, 0), np.float32)
        self._keys: U64 = np.zeros(0, np.uint64)

    def build(self, sequences: ListLike[Sequence]) -> SamplingBatch:
        """Row r is for the next token of `sequences[r]`."""
        rows = [self._row(sequence) for sequence in sequences]
        if len(self._rows) > len(rows) + _MAX_REMEMBERED:
            self._rows = dict(zip(sequences, rows, strict=True))
        params, keys = self._columns(rows)
        numbers = np.array([sequence.num_output_tokens for sequence in sequences], np.uint64)
        biases = {i: row.biases(sequences[i]) for i, row in enumerate(rows) if row.has_biases}
        seen = {i: row.seen(sequences[i]) for i, row in enumerate(rows) if row.has_penalties}
        bias_starts, bias_ids, bias_values = _ragged(biases, len(rows), np.float32)
        seen_starts, seen_ids, seen_counts = _ragged(seen, len(rows), np.int32)
        return SamplingBatch(
            temperature=params[0],
            top_k=params[1].astype(np.int32),
            top_p=params[2],
            min_p=params[3],
            uniform=uniform(keys, numbers),
            repetition=params[4],
            presence=params[5],
            frequency=params[6],
            bias_starts=bias_starts,
            bias_ids=bias_ids,
            bias_values=bias_values,
            seen_starts=seen_starts,
            seen_ids=seen_ids,
            seen_counts=seen_counts,
            wants_logprobs=any(row.wants_logprobs for row in rows),
        )

    def _columns(self, rows: list[_Row]) -> tuple[F32, U64]:
        """Parameters [7, R] and keys [R]; most steps have the rows of the step before."""
        if rows != self._last_rows:
            self._last_rows = rows
            self._params = np.array([row.params for row in rows], np.float32).reshape(-1, 7).T.copy()
            self._keys = np.array([row.key for row in rows], np.uint64)
        return self._params, self._keys

    def _row(self, sequence: Sequence) -> _Row:
        row = self._rows.get(sequence)
        if row is None:
            row = self._rows[sequence] = _Row(sequence, self._vocab_size, self._eos_token_ids)
        return row


def uniform(keys: U64, numbers: U64) -> F64:
    """[R] in [0, 1): the top 53 bits of output `numbers[r]` of the SplitMix64 generator with state `keys[r]`."""
    mixed = keys + (numbers + np.uint64(1)) * np.uint64(_GAMMA)
    mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(_MIX_1)
    mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(_MIX_2)
    mixed ^= mixed >> np.uint64(31)
    top: F64 = (mixed >> np.uint64(11)).astype(np.float64)
    return top * 2.0**-53


def split_mix(seed: int, number: int) -> int:
    """Output `number` (from 0) of the SplitMix64 generator seeded with `seed` modulo 2^64."""
    mixed = (seed + (number + 1) * _GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * _MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * _MIX_2) & _MASK
    return mixed ^ (mixed >> 31)


_Entries = tuple[I32, NDArray[np.generic]]
"""Token ids and what belongs to each."""


def _entries(values: dict[int, float]) -> _Entries:
    return np.array(list(values), np.int32), np.array(list(values.values()), np.float32)


def _concatenated(a: _Entries, b: _Entries) -> _Entries:
    return np.concatenate((a[0], b[0])), np.concatenate((a[1], b[1]))


def _ragged(
    entries: dict[int, _Entries], num_rows: int, dtype: type[Scalar]
) -> tuple[I32, I32, NDArray[Scalar]]:
    """Starts [num_rows + 1], ids and values of the rows that have entries, one after another."""
    starts = np.zeros(num_rows + 1, np.int32)
    if not entries:
        return starts, np.zeros(0, np.int32), np.zeros(0, dtype)
    for row, (ids, _) in entries.items():
        starts[row + 1] = ids.size
    ids = np.concatenate([ids for ids, _ in entries.values()])
    values = np.concatenate([values for _, values in entries.values()])
    return np.cumsum(starts, dtype=np.int32), ids, values.astype(dtype, copy=False)


class _Row:
    """One sequence's part of every SamplingBatch that it is in."""

    __slots__ = (
        "_bias",
        "_bias_and_ban",
        "_seen",
        "has_biases",
        "has_penalties",
        "key",
        "params",
        "wants_logprobs",
    )

    def __init__(self, sequence: Sequence, vocab_size: int, eos_token_ids: frozenset[int]) -> None:
        p = sequence.request.sampling
        self.params = (
            p.temperature,
            min(p.top_k, vocab_size),
            p.top_p,
            p.min_p,
            p.repetition_penalty,
            p.presence_penalty,
            p.frequency_penalty,
        )
        self.key = split_mix(p.seed, sequence.index)
        self.wants_logprobs = p.num_logprobs is not None
        ending = p.stop_token_ids if p.ignore_eos else p.stop_token_ids | eos_token_ids
        self._bias = _entries({i: v for i, v in p.logit_bias.items() if 0 <= i < vocab_size})
        banned = _entries({i: -np.inf for i in sorted(ending) if 0 <= i < vocab_size})
        self._bias_and_ban = _concatenated(self._bias, banned)
        self.has_biases = bool(p.logit_bias) or p.min_tokens > 0
        self.has_penalties = p.repetition_penalty != 1 or p.presence_penalty != 0 or p.frequency_penalty != 0
        self._seen = _SeenTokens(with_prompt=p.repetition_penalty != 1) if self.has_penalties else None

    def biases(self, sequence: Sequence) -> _Entries:
        """Those asked for, and a ban of what would end the sequence before `min_tokens`."""
        early = sequence.num_output_tokens < sequence.request.sampling.min_tokens
        return self._bias_and_ban if early else self._bias

    def seen(self, sequence: Sequence) -> _Entries:
        assert self._seen is not None
        return self._seen.update(sequence)


class _SeenTokens:
    """The distinct tokens of a sequence in order of first appearance, and how often each is in the output."""

    __slots__ = ("_counts", "_ids", "_num_taken", "_places", "_with_prompt")

    def __init__(self, with_prompt: bool) -> None:
        self._with_prompt = with_prompt
        self._num_taken = 0
        """Of the sequence's tokens, how many are counted already."""
        self._places: dict[int, int] = {}
        self._ids = np.zeros(64, np.int32)
        self._counts = np.zeros(64, np.int32)

    def update(self, sequence: Sequence) -> _Entries:
        num_prompt, token_ids = sequence.num_prompt_tokens, sequence.token_ids
        if self._num_taken < num_prompt:
            for token_id in sequence.request.prompt_token_ids if self._with_prompt else ():
                self._place(token_id)
            self._num_taken = num_prompt
        for token_id in token_ids[self._num_taken :]:
            place = self._place(token_id)  # may replace the array of counts
            self._counts[place] += 1
        self._num_taken = len(token_ids)
        return self._ids[: len(self._places)], self._counts[: len(self._places)]

    def _place(self, token_id: int) -> int:
        place = self._places.setdefault(token_id, len(self._places))
        if place == self._ids.size:
            self._ids = np.concatenate((self._ids, np.zeros_like(self._ids)))
            self._counts = np.concatenate((self._counts, np.zeros_like(self._counts)))
        self._ids[place] = token_id
        return place
