"""Coverage: how many of those let in had their promise kept, and the margins that keep it at 99 in 100.

Adaptive conformal inference (Gibbs and Candes, 2021), on the factor by which forecasts are held against promises: a
broken promise raises a margin by GAMMA * (1 - ALPHA), a kept one lowers it by GAMMA * ALPHA, never below 1. A tenant
with enough outcomes in a lane has a margin of its own there, so that one whose promises are hard to keep costs others
no room; all others have the lane's, which learns from their outcomes.

The bound needs no assumption about traffic or machine. Of any T outcomes of a margin in a row, the broken ones are at
most

    ALPHA * T + (most - margin at the start) / GAMMA

because each outcome moves the margin up by at least GAMMA * (is broken - ALPHA). The margin stays below
`most = R + GAMMA * D`: a promise is broken only if the first token took longer than the forecast times the margin of
its admission, so that this margin was below R, the largest factor by which any forecast was wrong; it rose since by
the outcomes of the D requests that were let in and had no first token yet.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from math import sqrt

from penstock.priority.ratios import Ratios

ALPHA = 0.01
"""The share of promises that may be broken."""
GAMMA = 0.1
ENOUGH = 16
"""The outcomes of a tenant after which its own margin counts."""
_NORMAL_95 = 1.96
NEAR = 0.5
"""A request is let in near the border if so much of its promise was expected to go by."""


@dataclass(slots=True)
class Margin:
    """A factor on the time that is compared with a promise, learnt from what became of promises."""

    value: float = 1.0
    num: int = 0
    """The outcomes that it learnt from."""

    def note(self, *, is_kept: bool) -> None:
        self.num += 1
        self.value = max(1.0, self.value + GAMMA * ((not is_kept) - ALPHA))


@dataclass(slots=True)
class Coverage:
    """The promises of one lane."""

    num: int = 0
    num_kept: int = 0
    margin: Margin = field(default_factory=Margin)
    """The margin of tenants with few outcomes."""
    num_needless: float = 0.0
    """The expected number of refused requests that would have had their promise kept, each alone let in in addition:
    for each, the share of the last requests let in near the border whose first token came so late, for their forecast,
    that this one would still have been in time."""
    border: Ratios = field(default_factory=Ratios)
    """The ratios of the last requests that were let in although half of the promise, or more, was expected to go by."""

    @property
    def interval(self) -> tuple[float, float]:
        """The 95 % interval of the share that is kept."""
        return interval(self.num_kept, self.num)

    def note(self, own: Margin, *, is_kept: bool) -> None:
        """Takes the outcome of a request that was let in with a promise, of a tenant with this margin."""
        self.num += 1
        self.num_kept += is_kept
        if own.num < ENOUGH:
            self.margin.note(is_kept=is_kept)
        own.note(is_kept=is_kept)

    def margin_of(self, own: Margin) -> float:
        """Returns the margin of a tenant that has this one of its own."""
        return (own if own.num >= ENOUGH else self.margin).value


def interval(num_kept: int, num: int) -> tuple[float, float]:
    """Returns the 95 % interval of a share (Wilson, 1927); all is possible while there is nothing to go by."""
    if not num:
        return 0.0, 1.0
    squared = _NORMAL_95**2
    centre = (num_kept + squared / 2) / (num + squared)
    spread = _NORMAL_95 * sqrt(num_kept * (num - num_kept) / num + squared / 4) / (num + squared)
    return max(0.0, centre - spread), min(1.0, centre + spread)
