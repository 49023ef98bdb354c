"""A circuit breaker, as plain arithmetic: it says whether Redis is worth asking. Time comes in with every call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

MAX_FAILURES = 5
"""The breaker opens after so many failures in a row."""
PROBE_S = 1.0
"""Nothing is asked for at least so long after the breaker opened, and at most for twice as long."""

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """A closed breaker lets all ask, an open one none, and a half open one a single call, whose answer decides."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        """`jitter` gives numbers from 0 to 1, so that many servers do not ask at the same moment."""
        self.state: BreakerState = "closed"
        self._jitter = jitter
        self._num_failures = 0
        self._probe_s = 0.0

    def may_call(self, now_s: float) -> bool:
        """Says whether a call may be made, which then ends with one of `succeeded`, `failed` and `abandoned`."""
        if self.state == "closed":
            return True
        if self.state == "half_open" or now_s < self._probe_s:
            return False
        self.state = "half_open"
        return True

    def succeeded(self) -> None:
        """Closes the breaker, also for a call from before it opened: Redis answered, after all."""
        self.state = "closed"
        self._num_failures = 0

    def failed(self, now_s: float, *, refused: bool = False) -> None:
        """Counts a failure; if the connection was `refused`, nobody is there, and the breaker opens at once."""
        self._num_failures += 1
        if self.state == "half_open" or (
            self.state == "closed" and (refused or self._num_failures >= MAX_FAILURES)
        ):
            self.state = "open"
            self._probe_s = now_s + PROBE_S * (1 + self._jitter())

    def abandoned(self, now_s: float) -> None:
        """Lets the next call ask instead: nobody waits for this one's answer any more."""
        if self.state == "half_open":
            self.state = "open"
            self._probe_s = now_s
