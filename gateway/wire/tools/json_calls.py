"""Calls whose arguments are JSON: objects with the tool's name and its arguments, or arguments after a name."""

from __future__ import annotations

import re
from collections.abc import Generator

from penstock.gateway.wire.tools.scanning import FormatParser, Malformed, Steps, string_of

_BARE = re.compile(r"[A-Za-z0-9+.-]*")
_ID = re.compile(r"[A-Za-z0-9_-]*")
_NAME_KEYS = ("name", "tool_name")
_ARGUMENTS_KEYS = ("arguments", "parameters")


class JsonCalls(FormatParser):
    """Reads objects like `{"name": "clock", "arguments": {"zone": "UTC"}}`, lists of them, and `clock[ARGS]{...}`."""

    def section(self) -> Steps:
        i = yield from self.past_space()
        is_list = self._text[i] == "["
        i += is_list
        while True:
            i = yield from self.past_space(i)
            named = self._format.after_name and self._text[i] != "{"
            yield from self._named(i) if named else self._object(i)
            i = yield from self.past_space()
            if is_list and self._text[i] == "]":
                self.consume(i + 1)
                return
            if self._text[i] not in ",;{":
                return
            self.consume(i + (self._text[i] != "{"))
            i = self._at

    def _named(self, start: int) -> Steps:
        i = yield from self.tool_name(start)
        name = self._text[start:i]
        if (yield from self.ahead("[CALL_ID]", i)):
            i = yield from self.match(_ID, i + len("[CALL_ID]"))
        if (yield from self.ahead(self._format.after_name, i)):
            i += len(self._format.after_name)
        i = yield from self.past_space(i)
        if self._text[i] != "{":
            raise Malformed
        self.consume(i)
        self.begin(name)
        yield from self.json_argue()

    def _object(self, i: int) -> Steps:
        """Reads the object at `i`; its arguments are passed on as they come, if the name is known before them."""
        name = arguments = None
        opening = "{"
        while self._text[i] == opening:
            i = yield from self.past_space(i + 1)
            if self._text[i] == "}" and opening == "{":
                break
            start, i = i, (yield from self._quoted_end(i))
            key = string_of(self._text[start:i])
            i = yield from self.past_space(i)
            if self._text[i] != ":":
                raise Malformed
            start = i = yield from self.past_space(i + 1)
            if key in _ARGUMENTS_KEYS and name is not None and self._text[i] == "{":
                self.consume(i)
                self.begin(name)
                yield from self.json_argue()
                yield from self._rest_of_object()
                return
            i = yield from self._value_end(i)
            if key in _NAME_KEYS:
                name = string_of(self._text[start:i])
                self.check_name(name)
            elif key in _ARGUMENTS_KEYS:
                arguments = self._text[start:i]
            i = yield from self.past_space(i)
            opening = ","
        if self._text[i] != "}" or name is None:
            raise Malformed
        whole = _object_text(arguments)
        self.consume(i + 1)
        self.begin(name)
        self.argue(whole)

    def _quoted_end(self, start: int) -> Generator[None, None, int]:
        if self._text[start] != '"':
            raise Malformed
        return (yield from self.json_end(start))

    def _value_end(self, start: int) -> Generator[None, None, int]:
        compound = self._text[start] in '"{['
        return (yield from self.json_end(start) if compound else self.match(_BARE, start))

    def _rest_of_object(self) -> Steps:
        """Passes over what follows the arguments, up to the object's end."""
        while True:
            i = yield from self.past_space()
            if self._text[i] == "}":
                self.consume(i + 1)
                return
            if self._text[i] not in ",:":
                i = (yield from self._value_end(i)) - 1
            self.consume(i + 1)


class Fenced(JsonCalls):
    """Reads a name, and after it a block of JSON as Markdown has it, between the markers of each call."""

    def section(self) -> Steps:
        before, *after = self._format.around
        i = yield from self.past_space()
        while True:
            i = yield from self.behind(before, i)
            yield from self._named((yield from self.past_space(i)))
            for text in after:
                yield from self.skip(text.lstrip())
            i = yield from self.past_space()
            if not (yield from self.ahead(before, i)):
                return


def _object_text(arguments: str | None) -> str:
    """Arguments as the text of an object: some models leave them out, say null, or put the object into a string."""
    if arguments is None or arguments == "null":
        return "{}"
    text = string_of(arguments) if arguments.startswith('"') else arguments
    if not text.startswith("{"):
        raise Malformed
    return text
