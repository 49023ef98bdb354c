"""Calls with tags around the tool's name and around each argument, whose text is as it is."""

from __future__ import annotations

import json
from collections.abc import Generator, Sequence
from json.encoder import encode_basestring
from typing import Any

from penstock.gateway.wire.tools.pythonic import json_of
from penstock.gateway.wire.tools.scanning import FormatParser, Malformed, Steps, num_begun, string_of

_TYPES_OF_JSON = frozenset({"integer", "number", "boolean", "object", "array", "null"})
_MOST_REFERENCES = 8
_CDATA = "<![CDATA[", "]]>"


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
        i = yield from self.tool_name(start)
        name = self._text[start:i]
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
                yield from self._value(property_schema(self._tools.schemas.get(name), key))
                opening = ", "
        finally:
            self.argue("}" if opening == ", " else "{}")
        yield from self.skip(self._tags.end)

    def _comes(self, tag: str) -> Generator[None, None, bool]:
        yield from self.skip_space()
        return (yield from self.ahead(tag))

    def _key(self) -> Generator[None, None, str]:
        """Passes over all up to an argument's value, which comes next."""
        start, after = len(self._tags.key[0]), self._tags.key[1]
        while (end := self._text.find(after, start)) < 0 and "\n" not in self._text[start:]:
            yield from self.more()
        key = self._text[start:end].strip()
        if end < 0 or not key or "\n" in self._text[start:end]:
            raise Malformed
        i = end + len(after)
        if self._tags.value[0]:
            i = yield from self.behind(self._tags.value[0], (yield from self.past_space(i)))
        if (yield from self.ahead(self._tags.pad, i)):
            i += len(self._tags.pad)
        self.consume(i)
        return key

    def _value(self, schema: Any) -> Steps:
        """Passes on one argument, up to its end tag or what stands in its place."""
        is_text = not is_json(schema)
        is_quoted = self._format.has_cdata and (yield from self.ahead(_CDATA[0]))
        self.consume(len(_CDATA[0]) * is_quoted)
        kept = ""
        if is_text:
            self.argue('"')
        while True:
            end, found = self._value_end(_CDATA[1:] if is_quoted else self._ends)
            part = self.consume(end)
            if is_text:
                self.argue(encode_basestring(part)[1:-1])
            else:
                kept += part
            if found or self._ended:
                break
            yield
        self.argue('"' if is_text else json_text(kept))
        if is_quoted:
            yield from self.skip(_CDATA[1])
        pad, end_tag = self._tags.pad, self._tags.value[1]
        start = len(pad) if self._text.startswith(pad) else 0
        if (yield from self.ahead(end_tag, start)):
            self.consume(start + len(end_tag))

    @property
    def _ends(self) -> Sequence[str]:
        tags = self._tags
        return [tag for tag in (tags.value[1], tags.key[0], tags.end, self._format.closing) if tag]

    def _value_end(self, ends: Sequence[str]) -> tuple[int, bool]:
        """Returns how much of the text certainly belongs to the value, and whether the value ends there.

        One pad before the end belongs to the tag.
        """
        pad = self._tags.pad
        places = [place for tag in ends if (place := self._text.find(tag)) >= 0]
        if self._ended and not places:
            return len(self._text), True
        end = min(places) if places else len(self._text) - max(num_begun(self._text, tag) for tag in ends)
        return len(self._text[:end].removesuffix(pad)), bool(places)


def property_schema(schema: Any, key: str) -> Any:
    """Returns the schema of one member of an object; references are followed."""
    properties = schema.get("properties") if isinstance(schema, dict) else None
    found = properties.get(key) if isinstance(properties, dict) else None
    for _ in range(_MOST_REFERENCES):
        if not isinstance(found, dict) or "$ref" not in found:
            break
        found = _referred(schema, found["$ref"])
    return found


def _referred(schema: Any, reference: object) -> Any:
    for name in str(reference).removeprefix("#/").split("/"):
        schema = schema.get(name) if isinstance(schema, dict) else None
    return schema


def is_json(schema: Any) -> bool:
    """Returns whether values of this schema are written as JSON; a string stands as it is."""
    kinds = _kinds(schema)
    return "string" not in kinds and not _TYPES_OF_JSON.isdisjoint(kinds)


def _kinds(schema: Any) -> set[str]:
    """Returns the types that a schema allows, as far as it says so at its top."""
    if not isinstance(schema, dict):
        return set()
    kind, forms = schema.get("type"), [schema.get(key) for key in ("anyOf", "oneOf")]
    kinds = {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
    return kinds.union(*(_kinds(form) for some in forms if isinstance(some, list) for form in some))


def json_text(text: str) -> str:
    """Returns the value of a text, in JSON or as Python writes it; the text itself if it is neither."""
    text = text.strip()
    try:
        json.loads(text, parse_constant=string_of)
    except (Malformed, ValueError, RecursionError):
        try:
            return json_of(text)
        except Malformed:
            return json.dumps(text, ensure_ascii=False)
    return text
