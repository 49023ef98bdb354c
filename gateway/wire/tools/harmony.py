"""Harmony, the format of gpt-oss: messages, each with its channel and its recipient in a header.

See docs/format.md of github.com/openai/harmony.
"""

from __future__ import annotations

import re
from collections.abc import Generator

from penstock.gateway.wire.parsing import ReasoningDelta, TextDelta
from penstock.gateway.wire.tools.formats import HARMONY, TOOL_FORMATS
from penstock.gateway.wire.tools.scanning import DeltaType, FormatParser, Malformed, Steps, Tools

_START, _CHANNEL, _MESSAGE, _END, _CALL = "<|start|>", "<|channel|>", "<|message|>", "<|end|>", "<|call|>"
_RECIPIENT = re.compile(r"\bto=(?:functions\.)?([A-Za-z0-9_.:/-]+)")
_CHANNEL_NAME = re.compile(r"<\|channel\|>\s*(\w+)")


class Harmony(FormatParser):
    """Reads messages: those of the channel "analysis" are reasoning, those to a tool are calls, and others are text.

    Text without a header belongs to the message that the prompt has begun. Of several messages of one kind, each
    begins in a line of its own.
    """

    def __init__(self, tools: Tools | None, *, tells_reasoning: bool, is_open: bool) -> None:
        """
        Args:
            tools: None if what is said to a tool is reasoning, for the request has none.
            tells_reasoning: reasoning is no text like any other.
            is_open: the prompt has begun reasoning.
        """
        super().__init__(TOOL_FORMATS[HARMONY], tools or Tools({}, str))
        self._has_tools = tools is not None
        self._reasoning: DeltaType = ReasoningDelta if tells_reasoning else TextDelta
        self._is_open = is_open
        self._kinds: set[DeltaType] = set()

    def parse(self) -> Steps:
        self.reasons = self._is_open or None
        header = yield from self._header()
        if header or not self._is_open:
            yield from self._message(header)
        else:
            yield from self._said(self._reasoning)
        while (yield from self._comes()):
            yield from self._message((yield from self._header()))

    def _comes(self) -> Generator[None, None, bool]:
        """Returns whether another message comes; until its header is read nobody knows what it is."""
        yield from self.skip()
        self.reasons = None
        return self._at < len(self._text)

    def _header(self) -> Generator[None, None, str]:
        """Passes over a header; empty if none comes."""
        if not (yield from self.begins(_START, _CHANNEL, _MESSAGE, "to=")):
            return ""
        try:
            yield from self.until(_MESSAGE)
        except Malformed:
            return self.consume() + _MESSAGE
        return self.consume(self._at + len(_MESSAGE))

    def _message(self, header: str) -> Steps:
        """Reads the text of a message; it is reasoning, too, if it is said to a tool and is no object."""
        recipient, channel = _RECIPIENT.search(header), _CHANNEL_NAME.search(header)
        if header:
            yield from self.skip()
        callee = recipient[1] if recipient and self._has_tools else ""
        if callee and ((yield from self.begins("{", _END, _CALL)) or self._at == len(self._text)):
            yield from self._called(callee)
        elif recipient or (channel and channel[1] == "analysis"):
            yield from self._said(self._reasoning)
        else:
            self.is_over = channel is None or channel[1] == "final"
            yield from self._said(TextDelta)

    def _said(self, kind: DeltaType) -> Steps:
        self.reasons = kind is ReasoningDelta
        if kind in self._kinds:
            self.say("\n", kind)
        self._kinds.add(kind)
        yield from self.said_until(_END, kind)

    def _called(self, name: str) -> Steps:
        self.reasons = False
        self.begin(name)
        if self._text.startswith("{", self._at):
            try:
                yield from self.json(self.argued)
            except Malformed:
                return
        else:
            self.argue("{}")
        yield from self.skip(_END)
        yield from self.skip(_CALL)
