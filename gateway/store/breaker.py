"""Whether it is worth asking: a breaker, as plain arithmetic. Time comes in with every call."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Literal

MAX_FAILURES = 5
"""In a row; then it opens."""
PROBE_S = 1.0
"""At least so long nothing is asked after it opened, and at most twice as long."""

BreakerState = Literal["closed", "open", "half_open"]


class Breaker:
    """Closed: all may ask. Open: none may. Half open: one does, and its answer decides."""

    def __init__(self, jitter: Callable[[], float] = random.random) -> None:
        """`jitter` gives numbers from 0 to 1, so that many servers do not ask at the same moment."""
        self.state: BreakerState = "closed"
        self._jitter = jitter
        self._num_failures = 0
        self._probe_s = 0.0

    def may_call(self, now_s: float) -> bool:
        """Who was let in says how it went, once: `succeeded`, `failed` or `abandoned`."""
        if self.state == "closed":
            return True
        if self.state == "half_open" or now_s < self._probe_s:
            return False
        self.state = "half_open"
        return True

    def succeeded(self) -> None:
        """Also when it was asked before the breaker opened: it answered, after all."""
        self.state = "closed"
        self._num_failures = 0

    def failed(self, now_s: float, *, refused: bool = False) -> None:
        """`refused`: nobody is there at all, so that there is no need to find out four times more."""
        self._num_failures += 1
        if self.state == "half_open" or (
            self.state == "closed" and (refused or self._num_failures >= MAX_FAILURES)
        ):
            self.state = "open"
            self._probe_s = now_s + PROBE_S * (1 + self._jitter())

    def abandoned(self, now_s: float) -> None:
        """Nobody waits for the answer any more: the next one may ask instead."""
        if self.state == "half_open":
            self.state = "open"
            self._probe_s = now_s
