"""Typical-p, top-a and XTC keep what their definitions say, whatever rows are beside and whoever chooses."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
import torch
from transformers import TypicalLogitsWarper

from penstock.engine.hashing import split_mix
from penstock.engine.planning.request import Sequence
from penstock.engine.sampling import reference
from penstock.engine.sampling.tables import Choose
from tests.engine.sampling.cases import VOCAB, holding, make_logits, make_sequence, sample

NUM = 24


def by_definition(row: list[float], sequence: Sequence) -> set[int]:
    """The tokens that may be chosen, in plain numbers."""
    params = sequence.request.sampling
    order = sorted(range(len(row)), key=lambda i: -row[i])
    if params.top_k:
        order = [i for i in order if row[i] >= row[order[params.top_k - 1]]]
    peak = row[order[0]]
    weight = {i: math.exp((row[i] - peak) / params.temperature) for i in order}
    weight = {i: w for i, w in weight.items() if w >= params.min_p}

    def shares() -> dict[int, float]:
        total = math.fsum(weight.values())
        return {i: w / total for i, w in weight.items()}

    if params.typical_p < 1:
        p = shares()
        entropy = -math.fsum(x * math.log(x) for x in p.values())
        mass = 0.0
        nearest = sorted(p, key=lambda i: abs(-math.log(p[i]) - entropy))
        for end, i in enumerate(nearest, 1):
            mass += p[i]
            if mass >= params.typical_p:
                weight = {i: weight[i] for i in nearest[:end]}
                break
    p = shares()
    weight = {i: weight[i] for i in p if p[i] >= params.top_a * max(p.values()) ** 2}
    state = split_mix(params.seed, sequence.index)
    chance = (split_mix(split_mix(state, sequence.num_output_tokens), 0) >> 11) / 2**53
    p = shares()
    top = sorted((i for i in p if p[i] >= params.xtc_threshold), key=lambda i: p[i])
    return set(p) - (set(top[1:]) if chance < params.xtc_probability else set())


FIELDS: list[dict[str, Any]] = [
    {"typical_p": 0.2},
    {"typical_p": 0.9, "temperature": 0.7},
    {"top_a": 0.4},
    {"top_a": 1.0, "temperature": 1.4},
    {"xtc_probability": 0.5, "xtc_threshold": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.1, "min_p": 0.05},
    {"xtc_probability": 1.0, "xtc_threshold": 0.0, "top_k": 5},
    {"typical_p": 0.8, "top_a": 0.2, "top_k": 20, "xtc_probability": 0.5, "xtc_threshold": 0.1},
]


def sequences_of(fields: dict[str, Any], **more: Any) -> list[Sequence]:
    return [make_sequence({**fields, **more, "seed": seed}, output=[5] * (seed % 3)) for seed in range(NUM)]


def logits_of(seed: int) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(seed).standard_normal((NUM, VOCAB)).astype(np.float32)) * 2


def bits_of(masks: torch.Tensor) -> list[set[int]]:
    return [{i for i in range(VOCAB) if int(row[i // 32]) >> i % 32 & 1} for row in masks]


@pytest.mark.parametrize("fields", FIELDS)
def test_what_is_kept_is_what_the_definitions_say(fields: dict[str, Any]) -> None:
    sequences, logits = sequences_of(fields), logits_of(1)
    sampler = holding(sequences)
    seats = torch.arange(NUM, dtype=torch.int32)
    numbers = torch.tensor([one.num_output_tokens for one in sequences], dtype=torch.int32)
    found = bits_of(sampler._sieve.masks(logits, sampler.tables, seats, numbers, None))
    expected = [by_definition(row, one) for row, one in zip(logits.tolist(), sequences, strict=True)]
    assert found == expected
    chosen = sample(sampler, logits, dict(enumerate(sequences)))
    assert all(token_id in one for token_id, one in zip(chosen, expected, strict=True))
    assert len(set(map(len, expected))) > 1 or fields.get("top_k")


def test_typical_p_is_that_of_transformers() -> None:
    logits, sequences = logits_of(2), sequences_of({"typical_p": 0.6})
    sampler = holding(sequences)
    seats, zeros = torch.arange(NUM, dtype=torch.int32), torch.zeros(NUM, dtype=torch.int32)
    found = bits_of(sampler._sieve.masks(logits, sampler.tables, seats, zeros, None))
    told = TypicalLogitsWarper(mass=0.6)(torch.zeros(NUM, 1, dtype=torch.long), logits.double())
    assert found == [set(row.isfinite().nonzero().flatten().tolist()) for row in told]


def test_every_implementation_chooses_the_same(choose: Choose) -> None:
    fields = {"presence_penalty": 0.5, "logit_bias": {7: -torch.inf, 8: 2.0}}
    sequences = [
        make_sequence({**FIELDS[seed % len(FIELDS)], **fields, "seed": seed}, output=[5])
        for seed in range(NUM)
    ]
    logits = logits_of(4)
    found, expected = [
        sample(holding(sequences, choose=one), logits, dict(enumerate(sequences)))
        for one in (choose, reference.choose)
    ]
    assert found == expected
    alone = [
        sample(holding([sequence], choose=choose), logits[i : i + 1], {0: sequence})[0]
        for i, sequence in enumerate(sequences)
    ]
    assert alone == expected


def test_the_last_step_without_them_is_as_if_there_had_been_none() -> None:
    """A seat that had a sequence with filters gets one without."""
    plain, sifted = sequences_of({"top_p": 0.7}), sequences_of({"typical_p": 0.2})
    logits, sampler = make_logits(NUM, 3), holding(sifted)
    for seat, sequence in enumerate(plain):
        sampler.assign(seat, sequence)
    assert not sampler.filters(range(NUM)).sifted
    expected = sample(holding(plain), logits, dict(enumerate(plain)))
    assert sample(sampler, logits, dict(enumerate(plain))) == expected
