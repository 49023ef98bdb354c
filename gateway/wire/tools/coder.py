"""Qwen 3 Coder's calls: tags around the tool's name and around each argument, whose text is as it is."""

from __future__ import annotations

import json
from collections.abc import Generator
from json.encoder import encode_basestring
from typing import Any

from gateway.wire.tools.scanning import TAGS, FormatParser, Malformed, Steps, num_begun, string_of

_TYPES_OF_JSON = frozenset({"integer", "number", "boolean", "object", "array", "null"})
_MOST_REFERENCES = 8
_PYTHON_WORDS = {"True": "true", "False": "false", "None": "null"}
_ENDS = ("</parameter>", "<parameter=", "</function>", "</tool_call>")


class Qwen3Coder(FormatParser):
    """`<tool_call><function=NAME><parameter=KEY>VALUE</parameter></function></tool_call>`, with newlines between.

    The tool's schema says which values are JSON; all others are strings, passed on as they come.
    """

    markers = TAGS

    def parse(self) -> Steps:
        return self.tagged_calls(self._call)

    def _call(self) -> Steps:
        i = yield from self.past_space()
        if not (yield from self.ahead("<function=", i)):
            raise Malformed
        name, end = yield from self._name(i + len("<function="))
        self.consume(end)
        self.begin(name)
        opening = "{"
        try:
            while (yield from self._comes("<parameter=")):
                key, end = yield from self._name(len("<parameter="))
                self.consume(end)
                self.argue(f"{opening}{encode_basestring(key)}: ")
                yield from self._value(property_schema(self._tools.schemas.get(name), key))
                opening = ", "
        finally:
            self.argue("}" if opening == ", " else "{}")
        yield from self.skip("</function>")

    def _comes(self, tag: str) -> Generator[None, None, bool]:
        yield from self.skip_space()
        return (yield from self.ahead(tag))

    def _name(self, start: int) -> Generator[None, None, tuple[str, int]]:
        """What stands before the next `>`, and the place behind that."""
        while (end := self._text.find(">", start)) < 0:
            if "\n" in self._text[start:]:
                break
            yield from self.more()
        name = self._text[start:end].strip()
        if end < 0 or not name or "\n" in name:
            raise Malformed
        return name, end + 1

    def _value(self, schema: Any) -> Steps:
        """Passes on one argument, up to its end tag or what stands in its place."""
        is_text = not is_json(schema)
        if (yield from self.ahead("\n")):
            self.consume(1)
        kept = ""
        if is_text:
            self.argue('"')
        while True:
            end, found = self._value_end()
            part = self.consume(end)
            if is_text:
                self.argue(encode_basestring(part)[1:-1])
            else:
                kept += part
            if found or self._ended:
                break
            yield
        self.argue('"' if is_text else _json_text(kept))
        if (yield from self.ahead("</parameter>", 1 if self._text.startswith("\n") else 0)):
            self.consume(self._text.index(">") + 1)

    def _value_end(self) -> tuple[int, bool]:
        """How much of the text certainly belongs to the value, and whether the value ends there.

        One newline before the end belongs to the tag.
        """
        places = [place for tag in _ENDS if (place := self._text.find(tag)) >= 0]
        if places:
            end = min(places)
            return end - (self._text[:end].endswith("\n")), True
        if self._ended:
            return len(self._text), True
        held = max(num_begun(self._text, tag) for tag in _ENDS)
        end = len(self._text) - held
        return end - (self._text[:end].endswith("\n")), False


def property_schema(schema: Any, key: str) -> Any:
    """What the schema of an object says of one of its members; references within it are followed."""
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
    """Whether values of this schema are written as JSON; a string stands as it is."""
    kinds = _kinds(schema)
    return "string" not in kinds and not _TYPES_OF_JSON.isdisjoint(kinds)


def _kinds(schema: Any) -> set[str]:
    """The types that a schema allows, as far as it says so at its top."""
    if not isinstance(schema, dict):
        return set()
    kind, forms = schema.get("type"), [schema.get(key) for key in ("anyOf", "oneOf")]
    kinds = {name for name in (kind if isinstance(kind, list) else [kind]) if isinstance(name, str)}
    return kinds.union(*(_kinds(form) for some in forms if isinstance(some, list) for form in some))


def _json_text(text: str) -> str:
    """The value that a text says; a string, if it says none."""
    text = text.strip()
    text = _PYTHON_WORDS.get(text, text)
    try:
        json.loads(text, parse_constant=string_of)
    except (Malformed, ValueError, RecursionError):
        return json.dumps(text, ensure_ascii=False)
    return text
