"""Formats in which a call is a JSON object with the tool's name and its arguments."""

from __future__ import annotations

import re
from collections.abc import Generator

from gateway.wire.tools.scanning import TAGS, FormatParser, Malformed, Steps, string_of

_NAME = re.compile(r"[A-Za-z0-9_.:/-]+")
_BARE = re.compile(r"[A-Za-z0-9+.-]+")


class JsonCalls(FormatParser):
    """Reads objects like `{"name": "clock", "arguments": {"zone": "UTC"}}`."""

    arguments_keys = ("arguments", "parameters")
    only_known = False
    """An object that names no tool of the request's is no call."""

    def call_object(self) -> Steps:
        """Reads one object; its arguments are passed on as they come, if the name is known before them.

        Raises:
            Malformed: it is no call, and nothing of it is consumed; or it broke off after it was begun.
        """
        name = arguments = None
        i = yield from self.past_space()
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
            if key in self.arguments_keys and name is not None and self._text[i] == "{":
                self.consume(i)
                self.begin(name)
                yield from self.json_argue()
                yield from self._rest_of_object()
                return
            i = yield from self._value_end(i)
            if key == "name":
                name = self._tool(string_of(self._text[start:i]))
            elif key in self.arguments_keys:
                arguments = self._text[start:i]
            i = yield from self.past_space(i)
            opening = ","
        if self._text[i] != "}" or name is None:
            raise Malformed
        whole = _object_text(arguments)
        self.consume(i + 1)
        self.begin(name)
        self.argue(whole)

    def _tool(self, name: str) -> str:
        if not name or (self.only_known and name not in self._tools.schemas):
            raise Malformed
        return name

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


class Hermes(JsonCalls):
    """`<tool_call>{"name": ..., "arguments": {...}}</tool_call>`, of Hermes 2 Pro, Qwen 2.5 and 3 and their kin."""

    markers = TAGS

    def parse(self) -> Steps:
        return self.tagged_calls(self.call_object)


class LlamaJson(JsonCalls):
    """`{"name": ..., "parameters": {...}}` as the whole reply, of Llama 3.1 to 3.3; several are parted by `;`.

    Any JSON begins like a call, so only an object that names a tool of the request's is one.
    """

    markers = ("<|python_tag|>",)
    only_known = True

    def parse(self) -> Steps:
        try:
            start = yield from self.past_space()
        except Malformed:
            start = 0
        if not self._text.startswith("{", start) and not (yield from self.said_until("<|python_tag|>")):
            return
        while True:
            before = self._num_calls
            try:
                yield from self.call_object()
                yield from self.skip_space()
                if not self._text.startswith((";", ",")):
                    break
                self.consume(1)
            except Malformed:
                if self._num_calls == before:
                    break
        yield from self.said()


class Mistral(JsonCalls):
    """`[TOOL_CALLS]` and a list of objects, or, since 2025, `[TOOL_CALLS]name[ARGS]{...}` for each call."""

    markers = ("[TOOL_CALLS]", "[CALL_ID]", "[ARGS]")

    def parse(self) -> Steps:
        while (yield from self.said_until("[TOOL_CALLS]")):
            before = self._num_calls
            try:
                start = yield from self.past_space()
                yield from self._list() if self._text[start] == "[" else self._named(start)
            except Malformed:
                if self._num_calls == before:
                    self.say_opening()
                    continue
            yield from self.skip_space()

    def _list(self) -> Steps:
        bracket = yield from self.past_space()
        before, opening = self._num_calls, self.consume(bracket + 1)
        try:
            while True:
                yield from self.call_object()
                yield from self.skip_space()
                if self.consume(1) != ",":
                    return
        except Malformed:
            if self._num_calls == before:
                self._text = opening + self._text
            raise

    def _named(self, start: int) -> Steps:
        end = yield from self.match(_NAME, start)
        name, i = self._text[start:end], end
        if (yield from self.ahead("[CALL_ID]", i)):
            i = yield from self.match(_NAME, i + len("[CALL_ID]"))
        if (yield from self.ahead("[ARGS]", i)):
            i += len("[ARGS]")
        i = yield from self.past_space(i)
        if self._text[i] != "{":
            raise Malformed
        self.consume(i)
        self.begin(name)
        yield from self.json_argue()


def _object_text(arguments: str | None) -> str:
    """Arguments as the text of an object: some models leave them out, say null, or put the object into a string."""
    if arguments is None or arguments == "null":
        return "{}"
    text = string_of(arguments) if arguments.startswith('"') else arguments
    if not text.startswith("{"):
        raise Malformed
    return text
