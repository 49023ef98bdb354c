"""Calls with a tag around each argument, whose text is as it is."""

from __future__ import annotations

from collections.abc import Collection, Generator
from json.encoder import encode_basestring
from typing import Any

from penstock.gateway.wire.tools.formats import ToolFormat
from penstock.gateway.wire.tools.literals import json_text
from penstock.gateway.wire.tools.scanning import FormatParser, Malformed, Steps, Tools
from penstock.gateway.wire.tools.types import TEXT, admitted, property_schema

_CDATA = "<![CDATA[", "]]>"
_QUOTES = "\"'"
_LONGEST = 64
"""No number or word of JSON is longer, as far as a value that may as well be text waits for its end."""
_BEGINNINGS = {
    **{"{": "object", "[": "array", "(": "array"},
    **dict.fromkeys("-.0123456789", "number"),
    **dict.fromkeys("tfTF", "boolean"),
    **dict.fromkeys("nN", "null"),
}
"""The type of a value, in JSON or as Python writes it, by its first character."""


class Tagged(FormatParser):
    """Reads `<function=NAME><parameter=KEY>VALUE</parameter></function>`, or what a format has for these tags.

    The tool's schema says which values are JSON; all others are strings, passed on as they come.
    """

    def __init__(self, format: ToolFormat, tools: Tools) -> None:
        super().__init__(format, tools)
        assert format.call.argument is not None
        self._key, self._value, self._pad, *_ = format.call.argument
        ends = (self._value[1], self._key[0], *format.call.end, format.closing)
        self._ends = tuple(filter(None, ends))

    def call(self) -> Steps:
        call = self._format.call
        yield from self.expect(call.before)
        character = yield from self.peek()
        quote = character if character in _QUOTES else ""
        self._at += len(quote)
        name = yield from self.tool_name()
        if not (yield from self.take(quote)):
            raise Malformed
        yield from self.expect(call.after)
        if not call.after and not (yield from self.begins(self._key[0], self._format.closing)):
            raise Malformed
        self.begin(name)
        opening = "{"
        try:
            while (yield from self.begins(self._key[0])):
                key = yield from self._argument()
                self.argue(f"{opening}{encode_basestring(key)}: ")
                yield from self._passes_value(self._tools.schemas.get(name), key)
                opening = ", "
        finally:
            self.argue("}" if opening == ", " else "{}")
        for text in call.end:
            yield from self.skip(text)

    def _argument(self) -> Generator[None, None, str]:
        """Passes over all up to an argument's value, which comes next, and returns its key."""
        self._at += len(self._key[0])
        start = self._at
        marker = yield from self.until(self._key[1], "\n", self._format.opening)
        key = self._text[start : self._at].strip()
        if len(key) > 1 and key[0] == key[-1] and key[0] in _QUOTES:
            key = key[1:-1]
        if not key or marker != self._key[1]:
            raise Malformed
        self._at += len(marker)
        if self._value[0]:
            yield from self.expect(self._value[0])
        yield from self.take(self._pad)
        self.consume()
        return key

    def _passes_value(self, schema: Any, key: str) -> Steps:
        """Passes on one argument, up to its end tag or what stands in its place."""
        types, listed = admitted(property_schema(schema, key), schema)
        is_quoted = self._format.has_cdata and (yield from self.take(_CDATA[0]))
        self.consume()
        ends = _CDATA[1:] if is_quoted else self._ends
        if types <= {TEXT} or (yield from self._is_text(types, ends)):
            self.argue('"')
            yield from self.stream(*ends, out=self.argued_text, trim=self._trimmed)
            self.argue('"')
        else:
            is_whole = self._at < len(self._text)
            text = self.consume()
            self.argue(json_text(self._trimmed(text) if is_whole else text, types, listed))
        if is_quoted:
            yield from self.skip(_CDATA[1])
        if (yield from self.take(self._value[1])):
            self.consume()

    def _is_text(self, types: Collection[str], ends: tuple[str, ...]) -> Generator[None, None, bool]:
        """Moves past a value, up to its end or to where it can be nothing but text, and returns whether it is."""
        while True:
            marker = self.near(ends)
            begun = self._text[self._done : min(self._at, self._done + _LONGEST + 2)]
            if TEXT in types and not _may_be(types, self._trimmed(begun)):
                return True
            if marker or self._ended:
                return False
            yield

    def _trimmed(self, text: str) -> str:
        return text.removesuffix(self._pad)


def _may_be(types: Collection[str], begun: str) -> bool:
    """Returns whether a value that begins like this, and may be text, may be something else, too."""
    first = begun[:_LONGEST].lstrip()[:1]
    kind = _BEGINNINGS.get(first)
    if kind in ("object", "array"):
        return kind in types
    return len(begun) <= _LONGEST and (not first or kind in types)
