"""Gemma 4's calls: `call:name{key:<|"|>text<|"|>,n:42}`."""

from __future__ import annotations

import re
from collections.abc import Generator
from json.encoder import encode_basestring

from penstock.gateway.wire.tools.formats import QUOTE
from penstock.gateway.wire.tools.scanning import FormatParser, Malformed, Steps, num_begun
from penstock.gateway.wire.tools.tagged import json_text

_CALL = "call:"
_MOST_DEEP = 64
_BARE = re.compile(r"[^\s:,{}\[\]<\"]*")


class Gemma(FormatParser):
    """Passes on what comes as JSON: keys and texts get quotation marks, numbers and words stand as they are."""

    def section(self) -> Steps:
        i = yield from self.past_space()
        if not (yield from self.ahead(_CALL, i)):
            raise Malformed
        start = i + len(_CALL)
        i = yield from self.tool_name(start)
        name = self._text[start:i]
        i = yield from self.past_space(i)
        if self._text[i] != "{":
            raise Malformed
        self.consume(i)
        self.begin(name)
        yield from self._value(0)

    def _value(self, depth: int) -> Steps:
        """Passes on the value that comes next."""
        yield from self._space()
        if self._text[self._at] in "{[":
            yield from self._members(depth + 1)
        elif self._text[self._at] == '"' or (yield from self.ahead(QUOTE)):
            yield from self._string()
        else:
            end = yield from self.match(_BARE, self._at)
            self.argue(json_text(self.consume(end)))

    def _members(self, depth: int) -> Steps:
        """Passes on an object or a list."""
        if depth > _MOST_DEEP:
            raise Malformed
        bracket = self.consume(self._at + 1)
        closing, comma = "}" if bracket == "{" else "]", ""
        self.argue(bracket)
        yield from self._space()
        while self._text[self._at] != closing:
            self.argue(comma)
            if bracket == "{":
                yield from self._key()
            yield from self._value(depth)
            yield from self._space()
            if self._text[self._at] not in ("," + closing):
                raise Malformed
            if self._text[self._at] == ",":
                self.consume(self._at + 1)
                yield from self._space()
            comma = ", "
        self.argue(self.consume(self._at + 1))

    def _key(self) -> Steps:
        if self._text[self._at] == '"' or (yield from self.ahead(QUOTE)):
            yield from self._string()
        else:
            end = yield from self.match(_BARE, self._at)
            self.argue(encode_basestring(self.consume(end)))
        yield from self._space()
        if self.consume(self._at + 1) != ":":
            raise Malformed
        self.argue(": ")

    def _string(self) -> Steps:
        """Passes on a text as it comes, up to its closing mark."""
        if self._text[self._at] == '"':
            self.argue(self.consume((yield from self.json_end(self._at))))
            return
        self.consume(self._at + len(QUOTE))
        self.argue('"')
        while (end := self._text.find(QUOTE, self._at)) < 0:
            num_held = num_begun(self._text, QUOTE, self._at)
            self.argue_text(self.consume(len(self._text) - num_held))
            if self._ended:
                raise Malformed
            yield from self.pass_on("" if num_held else QUOTE[0], say=self.argued_text)
        self.argue_text(self.consume(end))
        self.consume(end + len(QUOTE))
        self.argue('"')

    def _space(self) -> Generator[None, None, None]:
        """Passes over space; Malformed if nothing follows it."""
        self.consume((yield from self.past_space()))
