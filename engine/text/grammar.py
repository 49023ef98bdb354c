"""The constraints of an answer: a grammar, as a request brings it, and the tokens that may come next in a sequence."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from enum import StrEnum
from typing import TYPE_CHECKING

from penstock.engine.text.bans import Bans

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
    answer: Grammar | None = None
    """The grammar that `@answer` in a Lark grammar stands for."""

    @property
    def plain(self) -> Grammar:
        """Returns the grammar without its compiled form."""
        return self


class CompiledGrammar(Grammar):
    """A grammar with its matcher, which is there as long as a request has the grammar; sent elsewhere, it is plain.

    Attributes:
        matcher: llguidance's, at its start; it is copied, and never moved on.
    """

    __slots__ = ("__weakref__", "_plain", "matcher")

    matcher: LLMatcher
    _plain: Grammar

    def __init__(self, grammar: Grammar, matcher: LLMatcher) -> None:
        super().__init__(grammar.kind, grammar.text, grammar.answer)
        object.__setattr__(self, "matcher", matcher)
        object.__setattr__(self, "_plain", grammar)

    @property
    def plain(self) -> Grammar:
        return self._plain

    def __reduce__(self) -> tuple[type[Grammar], tuple[GrammarKind, str, Grammar | None]]:
        return Grammar, (self.kind, self.text, self.answer)


class Guide:
    """The tokens that may come next in a sequence: its place in its grammar, and the tokens that its request rules out.

    It is a function of the sequence's output tokens: a sequence that gave way keeps it, and one that goes on after
    known tokens finds it again.

    Attributes:
        matcher: llguidance's; None without a grammar.
        bans: None if no token is ruled out.
        before: the last tokens of the sequence, as many as the bans look at.
        error: why the grammar can be followed no further; empty while it can.
    """

    __slots__ = ("bans", "before", "error", "matcher")

    def __init__(self, matcher: LLMatcher | None, bans: Bans | None = None, error: str = "") -> None:
        self.matcher = matcher
        self.bans = bans
        self.before = deque[int](maxlen=0 if bans is None else bans.reach)
        self.error = error
        self.look()

    @property
    def is_complete(self) -> bool:
        """Whether nothing but the end may follow."""
        return self.matcher is not None and not self.error and self.matcher.is_stopped()

    def advance(self, token_id: int) -> None:
        """Takes the next token of the sequence."""
        self.before.append(token_id)
        if self.matcher is not None and not self.error:
            self.matcher.consume_token(token_id)
            self.look()

    def allowed(self, drafts: list[int]) -> list[int]:
        """The drafts up to the first one that is ruled out."""
        if self.matcher is not None and not self.error:
            drafts = drafts[: self.matcher.validate_tokens(drafts)]
        return drafts if self.bans is None else drafts[: self._num_kept(self.bans, drafts)]

    def forced(self) -> list[int]:
        """Tokens that spell what has to come next."""
        return [] if self.error or self.matcher is None else self.matcher.compute_ff_tokens()

    def look(self) -> None:
        """Notes what went wrong in the matcher, if anything did."""
        if self.matcher is not None and self.matcher.is_error():
            self.error = f"the grammar could not be followed: {one_line(self.matcher.get_error())}"

    def _num_kept(self, bans: Bans, drafts: list[int]) -> int:
        before = list(self.before)
        for number, draft in enumerate(drafts):
            if not bans.may_follow(draft, before):
                return number
            before.append(draft)
        return len(drafts)


def one_line(text: str) -> str:
    """Shortens a message of llguidance, which may be of any length, to one line."""
    return " ".join(text.replace("<non-verbose/>", "").split())[:_MOST_CHARS]
