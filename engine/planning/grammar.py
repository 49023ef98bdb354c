"""What a constrained answer has to match: a grammar, as a request brings it, and a sequence's place in it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from llguidance import LLMatcher

_MOST_CHARS = 300


class GrammarKind(StrEnum):
    JSON_SCHEMA = "json_schema"
    """The text is a JSON Schema; the answer is a JSON text that it accepts."""
    REGEX = "regex"
    """The text is a regular expression; the whole answer matches it."""
    LARK = "lark"
    """The text is a Lark grammar in llguidance's dialect; the whole answer is derived from its rule `start`.

    Or it is one in GBNF, with a rule `root`.
    """


@dataclass(frozen=True, slots=True)
class Grammar:
    """The texts that an answer may be."""

    kind: GrammarKind
    text: str


class Guide:
    """A sequence's place in its grammar.

    It is a function of the sequence's output tokens: a sequence that gave way keeps it, and one that goes on after
    known tokens finds it again.

    Attributes:
        matcher: llguidance's.
        error: why the grammar can be followed no further; empty while it can.
    """

    __slots__ = ("error", "matcher")

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher
        self.error = ""
        self.look()

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return not self.error and self.matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        """Takes the next token of the sequence."""
        if not self.error:
            self.matcher.consume_token(token_id)
            self.look()

    def allowed(self, drafts: list[int]) -> list[int]:
        """The drafts up to the first one that the grammar rules out."""
        return drafts if self.error else drafts[: self.matcher.validate_tokens(drafts)]

    def forced(self) -> list[int]:
        """Tokens that spell what has to come next."""
        return [] if self.error else self.matcher.compute_ff_tokens()

    def look(self) -> None:
        """Notes what went wrong in the matcher, if anything did."""
        if self.matcher.is_error():
            self.error = f"the grammar could not be followed: {one_line(self.matcher.get_error())}"


def one_line(text: str) -> str:
    """What llguidance says of a grammar, which may be of any length."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:_MOST_CHARS]
