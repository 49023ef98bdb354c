"""Scanners: the ground of all parsers, which read text that comes in deltas as if all of it were there.

A format is a generator that yields whenever it needs more text than there is. It looks ahead as far as it likes and
consumes what it understood: text that turns out to be no call is still there to be said.

A parser's work is linear in its text: it goes on where it stopped to look when more text comes, and an opening that a
section without calls has passed over is not tried again.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from json.encoder import encode_basestring
from typing import Any

from penstock.gateway.wire.parsing import ArgumentsDelta, CallBegun, Piece, ReasoningDelta, TextDelta
from penstock.gateway.wire.tools.formats import Format

Steps = Generator[None, None, None]
Said = type[TextDelta | ReasoningDelta]
Say = Callable[[str], list[Piece]]

NO_MARKER = "\ud800"
"""A surrogate, which no text has."""

_STRUCTURE = re.compile(r'(?:[^"{}\[\]<]+|"[^"\\]*(?:\\.[^"\\]*)*")*', re.DOTALL)
"""Matches text and whole strings up to a bracket, a string without an end, or a "<", with which all markers begin.

Possessive quantifiers, which would say so, lose matches before Python 3.11.5 (cpython issue 101955). It needs none: it
can always end, and no text can be matched in two ways.
"""
_IN_STRING = re.compile(r'[^"\\]*')
SPACE = re.compile(r"\s*")
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

    Places are indexes into `_text`, of which all before `_at` is consumed. They hold until the next call of
    `said_until`, `pass_on` or `json_argue`, which drop what is consumed.
    """

    def __init__(self) -> None:
        self._text = ""
        self._at = 0
        self._seen = 0
        """The place up to which a format has looked at the text: no marker is searched for that ends before it."""
        self._opening = ""
        """The last marker that ended text, with the space before it."""
        self._ended = False
        self._pieces: list[Piece] = []
        self._steps = self.parse()
        self.quick: tuple[str, str, Said, Say | None] | None = None
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
                said, self._text, self._seen = self._text + text, "", 0
                if say is not None:
                    return say(said)
                if self.said is not None:  # not by `_tell`: a call for every token
                    self.said += (said,)
                return [kind(said)]
        return self._go_on(text)

    def finish(self) -> list[Piece]:
        self._ended = True
        return self._go_on("")

    def _go_on(self, text: str) -> list[Piece]:
        whole, self._text = self._text, ""  # with no other reference to it, it grows in its place
        whole += text
        self._text = whole
        next(self._steps, None)
        pieces, self._pieces = self._pieces, []
        return pieces

    # What comes out

    def say(self, text: str, kind: Said = TextDelta) -> None:
        if text:
            self._pieces.append(kind(text))

    def say_opening(self) -> None:
        """Says the marker after all: it opened nothing."""
        self.say(self._opening)

    # What goes in

    def more(self) -> Steps:
        """Waits for more text.

        Raises:
            Malformed: none comes.
        """
        if self._ended:
            self._seen = len(self._text)
            raise Malformed
        yield

    def pass_on(
        self, first: str, second: str = NO_MARKER, kind: Said = TextDelta, say: Say | None = None
    ) -> Steps:
        """Waits for more text; until one of two characters comes, text that ends in no space is a piece of this kind.

        Args:
            say: it makes other pieces of such text.
        """
        self._drop()
        self.quick = first, second, kind, say
        yield
        self.quick = None

    def consume(self, end: int) -> str:
        taken, self._at = self._text[self._at : end], end
        return taken

    def _drop(self) -> None:
        """Drops the text that is consumed, with which all places change."""
        if self._at:
            self._text, self._seen, self._at = self._text[self._at :], max(0, self._seen - self._at), 0

    def ahead(self, text: str, start: int | None = None) -> Generator[None, None, bool]:
        """Returns whether this text comes next, at `start`."""
        self._seen = start = self._at if start is None else start
        while len(self._text) - start < len(text):
            if self._ended or not text.startswith(self._text[start:]):
                return False
            yield
        return self._text.startswith(text, start)

    def behind(self, text: str, start: int) -> Generator[None, None, int]:
        """Returns the end of this text, which comes next at `start`, or raises Malformed."""
        if not (yield from self.ahead(text, start)):
            raise Malformed
        return start + len(text)

    def begins(self, *markers: str) -> Generator[None, None, bool]:
        """Returns whether one of these comes next, after space."""
        try:
            start = yield from self.past_space()
        except Malformed:
            return False
        for marker in markers:
            if (yield from self.ahead(marker, start)):
                return True
        return False

    def run_end(self, pattern: re.Pattern[str], start: int) -> Generator[None, None, int]:
        """Returns the end of a run of characters from `start` on; the pattern matches any part of a run."""
        while (start := end_of(pattern, self._text, start)) == len(self._text) and not self._ended:
            yield
        self._seen = start
        return start

    def past(self, pattern: re.Pattern[str], start: int) -> Generator[None, None, int]:
        """Returns the end of a run of characters, or raises Malformed if nothing follows it."""
        end = yield from self.run_end(pattern, start)
        if end == len(self._text):
            raise Malformed
        return end

    def past_space(self, start: int | None = None) -> Generator[None, None, int]:
        """Returns the place of the first character from `start` on that is no space, or raises Malformed."""
        return (yield from self.past(SPACE, self._at if start is None else start))

    def skip_space(self) -> Steps:
        self._at = yield from self.run_end(SPACE, self._at)

    def skip(self, text: str) -> Steps:
        """Passes over space and then this text, if it comes next, or its beginning where the reply was cut off."""
        yield from self.skip_space()
        is_there = yield from self.ahead(text)
        if is_there or text.startswith(self._text[self._at : self._at + len(text)]):
            self._at = min(len(self._text), self._at + len(text))

    def until(
        self, markers: re.Pattern[str], longest: int, start: int
    ) -> Generator[None, None, re.Match[str]]:
        """Returns the first of some markers from `start` on, none longer than `longest`, or raises Malformed."""
        while (match := search(markers, self._text, start)) is None:
            start = max(start, len(self._text) - longest + 1)
            yield from self.more()
        self._seen = match.start()
        return match

    def said_until(
        self, marker: str, kind: Said = TextDelta, say: Say | None = None
    ) -> Generator[None, None, bool]:
        """Says what comes before a marker, which is consumed. False: all was said, and there is none.

        Space before a marker is not said: it is the format's.

        Args:
            say: it makes other pieces of the text.
        """
        unsaid = self._at  # from `_at` up to here there is nothing but space
        self._seen = max(self._at, self._seen - len(marker) + 1)  # a marker may be what was not understood
        while (end := self._text.find(marker, self._seen)) < 0 and not self._ended:
            num_held = num_begun(self._text, marker, self._seen)
            self._seen = len(self._text) - num_held
            if said := self._text[unsaid : self._seen].rstrip():
                self._tell(self.consume(unsaid + len(said)), kind, say)
            yield from self.pass_on("" if num_held else marker[0], NO_MARKER, kind, say)
            unsaid = self._seen
        is_there = end >= 0
        before = self.consume(end if is_there else len(self._text))
        said = before.rstrip() if is_there else before
        self._tell(said, kind, say)
        self._opening = before[len(said) :] + marker
        self._at += len(marker) * is_there
        return is_there

    def _tell(self, text: str, kind: Said, say: Say | None) -> None:
        if text and say is not None:
            self._pieces += say(text)
        elif text:
            self._pieces.append(kind(text))
            if self.said is not None:
                self.said.append(text)

    def match(self, pattern: re.Pattern[str], start: int) -> Generator[None, None, int]:
        """Returns the end of a run of characters at `start`; it is not empty, and something else follows.

        Raises:
            Malformed: nothing like it comes.
        """
        end = yield from self.past(pattern, start)
        if end == start:
            raise Malformed
        return end


