"""Probabilities of labels, whatever tokens they have, against products that are worked out one by one."""

from __future__ import annotations

import math
import random
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.params import Branch, SamplingParams
from penstock.engine.planning.request import Request
from penstock.gateway.wire.decided import (
    choice_confidence,
    expected_level,
    probabilities_of,
    score_confidence,
)
from penstock.gateway.wire.labels import LabelSteps, label_branches
from tests.few import examples

VOCABULARY = range(6)
ENDS = (0, 1)
PROMPT = (3, 3, 4)


def next_token(before: Sequence[int]) -> list[float]:
    """What a model says of the token after these: any numbers, but always the same."""
    draw = random.Random(repr(list(before)))
    weights = [draw.random() ** 3 + 1e-3 for _ in VOCABULARY]
    return [weight / sum(weights) for weight in weights]


def expected(before: Sequence[int], label: Sequence[int], labels: Sequence[Sequence[int]]) -> float:
    """Its probability; that it ends there counts where another label goes on."""
    product = 1.0
    for number, token in enumerate(label):
        product *= next_token([*before, *label[:number]])[token]
    if any(len(other) > len(label) and list(other[: len(label)]) == list(label) for other in labels):
        product *= sum(next_token([*before, *label])[end] for end in ENDS)
    return product


def asked(branches: tuple[Branch, ...], prompt: Sequence[int]) -> list[list[float]]:
    """What an engine would tell of the branches."""
    request = Request(
        request_id="r", prompt_token_ids=tuple(prompt), sampling=SamplingParams(), branches=branches
    )
    return [
        [math.log(next_token(request.token_ids_of(index))[token]) for token in branch.candidates]
        for index, branch in enumerate(branches)
    ]


LABELS = st.lists(
    st.lists(st.integers(2, 4), min_size=1, max_size=4).map(tuple), min_size=2, max_size=8, unique=True
)


@settings(max_examples=examples(200), deadline=None)
@given(st.lists(LABELS, min_size=1, max_size=4))
def test_probabilities_are_the_products_of_those_of_their_tokens(
    questions: list[list[tuple[int, ...]]],
) -> None:
    alone = len(questions) == 1
    texts: list[tuple[int, ...]] = [() if alone else (5, number % 6) for number in range(len(questions))]
    branches, steps = label_branches(list(zip(texts, questions, strict=True)), ENDS)
    scores = asked(branches, PROMPT)
    for text, labels, own in zip(texts, questions, steps, strict=True):
        products = [expected([*PROMPT, *text], label, labels) for label in labels]
        found, mass = probabilities_of(own, scores)
        assert mass == pytest.approx(sum(products))
        assert found == pytest.approx([product / sum(products) for product in products])
        assert sum(found) == pytest.approx(1.0)


def numbering(branches: tuple[Branch, ...]) -> list[int]:
    return [child for branch in branches for child in branch.children]


@settings(max_examples=examples(100), deadline=None)
@given(st.lists(LABELS, min_size=2, max_size=5))
def test_branches_are_numbered_level_by_level(questions: list[list[tuple[int, ...]]]) -> None:
    branches, _ = label_branches([((9,), labels) for labels in questions], ENDS)
    assert numbering(branches) == list(range(1, len(branches)))
    assert all(branches[child].parent == index for index, b in enumerate(branches) for child in b.children)


def test_labels_of_one_token_take_nothing_more_than_the_question() -> None:
    branches, steps = label_branches([((7, 8), [(2,), (3,), (4,)]), ((9,), [(2,), (3,)])], ENDS)
    assert [branch.token_ids for branch in branches] == [(), (7, 8), (9,)]
    assert [branch.candidates for branch in branches] == [(), (2, 3, 4), (2, 3)]
    assert steps[1] == [[(2, (0,))], [(2, (1,))]]


def test_labels_share_the_tokens_that_they_begin_with() -> None:
    branches, _ = label_branches([((), [(2, 3, 4), (2, 3, 2), (3,)])], ENDS)
    assert [(b.token_ids, b.candidates) for b in branches] == [((), (2, 3)), ((2,), (3,)), ((3,), (4, 2))]


def test_one_that_others_begin_with_has_to_end() -> None:
    steps: list[LabelSteps]
    branches, (steps,) = label_branches([((), [(2,), (2, 3)])], ENDS)
    assert [branch.candidates for branch in branches] == [(2,), (3, *ENDS)]
    assert steps[0] == [(0, (0,)), (1, range(1, 3))]


@pytest.mark.parametrize(
    ("values", "of_choice", "of_score", "level"),
    [
        ([0.25, 0.25, 0.25, 0.25], 0.0, 0.0, 1.5),
        ([0.0, 1.0, 0.0], 1.0, 1.0, 1.0),
        ([0.5, 0.5], 0.0, 0.0, 0.5),
        ([0.1, 0.7, 0.2], 0.55, 0.55, 1.1),
        ([0.7, 0.1, 0.2], 0.55, 0.25, 0.5),
    ],
)
def test_confidence_says_how_much_stands_out(
    values: list[float], of_choice: float, of_score: float, level: float
) -> None:
    assert choice_confidence(values) == pytest.approx(of_choice)
    assert score_confidence(values) == pytest.approx(of_score)
    assert expected_level(values) == pytest.approx(level)


def test_small_probabilities_are_not_lost() -> None:
    found, mass = probabilities_of([[(0, (0,))], [(0, (1,))]], [[-2000.0, -2001.0]])
    assert found == pytest.approx([1 / (1 + math.exp(-1)), 1 / (1 + math.exp(1))])
    assert mass == 0.0
