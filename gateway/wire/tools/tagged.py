"""Calls with tags around the tool's name and around each argument, whose text is as it is."""

from __future__ import annotations

import json
import re
from collections.abc import Collection, Generator
from functools import cache
from json.encoder import encode_basestring
from typing import Any

from penstock.gateway.wire.tools.pythonic import json_of
from penstock.gateway.wire.tools.scanning import (
    FormatParser,
    Malformed,
    Steps,
    num_begun,
    search,
    string_of,
)
from penstock.gateway.wire.tools.types import TEXT, admitted, property_schema, type_of

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

    def section(self) -> Steps:
        assert self._format.tags is not None
        self._tags = self._format.tags
        yield from self._call()
        while self._tags.end and (yield from self.begins(self._tags.name[0])):
            yield from self._call()

    def _call(self) -> Steps:
        (before, after), end = self._tags.name, self._format.closing
        i = yield from self.behind(before, (yield from self.past_space()))
        start = yield from self.past_space(i)
        quote = self._text[start] if self._text[start] in _QUOTES else ""
        start += len(quote)
        i = yield from self.tool_name(start)
        name = self._text[start:i]
        i = yield from self.behind(quote, i)
        i = yield from self.behind(after, (yield from self.past_space(i)))
        if not after and not (yield from self.ahead(self._tags.key[0], i)):
            yield from self.behind(end, i)
        self.consume(i)
        self.begin(name)
        opening = "{"
        try:
            while (yield from self._comes(self._tags.key[0])):
                key = yield from self._key()
                self.argue(f"{opening}{encode_basestring(key)}: ")
                yield from self._value(self._tools.schemas.get(name), key)
                opening = ", "
        finally:
            self.argue("}" if opening == ", " else "{}")
        yield from self.skip(self._tags.end)

    def _comes(self, tag: str) -> Generator[None, None, bool]:
        yield from self.skip_space()
        return (yield from self.ahead(tag))

    def _key(self) -> Generator[None, None, str]:
        """Passes over all up to an argument's value, which comes next."""
        start, after = self._at + len(self._tags.key[0]), self._tags.key[1]
        end = yield from self.until(_any((after, "\n")), len(after), start)
        key = self._text[start : end.start()].strip()
        if len(key) > 1 and key[0] == key[-1] and key[0] in _QUOTES:
            key = key[1:-1]
        if not key or end[0] == "\n":
            raise Malformed
        i = end.end()
        if self._tags.value[0]:
            i = yield from self.behind(self._tags.value[0], (yield from self.past_space(i)))
        if (yield from self.ahead(self._tags.pad, i)):
            i += len(self._tags.pad)
        self.consume(i)
        return key

    def _value(self, schema: Any, key: str) -> Steps:
        """Passes on one argument, up to its end tag or what stands in its place."""
        types, listed = admitted(property_schema(schema, key), schema)
        is_quoted = self._format.has_cdata and (yield from self.ahead(_CDATA[0]))
        self.consume(self._at + len(_CDATA[0]) * is_quoted)
        kept, is_text = "", types <= {TEXT}
        self.argue('"' * is_text)
        while True:
            end, num_held, is_found = self._value_end(_CDATA[1:] if is_quoted else self._ends)
            kept += self.consume(end)
            if not is_text and TEXT in types and not _may_be(types, kept):
                is_text = True
                self.argue('"')
            if is_text:
                self.argue_text(kept)
                kept = ""
            if is_found or self._ended:
                break
            yield from self.pass_on("<]"[is_quoted] if is_text and not num_held else "", say=self.argued_text)
        self.argue('"' if is_text else json_text(kept, types, listed))
        if is_quoted:
            yield from self.skip(_CDATA[1])
        pad, end_tag = self._tags.pad, self._tags.value[1]
        start = self._at + (len(pad) if self._text.startswith(pad, self._at) else 0)
        if (yield from self.ahead(end_tag, start)):
            self.consume(start + len(end_tag))

    @property
    def _ends(self) -> tuple[str, ...]:
        tags = self._tags
        return tuple(filter(None, (tags.value[1], tags.key[0], tags.end, self._format.closing)))

    def _value_end(self, ends: tuple[str, ...]) -> tuple[int, int, bool]:
        """Returns where the text ends that certainly belongs to the value, how much after it does not yet, and whether
        the value ends there.

        One pad before the end belongs to the tag.
        """
        tag, end = search(_any(ends), self._text, self._at), len(self._text)
        if tag is None and self._ended:
            return end, 0, False
        held = max(num_begun(self._text, tag, self._at) for tag in ends) if tag is None else 0
        end = end - held if tag is None else tag.start()
        if self._text.endswith(self._tags.pad, self._at, end):
            end -= len(self._tags.pad)
        return end, len(self._text) - end, tag is not None


@cache
def _any(markers: tuple[str, ...]) -> re.Pattern[str]:
    return re.compile("|".join(map(re.escape, markers)))


def _may_be(types: Collection[str], begun: str) -> bool:
    """Returns whether a value that begins like this, and may be text, may be something else, too."""
    first = begun[:_LONGEST].lstrip()[:1]
    kind = _BEGINNINGS.get(first)
    if kind in ("object", "array"):
        return kind in types
    return len(begun) <= _LONGEST and (not first or kind in types)


def json_text(text: str, types: Collection[str] = frozenset(), listed: Collection[str] | None = None) -> str:
    """Returns the value of a text, in JSON or as Python writes it; the text itself if it is neither.

    Args:
        types: those that it may have; if text is one, only others make it more than text.
        listed: the strings that it may be, if they are listed.
    """
    stripped = text.strip()
    try:
        written = _json_or_python(stripped)
    except Malformed:
        return json.dumps(text if TEXT in types else stripped, ensure_ascii=False)
    value = json.loads(written)
    if TEXT in types and (type_of(value) not in set(types) - {TEXT} or stripped in (listed or ())):
        return json.dumps(text, ensure_ascii=False)
    if types and TEXT not in types and isinstance(value, str):
        return json_text(value, types)
    return written


def _json_or_python(text: str) -> str:
    try:
        json.loads(text, parse_constant=string_of)
    except (ValueError, RecursionError, Malformed):
        return json_of(text)
    return text
