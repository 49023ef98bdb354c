"""Reasoning: the markers that models write it between, and the parsers that tell it from what follows."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import NamedTuple

from penstock.gateway.wire.parsing import Piece, ReasoningDelta, ReplyParser, TextDelta
from penstock.gateway.wire.tools.formats import HARMONY
from penstock.gateway.wire.tools.scanning import NO_MARKER, FormatParser, Scanner, Steps


class ReasoningMarkers(NamedTuple):
    """The markers that reasoning is written between."""

    opening: str
    closing: str


REASONING_FORMATS: Mapping[str, ReasoningMarkers] = {
    HARMONY: ReasoningMarkers("<|channel|>analysis<|message|>", "<|end|>"),
    "minimax_m2": ReasoningMarkers("<think>", "</think>"),
    "think_answer": ReasoningMarkers("<think>", "</think>"),
    "think_response": ReasoningMarkers("<think>", "</think>"),
    "think": ReasoningMarkers("<think>", "</think>"),
    "mistral": ReasoningMarkers("[THINK]", "[/THINK]"),
    "seed_oss": ReasoningMarkers("<seed:think>", "</seed:think>"),
    "gemma4": ReasoningMarkers("<|channel>thought", "<channel|>"),
    "cohere2": ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
    "cohere2_text": ReasoningMarkers("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite_words": ReasoningMarkers("Here is my thought process:", "Here is my response:"),
}
"""The formats of reasoning; a chat template's is the first one whose closing, answer markers and sign are in it."""
ANSWERS: Mapping[str | None, tuple[str, str]] = {
    HARMONY: ("<|channel|>final<|message|>", "<|return|>"),
    "think_answer": ("<answer>", "</answer>"),
    "think_response": ("<response>", "</response>"),
    "cohere2": ("<|START_RESPONSE|>", "<|END_RESPONSE|>"),
    "cohere2_text": ("<|START_TEXT|>", "<|END_TEXT|>"),
}
"""The markers around the answer in some of these formats."""
_SIGNS = {"minimax_m2": ("<minimax:tool_call>",)}
"""Further texts by which a chat template shows its format of reasoning."""


def is_in(name: str, template: str) -> bool:
    """Returns whether a chat template speaks of this format."""
    signs = (REASONING_FORMATS[name].closing, *ANSWERS.get(name, ()), *_SIGNS.get(name, ()))
    return all(sign in template for sign in signs)


class PlainParser:
    """The parser of replies that are nothing but text."""

    def feed(self, text: str) -> list[Piece]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class ReasoningScanner(Scanner):
    """The parser of a reply that may begin with reasoning. Space around reasoning is part of neither."""

    def __init__(self, format: str, is_open: bool, answer: ReplyParser) -> None:
        super().__init__()
        self._thinking = REASONING_FORMATS[format]
        self._around = ANSWERS.get(format)
        self._is_open = is_open
        self._answer = answer
        self.reasons = is_open or None
        self._calls = answer if isinstance(answer, FormatParser) and answer.has_ends else None
        self.said = None if self._calls is None else []

    def parse(self) -> Steps:
        if self._is_open or (yield from self.begins(self._thinking.opening)):
            self.reasons = True
            yield from self.skip(self._thinking.opening)
            yield from self.skip()
            is_closed = yield from self.said_until(self._thinking.closing, ReasoningDelta)
            if not is_closed and self._calls is not None:
                # As Qwen 3.5 may write it. Its text counts as reasoning, too: until the end it might be an example.
                self._pieces += self._calls.last_calls("".join(self.said or ()))
        self.is_over = True
        if self.reasons:
            yield from self.skip()
        if self._around and (yield from self.begins(self._around[0])):
            yield from self.skip(self._around[0])
            yield from self.skip()
            yield from self.said_until(self._around[1], self._answer.feed)
            yield from self.skip()
        yield from self.said_until(NO_MARKER, self._answer.feed)
        self._pieces += self._answer.finish()


class Thoughts:
    """Counts the tokens of a reply's choices that are reasoning, its markers included."""

    def __init__(
        self, make: Callable[[], Scanner], first: str, token_bytes: Callable[[int], bytes], without: set[int]
    ) -> None:
        """
        Args:
            make: it makes a parser of reasoning.
            first: the character with which the marker begins that ends reasoning.
            without: tokens without that character, as far as they were looked at; further ones are added.
        """
        self._make = make
        self._first = first
        self._token_bytes = token_bytes
        self._without = without
        self._choices: dict[Hashable, Scanner] = {}
        self.num_over = 0
        """The choices that reason no more."""

    def count(self, choice: Hashable, token_ids: Iterable[int]) -> int:
        """Returns how many of a choice's next tokens are reasoning, earlier undecided ones included."""
        read = self._choices.get(choice)
        if read is None:
            read = self._choices[choice] = self._make()
        if read.is_over:
            return 0
        number = 0
        for token_id in token_ids:
            if token_id in self._without and read.quick is not None and read.quick[0] == self._first:
                number += bool(read.reasons)
                continue
            read.num_undecided += 1
            # A byte a character: a token may end within one.
            text = self._token_bytes(token_id).decode("latin-1")
            if self._first not in text:
                self._without.add(token_id)
            read.feed(text)
            if read.reasons is not None:
                number += read.num_undecided * read.reasons
                read.num_undecided = 0
            if read.is_over:
                self.num_over += 1
                break
        return number
