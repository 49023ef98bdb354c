"""The rule of `engine.sampling.reference` written out again for one row: numpy in float64, noise in unsigned integers.

Levels, masses and scores are not rounded here. Where the reference may round to either side, `acceptable` names every
token that it may choose.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence as ListLike
from typing import Any

import numpy as np
from numpy.typing import NDArray

from penstock.engine.hashing import split_mix
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Sequence

F64 = NDArray[np.float64]
U64 = NDArray[np.uint64]
Bools = NDArray[np.bool_]

ROUNDING = 2e-5
"""Relative to a mass, or to 1 nat: more than float32 rounds, and more than a level is wide (2^-17 nat)."""
DEEPEST = 32.0
"""All tokens so many nats below the most likely one share the last level."""


def noise_key(seed: int, index: int, number: int) -> int:
    return split_mix(split_mix(seed, index), number)


def finalized(value: Any) -> Any:
    """The 32-bit finalizer of MurmurHash3, of an int or of an array of uint64."""
    value = (value ^ value >> 16) * 0x85EBCA6B % 2**32
    value = (value ^ value >> 13) * 0xC2B2AE35 % 2**32
    return value ^ value >> 16


def noise_bits(key: int, vocab_size: int) -> U64:
    low, high = np.uint64(key % 2**32), np.uint64(key // 2**32)
    bits: U64 = finalized(finalized(np.arange(vocab_size, dtype=np.uint64) ^ low) ^ high)
    return bits


def gumbel(bits: NDArray[np.integer[Any]]) -> F64:
    u = (bits + 0.5) / 2**32
    noise: F64 = -np.log(-np.log1p(-u))
    return noise


def processed(logits: ListLike[float], sequence: Sequence, eos_token_ids: frozenset[int]) -> F64:
    """Biases, bans and penalties, one token at a time, from what OpenAI and the CTRL paper say."""
    p = sequence.request.sampling
    prompt = set(sequence.request.prompt_token_ids)
    output = Counter(sequence.token_ids[sequence.num_prompt_tokens :])
    ending = p.stop_token_ids if p.ignore_eos else p.stop_token_ids | eos_token_ids
    is_early = sequence.num_output_tokens < p.min_tokens
    values = []
    for token_id, logit in enumerate(logits):
        value = logit + p.logit_bias.get(token_id, 0.0)
        if is_early and token_id in ending:
            value = -math.inf
        if token_id in prompt or token_id in output:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * output[token_id] + p.presence_penalty * (output[token_id] > 0)
        values.append(value)
    return np.array(values)


def kept(values: F64, p: SamplingParams) -> tuple[Bools, Bools]:
    """The tokens that the filters keep for certain, and those that rounding may keep as well."""
    nats = (values.max() - values) / p.temperature
    clipped = np.minimum(nats, DEEPEST)
    certain = _kept(nats[None, :] < nats[:, None], np.exp(-nats), p, 1 - ROUNDING)
    possible = _kept(clipped[None, :] < clipped[:, None] - ROUNDING, np.exp(-nats), p, 1 + ROUNDING)
    return certain, possible


def _kept(is_ahead: Bools, weights: F64, p: SamplingParams, margin: float) -> Bools:
    """`is_ahead[i, j]`: token j is more likely than token i. What nothing is ahead of is always kept."""
    found: Bools = is_ahead.sum(1) < (p.top_k or len(weights))
    mass = weights * found
    is_first = ~is_ahead.any(1)
    if p.top_p < 1:
        found &= (is_ahead @ mass < p.top_p * margin * mass.sum()) | is_first
    found &= (weights >= p.min_p / margin) | is_first
    return found


def acceptable(logits: ListLike[float], sequence: Sequence, eos_token_ids: frozenset[int]) -> set[int]:
    """The tokens that may be chosen next: one, but where rounding decides; -1 if every token is banned."""
    p = sequence.request.sampling
    values = processed(logits, sequence, eos_token_ids)
    if values.max() == -math.inf:
        return {-1}
    if p.temperature == 0:
        return set(np.flatnonzero(values >= values.max() - ROUNDING).tolist())
    certain, possible = kept(values, p)
    key = noise_key(p.seed, sequence.index, sequence.num_output_tokens)
    scores = values + p.temperature * gumbel(noise_bits(key, len(values)))
    return set(np.flatnonzero(possible & (scores >= scores[certain].max() - ROUNDING)).tolist())
