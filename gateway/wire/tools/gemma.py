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
_BARE = re.compile(r"[^\s:,{}\[\]<\"]+")


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
        if self._text[0] in "{[":
            yield from self._members(depth + 1)
        elif self._text[0] == '"' or (yield from self.ahead(QUOTE)):
            yield from self._string()
        else:
            end = yield from self.match(_BARE)
            self.argue(json_text(self.consume(end)))

    def _members(self, depth: int) -> Steps:
        """Passes on an object or a list."""
        if depth > _MOST_DEEP:
            raise Malformed
        bracket = self.consume(1)
        closing, comma = "}" if bracket == "{" else "]", ""
        self.argue(bracket)
        yield from self._space()
        while self._text[0] != closing:
            self.argue(comma)
            if bracket == "{":
                yield from self._key()
            yield from self._value(depth)
            yield from self._space()
            if self._text[0] not in ("," + closing):
                raise Malformed
            if self._text[0] == ",":
                self.consume(1)
                yield from self._space()
            comma = ", "
        self.argue(self.consume(1))

    def _key(self) -> Steps:
        if self._text[0] == '"' or (yield from self.ahead(QUOTE)):
            yield from self._string()
        else:
            end = yield from self.match(_BARE)
            self.argue(encode_basestring(self.consume(end)))
        yield from self._space()
        if self.consume(1) != ":":
            raise Malformed
        self.argue(": ")

    def _string(self) -> Steps:
        """Passes on a text as it comes, up to its closing mark."""
        if self._text[0] == '"':
            self.argue(self.consume((yield from self.json_end(0))))
            return
        self.consume(len(QUOTE))
        self.argue('"')
        while QUOTE not in self._text:
            self.argue(encode_basestring(self.consume(len(self._text) - num_begun(self._text, QUOTE)))[1:-1])
            yield from self.more()
        said, _, self._text = self._text.partition(QUOTE)
        self.argue(encode_basestring(said)[1:-1] + '"')

    def _space(self) -> Generator[None, None, None]:
        """Passes over space; Malformed if nothing follows it."""
        self.consume((yield from self.past_space()))
