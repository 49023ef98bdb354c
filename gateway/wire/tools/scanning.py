"""Scanners: the ground of all parsers, which read text that comes in deltas as if all of it were there.

A format is a generator that yields whenever it needs more text than there is. It looks ahead as far as it likes and
consumes what it understood: text that turns out to be no call is still there to be said.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Generator, Mapping
from dataclasses import dataclass
from typing import Any

from penstock.gateway.wire.parsing import ArgumentsDelta, CallBegun, Piece, ReasoningDelta, TextDelta
from penstock.gateway.wire.tools.formats import Format

Steps = Generator[None, None, None]
Said = type[TextDelta | ReasoningDelta]
Say = Callable[[str], list[Piece]]

NO_MARKER = "\ud800"
"""A surrogate, which no text has."""

_PLAIN = re.compile(r'[^"{}\[\]<]*')
_IN_STRING = re.compile(r'[^"\\]*')
_SPACE = re.compile(r"\s*")
_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")


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
    """A `gateway.wire.parsing.ReplyParser` whose subclasses add `parse`."""

    def __init__(self) -> None:
        self._text = ""
        """The text that was not consumed yet."""
        self._opening = ""
        """The marker that was found last, with the space before it."""
        self._ended = False
        self._pieces: list[Piece] = []
        self._steps = self.parse()
        self._quick: tuple[str, Said, Say | None] | None = None
        """While text is said until a marker: how that begins, and what text is in which it does not begin."""
        self.told: list[str] | None = None
        """The texts that were said up to markers, and by no other parser; if somebody wants them, a list."""
        self.reasons: bool | None = None
        """Whether the text that came last is reasoning; None if what follows decides that."""
        self.is_over = False
        """Whether all reasoning was read, or there is none."""
        self.num_undecided = 0
        """The number of tokens of which it is not known yet whether they are reasoning; see `Thoughts`."""

    def parse(self) -> Steps:
        """Reads the whole reply."""
        raise NotImplementedError

    def feed(self, text: str) -> list[Piece]:
        if self._quick is not None:
            marker, kind, say = self._quick
            said = self._text + text
            if said and marker not in said and not said[-1].isspace():
                self._text = ""
                if say is not None:
                    return say(said)
                if self.told is not None:  # not by `_tell`: a call for every token
                    self.told += (said,)
                return [kind(said)]
        return self._go_on(text)

    def finish(self) -> list[Piece]:
        self._ended = True
        return self._go_on("")

    def _go_on(self, text: str) -> list[Piece]:
        self._text += text
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
            raise Malformed
        yield

    def pass_on(self, marker: str, kind: Said = TextDelta, say: Say | None = None) -> Steps:
        """Waits for more text; meanwhile text in which no marker begins and no space ends is a piece of this kind.

        Args:
            say: it makes other pieces of such text.
        """
        self._quick = marker[0], kind, say
        yield
        self._quick = None

    def consume(self, length: int) -> str:
        taken, self._text = self._text[:length], self._text[length:]
        return taken

    def ahead(self, text: str, start: int = 0) -> Generator[None, None, bool]:
        """Returns whether this text comes next, at `start`."""
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

    def past_space(self, start: int = 0) -> Generator[None, None, int]:
        """Returns the place of the first character from `start` on that is no space, or raises Malformed."""
        while (end := _end(_SPACE, self._text, start)) == len(self._text):
            yield from self.more()
        return end

    def skip_space(self) -> Steps:
        while True:
            self._text = self._text.lstrip()
            if self._text or self._ended:
                return
            yield

    def skip(self, text: str) -> Steps:
        """Passes over space and then this text, if it comes next, or its beginning where the reply was cut off."""
        yield from self.skip_space()
        if (yield from self.ahead(text)) or text.startswith(self._text):
            self.consume(len(text))

    def said_until(
        self, marker: str, kind: Said = TextDelta, say: Say | None = None
    ) -> Generator[None, None, bool]:
        """Says what comes before a marker, which is consumed. False: all was said, and there is none.

        Space before a marker is not said: it is the format's.

        Args:
            say: it makes other pieces of the text.
        """
        while marker not in self._text and not self._ended:
            self._tell(self.consume(len(self._text) - num_held(self._text, marker)), kind, say)
            yield from self.pass_on(marker, kind, say)
        before, found, self._text = self._text.partition(marker)
        said = before.rstrip() if found else before
        self._tell(said, kind, say)
        self._opening = before[len(said) :] + marker
        return bool(found)

    def _tell(self, text: str, kind: Said, say: Say | None) -> None:
        if text and say is not None:
            self._pieces += say(text)
        elif text:
            self._pieces.append(kind(text))
            if self.told is not None:
                self.told.append(text)

    def match(self, pattern: re.Pattern[str], start: int = 0) -> Generator[None, None, int]:
        """Returns the end of the longest text like this from `start` on; it is not empty, and something else follows.

        Raises:
            Malformed: nothing like it comes.
        """
        while (end := _end(pattern, self._text, start)) == len(self._text):
            yield from self.more()
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
        before = self._num_calls
        try:
            yield from self.section()
        except Malformed:
            if self._num_calls == before:
                return False
        yield from self.skip(self._format.closing)
        yield from self.skip_space()
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
            self._pieces.append(ArgumentsDelta(self._num_calls - 1, text))

    def json_end(self, start: int) -> Generator[None, None, int]:
        """Returns the end of a JSON string, object or array that begins at `start`; raises Malformed if it has none."""
        scan, end = JsonScan(), start
        while True:
            end = scan.advance(self._text, end)
            if scan.done:
                return end
            yield from self.more()

    def json_argue(self) -> Steps:
        """Passes on the object that comes next as the arguments of the call that was begun last.

        Raises:
            Malformed: it broke off; what came of it is passed on.
        """
        scan = JsonScan()
        while not scan.done:
            try:
                end = scan.advance(self._text, 0)
            except Malformed:
                self.argue(self.consume(scan.stopped_at))
                raise
            self.argue(self.consume(end))
            if not scan.done:
                yield from self.more()


class JsonScan:
    """Finds the end of a JSON value that is a string, an object or an array, as its text comes."""

    def __init__(self) -> None:
        self.done = False
        self.stopped_at = 0
        """The place where the text stopped to be JSON."""
        self._closing: list[str] = []
        """The brackets that are open, as they close."""
        self._in_string = False
        self._escaped = False

    def advance(self, text: str, start: int) -> int:
        """Returns the end of the value, or of the text if the value goes on.

        Raises:
            Malformed: brackets do not match, or something is there that JSON does not have.
        """
        i = start
        while i < len(text) and not self.done:
            i = self._string(text, i) if self._in_string else self._structure(text, i)
        return i

    def _string(self, text: str, i: int) -> int:
        if self._escaped:
            self._escaped = False
            return i + 1
        i = _end(_IN_STRING, text, i)
        if i == len(text):
            return i
        self._escaped = text[i] == "\\"
        if not self._escaped:
            self._in_string = False
            self.done = not self._closing
        return i + 1

    def _structure(self, text: str, i: int) -> int:
        i = _end(_PLAIN, text, i)
        if i == len(text):
            return i
        character = text[i]
        if character == '"':
            self._in_string = True
        elif character in "{[":
            self._closing.append("}" if character == "{" else "]")
        elif self._closing and character == self._closing[-1]:
            self._closing.pop()
            self.done = not self._closing
        else:
            self.stopped_at = i
            raise Malformed
        return i + 1


def string_of(text: str) -> str:
    """Returns the text of a JSON string; raises Malformed if it is none."""
    try:
        value = json.loads(text)
    except ValueError:
        raise Malformed from None
    if not isinstance(value, str):
        raise Malformed
    return value


def _end(pattern: re.Pattern[str], text: str, start: int) -> int:
    """Returns the end of a match at `start`, which may be empty."""
    found = pattern.match(text, start)
    return start if found is None else found.end()


def num_held(text: str, marker: str) -> int:
    """Returns how many characters at the end of a text are held back: a marker's beginning, and space."""
    shown = text[: len(text) - num_begun(text, marker)].rstrip()
    return len(text) - len(shown)


def num_begun(text: str, marker: str) -> int:
    """Returns how many characters at the end of a text a marker begins with."""
    longest = min(len(text), len(marker) - 1)
    return next((n for n in range(longest, 0, -1) if marker.startswith(text[-n:])), 0)
