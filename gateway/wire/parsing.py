"""The parts of a reply once its text is parsed: text, reasoning, and tool calls.

A parser is a pure function of the text: the same text, however it is cut into deltas, gives pieces that say the same.
So a reply that is resumed, or taken over by another process, has the same pieces again.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Protocol

import orjson


@dataclass(slots=True)
class TextDelta:  # one for every token: frozen, it would take twice the time to make
    """A piece of the text that is meant for the user."""

    text: str


@dataclass(slots=True)
class ReasoningDelta:
    """A piece of the reasoning that comes first."""

    text: str


@dataclass(frozen=True, slots=True)
class CallBegun:
    """The beginning of a call; its arguments follow. `index` counts the calls of one choice from 0."""

    index: int
    id: str
    name: str


@dataclass(slots=True)
class ArgumentsDelta:
    """A piece of the arguments of the call that was begun last; joined, they are the text of a JSON object."""

    index: int
    text: str


Piece = TextDelta | ReasoningDelta | CallBegun | ArgumentsDelta


class ReplyParser(Protocol):
    """A parser of one choice of one reply."""

    def feed(self, text: str) -> list[Piece]:
        """Returns the pieces that this text makes certain; text that could still become a marker is held back."""

    def finish(self) -> list[Piece]:
        """Returns the pieces that were held back, when no more text comes."""


@dataclass(slots=True)
class Call:
    """A whole call of a tool."""

    id: str
    name: str
    arguments: str = ""

    @property
    def input(self) -> object:
        """The arguments as JSON's objects; none, if the answer ended within them."""
        try:
            return orjson.loads(self.arguments)
        except orjson.JSONDecodeError:
            return {}


@dataclass(slots=True)
class Answer:
    """All pieces of a choice, joined."""

    text: str = ""
    reasoning: str = ""
    calls: list[Call] = field(default_factory=list)

    def add(self, pieces: Iterable[Piece]) -> None:
        texts: list[str] = []
        reasoning: list[str] = []
        arguments: dict[int, list[str]] = {}
        for piece in pieces:
            if isinstance(piece, TextDelta):
                texts.append(piece.text)
            elif isinstance(piece, ReasoningDelta):
                reasoning.append(piece.text)
            elif isinstance(piece, CallBegun):
                self.calls.append(Call(piece.id, piece.name))
            else:
                arguments.setdefault(piece.index, []).append(piece.text)
        self.text += "".join(texts)
        self.reasoning += "".join(reasoning)
        for index, parts in arguments.items():
            self.calls[index].arguments += "".join(parts)


def answer_of(parser: ReplyParser, text: str) -> Answer:
    """Parses a whole text."""
    return joined([*parser.feed(text), *parser.finish()])


def joined(pieces: Iterable[Piece]) -> Answer:
    answer = Answer()
    answer.add(pieces)
    return answer
