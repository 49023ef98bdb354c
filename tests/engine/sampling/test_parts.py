"""Ranks with parts of the vocabulary choose the tokens of one process with all of it, to the bit."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling import reference
from penstock.engine.sampling.tables import Choose, Filters
from tests.engine.kernels.sampling_rows import random_masks
from tests.engine.sampling.cases import ROWS, VOCAB, choose_next, holding, make_logits, make_sequence
from tests.engine.sampling.parts import in_parts
from tests.few import examples

UNFILTERED = Filters(top_k=False, top_p=False)
WITHOUT_FILTERS = {"top_k": 0, "top_p": 1.0, "min_p": 0.0}
PLACES = [None, 0, 9, VOCAB // 2, VOCAB - 1]


def test_the_best_of_the_parts_is_the_best_of_all(choose: Choose) -> None:
    """Biases, bans, penalties of what was chosen before, masks, ties, and rows without a token."""

    @settings(max_examples=examples(60), deadline=None)
    @given(
        rows=st.lists(ROWS, min_size=1, max_size=4),
        num_parts=st.integers(2, 9),
        seed=st.integers(0, 2**32 - 1),
        share=st.sampled_from([None, 0.0, 0.05, 0.7]),
        poison=st.sampled_from(PLACES),
    )
    def check(rows: list[Any], num_parts: int, seed: int, share: float | None, poison: int | None) -> None:
        sequences = [
            make_sequence(params | WITHOUT_FILTERS, prompt, output, i)
            for i, (params, prompt, output) in enumerate(rows)
        ]
        whole, parts = (holding(sequences, choose=one) for one in (choose, in_parts(choose, num_parts)))
        seats = torch.tensor([*range(len(rows)), -1], dtype=torch.int32)
        for step in range(3):
            logits = make_logits(len(seats), seed + step)
            if poison is not None and step == 1:
                logits[0, poison] = (torch.nan, torch.inf, -torch.inf)[seed % 3]
            masks = None if share is None else random_masks(len(seats), VOCAB, share, seed + step)
            numbers = torch.full_like(seats, step)
            expected = whole.sample(logits, seats, numbers, UNFILTERED, masks)
            assert parts.sample(logits, seats, numbers, UNFILTERED, masks).equal(expected)
            assert parts.tables.counts.equal(whole.tables.counts)
            assert poison is None or step != 1 or expected[0] == -1

    check()


@pytest.mark.parametrize("size", [2, 3, 8])
def test_of_equal_scores_of_several_parts_the_first_token_is_chosen(choose: Choose, size: int) -> None:
    logits = torch.zeros(VOCAB)
    logits[[11, 23, VOCAB - 1]] = 2.0
    greedy = make_sequence({"temperature": 0.0})
    assert choose_next([greedy], logits, choose=in_parts(choose, size)) == [11]


@pytest.mark.parametrize("zeros", [(0.0, -0.0), (-0.0, 0.0)])
def test_both_zeros_are_equal(choose: Choose, zeros: tuple[float, float]) -> None:
    logits = torch.full((VOCAB,), -1.0)
    logits[3], logits[VOCAB - 2] = zeros
    greedy = make_sequence({"temperature": 0.0})
    assert choose_next([greedy], logits, choose=in_parts(choose, 2)) == [3]


def test_a_part_that_has_every_token_banned_leaves_the_others(choose: Choose) -> None:
    banned = dict.fromkeys(range(VOCAB // 2), -torch.inf)
    sequences = [make_sequence({"logit_bias": banned, "seed": seed}) for seed in range(20)]
    tokens = choose_next(sequences, torch.zeros(VOCAB), choose=in_parts(choose, 2))
    assert tokens == choose_next(sequences, torch.zeros(VOCAB), choose=choose)
    assert min(tokens) >= VOCAB // 2


def test_candidates_are_some_numbers_for_each_row() -> None:
    candidates = torch.tensor([[5, 0, 2], [0, 1, 0]]).float().view(torch.int32)
    rows = torch.stack((candidates, torch.tensor([[7, 8, 9]] * 2), torch.tensor([[0, 0, 0], [0, 1, 0]])), -1)
    sampler = holding([make_sequence({}), make_sequence({})])
    seats = torch.tensor([0, 1], dtype=torch.int32)
    found = reference.choose_among(rows.to(torch.int32).view(2, -1), sampler.tables, seats)
    assert found.tolist() == [7, -1]
