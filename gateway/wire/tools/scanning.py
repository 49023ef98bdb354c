"""Scanners: the ground of all parsers, which read text that comes in deltas as if all of it were there.

A format is a generator that yields whenever it needs more text than there is. Its cursor goes ahead as far as it likes,
and what it understood is consumed: text that turns out to be no call is still there to be said.

A parser's work is linear in its text: it goes on where it stopped to look when more text comes, and an opening that a
section without calls has passed over is not tried again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from functools import cache
from json.encoder import encode_basestring
from typing import Any

from penstock.gateway.wire.parsing import ArgumentsDelta, CallBegun, Piece, ReasoningDelta, TextDelta
from penstock.gateway.wire.tools.formats import ToolFormat

Steps = Generator[None, None, None]
DeltaType = type[TextDelta | ReasoningDelta]
PieceMaker = Callable[[str], list[Piece]]
Out = DeltaType | PieceMaker
"""What becomes of text: a piece of this kind, or the pieces that a function makes."""
Trim = Callable[[str], str]

NO_MARKER = "\ud800"
"""A surrogate, which no text has."""

_STRUCTURE = re.compile(r'(?:[^"{}\[\]<]+|"[^"\\]*(?:\\.[^"\\]*)*")*', re.DOTALL)
"""Matches text and whole strings up to a bracket, a string without an end, or a "<", with which all markers begin.

Possessive quantifiers, which would say so, lose matches before Python 3.11.5 (cpython issue 101955). It needs none: it
can always end, and no text can be matched in two ways.
"""
_IN_STRING = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
"""The run of characters after a quotation mark in which no string ends."""
SPACE = re.compile(r"\s*")
_NOTHING = re.compile("")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]*")
_CLOSING = {"{": "}", "[": "]"}


class Malformed(Exception):
    """The text that comes is not what the format says."""


@dataclass(frozen=True, slots=True)
class Tools:
    """The tools that a reply may call."""

    schemas: Mapping[str, Any]
    """The JSON schema of its arguments, by the name of the tool."""
    new_id: Callable[[int], str]
    """A function that makes the id of a reply's call from its number, counted from 0."""


