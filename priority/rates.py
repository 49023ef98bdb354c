"""Fading rates of events: an event a half-life ago counts half."""

from __future__ import annotations

from math import exp2, log

HALF_LIFE_S = 5.0
_LONG_S = 40.0


class Rate:
    """Amounts per second, weighted towards the present."""

    __slots__ = ("_amounts", "_at_s")

    def __init__(self) -> None:
        self._amounts = 0.0, 0.0
        self._at_s = 0.0

    def add(self, amount: float, now: float) -> None:
        short, long = self._faded(now)
        self._amounts, self._at_s = (short + amount, long + amount), now

    def per_second(self, now: float, ahead_s: float = 0.0) -> float:
        """Returns the recent rate, over as long a past as the caller looks ahead."""
        short, long = (
            amount * log(2) / s for amount, s in zip(self._faded(now), (HALF_LIFE_S, _LONG_S), strict=True)
        )
        return short + (long - short) * min(1.0, ahead_s / _LONG_S)

    def _faded(self, now: float) -> tuple[float, float]:
        ago_s = now - self._at_s
        if ago_s <= 0:
            return self._amounts
        short, long = self._amounts
        return short * exp2(-ago_s / HALF_LIFE_S), long * exp2(-ago_s / _LONG_S)
