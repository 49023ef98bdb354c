"""Calls as Python writes them: `[clock(zone="UTC"), add(a=1, b=2)]`, and those of the Llama models."""

from __future__ import annotations

import json
import re
from collections.abc import Generator
from string import ascii_letters

from penstock.gateway.wire.tools.json_calls import CallSyntax, JsonCalls
from penstock.gateway.wire.tools.literals import json_of, json_of_text
from penstock.gateway.wire.tools.scanning import SPACE, Malformed, Steps

_NAME = re.compile(r"[A-Za-z0-9_.-]*")
_LITERAL = re.compile(r"""[^"'()\[\]{},<]*""")
_FIRST = f"{ascii_letters}_"
_CLOSING = {"(": ")", "[": "]", "{": "}"}


class Pythonic(JsonCalls):
    """Reads a list of calls, or one call per line, up to other text. An argument is passed on when it is complete.

    Llama 4 and LFM2 may write JSON instead, whichever is asked for. LFM2.5's template puts quotation marks around any
    text and escapes nothing in it: those that neither an argument of the tool nor the end of the call follows belong to
    the text, as newlines do.
    """

    def form(self, first: str, is_list: bool) -> CallSyntax:
        if first == "{":
            return super().form(first, is_list)
        if self._format.layout.start and not is_list:
            raise Malformed
        return self._python_call, "," * is_list, "" if is_list else _FIRST

    def _python_call(self, _first: str) -> Steps:
        """Reads one call, which is begun when its first argument, or its end, is certain."""
        name, opening = (yield from self._identifier()), "{"
        if (yield from self.peek()) != "(" or name not in self._tools.schemas:
            raise Malformed
        self._at += 1
        while (yield from self.peek()) != ")":
            key = yield from self._identifier()
            yield from self.expect("=")
            is_text = (yield from self.peek()) in "\"'"
            start = self._at
            yield from self._text_argument(name) if is_text else self._literal()
            value = (json_of_text if is_text else json_of)(self._text[start : self._at])
            self.consume()
            if opening == "{":
                self.begin(name)
            self.argue(f"{opening}{json.dumps(key)}: {value}")
            opening = ", "
            self._at += (yield from self.peek()) == ","
        self._at += 1
        if opening == "{":
            self.begin(name)
        self.argue("{}" if opening == "{" else "}")
        self.consume()

    def _identifier(self) -> Generator[None, None, str]:
        """Moves past space and the name of a call or an argument, and returns it."""
        yield from self.peek()
        name = yield from self.word(_NAME)
        if name[0] not in _FIRST:
            raise Malformed
        return name

    def _text_argument(self, name: str) -> Steps:
        """Moves past an argument that is a string."""
        quote = self._text[self._at]
        while True:
            yield from self.string(quote)
            end = self._at
            may_end = yield from self._may_end(name)
            self._at = end - (not may_end)
            if may_end:
                return

    def _may_end(self, name: str) -> Generator[None, None, bool]:
        """Returns whether an argument can end here, judging by the text after it: another one, or the call's end."""
        if (yield from self._comes(",")):
            key = yield from self._following()
            if key:
                schema = self._tools.schemas[name]
                properties = schema.get("properties") if isinstance(schema, dict) else None
                return (yield from self._comes("=")) and (not properties or key in properties)
        if not (yield from self._comes(")")):
            return False
        return not self._format.layout.start or (yield from self._may_end_call())

    def _may_end_call(self) -> Generator[None, None, bool]:
        """Returns whether a call in a list can end here: before another one, the list's end, or a marker."""
        if (yield from self._comes(",")):
            return bool((yield from self._following())) and (yield from self._comes("("))
        return self._text[self._at : self._at + 1] in ("", "]") or (yield from self.take("<|"))

    def _comes(self, character: str) -> Generator[None, None, bool]:
        """Moves past space, and past this character if it comes next."""
        yield from self.run(SPACE)
        is_there = self._text.startswith(character, self._at)
        self._at += is_there
        return is_there

    def _following(self) -> Generator[None, None, str]:
        """Moves past space and a name, which may be empty, and returns it."""
        yield from self.run(SPACE)
        start = self._at
        yield from self.run(_NAME)
        return self._text[start : self._at]

    def _literal(self) -> Steps:
        """Moves past a literal, up to the comma or bracket after it."""
        closing: list[str] = []
        while True:
            character = yield from self.past(_LITERAL)
            if character in "\"'":
                yield from self.string(character)
                continue
            if not closing and character in ",)":
                return
            if character in _CLOSING:
                closing.append(_CLOSING[character])
            elif character != "," and (not closing or closing.pop() != character):
                raise Malformed
            self._at += 1


class Llama(Pythonic):
    """Reads calls that begin a reply, or stand behind the markers of the format."""

    _before = ""
    """Text that is said when a call begins behind it."""

    def section(self) -> Steps:
        before, closing = self._num_calls, self._format.closing
        self._before = ""
        try:
            yield from super().section()
        except Malformed:
            if self._num_calls > before or not self._opening or not closing:
                raise
            # Llama 4's template writes what is said before calls between the markers.
            if (yield from self.until(closing, self._format.tag)) != closing:
                raise
            self._before = self._text[self._done : self._at].rstrip()
            self._at += len(closing)
            yield from super().section()

    def begin(self, name: str) -> None:
        self.say(self._before)
        self._before = ""
        super().begin(name)
