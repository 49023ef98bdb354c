"""Counts against expected frequencies: Pearson's chi-square, with a bound that one honest run in 10,000 exceeds."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

Counts = NDArray[np.integer[Any]]


def chi_square(found: Counts, expected: NDArray[np.float64]) -> tuple[float, int]:
    """The statistic and its degrees of freedom; cells that expect fewer than 5 are pooled into one."""
    rare = expected < 5
    cells = [*zip(found[~rare], expected[~rare], strict=True), (found[rare].sum(), expected[rare].sum())]
    cells = [(n, e) for n, e in cells if e > 0]
    return float(sum((n - e) ** 2 / e for n, e in cells)), max(1, len(cells) - 1)


def bound(degrees: int) -> float:
    """The 0.9999 quantile of chi-square (Wilson and Hilferty's approximation)."""
    return float(degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3)


def assert_frequencies(found: Counts, probabilities: NDArray[np.float64]) -> None:
    """`found` counts what was drawn from `probabilities`; what has none was never drawn."""
    assert not found[probabilities == 0].any()
    statistic, degrees = chi_square(found, found.sum() * probabilities)
    assert statistic < bound(degrees)


def assert_independent(first: NDArray[np.int64], second: NDArray[np.int64], num_values: int) -> None:
    """Pairs of uniform numbers below `num_values` fall into all cells alike."""
    found = np.bincount(first * num_values + second, minlength=num_values**2)
    assert_frequencies(found, np.full(num_values**2, 1 / num_values**2))
