"""Grammars of replies that may or have to call a tool, in llguidance's dialect of Lark."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Collection, Hashable, Mapping
from enum import Enum
from functools import cache, partial
from hashlib import sha256
from json.encoder import encode_basestring_ascii as quoted
from typing import Any

import orjson

from penstock.engine.text.exact_numbers import TooComplex, exact_rules
from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.gateway.errors import invalid
from penstock.gateway.wire.memo import Memo
from penstock.gateway.wire.tools.formats import (
    HARMONY,
    TOOL_FORMATS,
    ArgumentForm,
    CallForm,
    Style,
    ToolFormat,
)
from penstock.gateway.wire.tools.types import TEXT, admitted, property_schema
from penstock.gateway.wire.tools.use import ToolUse

MAX_TOOLS_BYTES = 1024 * 1024
"""The JSON of the schemas for which a grammar of calls is made: 30 tools of an agent have some 40 KiB, 512 some 800."""
_GRAMMARS_BYTES = 16 * 1024 * 1024
Spell = Callable[[str], str]
"""A function that writes a marker as grammars do: as the special token that it is, or as text."""
Schemas = Mapping[str, Any]

_TIGHT = {"item_separator": ", ", "key_separator": ": ", "whitespace_flexible": False}
_ANY = "/(?s:.*)/"
_LINE = r'"\n"?'
_NO_CALLS = ToolFormat(CallForm(Style.JSON))


class Beside(Enum):
    """The kinds of reply that are allowed in addition to calls."""

    NOTHING = "nothing"
    ANSWER = "answer"
    """A reply may match the grammar `@answer` instead of calling."""
    TEXT = "text"
    """Any text, before calls, after them, or in their place."""


def calls_grammar(
    format: str | None,
    schemas: Schemas,
    spell: Spell,
    one_call: bool,
    thinking: tuple[str, str] | None = None,
    is_open: bool = False,
    beside: Beside = Beside.NOTHING,
    lenient: Collection[str] = (),
) -> str:
    """Returns the grammar of replies that call one of these tools, or several times, after reasoning if there is any.

    Args:
        format: the format of calls; None for no calls.
        schemas: the JSON schema of its arguments, by the name of each tool; without one a reply may only do otherwise.
        thinking: the markers of the reasoning that may come first.
        is_open: the prompt has begun reasoning.
        lenient: tools whose schemas may have keywords that nothing can be held to; these are passed over.
    """
    rules = _Rules(_NO_CALLS if format is None else TOOL_FORMATS[format], spell)
    has_channels = format == HARMONY
    if schemas:
        rules.calls(schemas, one_call=one_call or has_channels, lenient=lenient)
    if has_channels and thinking is not None:
        return rules.text(rules.messages(beside, calls=bool(schemas), is_open=is_open))
    thought = "" if thinking is None else rules.reasoning(*thinking, is_open=is_open)
    before = f"({thought}){'' if is_open else '?'}" if thought else ""
    if beside is not Beside.TEXT:
        ends = ["calls"] * bool(schemas) + ["@answer"] * (beside is Beside.ANSWER)
        return rules.text(f"{before} ({' | '.join(ends)})")
    opening = "" if thinking is None or is_open else thinking[0]
    return rules.text(rules.free(before, opening))


class ReplyGrammars:
    """The grammars of one model's replies; those of the latest tools are remembered."""

    def __init__(self, spell: Spell) -> None:
        self._spell = spell
        self._texts = Memo[Hashable, str](_GRAMMARS_BYTES)

    def grammar(
        self,
        format: str | None,
        thinking: tuple[str, str] | None,
        is_open: bool,
        use: ToolUse,
        answer: Grammar | None,
        tenant: str,
    ) -> Grammar:
        """Returns the grammar of a reply, reasoning and then calls or an answer; see `calls_grammar`.

        Args:
            answer: what an answer has to match; a reply that has to call a tool has none.
            tenant: whose request it is: nobody learns from the time that it takes what tools others have.

        Raises:
            ApiError: 400, if the tools are too large for a grammar.
        """
        may_answer = not use.required and answer is not None
        beside = Beside.ANSWER if may_answer else Beside.NOTHING if use.required else Beside.TEXT
        schemas = {n: schema for n, schema in use.schemas.items() if not use.required or n in use.required}
        lenient = () if use.required else sorted(schemas.keys() - use.strict)
        written = orjson.dumps([schemas, lenient])
        if len(written) > MAX_TOOLS_BYTES:
            size = f"The schemas of 'tools' have {len(written)} bytes of JSON."
            message = f"{size} Calls can be held to at most {MAX_TOOLS_BYTES}."
            raise invalid(message, "tools", "tools_too_large")
        flags = use.one_call, thinking, is_open, beside
        write = partial(calls_grammar, format, schemas, self._spell, *flags, lenient)
        try:
            text = self._texts.get((tenant, format, *flags, sha256(written).digest()), write)
        except TooComplex as error:
            raise invalid(f"Invalid 'tools': {error}.", "tools", "invalid_grammar") from None
        return Grammar(GrammarKind.LARK, text, answer if may_answer else None)


