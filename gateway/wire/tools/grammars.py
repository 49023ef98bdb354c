"""Grammars of replies that have to call a tool, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from typing import Any

from gateway.wire.tools.coder import is_json, property_schema

Spell = Callable[[str], str]
"""How a grammar writes a marker: as the special token that it is, or as text."""
Schemas = Mapping[str, Any]

_TIGHT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}


def calls_grammar(
    format: str,
    schemas: Schemas,
    spell: Spell,
    *,
    one_call: bool,
    thinking: tuple[str, str] | None = None,
    is_open: bool = False,
    newer: bool = False,
) -> str:
    """A call of one of these tools, or several calls.

    Args:
        schemas: the JSON schema of its arguments, by the name of each tool.
        thinking: what reasoning, which may come first, is written between.
        is_open: it has begun already.
        newer: of the two ways in which Mistral's models write calls, that with `[ARGS]`.
    """
    rules = _Rules(format, spell, newer)
    before = "" if thinking is None else rules.reasoning(*thinking, is_open=is_open)
    calls = [rules.call(name, schema) for name, schema in schemas.items()]
    start, between, end = rules.frame
    more = "" if one_call else f" ({between} call)*"
    rules.add("call", " | ".join(calls))
    rules.add("calls", f"{start} call{more} {end}")
    return rules.text(f"start: {before} calls")


class _Rules:
    """The rules of one grammar, as they are added."""

    def __init__(self, format: str, spell: Spell, newer: bool) -> None:
        self._format = format
        self._spell = spell
        self._newer = newer
        self._rules: list[str] = []

    def add(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name

    def text(self, start: str) -> str:
        return "\n".join([start, *self._rules, ""])

    @property
    def frame(self) -> tuple[str, str, str]:
        """What stands before all calls, between two, and after all."""
        opening = self._spell("[TOOL_CALLS]")
        if self._format == "mistral":
            return ("", "", "") if self._newer else (f'{opening} "["', '", "', '"]"')
        if self._format == "llama_pythonic":
            return '"["', '", "', '"]"'
        return "", '"; "' if self._format == "llama3_json" else r'"\n"', ""

    def reasoning(self, opening: str, closing: str, *, is_open: bool) -> str:
        """Text up to a marker: one that is a special token is no part of any text, another one ends it."""
        end = self._spell(closing)
        if end == _quoted(closing):
            self.add(f"reasoned[suffix={end}]", "/(?s:.*)/")
        else:
            self.add("reasoned", f"/(?s:.*)/ {end}")
        whole = r"reasoned /[ \n]{0,4}/"
        return whole if is_open else f"({self._spell(opening)} {whole})?"

    def call(self, name: str, schema: Any) -> str:
        """The rule of a call of one tool."""
        rule = f"call_{len(self._rules)}"
        if self._format == "llama_pythonic":
            return self.add(rule, f"{_quoted(name + '(')} {self._keywords(schema)} {_quoted(')')}")
        if self._format == "qwen3_coder":
            function, end = f"\n<function={name}>\n", "</function>\n"
            opening = f"{self._spell('<tool_call>')} {_quoted(function)}"
            closing = f"{_quoted(end)} {self._spell('</tool_call>')}"
            return self.add(rule, f"{opening} {self._parameters(schema)} {closing}")
        arguments = self._json(_object(schema))
        if self._format == "mistral" and self._newer:
            named = f"{self._spell('[TOOL_CALLS]')} {_quoted(name)} {self._spell('[ARGS]')}"
            return self.add(rule, f"{named} {arguments}")
        key = "parameters" if self._format == "llama3_json" else "arguments"
        opening = _quoted(f'{{"name": {json.dumps(name)}, "{key}": ')
        whole = f'{opening} {arguments} "}}"'
        if self._format == "hermes":
            whole = rf'{self._spell("<tool_call>")} "\n" {whole} "\n" {self._spell("</tool_call>")}'
        return self.add(rule, whole)

    def _json(self, schema: Any) -> str:
        given = {**schema, "x-guidance": _TIGHT} if isinstance(schema, dict) else schema
        return self.add(f"json_{len(self._rules)}", f"%json {json.dumps(given)}")

    def _keywords(self, schema: Any) -> str:
        """Keyword arguments in the schema's order, those that are not required left out at will."""
        first, rest = '""', '""'
        for key, of_value, is_required in reversed(list(_properties(schema))):
            value = f"{_quoted(key + '=')} {self._json(of_value)}"
            alone = f"{value} {rest}"
            first = self.add(f"first_{len(self._rules)}", alone if is_required else f"{alone} | {first}")
            after = f'", " {value}'
            rest = self.add(f"rest_{len(self._rules)}", f"{after if is_required else f'({after})?'} {rest}")
        return first

    def _parameters(self, schema: Any) -> str:
        parts = []
        for key, of_value, is_required in _properties(schema):
            opening, closing = _quoted(f"<parameter={key}>\n"), "\n</parameter>\n"
            if is_json(of_value):
                part = f"({opening} {self._json(of_value)} {_quoted(closing)})"
            elif words := _words(of_value):
                part = f"({opening} ({' | '.join(map(_quoted, words))}) {_quoted(closing)})"
            else:
                value = f"text_{len(self._rules)}"
                self.add(f"{value}[suffix={_quoted(closing)}]", r"/(?s:.*)/")
                part = f"({opening} {value})"
            parts.append(part if is_required else f"{part}?")
        return " ".join(parts) or '""'


def _properties(schema: Any) -> list[tuple[str, Any, bool]]:
    """Name, schema, and whether it must be there, of each argument."""
    given = _object(schema)
    required = given.get("required") or ()
    defined = {key: given[key] for key in ("$defs", "definitions") if key in given}
    found = []
    for key in given.get("properties") or {}:
        of_value = property_schema(given, key)
        whole = {**defined, **of_value} if isinstance(of_value, dict) else of_value
        found.append((key, whole, key in required))
    return found


def _object(schema: Any) -> dict[str, Any]:
    return {"type": "object", **schema} if isinstance(schema, dict) else {"type": "object"}


def _words(schema: Any) -> list[str]:
    """The strings that a value may be, if the schema lists them."""
    words = schema.get("enum") if isinstance(schema, dict) else None
    return [word for word in words if isinstance(word, str)] if isinstance(words, list) else []


def _quoted(text: str) -> str:
    return json.dumps(text)