class Scanner:
    """A `gateway.wire.parsing.ReplyParser` whose subclasses add `parse`.

    Places are indexes into `_text`: all before `_done` is consumed, and the cursor is at `_at`. They hold until the
    next call of `stream`, `pass_on` or `json`, which drop what is consumed.
    """

    def __init__(self) -> None:
        self._text = ""
        self._done = 0
        self._at = 0
        """The place up to which a format has looked at the text: no marker is searched for that ends before it."""
        self._opening = ""
        """The last marker that ended text, with the space before it."""
        self._ended = False
        self._pieces: list[Piece] = []
        self._out: Out | None = None
        """What becomes of all that the cursor passes; None if it is only looked at."""
        self._steps = self.parse()
        self.quick: tuple[str, str, DeltaType, PieceMaker | None] | None = None
        """While text is passed on: two characters with which something else may begin, and what other text makes."""
        self.said: list[str] | None = None
        """The texts of the pieces that this parser made up to markers; a list if they are to be kept."""
        self.reasons: bool | None = None
        """Whether the latest text is reasoning; None while that depends on further text."""
        self.is_over = False
        """Whether all reasoning has been read, or there is none."""
        self.num_undecided = 0
        """The number of tokens of which it is not known yet whether they are reasoning; see `Thoughts`."""

    def parse(self) -> Steps:
        """Reads the whole reply."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Piece]:
        if self.quick is not None and text and not text[-1].isspace():
            first, second, kind, say = self.quick
            if first not in text and second not in text:
                said, self._text, self._at = self._text + text, "", 0
                if say is not None:
                    return say(said)
                if self.said is not None:  # not by `say`: a call for every token
                    self.said += (said,)
                return [kind(said)]
        return self._go_on(text)

    def finish(self) -> list[Piece]:
        self._ended = True
        return self._go_on("")

    def _go_on(self, text: str) -> list[Piece]:
        whole, self._text = self._text, ""  # with no other reference to it, it grows in its place
        whole += text
        self._text, self.quick = whole, None
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    # What comes out

    def say(self, text: str, out: Out = TextDelta) -> None:
        if not text:
            return
        if not isinstance(out, type):
            self._pieces += out(text)
            return
        self._pieces.append(out(text))
        if self.said is not None:
            self.said.append(text)

    # What goes in

    def wait(self, first: str = "", second: str = NO_MARKER) -> None:
        """Gets ready for more text, for which the caller yields; see `pass_on`.

        Raises:
            Malformed: none comes.
        """
        if self._ended:
            self._at = len(self._text)
            raise Malformed
        if self._out is not None:
            self.say(self.consume(), self._out)
            self.pass_on(first, second, self._out)

    def pass_on(self, first: str, second: str, out: Out) -> None:
        """Until one of two characters comes, further text that does not end in space is passed on at once."""
        if self._done:
            self._text, self._at, self._done = self._text[self._done :], self._at - self._done, 0
        self.quick = (first, second, out, None) if isinstance(out, type) else (first, second, TextDelta, out)

    def consume(self, end: int | None = None) -> str:
        """Returns the text up to the cursor, or up to `end`, which is read."""
        end = self._at if end is None else end
        taken, self._done, self._at = self._text[self._done : end], end, max(end, self._at)
        return taken

    def past(self, pattern: re.Pattern[str], *stops: str) -> Generator[None, None, str]:
        """Moves to the end of a run of characters and returns the one after it, or raises Malformed.

        Args:
            pattern: it matches any part of a run.
            stops: see `pass_on`.
        """
        while (at := end_of(pattern, self._text, self._at)) == len(self._text):
            self._at = at
            self.wait(*stops)
            yield
        self._at = at
        return self._text[at]

    def run(self, pattern: re.Pattern[str]) -> Steps:
        """Moves to the end of a run of characters, or of the reply."""
        try:
            yield from self.past(pattern)
        except Malformed:
            return

    def peek(self) -> Generator[None, None, str]:
        """Moves past space and returns the next character, or raises Malformed."""
        return (yield from self.past(SPACE))

    def word(self, pattern: re.Pattern[str]) -> Generator[None, None, str]:
        """Moves past a run and returns it, or raises Malformed if it is empty, or the last text."""
        start = self._at
        yield from self.past(pattern)
        if self._at == start:
            raise Malformed
        return self._text[start : self._at]

    def take(self, text: str) -> Generator[None, None, bool]:
        """Moves past this text and returns True, if it comes next."""
        while len(self._text) - self._at < len(text):
            if self._ended or not text.startswith(self._text[self._at :]):
                return False
            yield
        is_there = self._text.startswith(text, self._at)
        self._at += len(text) * is_there
        return is_there

    def expect(self, text: str) -> Steps:
        """Moves past space and then this text, or raises Malformed."""
        yield from self.peek()
        if not (yield from self.take(text)):
            raise Malformed

    def begins(self, *markers: str) -> Generator[None, None, bool]:
        """Moves past space and returns whether one of these comes next."""
        yield from self.run(SPACE)
        for marker in markers:
            if (yield from self.take(marker)):
                self._at -= len(marker)
                return True
        return False

    def skip(self, text: str = "") -> Steps:
        """Consumes space and then this text, if it comes next, or its beginning where the reply was cut off."""
        yield from self.run(SPACE)
        if not (yield from self.take(text)):
            rest = self._text[self._at : self._at + len(text)]
            self._at += len(rest) * text.startswith(rest)
        self.consume()

    def until(self, *markers: str) -> Generator[None, None, str]:
        """Moves to the first of some markers and returns it, or raises Malformed."""
        while not (marker := self.near(markers)):
            self.wait()
            yield
        return marker

    def near(self, markers: tuple[str, ...]) -> str:
        """Moves to the first of some markers and returns it, or to where one may begin, if none is there."""
        match = search(_any_of(markers), self._text, self._at)
        marker = match[1] if match else None
        self._at = match.start() if match and (marker or not self._ended) else len(self._text)
        return marker or ""

    def stream(
        self, *markers: str, out: Out = TextDelta, trim: Trim = str.rstrip
    ) -> Generator[None, None, str]:
        """Passes on text up to the first of some markers, which all begin alike; returns it, or "" if there is none.

        Args:
            trim: it removes from the end of a text what belongs to the marker after it. By default, space.
        """
        unsaid = self._done  # from `_done` up to here there is nothing but what may be trimmed
        longest = max(map(len, markers))
        self._at = max(self._done, self._at - longest + 1)  # a marker may be what was not understood
        while not (marker := self.near(markers)) and not self._ended:
            if said := trim(self._text[unsaid : self._at]):
                self.say(self.consume(unsaid + len(said)), out)
            is_begun = self._at < len(self._text)
            self.pass_on("" if is_begun else markers[0][0], NO_MARKER, out)
            yield
            unsaid = self._at
        before = self.consume()
        said = trim(before) if marker else before
        self.say(said, out)
        self._opening = before[len(said) :] + marker
        return marker

    def said_until(
        self, marker: str, out: Out = TextDelta, trim: Trim = str.rstrip
    ) -> Generator[None, None, bool]:
        """Passes on text up to a marker, which is consumed; returns False if all is passed on, and there is none."""
        is_there = bool((yield from self.stream(marker, out=out, trim=trim)))
        self._at += len(marker) * is_there
        self.consume()
        return is_there

    # JSON

    def json(self, out: Out | None = None) -> Steps:
        """Moves past the JSON string, object or array that comes next, and passes it on if there is a way out.

        Raises:
            Malformed: it broke off; what came of it is passed on.
        """
        self._out = out
        closing: list[str] = []
        try:
            while True:
                character = self._text[self._at]
                if character == '"':
                    yield from self.string(character)
                elif character in _CLOSING:
                    closing.append(_CLOSING[character])
                    self._at += 1
                elif closing and character == closing.pop():
                    self._at += 1
                else:
                    raise Malformed
                if not closing:
                    return
                yield from self.past(_STRUCTURE)
        finally:
            self._out = None
            if out is not None:
                self.say(self.consume(), out)

    def string(self, quote: str) -> Steps:
        """Moves past the string that comes next; a backslash takes a quotation mark its meaning."""
        self._at += 1
        while (yield from self.past(_IN_STRING[quote], quote, "\\")) != quote:
            self._at += 1
            yield from self.past(_NOTHING)
            self._at += 1
        self._at += 1


class FormatParser(Scanner):
    """The parser of one format; subclasses add `call`, which is their style's."""

    def __init__(self, format: ToolFormat, tools: Tools) -> None:
        super().__init__()
        self._format = format
        self._tools = tools
        self._num_calls = 0

    def parse(self) -> Steps:
        if not self._format.opening:
            yield from self._tries_section()
        marker = self._format.opening or self._format.tag
        while marker and (yield from self.said_until(marker)):
            if not (yield from self._tries_section()):
                self.say(self._opening)
        yield from self.said_until(NO_MARKER)

    def _tries_section(self) -> Generator[None, None, bool]:
        before, looked_at = self._num_calls, 0
        try:
            yield from self.section()
        except Malformed:
            if self._num_calls == before:
                return False
            looked_at, self._at = self._at, self._done
        yield from self.skip(self._format.closing)
        yield from self.skip()
        self._at = max(self._at, looked_at)
        return True

    def section(self) -> Steps:
        """Reads the calls between an opening and its closing.

        Raises:
            Malformed: there is no call, and nothing was consumed; or the last one broke off.
        """
        call = self._format.call
        yield from self.call()
        while call.end and call.before and (yield from self.begins(call.before)):
            yield from self.call()

    def call(self) -> Steps:
        """Reads one call; raises as `section` does."""
        raise NotImplementedError

    @property
    def has_ends(self) -> bool:
        """Whether calls have markers on both sides."""
        return bool(self._format.opening and self._format.closing)

    def last_calls(self, text: str) -> list[Piece]:
        """Returns the calls with which a whole text ends; none, if it does not, or one of them calls no known tool."""
        opening, closing, start = self._format.opening, self._format.closing, len(text)
        while (end := text.rfind(closing, 0, start)) >= 0 and not text[end + len(closing) : start].strip():
            start = text.rfind(opening, 0, end)
            if start < 0:
                return []
        pieces = self.feed(text[start:]) + self.finish()
        calls: list[Piece] = [piece for piece in pieces if not isinstance(piece, TextDelta)]
        names = [piece.name for piece in calls if isinstance(piece, CallBegun)]
        return calls if self._tools.schemas.keys() >= set(names) else []

    def tool_name(self) -> Generator[None, None, str]:
        """Moves past the name that comes next, and returns it."""
        name = yield from self.word(_NAME)
        self.check_name(name)
        return name

    def check_name(self, name: str) -> None:
        """Raises Malformed for a name that makes no call."""
        if not name or not (self._format.opening or name in self._tools.schemas):
            raise Malformed

    def begin(self, name: str) -> None:
        """Begins a call, and consumes all up to the cursor."""
        self.consume()
        self._pieces.append(CallBegun(self._num_calls, self._tools.new_id(self._num_calls), name))
        self._num_calls += 1

    def argue(self, text: str) -> None:
        self.say(text, self.argued)

    def argued(self, text: str) -> list[Piece]:
        """Returns the pieces of a part of the latest call's arguments."""
        return [ArgumentsDelta(self._num_calls - 1, text)]

    def argued_text(self, text: str) -> list[Piece]:
        """Returns the pieces of a part of an argument that is a string."""
        return self.argued(encode_basestring(text)[1:-1])


@cache
def _any_of(markers: tuple[str, ...]) -> re.Pattern[str]:
    """Returns a pattern whose group is one of these markers; without it, one may begin at the end of the text."""
    begun = [NO_MARKER]
    for marker in markers:
        pattern = ""
        for character in reversed(marker[:-1]):
            pattern = f"(?:{re.escape(character)}{pattern})?"
        begun += [pattern.removesuffix("?")] * bool(pattern)
    return re.compile(rf"({'|'.join(map(re.escape, markers))})|(?:{'|'.join(begun)})\Z")


def end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Returns the end of a match at `start`, which may be empty."""
    match = pattern.match(text, start)
    return start if match is None else match.end()


def search(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    return pattern.search(text, start)
