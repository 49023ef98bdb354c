"""Rates of events that fade: half of what was seen five seconds ago counts."""

from __future__ import annotations

from math import exp2, log

HALF_LIFE_S = 5.0


class Rate:
    """Amounts per second, weighted towards the present."""

    __slots__ = ("_amount", "_at_s")

    def __init__(self) -> None:
        self._amount = 0.0
        self._at_s = 0.0

    def add(self, amount: float, now: float) -> None:
        self._amount = self._faded(now) + amount
        self._at_s = now

    def per_second(self, now: float) -> float:
        return self._faded(now) * log(2) / HALF_LIFE_S

    def _faded(self, now: float) -> float:
        if not self._amount:
            return 0.0
        return self._amount * exp2(-max(0.0, now - self._at_s) / HALF_LIFE_S)