class FormatParser(Scanner):
    """The parser of one format; subclasses add `section`, the part that is their style's."""

    def __init__(self, format: Format, tools: Tools) -> None:
        super().__init__()
        self._format = format
        self._tools = tools
        self._num_calls = 0

    def section(self) -> Steps:
        """Reads the calls between an opening and its closing.

        Raises:
            Malformed: there is no call, and nothing was consumed; or the last one broke off.
        """
        raise NotImplementedError

    def parse(self) -> Steps:
        if not self._format.opening:
            yield from self._tries_section()
        marker = self._format.opening or self._format.tag
        while marker and (yield from self.said_until(marker)):
            if not (yield from self._tries_section()):
                self.say_opening()
        yield from self.said_until(NO_MARKER)

    def _tries_section(self) -> Generator[None, None, bool]:
        before, seen = self._num_calls, 0
        try:
            yield from self.section()
        except Malformed:
            if self._num_calls == before:
                return False
            seen = self._seen
        yield from self.skip(self._format.closing)
        yield from self.skip_space()
        self._seen = max(self._seen, seen)
        return True

    def tool_name(self, start: int) -> Generator[None, None, int]:
        """Returns the end of the name that begins at `start`."""
        end = yield from self.match(_NAME, start)
        self.check_name(self._text[start:end])
        return end

    def check_name(self, name: str) -> None:
        """Raises Malformed for a name that makes no call."""
        if not name or not (self._format.opening or name in self._tools.schemas):
            raise Malformed

    def begin(self, name: str) -> None:
        self._pieces.append(CallBegun(self._num_calls, self._tools.new_id(self._num_calls), name))
        self._num_calls += 1

    def argue(self, text: str) -> None:
        if text:
            self._pieces += self.argued(text)

    def argue_text(self, text: str) -> None:
        """Passes on a part of an argument that is a string."""
        if text:
            self._pieces += self.argued_text(text)

    def argued(self, text: str) -> list[Piece]:
        return [ArgumentsDelta(self._num_calls - 1, text)]

    def argued_text(self, text: str) -> list[Piece]:
        return self.argued(encode_basestring(text)[1:-1])

    def json_end(self, start: int) -> Generator[None, None, int]:
        """Returns the end of a JSON string, object or array that begins at `start`; raises Malformed if it has none."""
        scan, end = JsonScan(), start
        while True:
            self._seen = end = scan.advance(self._text, end)
            if scan.is_broken:
                raise Malformed
            if scan.is_done:
                return end
            yield from self.more()

    def json_argue(self) -> Steps:
        """Passes on the object that comes next as the arguments of the call that was begun last.

        Raises:
            Malformed: it broke off; what came of it is passed on.
        """
        scan = JsonScan()
        while not scan.is_done:
            self.argue(self.consume(scan.advance(self._text, self._at)))
            if scan.is_broken or (self._ended and not scan.is_done):
                raise Malformed
            if not scan.is_done:
                yield from self.pass_on('"' if scan.is_within_string else "", "\\", say=self.argued)


