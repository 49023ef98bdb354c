"""What a planned step is expected to take, with drafts and without."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

_LONG = 0.15
"""How much a step that is longer by some part has to bring more than that part: as those without drafts wait for it."""


@dataclass(frozen=True, slots=True)
class Price:
    """What a step takes, in seconds, by the number of its drafts."""

    plain_s: float
    """The step without drafts."""
    token_s: float
    """What a token takes in steps that do nothing but decode, without drafts: what a draft that is right saves."""
    added_s: Callable[[int], float]
    """What so many drafts add, by the model of step times."""
    overhead: float = 1.0
    """What steps with drafts took of late, in units of what the model says of them."""

    def modelled_s(self, num_drafts: int) -> float:
        """The whole step with so many drafts, as the model has it."""
        return self.plain_s + self.added_s(num_drafts)

    def seconds(self, num_drafts: int) -> float:
        """The whole step with so many drafts, as such steps were measured."""
        return self.modelled_s(num_drafts) * (self.overhead if num_drafts else 1.0)


def value(num_tokens: float, seconds: float) -> float:
    """What steps are chosen by: tokens a second, less where a step is longer.

    A draft that is right with chance p is worth its place while p is more than 1 + _LONG times the part by which it
    makes the step longer, in tokens: so a step bound by memory gets many, and one bound by arithmetic none.
    """
    return num_tokens / float(seconds ** (1.0 + _LONG))