class _Rules:
    """The rules of one grammar, as they are added."""

    def __init__(self, format: ToolFormat, spell: Spell) -> None:
        self._format = format
        self._spell = cache(spell)
        self._rules: list[str] = []
        self._heads: dict[str, str] = {}
        """The texts with which calls begin, by the rule for the rest."""

    def add(self, name: str, expression: str) -> str:
        self._rules.append(f"{name}: {expression}")
        return name

    def text(self, start: str) -> str:
        return "\n".join([f"start: {start}", *self._rules, ""])

    def calls(self, schemas: Schemas, *, one_call: bool, lenient: Collection[str]) -> None:
        """Adds `calls`, and `opened`: what follows the marker that opens calls."""
        format = self._format
        calls = [self._call(name, schema, lenient=name in lenient) for name, schema in schemas.items()]
        self.add("call", " | ".join(calls))
        has_others = format.layout.between and not one_call
        self.add("others", f"({quoted(format.layout.between)} call)*" if has_others else '""')
        line = _LINE if format.has_lines else ""
        start, end = self._written(format.layout.start), self._written(format.layout.end)
        closing = self._written(format.closing if format.opening else "")
        self.add("opened", f"{line} {start} call others {end} {line} {closing}")
        opener = self._written(format.opening)
        has_one = one_call or format.layout.between or not format.opening
        self.add("calls", f"{opener} opened{'' if has_one else f' ({_LINE} {opener} opened)*'}")

    def _is_token(self, text: str) -> bool:
        """Returns whether a special token is written in a text."""
        return self._spell(text) != quoted(text)

    def _written(self, *texts: str) -> str:
        """Returns texts one after another: special tokens, and one lexeme for all that stands between two of them."""
        parts, plain = [], ""
        for text in filter(None, texts):
            if not self._is_token(text):
                plain += text
                continue
            parts += [quoted(plain), self._spell(text)] if plain else [self._spell(text)]
            plain = ""
        return " ".join(parts + [quoted(plain)] * bool(plain)) or '""'

    def _up_to(self, name: str, marker: str) -> str:
        """The rule of any text up to a marker: a special token is no part of any text, another marker ends it."""
        if self._is_token(marker):
            return self.add(name, f"{_ANY} {self._spell(marker)}")
        self.add(f"{name}[suffix={quoted(marker)}]", _ANY)
        return name

    def messages(self, beside: Beside, *, calls: bool, is_open: bool) -> str:
        """Harmony's messages: reasoning and what is said to the user before a call, and then a call or the answer."""
        self._up_to("said_before", "<|end|>")
        before = f"said_before {self._written('<|start|>', 'assistant')}"
        analysis, commentary, final = (
            self._written("<|channel|>", name, "<|message|>") for name in ("analysis", "commentary", "final")
        )
        self.add("message", f"({analysis} | {commentary}) {before}")
        ends = ["calls"] * calls
        if beside is not Beside.NOTHING:
            ends.append(f"{final} {_ANY if beside is Beside.TEXT else '@answer'}")
        return f"{before * is_open} message* ({' | '.join(ends)})"

    def free(self, before: str, thinking: str) -> str:
        """Any text in which every call is one of those that were added.

        Args:
            before: the reasoning that may or has to come first.
            thinking: the marker that it begins with, if it may.
        """
        if not self._format.opening:
            return f"{before} ({self._alone(thinking)})"
        opener = self._written(self._format.opening)
        self.add("said", _ANY)
        if self._is_token(self._format.opening):  # it is no part of a text
            return f"{before} (said {opener} opened)* said"
        self.add(f"begun[suffix={opener}]", _ANY)
        rest = "(begun opened)* said"
        if not thinking or self._is_token(thinking):
            return f"{before} {rest}"
        # Reasoning may have the marker in it, so that nothing else may begin as it does.
        self.add("ANSWERED", f"{_ANY} & ~/{_escaped(thinking)}(?s:.*)/")
        self.add(f"begun_first[suffix={opener}]", "ANSWERED")
        return f"{before.removesuffix('?')} {rest} | begun_first opened {rest} | ANSWERED"

    def _alone(self, thinking: str) -> str:
        """Calls that are all of a reply, or a text that begins neither like one of them nor like reasoning.

        All up to the first call's arguments is one lexeme, as any text would be.
        """
        format, layout = self._format, self._format.layout
        heads = {rest: rf"[ \n]*{_escaped(layout.start + head)}" for rest, head in self._heads.items()}
        first = " | ".join(f"/{head}/ {rest}" for rest, head in heads.items())
        begun = "|".join([*heads.values(), *([_escaped(thinking)] if thinking else [])])
        self.add("SAID", f"{_ANY} & ~/({begun})(?s:.*)/")
        is_token = format.tag and not format.closing and self._is_token(format.tag)
        return f"{f'{self._spell(format.tag)}?' if is_token else ''} ({first}) others {quoted(layout.end)} | SAID"

    def reasoning(self, opening: str, closing: str, *, is_open: bool) -> str:
        """Reasoning, with the newline that GLM-4.5 writes before it, and with space after it."""
        self._up_to("reasoned", closing)
        whole = r"reasoned /[ \n]{0,4}/"
        return whole if is_open else f"{_LINE} {self._spell(opening)} {whole}"

    def _call(self, name: str, schema: Any, *, lenient: bool) -> str:
        """The rule of a call of one tool, without the marker that opens it."""
        format, rule = self._format, f"call_{len(self._rules)}"
        before, after, argument = format.call.before, format.call.after, format.call.argument
        if argument is None:
            arguments = self._json(_object(schema), lenient=lenient)
        else:
            arguments = self._arguments(argument, schema, lenient=lenient)
        rest = self.add(f"after_{rule}", f"{arguments} {self._written(*format.call.end)}")
        self._heads[rest] = begun = f"{before}{name}{after}"
        head = self._written(before, name, after)
        if format.style is Style.JSON and not format.opening:
            # As lexemes of JSON, for an answer in JSON may begin in the same way.
            head = " ".join(map(quoted, re.findall(r'"[^"]*"|[{:,] ?', begun)))
        return self.add(rule, f"{head} {rest}")

    def _arguments(self, argument: ArgumentForm, schema: Any, *, lenient: bool) -> str:
        """Arguments in the schema's order, those that are not required left out at will."""
        first = rest = '""'
        for key, of_value, is_required in reversed(_properties(schema)):
            value = self._argument(argument, key, of_value, lenient=lenient)
            if not argument.between:
                first = f"({value}){'' if is_required else '?'} {first}"
                continue
            alone = f"{value} {rest}"
            first = self.add(f"first_{len(self._rules)}", alone if is_required else f"{alone} | {first}")
            after = f"{quoted(argument.between)} {value}"
            rest = self.add(f"rest_{len(self._rules)}", f"{after if is_required else f'({after})?'} {rest}")
        return first if argument.between else f"{_LINE} {first}"

    def _argument(self, argument: ArgumentForm, key: str, schema: Any, *, lenient: bool) -> str:
        opening = self._written(argument.key[0], key, argument.key[1], argument.pad)
        if argument.value[0]:
            opening += f" {_LINE} {self._written(argument.value[0])}"
        return (
            f"{opening} {self._value(argument, schema, lenient=lenient)} {'' if argument.between else _LINE}"
        )

    def _value(self, argument: ArgumentForm, schema: Any, *, lenient: bool) -> str:
        """A value as JSON, or as text up to a marker."""
        types, words = admitted(schema, schema)
        marker, after = argument.quote or argument.value[1], self._written(argument.pad, argument.value[1])
        if TEXT not in types or not marker:
            return f"{self._json(schema, lenient=lenient)} {after}"
        text = self._written(argument.quote) + " "
        if words:
            text += f"({' | '.join(map(quoted, sorted(words)))}) {self._written(argument.pad, marker)}"
        else:
            text += self._up_to(f"text_{len(self._rules)}", marker)
        if types == {TEXT} or (words is None and not argument.quote):  # any other value is text as well
            return text
        keywords = schema if isinstance(schema, dict) else {}
        no_text = {"type": sorted(types - {TEXT})}
        others = {**keywords, "allOf": [*keywords.get("allOf", ()), no_text]}
        return f"({text} | {self._json(others, lenient=lenient)} {after})"

    def _json(self, schema: Any, *, lenient: bool) -> str:
        style = {**_TIGHT, "lenient": True} if lenient else _TIGHT
        name = f"json_{len(self._rules)}"
        if rules := exact_rules(schema, name, style):
            self._rules += rules
            return name
        styled = {**schema, "x-guidance": style} if isinstance(schema, dict) else schema
        return self.add(name, f"%json {json.dumps(styled)}")


def _properties(schema: Any) -> list[tuple[str, Any, bool]]:
    """Returns each argument's name, its schema, and whether it is required."""
    whole = _object(schema)
    required = whole.get("required") or ()
    defined = {key: whole[key] for key in ("$defs", "definitions") if key in whole}
    members = []
    for key in whole.get("properties") or {}:
        of_value = property_schema(whole, key)
        if isinstance(of_value, dict):
            of_value = {**defined, **of_value}
        members.append((key, of_value, key in required))
    return members


def _object(schema: Any) -> dict[str, Any]:
    return {"type": "object", **schema} if isinstance(schema, dict) else {"type": "object"}


def _escaped(text: str) -> str:
    """Returns a text as regular expressions between slashes have it."""
    return re.escape(text).replace("/", r"\/").replace("\\\n", r"\n")
