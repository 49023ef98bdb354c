"""Labels as tokens: the branches of a request that bring the log probabilities of all tokens of all labels."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.engine.planning.params import Branch

LabelSteps = list[tuple[int, Sequence[int]]]
"""A label's tokens, in order: each is one of the candidates of a branch, at one of these places."""


class _Growing(NamedTuple):
    """A branch that is to be made, and the labels that go on from it: their steps so far, and the tokens left."""

    parent: int
    token_ids: tuple[int, ...]
    labels: list[tuple[LabelSteps, Sequence[int]]]


def label_branches(
    questions: Sequence[tuple[Sequence[int], Sequence[Sequence[int]]]], end_token_ids: Sequence[int]
) -> tuple[tuple[Branch, ...], list[list[LabelSteps]]]:
    """The branches of questions after what they have in common, and the steps of each question's labels.

    Labels share branches as far as their tokens are the same. One that others begin with ends with any of the tokens
    that end an answer; one that no other begins with needs no end.

    Args:
        questions: the tokens of each, and those of its labels; a single one is to have no tokens: it is the prompt.
    """
    steps: list[list[LabelSteps]] = [[[] for _ in labels] for _, labels in questions]
    pending = deque(
        _Growing(0, tuple(token_ids), list(zip(steps_of, labels, strict=True)))
        for (token_ids, labels), steps_of in zip(questions, steps, strict=True)
    )
    num_named = len(questions)
    branches: list[Branch] = []
    if num_named > 1:
        branches.append(Branch(first_child=1, num_children=num_named))
        num_named += 1
    while pending:
        growing = pending.popleft()
        below, candidates = _take_step(len(branches), growing.labels, end_token_ids)
        pending += (_Growing(len(branches), (token_id,), labels) for token_id, labels in below)
        branches.append(
            Branch(
                token_ids=growing.token_ids,
                candidates=candidates,
                parent=growing.parent,
                first_child=num_named,
                num_children=len(below),
            )
        )
        num_named += len(below)
    return tuple(branches), steps


def _take_step(
    branch: int, labels: Iterable[tuple[LabelSteps, Sequence[int]]], end_token_ids: Sequence[int]
) -> tuple[list[tuple[int, list[tuple[LabelSteps, Sequence[int]]]]], tuple[int, ...]]:
    """Adds the next step of each label; returns those that go further, by token, and the branch's candidates."""
    by_token: dict[int, list[tuple[LabelSteps, Sequence[int]]]] = {}
    ending: list[LabelSteps] = []
    for steps, left in labels:
        if left:
            by_token.setdefault(left[0], []).append((steps, left[1:]))
        else:
            ending.append(steps)
    for i, going_on in enumerate(by_token.values()):
        for steps, _ in going_on:
            steps.append((branch, (i,)))
    candidates = (*by_token, *(end_token_ids if ending else ()))
    for steps in ending:
        steps.append((branch, range(len(by_token), len(candidates))))
    further = [(token, group) for token, group in by_token.items() if len(group) > 1 or group[0][1]]
    return further, candidates
