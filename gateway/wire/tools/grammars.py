"""Grammars of replies that may or have to call a tool, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from enum import Enum
from functools import cache
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

from penstock.engine.planning.exact_numbers import exact_rules
from penstock.gateway.wire.tools.formats import QUOTE, TOOL_FORMATS, Format, Style
from penstock.gateway.wire.tools.types import TEXT, admitted, property_schema

Spell = Callable[[str], str]
"""A function that writes a marker as grammars do: as the special token that it is, or as text."""
Schemas = Mapping[str, Any]

_TIGHT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_ANY = "/(?s:.*)/"
_LINE = r'"\n"?'


class Beside(Enum):
    """The kinds of reply that are allowed in addition to calls."""

    NOTHING = "nothing"
    ANSWER = "answer"
    """A reply may match the grammar `@answer` instead of calling."""
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
    beside: Beside = Beside.NOTHING,
    lenient: Collection[str] = (),
) -> str:
    """A call of one of these tools, or several calls.

    Args:
        schemas: the JSON schema of its arguments, by the name of each tool; harmony's messages may do without.
        thinking: what reasoning, which may come first, is written between.
        is_open: it has begun already.
        lenient: tools whose schemas may have keywords that nothing can be held to; these are passed over.
    """
    rules = _Rules(TOOL_FORMATS[format], spell)
    has_channels = TOOL_FORMATS[format].style is Style.HARMONY
    if schemas:
        rules.calls(schemas, one_call=one_call or has_channels, lenient=lenient)
    if has_channels and thinking is not None:
        return rules.text(f"start: {rules.messages(beside, calls=bool(schemas), is_open=is_open)}")
    thought = "" if thinking is None else rules.reasoning(*thinking, is_open=is_open)
    before = f"({thought}){'' if is_open else '?'}" if thought else ""
    if beside is Beside.NOTHING:
        return rules.text(f"start: {before} calls")
    if beside is Beside.ANSWER:
        return rules.text(f"start: {before} (calls | @answer)")
    opening = "" if thinking is None or is_open else thinking[0]
    return rules.text(f"start: {rules.free(before, opening, one_call=one_call)}")


def answer_grammar(spell: Spell, thinking: tuple[str, str], *, is_open: bool) -> str:
    """Reasoning, and then what the grammar `@answer` says."""
    rules = _Rules(None, spell)
    thought = rules.reasoning(*thinking, is_open=is_open)
    return rules.text(f"start: ({thought}){'' if is_open else '?'} @answer")


class _Rules:
    """The rules of one grammar, as they are added."""

    def __init__(self, format: Format | None, spell: Spell) -> None:
        self._given = format
        self._spell = cache(spell)
        self._rules: list[str] = []
        self._begun: dict[str, str] = {}
        """The beginnings of calls that may be a whole reply, by the rule for the rest."""

    def add(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name

    def text(self, start: str) -> str:
        return "\n".join([start, *self._rules, ""])

    def calls(self, schemas: Schemas, *, one_call: bool, lenient: Collection[str]) -> None:
        """Adds `calls`, and `opened`: what follows the marker that opens calls."""
        calls = [self.call(name, schema, lenient=name in lenient) for name, schema in schemas.items()]
        self.add("call", " | ".join(calls))
        format = self._format
        others = f" ({quoted(format.layout.between)} call)*" if format.layout.between and not one_call else ""
        line = _LINE if format.has_lines else ""
        start, end = self._written(format.layout.start), self._written(format.layout.end)
        closing = self._written(format.closing if format.opening else "")
        self.add("opened", f"{line} {start} call{others} {end} {line} {closing}")
        opener = self._written(format.opening)
        more = (
            "" if one_call or format.layout.between or not format.opening else f" ({_LINE} {opener} opened)*"
        )
        self.add("calls", f"{opener} opened{more}")

    @property
    def _format(self) -> Format:
        assert self._given is not None
        return self._given

    def _written(self, *texts: str) -> str:
        """Returns texts one after another: special tokens, and one lexeme for all that stands between two of them."""
        parts, plain = [], ""
        for text in filter(None, texts):
            spelt = self._spell(text)
            if spelt == quoted(text):
                plain += text
                continue
            parts += [quoted(plain), spelt] if plain else [spelt]
            plain = ""
        return " ".join(parts + [quoted(plain)] * bool(plain)) or '""'

    def _up_to(self, name: str, marker: str) -> str:
        """The rule of any text up to a marker: a special token is no part of any text, another marker ends it."""
        if self._spell(marker) == quoted(marker):
            self.add(f"{name}[suffix={quoted(marker)}]", _ANY)
            return name
        return self.add(name, f"{_ANY} {self._spell(marker)}")

    def messages(self, beside: Beside, *, calls: bool, is_open: bool) -> str:
        """Harmony's messages: reasoning and what is said to the user before a call, and then a call or the answer."""
        self._up_to("told", "<|end|>")
        told = f"told {self._written('<|start|>', 'assistant')}"
        analysis, commentary, final = (
            self._written("<|channel|>", name, "<|message|>") for name in ("analysis", "commentary", "final")
        )
        self.add("message", f"({analysis} | {commentary}) {told}")
        ends = ["calls"] * calls
        if beside is not Beside.NOTHING:
            ends.append(f"{final} {_ANY if beside is Beside.TEXT else '@answer'}")
        return f"{told * is_open} message* ({' | '.join(ends)})"

    def free(self, before: str, thinking: str, *, one_call: bool) -> str:
        """Any text in which every call is one of those that were added.

        Args:
            before: the reasoning that may or has to come first.
            thinking: the marker that it begins with, if it may.
        """
        if not self._format.opening:
            return f"{before} ({self._tag} {self._led_calls(one_call=one_call)} | {self._no_call(thinking)})"
        opener = self._written(self._format.opening)
        self.add("said", _ANY)
        if opener != quoted(self._format.opening):  # a special token is no part of a text
            return f"{before} (said {opener} opened)* said"
        self.add(f"begun[suffix={opener}]", _ANY)
        rest = "(begun opened)* said"
        if not thinking or self._spell(thinking) != quoted(thinking):
            return f"{before} {rest}"
        # Reasoning may have the marker in it, so that nothing else may begin as it does.
        self.add("ANSWERED", f"{_ANY} & ~/{_escaped(thinking)}(?s:.*)/")
        self.add(f"begun_first[suffix={opener}]", "ANSWERED")
        return f"{before.removesuffix('?')} {rest} | begun_first opened {rest} | ANSWERED"

    @property
    def _tag(self) -> str:
        """Returns the special token that may stand before calls that are all of a reply, if no other has to end it."""
        tag = "" if self._format.closing else self._format.tag
        return f"{self._spell(tag)}?" if tag and self._spell(tag) != quoted(tag) else ""

    def _led_calls(self, *, one_call: bool) -> str:
        """Calls that are all of a reply: all up to the first one's arguments is one lexeme, as any text would be."""
        between, end = self._format.layout.between, self._format.layout.end
        led = " | ".join(f"/{begun}/ {rest}" for rest, begun in self._beginnings.items())
        others = "" if one_call or not between else f"({quoted(between)} call)*"
        return f"({led}) {others} {quoted(end)}"

    def _no_call(self, thinking: str) -> str:
        """A text that does not begin like a call, or like reasoning."""
        begun = "|".join([*self._beginnings.values(), *([_escaped(thinking)] if thinking else [])])
        return self.add("SAID", f"{_ANY} & ~/({begun})(?s:.*)/")

    @property
    def _beginnings(self) -> dict[str, str]:
        """Returns regular expressions of how calls begin that are all of a reply, by the rule of what follows."""
        start = self._format.layout.start
        return {rest: rf"[ \n]*{_escaped(start + begun)}" for rest, begun in self._begun.items()}

    def reasoning(self, opening: str, closing: str, *, is_open: bool) -> str:
        """Reasoning, with the newline that GLM-4.5 writes before it, and with space after it."""
        self._up_to("reasoned", closing)
        whole = r"reasoned /[ \n]{0,4}/"
        return whole if is_open else f"{_LINE} {self._spell(opening)} {whole}"

    def call(self, name: str, schema: Any, *, lenient: bool) -> str:
        """The rule of a call of one tool, without the marker that opens it."""
        rule, format = f"call_{len(self._rules)}", self._format
        if format.style is Style.TAGGED:
            return self.add(rule, self._tagged(name, schema, lenient=lenient))
        if format.style is Style.GEMMA:
            members = self._keywords(schema, ":", ",", lenient=lenient)
            return self.add(rule, f"{quoted(f'call:{name}' + '{')} {members} {quoted('}')}")
        if format.style is Style.PYTHON:
            keywords = self._keywords(schema, "=", ", ", lenient=lenient)
            return self._begin(rule, [f"{name}("], f"{keywords} {quoted(')')}")
        arguments = self._json(_object(schema), lenient=lenient)
        if format.style is Style.FENCED:
            before, *after = format.around
            return self._begin(
                rule, [before + name, format.after_name], f"{arguments} {self._written(*after)}"
            )
        if format.style in (Style.NAMED, Style.HARMONY):
            return self._begin(rule, [name, format.after_name], arguments)
        begun = f'{{{format.lead}"{format.name_key}": {json.dumps(name)}, "{format.arguments_key}": '
        # As lexemes of JSON, for an answer in JSON may begin in the same way.
        lexemes = [begun] if format.opening else re.findall(r'"[^"]*"|[{:,] ?', begun)
        return self._begin(rule, lexemes, f'{arguments} "}}"')

    def _begin(self, rule: str, lexemes: Sequence[str], rest: str) -> str:
        after = self.add(f"after_{rule}", rest)
        self._begun[after] = "".join(lexemes)
        return self.add(rule, f"{' '.join(map(self._spell, lexemes))} {after}")

    def _json(self, schema: Any, *, lenient: bool) -> str:
        style = {**_TIGHT, "lenient": True} if lenient else _TIGHT
        name = f"json_{len(self._rules)}"
        if rules := exact_rules(schema, name, style):
            self._rules += rules
            return name
        given = {**schema, "x-guidance": style} if isinstance(schema, dict) else schema
        return self.add(name, f"%json {json.dumps(given)}")

    def _keywords(self, schema: Any, assigns: str, separator: str, *, lenient: bool) -> str:
        """Arguments in the schema's order, those that are not required left out at will."""
        first, rest = '""', '""'
        for key, of_value, is_required in reversed(list(_properties(schema))):
            value = f"{quoted(key + assigns)} {self._literal(of_value, lenient=lenient)}"
            alone = f"{value} {rest}"
            first = self.add(f"first_{len(self._rules)}", alone if is_required else f"{alone} | {first}")
            after = f"{quoted(separator)} {value}"
            rest = self.add(f"rest_{len(self._rules)}", f"{after if is_required else f'({after})?'} {rest}")
        return first

    def _literal(self, schema: Any, *, lenient: bool) -> str:
        if self._format.style is Style.PYTHON:
            return self._json(schema, lenient=lenient)
        return self._value(schema, QUOTE, (QUOTE,), lenient=lenient)

    def _value(self, schema: Any, before: str, after: tuple[str, ...], *, lenient: bool) -> str:
        """A value as JSON, or as text between two markers; without the first one, text has no bounds of its own."""
        types, words = admitted(schema, schema)
        if TEXT in types:
            text = f"{self._written(before)} {self._text(sorted(words or ()), after[-1], *after[:-1])}"
            if types == {TEXT} or (words is None and not before):  # any other value is text as well
                return text
            given = schema if isinstance(schema, dict) else {}
            schema = {**given, "allOf": [*given.get("allOf", ()), {"type": sorted(types - {TEXT})}]}
        others = f"{self._json(schema, lenient=lenient)} {'' if before else self._written(*after)}"
        return f"({text} | {others})" if TEXT in types else others

    def _text(self, listed: Sequence[str], marker: str, before: str = "") -> str:
        """A text as it is, up to a marker."""
        if listed:
            return f"({' | '.join(map(quoted, listed))}) {self._written(before, marker)}"
        return self._up_to(f"text_{len(self._rules)}", marker)

    def _tagged(self, name: str, schema: Any, *, lenient: bool) -> str:
        tags = self._format.tags
        assert tags is not None
        parts = [self._written(tags.name[0], name, tags.name[1]), _LINE]
        for key, of_value, is_required in _properties(schema):
            opening = self._written(tags.key[0], key, tags.key[1], tags.pad)
            if tags.value[0]:
                opening += f" {_LINE} {self._written(tags.value[0])}"
            value = self._value(of_value, "", (tags.pad, tags.value[1]), lenient=lenient)
            parts.append(f"({opening} {value} {_LINE}){'' if is_required else '?'}")
        return " ".join([*parts, self._written(tags.end)])


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


def _escaped(text: str) -> str:
    """Returns a text as regular expressions between slashes have it."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
