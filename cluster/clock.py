"""The clock by which a switch tells that a replica is silent."""

from __future__ import annotations

from collections.abc import Callable
from time import monotonic

MOST_S = 0.5
"""The longest time that counts between two readings: the switch reads the clock four times a second."""


class AwakeClock:
    """A clock that stands still while the event loop is held up: what was not read meanwhile is not silence."""

    def __init__(self, clock: Callable[[], float] = monotonic) -> None:
        self._clock = clock
        self._read_s = clock()
        self._held_up_s = 0.0

    def __call__(self) -> float:
        """Returns seconds that never go back."""
        now_s = self._clock()
        self._held_up_s += max(0.0, now_s - self._read_s - MOST_S)
        self._read_s = now_s
        return now_s - self._held_up_s
