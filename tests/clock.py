"""A clock for tests of what depends on time."""

from __future__ import annotations


class Clock:
    """Stands still until the test moves it."""

    def __init__(self, now: float = 1000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now
