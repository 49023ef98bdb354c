"""Compares the served model with its weights in float32."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import exp, fsum, log
from typing import TYPE_CHECKING

from penstock.app.check.ours import Predictions, Top

if TYPE_CHECKING:
    from torch import Tensor

_TIE = 0.01
"""A token that is less likely than the likeliest by no more than this, in its logarithm, is as good."""
_LEAST = 1e-9


@dataclass(frozen=True, slots=True)
class Distance:
    """Sums over places, and over tokens that were chosen greedily."""

    kl: float = 0.0
    agreeing: int = 0
    places: int = 0
    greedy: int = 0
    chosen: int = 0

    @property
    def mean_kl(self) -> float:
        return self.kl / self.places

    @property
    def agreement(self) -> float:
        return self.agreeing / self.places


def total(distances: Iterable[Distance]) -> Distance:
    rows = [(each.kl, each.agreeing, each.places, each.greedy, each.chosen) for each in distances]
    kl, *counts = map(sum, zip(*rows, strict=True))
    return Distance(kl, *map(int, counts))


def compare(predictions: Predictions, exact: Tensor) -> Distance:
    """
    Args:
        exact: log probabilities after each token of the text, and of what was chosen after it.
    """
    likeliest = exact.argmax(-1).tolist()
    kl = sum(divergence(exact[i], top) for i, top in enumerate(predictions.places))
    agreeing = sum(top[0][0] == best for top, best in zip(predictions.places, likeliest, strict=False))
    greedy = _num_same(exact[len(predictions.token_ids) - 1 :], predictions.greedy)
    return Distance(kl, agreeing, len(predictions.places), greedy, len(predictions.greedy))


def divergence(exact: Tensor, top: Top) -> float:
    """KL of the likeliest tokens of ours, and of all others as one, from the exact log probabilities."""
    token_ids, ours = zip(*top, strict=True)
    theirs: list[float] = exact[list(token_ids)].tolist()
    rest = [max(_LEAST, 1 - sum(map(exp, values))) for values in (theirs, ours)]
    pairs = [*zip(theirs, ours, strict=True), (log(rest[0]), log(rest[1]))]
    return fsum(exp(p) * (p - q) for p, q in pairs)


def _num_same(exact: Tensor, chosen: Sequence[int]) -> int:
    """The tokens before the first that another is likelier than."""
    for i, token_id in enumerate(chosen):
        if exact[i, token_id] < exact[i].max() - _TIE:
            return i
    return len(chosen)
