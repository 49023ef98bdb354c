"""Grammars of replies that may or have to call a tool, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping
from enum import Enum
from typing import Any

from gateway.wire.tools.coder import is_json, property_schema
from gateway.wire.tools.scanning import TAGS

Spell = Callable[[str], str]
"""How a grammar writes a marker: as the special token that it is, or as text."""
Schemas = Mapping[str, Any]

_TIGHT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_OPENERS = {"hermes": TAGS[0], "qwen3_coder": TAGS[0], "mistral": "[TOOL_CALLS]"}
"""By format, the marker that calls begin with; in the other formats calls are all of a reply."""


_ANY = "/(?s:.*)/"
_PYTHON_TAG = "<|python_tag|>"


class Beside(Enum):
    """What a reply may be beside calls."""

    NOTHING = "nothing"
    ANSWER = "answer"
    """In place of calls, what the grammar `@answer` says."""
    TEXT = "text"
    """Any text, before calls, after them, or in their place."""


def calls_grammar(
    format: str,
    schemas: Schemas,
    spell: Spell,
    *,
    one_call: bool,
    thinking: tuple[str, str] | None = None,
    is_open: bool = False,
    newer: bool = False,
    beside: Beside = Beside.NOTHING,
    lenient: Collection[str] = (),
) -> str:
    """A call of one of these tools, or several calls.

    Args:
        schemas: the JSON schema of its arguments, by the name of each tool.
        thinking: what reasoning, which may come first, is written between.
        is_open: it has begun already.
        newer: of the two ways in which Mistral's models write calls, that with `[ARGS]`.
        lenient: tools whose schemas may have keywords that nothing can be held to; these are passed over.
    """
    rules = _Rules(format, spell, newer)
    thought = "" if thinking is None else rules.reasoning(*thinking, is_open=is_open)
    before = f"({thought}){'' if is_open else '?'}" if thought else ""
    rules.calls(schemas, one_call=one_call, lenient=lenient)
    if beside is Beside.NOTHING:
        return rules.text(f"start: {before} calls")
    if beside is Beside.ANSWER:
        return rules.text(f"start: {before} (calls | @answer)")
    opening = "" if thinking is None or is_open else thinking[0]
    return rules.text(f"start: {rules.free(before, opening, one_call=one_call)}")


def answer_grammar(spell: Spell, thinking: tuple[str, str], *, is_open: bool) -> str:
    """Reasoning, and then what the grammar `@answer` says."""
    rules = _Rules("", spell, newer=False)
    thought = rules.reasoning(*thinking, is_open=is_open)
    return rules.text(f"start: ({thought}){'' if is_open else '?'} @answer")


class _Rules:
    """The rules of one grammar, as they are added."""

    def __init__(self, format: str, spell: Spell, newer: bool) -> None:
        self._format = format
        self._spell = spell
        self._newer = newer
        self._rules: list[str] = []
        self._begun: dict[str, str] = {}
        """By the rule of what follows, what a call begins with that may be all of a reply."""

    def add(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name

    def text(self, start: str) -> str:
        return "\n".join([start, *self._rules, ""])

    def calls(self, schemas: Schemas, *, one_call: bool, lenient: Collection[str]) -> None:
        """Adds `calls`, and `opened`: what follows the marker that opens calls."""
        calls = [self.call(name, schema, lenient=name in lenient) for name, schema in schemas.items()]
        self.add("call", " | ".join(calls))
        start, between, end = self._list
        others = f" ({_quoted(between)} call)*" if between and not one_call else ""
        self.add("opened", f"{_quoted(start)} call{others} {_quoted(end)}")
        opener = self._opener
        more = "" if one_call or between else f" ({self._gap} {opener} opened)*"
        self.add("calls", f"{opener} opened{more}")

    def free(self, before: str, thinking: str, *, one_call: bool) -> str:
        """Any text in which every call is one of those that were added.

        Args:
            before: the reasoning that may or has to come first.
            thinking: the marker that it begins with, if it may.
        """
        if self._format not in _OPENERS:
            return f"{before} ({self._tag} {self._led_calls(one_call=one_call)} | {self._no_call(thinking)})"
        opener = self._opener
        self.add("said", _ANY)
        if opener != _quoted(_OPENERS[self._format]):  # a special token is no part of a text
            return f"{before} (said {opener} opened)* said"
        self.add(f"begun[suffix={opener}]", _ANY)
        rest = "(begun opened)* said"
        if not thinking or self._spell(thinking) != _quoted(thinking):
            return f"{before} {rest}"
        # Reasoning may have the marker in it, so that nothing else may begin as it does.
        self.add("ANSWERED", f"{_ANY} & ~/{_escaped(thinking)}(?s:.*)/")
        self.add(f"begun_first[suffix={opener}]", "ANSWERED")
        return f"{before.removesuffix('?')} {rest} | begun_first opened {rest} | ANSWERED"

    @property
    def _opener(self) -> str:
        return self._spell(_OPENERS[self._format]) if self._format in _OPENERS else '""'

    @property
    def _list(self) -> tuple[str, str, str]:
        """The texts before the calls that one marker opens, between two, and after all; one call only without any."""
        if self._format == "llama_pythonic" or (self._format == "mistral" and not self._newer):
            return "[", ", ", "]"
        return "", "; " if self._format == "llama3_json" else "", ""

    @property
    def _gap(self) -> str:
        """What stands between a call and the next marker."""
        return '""' if self._format == "mistral" else r'"\n"'

    @property
    def _tag(self) -> str:
        """What may stand before calls that are all of a reply, if it is a special token."""
        spelt = self._spell(_PYTHON_TAG)
        return f"{spelt}?" if self._format == "llama3_json" and spelt != _quoted(_PYTHON_TAG) else ""

    def _led_calls(self, *, one_call: bool) -> str:
        """Calls that are all of a reply: all up to the first one's arguments is one lexeme, as any text would be."""
        _, between, end = self._list
        led = " | ".join(f"/{begun}/ {rest}" for rest, begun in self._beginnings.items())
        others = "" if one_call else f"({_quoted(between)} call)*"
        return f"({led}) {others} {_quoted(end)}"

    def _no_call(self, thinking: str) -> str:
        """A text that does not begin like a call, or like reasoning."""
        begun = "|".join([*self._beginnings.values(), *([_escaped(thinking)] if thinking else [])])
        return self.add("SAID", f"{_ANY} & ~/({begun})(?s:.*)/")

    @property
    def _beginnings(self) -> dict[str, str]:
        """By the rule of what follows, regular expressions of what calls that are all of a reply begin with."""
        start = self._list[0]
        return {rest: rf"[ \n]*{_escaped(start + begun)}" for rest, begun in self._begun.items()}

    def reasoning(self, opening: str, closing: str, *, is_open: bool) -> str:
        """Reasoning: text up to a marker. One that is a special token is no part of any text, another one ends it."""
        end = self._spell(closing)
        if end == _quoted(closing):
            self.add(f"reasoned[suffix={end}]", _ANY)
        else:
            self.add("reasoned", f"{_ANY} {end}")
        whole = r"reasoned /[ \n]{0,4}/"
        return whole if is_open else f"{self._spell(opening)} {whole}"

    def call(self, name: str, schema: Any, *, lenient: bool) -> str:
        """The rule of a call of one tool, without the marker that opens it."""
        rule = f"call_{len(self._rules)}"
        if self._format == "llama_pythonic":
            return self._begin(rule, f"{name}(", f"{self._keywords(schema, lenient=lenient)} {_quoted(')')}")
        if self._format == "qwen3_coder":
            function, end = f"\n<function={name}>\n", "</function>\n"
            parameters = self._parameters(schema, lenient=lenient)
            return self.add(rule, f"{_quoted(function)} {parameters} {_quoted(end)} {self._spell(TAGS[1])}")
        arguments = self._json(_object(schema), lenient=lenient)
        if self._format == "mistral" and self._newer:
            return self.add(rule, f"{_quoted(name)} {self._spell('[ARGS]')} {arguments}")
        key = "parameters" if self._format == "llama3_json" else "arguments"
        opening = f'{{"name": {json.dumps(name)}, "{key}": '
        if self._format == "llama3_json":
            return self._begin(rule, opening, f'{arguments} "}}"')
        whole = f'{_quoted(opening)} {arguments} "}}"'
        return self.add(
            rule, rf'"\n" {whole} "\n" {self._spell(TAGS[1])}' if self._format == "hermes" else whole
        )

    def _begin(self, rule: str, begun: str, rest: str) -> str:
        after = self.add(f"after_{rule}", rest)
        self._begun[after] = begun
        # As lexemes of JSON, for an answer in JSON may begin in the same way.
        lexemes = [begun] if self._format == "llama_pythonic" else re.findall(r'"[^"]*"|[{:,] ?', begun)
        return self.add(rule, f"{' '.join(map(_quoted, lexemes))} {after}")

    def _json(self, schema: Any, *, lenient: bool) -> str:
        style = {**_TIGHT, "lenient": True} if lenient else _TIGHT
        given = {**schema, "x-guidance": style} if isinstance(schema, dict) else schema
        return self.add(f"json_{len(self._rules)}", f"%json {json.dumps(given)}")

    def _keywords(self, schema: Any, *, lenient: bool) -> str:
        """Keyword arguments in the schema's order, those that are not required left out at will."""
        first, rest = '""', '""'
        for key, of_value, is_required in reversed(list(_properties(schema))):
            value = f"{_quoted(key + '=')} {self._json(of_value, lenient=lenient)}"
            alone = f"{value} {rest}"
            first = self.add(f"first_{len(self._rules)}", alone if is_required else f"{alone} | {first}")
            after = f'", " {value}'
            rest = self.add(f"rest_{len(self._rules)}", f"{after if is_required else f'({after})?'} {rest}")
        return first

    def _parameters(self, schema: Any, *, lenient: bool) -> str:
        parts = []
        for key, of_value, is_required in _properties(schema):
            opening, closing = _quoted(f"<parameter={key}>\n"), "\n</parameter>\n"
            if is_json(of_value):
                part = f"({opening} {self._json(of_value, lenient=lenient)} {_quoted(closing)})"
            elif words := _words(of_value):
                part = f"({opening} ({' | '.join(map(_quoted, words))}) {_quoted(closing)})"
            else:
                value = f"text_{len(self._rules)}"
                self.add(f"{value}[suffix={_quoted(closing)}]", _ANY)
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


def _escaped(text: str) -> str:
    """As a regular expression between slashes has it."""
    return re.escape(text).replace("/", r"\/")
