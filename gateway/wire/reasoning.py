"""Reasoning: the markers that models write it between, and the parsers that tell it from what follows."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from typing import NamedTuple

from penstock.gateway.wire.parsing import CallBegun, Piece, ReasoningDelta, ReplyParser, TextDelta
from penstock.gateway.wire.tools.formats import HARMONY, Format
from penstock.gateway.wire.tools.scanning import NO_MARKER, Scanner, Steps


class Thinking(NamedTuple):
    """The markers that reasoning is written between."""

    opening: str
    closing: str


REASONING_FORMATS: Mapping[str, Thinking] = {
    HARMONY: Thinking("<|channel|>analysis<|message|>", "<|end|>"),
    "minimax_m2": Thinking("<think>", "</think>"),
    "think_answer": Thinking("<think>", "</think>"),
    "think_response": Thinking("<think>", "</think>"),
    "think": Thinking("<think>", "</think>"),
    "mistral": Thinking("[THINK]", "[/THINK]"),
    "seed_oss": Thinking("<seed:think>", "</seed:think>"),
    "gemma4": Thinking("<|channel>thought", "<channel|>"),
    "cohere2": Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    "cohere2_text": Thinking("<|START_THINKING|>", "<|END_THINKING|>"),
    "granite_words": Thinking("Here is my thought process:", "Here is my response:"),
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


class Plain:
    """The parser of replies that are nothing but text."""

    def feed(self, text: str) -> list[Piece]:
        return [TextDelta(text)] if text else []

    def finish(self) -> list[Piece]:
        return []


class Reasoned(Scanner):
    """The parser of a reply that may begin with reasoning. Space around reasoning is part of neither."""

    def __init__(self, format: str, is_open: bool, answer: ReplyParser) -> None:
        super().__init__()
        self._thinking = REASONING_FORMATS[format]
        self._around = ANSWERS.get(format)
        self._is_open = is_open
        self._answer = answer
        self.reasons = is_open or None

    def parse(self) -> Steps:
        if self._is_open or (yield from self.begins(self._thinking.opening)):
            self.reasons = True
            yield from self.skip(self._thinking.opening)
            yield from self.skip()
            yield from self.said_until(self._thinking.closing, ReasoningDelta)
        self.is_over = True
        if self.reasons:
            yield from self.skip()
        if self._around and (yield from self.begins(self._around[0])):
            yield from self.skip(self._around[0])
            yield from self.skip()
            yield from self.said_until(self._around[1], say=self._answer.feed)
            yield from self.skip()
        yield from self.said_until(NO_MARKER, say=self._answer.feed)
        self._pieces += self._answer.finish()


class Unclosed:
    """Adds the calls with which a reply ends whose reasoning never does, as Qwen 3.5 may write it.

    Their text counts as reasoning, too: until the end they might be an example.
    """

    def __init__(
        self, parser: Reasoned, format: Format, names: Collection[str], make: Callable[[], ReplyParser]
    ) -> None:
        self._parser = parser
        self._format = format
        self._names = names
        self._make = make
        """Returns a parser of calls."""
        self._thoughts = parser.said = []
        self.feed = parser.feed

    def finish(self) -> list[Piece]:
        is_unclosed = bool(self._parser.reasons) and not self._parser.is_over
        pieces = self._parser.finish()
        return pieces + self._calls() if is_unclosed else pieces

    def _calls(self) -> list[Piece]:
        text, (opening, closing) = "".join(self._thoughts), (self._format.opening, self._format.closing)
        start = len(text)
        while (end := text.rfind(closing, 0, start)) >= 0 and not text[end + len(closing) : start].strip():
            start = text.rfind(opening, 0, end)
            if start < 0:
                return []
        parser = self._make()
        pieces = parser.feed(text[start:]) + parser.finish()
        calls: list[Piece] = [piece for piece in pieces if not isinstance(piece, TextDelta)]
        begun = [piece.name for piece in calls if isinstance(piece, CallBegun)]
        return calls if all(name in self._names for name in begun) else []
