"""Questions about one input, each with the answers that it may have."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

LEAD = "\n\nAnswer the following about the text above with one of the answers listed, exactly as it is written.\n\n"
"""The text between the input and every question."""


@dataclass(frozen=True, slots=True)
class Option:
    """One of the answers that a question may have."""

    label: str
    """The text that the model would answer with."""
    value: str | bool
    description: str = ""


@dataclass(frozen=True, slots=True)
class Question:
    """One question, whichever API it came by."""

    field: str
    """Its place in the body."""
    kind: Literal["predicate", "choice", "score"]
    name: str | None
    instructions: str
    options: tuple[Option, ...]
    options_field: str = "criteria"
    """The place of an option in the question."""

    @property
    def text(self) -> str:
        """The text that the model is asked."""
        lines = (f"- {o.label}: {o.description}" if o.description else f"- {o.label}" for o in self.options)
        return "\n".join((self.instructions, *lines)).strip()

    def option_field(self, number: int) -> str:
        return f"{self.field}.{self.options_field.format(number)}"


@dataclass(frozen=True, slots=True)
class Questions:
    """All questions of one body."""

    messages: Sequence[dict[str, Any]]
    """The input as chat templates know it, which ends with the user."""
    questions: Sequence[Question]
