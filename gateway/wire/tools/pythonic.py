"""Calls as Python writes them: `[clock(zone="UTC"), add(a=1, b=2)]`, and literals of Python as JSON."""

from __future__ import annotations

import ast
import json
import re
from collections.abc import Generator, Sequence

from penstock.gateway.wire.tools.scanning import SPACE, FormatParser, Malformed, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_AFTER = {'"': re.compile(r'[^"\\]*'), "'": re.compile(r"[^'\\]*")}
"""The run of characters after a quotation mark in which no string ends."""
_LITERAL = re.compile(r"""[^"'()\[\]{},]*""")
_NUMBER = re.compile(rb"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
"""Matches the numbers of JSON."""
_IN_TEXT = re.compile(r'\\[^\n\r]|[\\"\n\r]')
_AS_WRITTEN = {"\\": "\\\\", '"': '\\"', "\n": "\\n", "\r": "\\r"}
_ESCAPE = re.compile(r"\\(.)", re.DOTALL)
_ESCAPABLE = "\\'\"abfnrtvxuUN0\n"
_WORDS = ("true", "false", "null")
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(FormatParser):
    """Reads a list of calls, or one call per line, up to other text. An argument is passed on when it is complete.

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
            i = self._at

    def _call(self, i: int) -> Steps:
        """Reads one call, which is begun when its first argument, or its end, is certain."""
        end = yield from self._name_end(i)
        name, opening = self._text[i:end], "{"
        i = yield from self.past_space(end)
        if self._text[i] != "(" or name not in self._tools.schemas:
            raise Malformed
        i = yield from self.past_space(i + 1)
        while self._text[i] != ")":
            end = yield from self._name_end(i)
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

    def _name_end(self, i: int) -> Generator[None, None, int]:
        end = yield from self.match(_NAME, i)
        if not (self._text[i].isalpha() or self._text[i] == "_"):
            raise Malformed
        return end

    def _text_end(self, i: int, name: str) -> Generator[None, None, int]:
        """Returns the end of an argument that is a string."""
        quote = self._text[i]
        while True:
            i = yield from self._string_end(i, quote)
            if (yield from self._may_end(i, name)):
                return i
            i -= 1

    def _may_end(self, i: int, name: str) -> Generator[None, None, bool]:
        """Returns whether an argument can end at `i`, judging by the text after it: another one, or the call's end."""
        after = yield from self._next(i)
        if self._text.startswith(",", after):
            start = yield from self._next(after + 1)
            end = yield from self.run_end(_NAME, start)
            if end > start:
                schema, assigns = self._tools.schemas[name], (yield from self._next(end))
                known = schema.get("properties") if isinstance(schema, dict) else None
                is_key = not known or self._text[start:end] in known
                return is_key and self._text.startswith("=", assigns)
            after = start
        if not self._text.startswith(")", after):
            return False
        return not self._format.layout.start or (yield from self._may_end_call(after + 1))

    def _may_end_call(self, i: int) -> Generator[None, None, bool]:
        """Returns whether a call in a list can end at `i`: before another one, the list's end, or a marker."""
        after = yield from self._next(i)
        if not self._text.startswith(",", after):
            return self._text[after : after + 1] in ("", "]") or (yield from self.ahead("<|", after))
        start = yield from self._next(after + 1)
        end = yield from self.run_end(_NAME, start)
        opening = yield from self._next(end)
        return end > start and self._text.startswith("(", opening)

    def _next(self, i: int) -> Generator[None, None, int]:
        """Returns the place of the first character from `i` on that is no space, or the end of the reply."""
        return (yield from self.run_end(SPACE, i))

    def _literal_end(self, i: int) -> Generator[None, None, int]:
        """Returns the end of a literal: the place of the comma or bracket after it."""
        closing: list[str] = []
        while True:
            i = yield from self.past(_LITERAL, i)
            character = self._text[i]
            if character in "\"'":
                i = yield from self._string_end(i, character)
                continue
            if not closing and character in ",)":
                return i
            if character in _CLOSING:
                closing.append(_CLOSING[character])
            elif character != "," and (not closing or closing.pop() != character):
                raise Malformed
            i += 1

    def _string_end(self, start: int, quote: str) -> Generator[None, None, int]:
        """Returns the place after the next quotation mark behind `start`; a backslash takes one its meaning."""
        i = yield from self.past(_AFTER[quote], start + 1)
        while self._text[i] != quote:
            while len(self._text) < i + 2:
                yield from self.more()
            i = yield from self.past(_AFTER[quote], i + 2)
        return i + 1


def _json_of_text(literal: str) -> str:
    length = 3 if len(literal) > 5 and literal[:3] == literal[-3:] == literal[0] * 3 else 1
    text = _IN_TEXT.sub(lambda found: _AS_WRITTEN.get(found[0], found[0]), literal[length:-length])
    return json_of(f'"{text}"')


def json_of(literal: str) -> str:
    """Returns a literal of Python as JSON; raises Malformed for what is no literal, or none that JSON has."""
    source = _ESCAPE.sub(_escaped, literal.strip())
    try:
        return _json(ast.parse(source, mode="eval").body, source.encode().splitlines(keepends=True))
    except (SyntaxError, ValueError, TypeError, RecursionError, MemoryError):
        raise Malformed from None


def _escaped(found: re.Match[str]) -> str:
    """A backslash before what it does not escape stands for itself."""
    return found[0] if found[1] in _ESCAPABLE else "\\" + found[0]


def _json(node: ast.expr, lines: Sequence[bytes]) -> str:
    """Returns a literal as JSON, numbers as they are written; JSON's true, false and null are understood, too."""
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return node.id
    if isinstance(node, ast.List | ast.Tuple):
        return f"[{', '.join(_json(item, lines) for item in node.elts)}]"
    if isinstance(node, ast.Dict):
        pairs = zip(node.keys, node.values, strict=True)
        return f"{{{', '.join(f'{_key(key)}: {_json(value, lines)}' for key, value in pairs if key)}}}"
    text = json.dumps(ast.literal_eval(node), ensure_ascii=False, allow_nan=False)
    written = lines[node.lineno - 1][node.col_offset : node.end_col_offset]
    return written.decode() if _NUMBER.fullmatch(written) else text


def _key(node: ast.expr) -> str:
    if isinstance(node, ast.Name) and node.id in _WORDS:
        return json.dumps(node.id)
    return json.dumps(str(ast.literal_eval(node)), ensure_ascii=False)
