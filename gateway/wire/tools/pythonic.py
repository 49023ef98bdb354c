"""Calls as Python writes them: `[clock(zone="UTC"), add(a=1, b=2)]`, and literals of Python as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator

from gateway.wire.tools.scanning import FormatParser, Malformed, Steps

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPABLE = "\\'\"abfnrtvxuUN0\n"
_WORDS = {"true": True, "false": False, "null": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(FormatParser):
    """Reads a list of calls, or one on each line, up to what is none. An argument is passed on when it is complete."""

    def section(self) -> Steps:
        i = yield from self.past_space()
        is_list = self._text[i] == "["
        if not is_list and self._format.layout.start:
            raise Malformed
        i += is_list
        while True:
            yield from self._call((yield from self.past_space(i)))
            i = yield from self.past_space()
            if is_list and self._text[i] not in ",]":
                raise Malformed
            if is_list and self.consume(i + 1).endswith("]"):
                return
            i = 0

    def _call(self, i: int) -> Steps:
        """Reads one call, which is begun when its first argument, or its end, is certain."""
        end = yield from self.match(_NAME, i)
        name, opening = self._text[i:end], "{"
        i = yield from self.past_space(end)
        if self._text[i] != "(" or name not in self._tools.schemas:
            raise Malformed
        i = yield from self.past_space(i + 1)
        while self._text[i] != ")":
            end = yield from self.match(_NAME, i)
            key = self._text[i:end]
            i = yield from self.past_space(end)
            if self._text[i] != "=":
                raise Malformed
            end = yield from self._literal_end(i + 1)
            value = json_of(self._text[i + 1 : end])
            self.consume(end)
            if opening == "{":
                self.begin(name)
            self.argue(f"{opening}{json.dumps(key)}: {value}")
            opening = ", "
            i = yield from self.past_space()
            if self._text[i] == ",":
                i = yield from self.past_space(i + 1)
        if opening == "{":
            self.begin(name)
            self.argue("{}")
        else:
            self.argue("}")
        self.consume(i + 1)

    def _literal_end(self, i: int) -> Generator[None, None, int]:
        """Returns the end of a literal: the place of the comma or bracket after it."""
        closing: list[str] = []
        while True:
            while i >= len(self._text):
                yield from self.more()
            character = self._text[i]
            if character in "\"'":
                i = yield from self._string_end(i)
                continue
            if not closing and character in ",)":
                return i
            if character in _CLOSING:
                closing.append(_CLOSING[character])
            elif character in ")]}" and (not closing or closing.pop() != character):
                raise Malformed
            i += 1

    def _string_end(self, start: int) -> Generator[None, None, int]:
        quote, i = self._text[start], start + 1
        while True:
            while i >= len(self._text):
                yield from self.more()
            if self._text[i] == quote:
                return i + 1
            i += 2 if self._text[i] == "\\" else 1


def json_of(literal: str) -> str:
    """Raises Malformed for what is no literal, or none that JSON has."""
    try:
        tree = ast.parse(_ESCAPE.sub(_escaped, literal.strip()), mode="eval")
        return json.dumps(_value(tree.body), ensure_ascii=False, allow_nan=False)
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _escaped(found: re.Match[str]) -> str:
    """A backslash before what it does not escape stands for itself."""
    return found[0] if found[1] in _ESCAPABLE else "\\" + found[0]


def _value(node: ast.expr) -> object:
    """Returns the value of a literal; JSON's own words for true, false and null are understood, too."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return _WORDS[node.id]
    if isinstance(node, ast.List | ast.Tuple):
        return [_value(item) for item in node.elts]
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return {str(_value(key)): _value(value) for key, value in pairs if key is not None}
    return ast.literal_eval(node)
