"""The expected time of a planned step, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_LONG = 0.15
"""The gain required beyond the relative length that drafts add, because sequences without drafts wait as well."""


@dataclass(frozen=True, slots=True)
class Price:
    """The time of a step in seconds, by the number of its drafts."""

    plain_s: float
    """The step without drafts."""
    token_s: float
    """The time of a token in steps that only decode, without drafts, which a right draft saves."""
    added_s: Callable[[int], float]
    """The time that so many drafts add, by the model of step times."""
    overhead: float = 1.0
    """The time of recent steps with drafts, relative to the model."""

    def modelled_s(self, num_drafts: int) -> float:
        """The whole step with so many drafts, as the model has it."""
        return self.plain_s + self.added_s(num_drafts)

    def seconds(self, num_drafts: int) -> float:
        """The whole step with so many drafts, as such steps were measured."""
        return self.modelled_s(num_drafts) * (self.overhead if num_drafts else 1.0)


def value(num_tokens: float, seconds: float) -> float:
    """The value by which steps are chosen: tokens a second, with a penalty for long steps.

    A draft that is right with chance p is worth its place while p is more than 1 + _LONG times the part by which it
    makes the step longer, in tokens: so a step bound by memory gets many, and one bound by arithmetic none.
    """
    return num_tokens / float(seconds ** (1.0 + _LONG))
