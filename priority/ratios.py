"""Accuracy of forecasts: real over forecast time to the first token, of a tenant's or lane's last requests."""

from __future__ import annotations

from collections import deque
from itertools import islice, repeat

TOLD, LATE = 2 / 3, 0.9
"""The shares of first tokens that come before the reported time, and before the time compared with the promise."""
_KEPT = 64
_ENOUGH = 16
"""The number of a tenant's own ratios that suffice; with fewer, its lane's are used."""
_LEAST, _MOST = 0.5, 3.0


class Ratios:
    """The last ratios, and what follows from them for the next."""

    __slots__ = ("_last",)

    def __init__(self) -> None:
        self._last: deque[float] = deque(maxlen=_KEPT)

    def add(self, ratio: float) -> None:
        self._last.append(ratio)

    def quantile(self, part: float, others: Ratios | None = None) -> float:
        """Returns the quantile of the ratios; ratios that are not known yet count as 1.

        Args:
            others: the ratios to go by as far as these are too few.
        """
        known = sorted(self._known(others))
        return min(max(known[int(part * (len(known) - 1) + 0.5)], _LEAST), _MOST)

    def share_within(self, most: float, others: Ratios) -> float:
        """Returns the share of the ratios that are at most so large, by the same rules."""
        known = self._known(others)
        return sum(ratio <= most for ratio in known) / len(known)

    def _known(self, others: Ratios | None) -> list[float]:
        known = [*self._last]
        for more in (() if others is None else reversed(others._last), repeat(1.0)):
            known += islice(more, max(0, _ENOUGH - len(known)))
        return known
