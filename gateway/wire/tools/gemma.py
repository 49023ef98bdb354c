"""Gemma 4's calls: `call:name{key:<|"|>text<|"|>,n:42}`."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator
from json.encoder import encode_basestring

from penstock.gateway.wire.tools.formats import QUOTE
from penstock.gateway.wire.tools.literals import json_text
from penstock.gateway.wire.tools.scanning import FormatParser, Malformed, Steps

_MOST_DEEP = 64
_BARE = re.compile(r"[^\s:,{}\[\]<\"]*")


class Gemma(FormatParser):
    """Passes on what comes as JSON: keys and texts get quotation marks, numbers and words stand as they are."""

    def section(self) -> Steps:
        yield from self.expect(self._format.call.before)
        name = yield from self.tool_name()
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin(name)
        yield from self._value(0)

    def _next(self) -> Generator[None, None, str]:
        """Passes over space and returns the character after it."""
        character = yield from self.peek()
        self.consume()
        return character

    def _value(self, depth: int) -> Steps:
        """Passes on the value that comes next."""
        if (yield from self._next()) in "{[":
            yield from self._members(depth + 1)
        else:
            yield from self._scalar(json_text)

    def _members(self, depth: int) -> Steps:
        """Passes on an object or a list."""
        if depth > _MOST_DEEP:
            raise Malformed
        self._at += 1
        bracket, comma = self.consume(), ""
        closing = "}" if bracket == "{" else "]"
        self.argue(bracket)
        while (yield from self._next()) != closing:
            self.argue(comma)
            if bracket == "{":
                yield from self._scalar(encode_basestring)
                yield from self.expect(":")
                self.argue(": ")
            yield from self._value(depth)
            following = yield from self._next()
            if following not in ("," + closing):
                raise Malformed
            self._at += following == ","
            comma = ", "
        self._at += 1
        self.argue(self.consume())

    def _scalar(self, written: Callable[[str], str]) -> Steps:
        """Passes on a text as it comes, or what stands without quotation marks, as it is written in JSON."""
        if self._text[self._at] == '"':
            yield from self.json()
            self.argue(self.consume())
        elif (yield from self.take(QUOTE)):
            self.consume()
            self.argue('"')
            if not (yield from self.said_until(QUOTE, self.argued_text, str)):
                raise Malformed
            self.argue('"')
        else:
            yield from self.word(_BARE)
            self.argue(written(self.consume()))
