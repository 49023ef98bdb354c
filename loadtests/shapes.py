"""The number of users over time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp

from locust import LoadTestShape

_FOREVER_S = 3600.0


def steps(passed: float) -> float:
    """A fifth of the users, then two fifths, up to all."""
    return (min(int(passed * 5), 4) + 1) / 5


def double_wave(passed: float) -> float:
    """A morning and a higher evening, over a fifth of the users at night."""
    morning, evening = (exp(-(((passed - peak) / 0.11) ** 2)) for peak in (0.3, 0.7))
    return min(1.0, 0.2 + 0.5 * morning + 0.8 * evening)


def flash_crowd(passed: float) -> float:
    """A tenth of the users, and all of them from a fifth of the time to two fifths."""
    return 1.0 if 0.2 <= passed < 0.4 else 0.1


SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": lambda _: 1.0,
    "steps": steps,
    "double-wave": double_wave,
    "flash-crowd": flash_crowd,
}
"""The share of --users by the share of the run (0 to 1) that has passed."""


class Shape(LoadTestShape):
    """--load-shape over --run-time, or over an hour; --users and --spawn-rate mean what they mean without it."""

    use_common_options = True

    def tick(self) -> tuple[int, float] | None:
        options = self.runner.environment.parsed_options
        passed_s, run_s = self.get_run_time(), options.run_time or _FOREVER_S
        if options.run_time and passed_s >= run_s:
            return None
        num_users = options.num_users or 1
        wanted = max(1, round(num_users * SHAPES[options.load_shape](min(passed_s / run_s, 1.0))))
        at_once = options.load_shape == "flash-crowd"
        return wanted, max(num_users if at_once else options.spawn_rate or 1, 1)