class JsonScan:
    """Finds the end of a JSON value that is a string, an object or an array, as its text comes."""

    def __init__(self) -> None:
        self.is_done = False
        self.is_broken = False
        """Whether brackets do not match, or a character came that JSON does not have."""
        self._closing: list[str] = []
        """The brackets that are open, as they close."""
        self._in_string = False
        self._escaped = False

    @property
    def is_within_string(self) -> bool:
        """Whether any character but a quotation mark or a backslash leaves all as it is."""
        return self._in_string and not self._escaped

    def advance(self, text: str, start: int) -> int:
        """Returns the end of the value, or of the text if the value goes on, or the place where it is broken."""
        i = start
        while i < len(text) and not (self.is_done or self.is_broken):
            if self._closing or self._in_string:
                i = end_of(_IN_STRING if self._in_string else _STRUCTURE, text, i + self._escaped)
                self._escaped = False
            if i < len(text):
                self._take(text[i])
                i += not self.is_broken
        return i

    def _take(self, character: str) -> None:
        """Takes a character that can change what others mean."""
        if self._in_string:
            self._escaped = character == "\\"
            self._in_string = self._escaped
        elif character == '"':
            self._in_string = True
        elif character in _CLOSING:
            self._closing.append(_CLOSING[character])
        elif self._closing and character == self._closing[-1]:
            self._closing.pop()
        else:
            self.is_broken = True
        self.is_done = not (self._closing or self._in_string or self.is_broken)


def string_of(text: str) -> str:
    """Returns the text of a JSON string; raises Malformed if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        raise Malformed from None
    if not isinstance(value, str):
        raise Malformed
    return value


def end_of(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Returns the end of a match at `start`, which may be empty."""
    match = pattern.match(text, start)
    return start if match is None else match.end()


def search(pattern: re.Pattern[str], text: str, start: int) -> re.Match[str] | None:
    return pattern.search(text, start)


def num_begun(text: str, marker: str, start: int) -> int:
    """Returns how many characters at the end of a text, from `start` on, a marker begins with."""
    place = text.find(marker[0], max(start, len(text) - len(marker) + 1))
    while place >= 0 and not marker.startswith(text[place:]):
        place = text.find(marker[0], place + 1)
    return len(text) - place if place >= 0 else 0
