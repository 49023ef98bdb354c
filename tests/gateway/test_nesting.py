"""Nesting is measured before a parser sees it: never less than the parser would descend, never refused for less."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from gateway.errors import ApiError
from gateway.limits import OFF_LOOP_BYTES, Limits, json_depth, parse_object

SPACE, DIGITS, ESCAPES = " \t\n\r", "-0123456789.eE+", '"\\/bfnrtu'


class Wrong(Exception):
    """This is not JSON."""


class Descent:
    """A parser by the book that gives nothing back but how deep it was, also where it gave up."""

    def __init__(self, text: str) -> None:
        self._text = text
        self._at = 0
        self._depth = 0
        self.deepest = 0

    def run(self) -> int:
        with contextlib.suppress(Wrong):
            self._value()
        return self.deepest

    def _value(self) -> None:
        first = self._peek()
        if first == "[":
            self._inside("]", self._value)
        elif first == "{":
            self._inside("}", self._member)
        elif first == '"':
            self._string()
        else:
            self._word()

    def _inside(self, end: str, item: Callable[[], None]) -> None:
        self._at += 1
        self._depth += 1
        self.deepest = max(self.deepest, self._depth)
        if self._peek() != end:
            item()
            while self._peek() == ",":
                self._at += 1
                item()
        self._take(end)
        self._depth -= 1

    def _member(self) -> None:
        self._string()
        self._take(":")
        self._value()

    def _string(self) -> None:
        self._take('"')
        while (found := self._next()) != '"':
            if found == "\\" and self._next() not in ESCAPES:
                raise Wrong

    def _word(self) -> None:
        start = self._at
        while self._at < len(self._text) and self._text[self._at] in DIGITS:
            self._at += 1
        if start == self._at:
            raise Wrong

    def _peek(self) -> str:
        while self._text[self._at : self._at + 1] and self._text[self._at] in SPACE:
            self._at += 1
        return self._text[self._at : self._at + 1]

    def _next(self) -> str:
        if self._at == len(self._text):
            raise Wrong
        self._at += 1
        return self._text[self._at - 1]

    def _take(self, expected: str) -> None:
        if self._peek() != expected:
            raise Wrong
        self._at += 1


# Pieces that often make JSON, and just as often nearly do.
PIECES = st.lists(
    st.sampled_from(
        ["[", "]", "{", "}", ",", ":", '"', "\\", "[]", "{}", '""', '"[{"', '"\\""', '"a":', "1", " ", "é"]
    ),
    max_size=30,
).map("".join)


@given(PIECES)
@example('[[[["\\')
@example('"[[[["[')
def test_no_parser_comes_deeper_than_was_measured(text: str) -> None:
    assert json_depth(text.encode()) >= Descent(text).run()


JSON = st.recursive(
    st.integers(0, 9) | st.text('[]{}",:\\é', max_size=4),
    lambda inner: (
        st.lists(inner, max_size=3) | st.dictionaries(st.text('[{"\\', max_size=3), inner, max_size=3)
    ),
    max_leaves=12,
)


@given(JSON, st.sampled_from([None, 0, 3]), st.booleans())
def test_of_json_it_is_exact_however_it_is_laid_out(
    value: object, indent: int | None, is_ascii: bool
) -> None:
    text = json.dumps(value, indent=indent, ensure_ascii=is_ascii)
    assert json_depth(text.encode()) == Descent(text).run()


@pytest.mark.anyio
@pytest.mark.parametrize("padding", [0, OFF_LOOP_BYTES], ids=["on the loop", "in a thread"])
async def test_a_body_is_refused_from_the_next_level_on(padding: int) -> None:
    limits = Limits(max_json_depth=5)

    def nested(depth: int) -> bytes:
        return b'{"a":' + b"[" * (depth - 1) + b'"' + b"[" * padding + b'"' + b"]" * (depth - 1) + b"}"

    found = await parse_object(nested(5), limits)
    assert found == json.loads(nested(5))
    with pytest.raises(ApiError) as error:
        await parse_object(nested(6), limits)
    assert (error.value.status, error.value.code) == (400, "json_too_deep")
