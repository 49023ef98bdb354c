"""Calls as Python writes them: `[clock(zone="UTC"), add(a=1, b=2)]`, and literals of Python as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator

from penstock.gateway.wire.tools.scanning import FormatParser, Malformed, Steps

_NAME = re.compile(r"[A-Za-z_][A-Za-z0-9_.-]*")
_NEXT_KEY = re.compile(rf"\s*,\s*({_NAME.pattern})\s*=")
_END = re.compile(r"\s*(?:,\s*)?\)")
_END_IN_LIST = re.compile(rf"{_END.pattern}\s*(?:\]|<\||\Z|,\s*{_NAME.pattern}\s*\()")
_BEGUN = re.compile(rf"(?:\s*|{_END.pattern}\s*<?|(?:\s*|{_END.pattern}\s*),\s*(?:{_NAME.pattern}\s*)?)\Z")
"""What may become one of those that follow an argument: another one, the end of a call, or that of one in a list."""
_IN_TEXT = re.compile(r'\\[^\n\r]|[\\"\n\r]')
_AS_WRITTEN = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPABLE = "\\'\"abfnrtvxuUN0\n"
_WORDS = {"true": True, "false": False, "null": None}
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(FormatParser):
    """Reads a list of calls, or one on each line, up to what is none. An argument is passed on when it is complete.

    LFM2.5's template puts quotation marks around any text and escapes nothing in it: those that neither an argument of
    the tool nor the end of the call follows belong to the text, as newlines do.
    """

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
            i = yield from self.past_space(i + 1)
            if self._text[i] in "\"'":
                end = yield from self._text_end(i, name)
                value = _json_of_text(self._text[i:end])
            else:
                end = yield from self._literal_end(i)
                value = json_of(self._text[i:end])
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

    def _text_end(self, i: int, name: str) -> Generator[None, None, int]:
        """Returns the end of an argument that is a string."""
        quote, i = self._text[i], i + 1
        while True:
            while i >= len(self._text):
                yield from self.more()
            if self._text[i] == quote:
                while not self._ended and _BEGUN.match(self._text, i + 1):
                    yield
                if self._is_end(i + 1, name):
                    return i + 1
            i += 2 if self._text[i] == "\\" else 1

    def _is_end(self, i: int, name: str) -> bool:
        """Whether an argument may end at `i`, by what follows."""
        if (key := _NEXT_KEY.match(self._text, i)) is not None:
            schema = self._tools.schemas[name]
            known = schema.get("properties") if isinstance(schema, dict) else None
            return not known or key[1] in known
        end = _END_IN_LIST if self._format.layout.start else _END
        return end.match(self._text, i) is not None

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


def _json_of_text(literal: str) -> str:
    length = 3 if len(literal) > 5 and literal[:3] == literal[-3:] == literal[0] * 3 else 1
    text = _IN_TEXT.sub(lambda found: _AS_WRITTEN.get(found[0], found[0]), literal[length:-length])
    return json_of(f'"{text}"')


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
