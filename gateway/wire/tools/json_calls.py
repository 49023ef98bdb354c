"""Calls whose arguments are JSON: objects with the tool's name and its arguments, or arguments after a name."""

from __future__ import annotations

import re
from collections.abc import Callable, Generator

from penstock.gateway.wire.tools.formats import Style
from penstock.gateway.wire.tools.literals import object_text, string_of
from penstock.gateway.wire.tools.scanning import FormatParser, Malformed, Steps

_BARE = re.compile(r"[A-Za-z0-9+.-]*")
_ID = re.compile(r"[A-Za-z0-9_-]*")
_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")
CallSyntax = tuple[Callable[[str], Steps], str, str]
"""What reads a call of a section by its first character; the characters between two calls, and those of a call."""


class JsonCalls(FormatParser):
    """Reads objects like `{"name": "clock", "arguments": {"zone": "UTC"}}`, lists of them, and `clock[ARGS]{...}`."""

    def section(self) -> Steps:
        is_list = (yield from self.peek()) == "["
        self._at += is_list
        call, separators, firsts = self.form((yield from self.peek()), is_list)
        while True:
            yield from call((yield from self.peek()))
            following = yield from self.peek()
            if following in separators:
                self._at += 1
            elif following not in firsts:
                self._at += is_list and following == "]"
                return
            self.consume()

    def form(self, first: str, is_list: bool) -> CallSyntax:  # noqa: ARG002
        return self.json_call, ",;", "{"

    def json_call(self, first: str) -> Steps:
        """Reads the call that begins with this character."""
        is_named = self._format.style is Style.NAMED or self._format.after_name
        return self.named() if is_named and first != "{" else self._object()

    def named(self) -> Steps:
        name = yield from self.tool_name()
        if (yield from self.take("[CALL_ID]")):
            yield from self.word(_ID)
        yield from self.take(self._format.after_name or self._format.call.after)
        if (yield from self.peek()) != "{":
            raise Malformed
        self.begin(name)
        yield from self.json(self.argued)

    def _object(self) -> Steps:
        """Reads an object; its arguments are passed on as they come, if the name is known before them."""
        name = arguments = None
        opening = "{"
        while (yield from self.peek()) == opening:
            self._at += 1
            following = yield from self.peek()
            if following == "}" and opening == "{":
                break
            if following != '"':
                raise Malformed
            key = string_of((yield from self._value()))
            yield from self.expect(":")
            if (yield from self.peek()) == "{" and key in _ARGUMENTS_KEYS and name is not None:
                self.begin(name)
                yield from self.json(self.argued)
                yield from self._rest_of_object()
                return
            value = yield from self._value()
            if key in _NAME_KEYS:
                name = string_of(value)
                self.check_name(name)
            elif key in _ARGUMENTS_KEYS:
                arguments = value
            opening = ","
        if name is None:
            raise Malformed
        whole = object_text(arguments)
        yield from self.expect("}")
        self.begin(name)
        self.argue(whole)

    def _value(self) -> Generator[None, None, str]:
        """Moves past the value at the cursor, and returns its text."""
        start = self._at
        if self._text[start] not in '"{[':
            return (yield from self.word(_BARE))
        yield from self.json()
        return self._text[start : self._at]

    def _rest_of_object(self) -> Steps:
        """Passes over what follows the arguments, up to the object's end."""
        while (following := (yield from self.peek())) != "}":
            if following in ",:":
                self._at += 1
            else:
                yield from self._value()
            self.consume()
        self._at += 1
        self.consume()


class Fenced(JsonCalls):
    """Reads a name, and after it a block of JSON as Markdown has it, between the markers of each call."""

    section = FormatParser.section

    def call(self) -> Steps:
        yield from self.expect(self._format.call.before)
        yield from self.peek()
        yield from self.named()
        for text in self._format.call.end:
            yield from self.skip(text.lstrip())
