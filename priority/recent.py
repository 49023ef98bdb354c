"""Amounts by name over the last minute."""

from __future__ import annotations

from collections import deque

_PART_S = 5.0
_NUM_PARTS = 12


class LastMinute:
    """Amounts by name over the last minute, or up to five seconds more; only names of that time are kept."""

    def __init__(self) -> None:
        self._parts: deque[dict[str, int]] = deque([{}], maxlen=_NUM_PARTS + 1)
        self._begun = 0
        """The number of parts of time that had begun when the last one here did."""

    def add(self, name: str, amount: int, now: float) -> None:
        part = self._part(now)
        part[name] = part.get(name, 0) + amount

    def sums(self, now: float) -> dict[str, int]:
        self._part(now)
        sums: dict[str, int] = {}
        for part in self._parts:
            for name, amount in part.items():
                sums[name] = sums.get(name, 0) + amount
        return sums

    def _part(self, now: float) -> dict[str, int]:
        """Returns the present part, after forgetting what is over."""
        begun = int(now / _PART_S)
        for _ in range(min(begun - self._begun, _NUM_PARTS + 1)):
            self._parts.append({})
        self._begun = max(self._begun, begun)
        return self._parts[-1]
