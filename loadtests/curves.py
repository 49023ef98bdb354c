"""How the number of users goes with time: the part of --users there is when so much of the run (0 to 1) has passed."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from math import exp

_STEPS = 5
_CROWD = 10


def constant(passed: float) -> float:  # noqa: ARG001
    return 1.0


def steps(passed: float) -> float:
    """A fifth of the users, then two fifths, up to all."""
    return (min(int(passed * _STEPS), _STEPS - 1) + 1) / _STEPS


def double_wave(passed: float) -> float:
    """A morning and a higher evening, over a fifth of the users at night."""
    morning, evening = (exp(-(((passed - peak) / 0.11) ** 2)) for peak in (0.3, 0.7))
    return min(1.0, 0.2 + 0.5 * morning + 0.8 * evening)


def flash_crowd(passed: float) -> float:
    """A tenth of the users, and all of them from a fifth of the time to two fifths."""
    return 1.0 if 0.2 <= passed < 0.4 else 1 / _CROWD


SHAPES: Mapping[str, Callable[[float], float]] = {
    "constant": constant,
    "steps": steps,
    "double-wave": double_wave,
    "flash-crowd": flash_crowd,
}
