"""What a constrained answer has to match: a grammar, as a request brings it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    """The text is a JSON Schema; the answer is a JSON text that it accepts."""
    REGEX = "regex"
    """The text is a regular expression; the whole answer matches it."""
    LARK = "lark"
    """The text is a Lark grammar in llguidance's dialect; the whole answer is derived from its rule `start`."""


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that an answer may be."""

    kind: GrammarKind
    text: str
