"""Amounts by name over the last minute."""

from __future__ import annotations

from collections import deque

_PART_S = 5.0
_NUM_PARTS = 12


class LastMinute:
    """Amounts by name over the last minute, or up to five seconds more; only names of that time are kept."""

    def __init__(self) -> None:
        self._parts: deque[dict[str, int]] = deque([{}], maxlen=_NUM_PARTS + 1)
        self._present = self._parts[-1]
        self._ends_s = 0.0
        """The end of the present part."""

    def add(self, name: str, amount: int, now: float) -> None:
        if now >= self._ends_s:
            self._turn(now)
        self._present[name] = self._present.get(name, 0) + amount

    def sums(self, now: float) -> dict[str, int]:
        if now >= self._ends_s:
            self._turn(now)
        sums: dict[str, int] = {}
        for part in self._parts:
            for name, amount in part.items():
                sums[name] = sums.get(name, 0) + amount
        return sums

    def _turn(self, now: float) -> None:
        """Begins the part of `now`, and forgets what is over a minute before it."""
        num_parts = int((now - self._ends_s) / _PART_S) + 1
        self._parts.extend({} for _ in range(min(num_parts, _NUM_PARTS + 1)))
        self._present = self._parts[-1]
        self._ends_s += num_parts * _PART_S
