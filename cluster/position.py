"""The position of a client in a recorded reply, read off the events that pass, so that another replica can go on."""

from __future__ import annotations

import re
from typing import NamedTuple

from penstock.gateway.http.refusals import OLLAMA_PATH
from penstock.gateway.sessions.recordings.recording import INTERRUPTED
from penstock.gateway.wire.frames import KEEPALIVE

_INTERRUPTIONS = tuple(code.encode() for code in INTERRUPTED)


class _EventFormat(NamedTuple):
    """How the events of an API name a reply and their numbers."""

    id: re.Pattern[bytes]
    before: bytes
    """The bytes before the number of an event."""
    after: bytes
    fault: bytes
    """The beginning of an event that ends a stream early."""
    separator: bytes = b"\n\n"
    """The end of an event."""
    keepalive: bytes = KEEPALIVE
    """An event that says nothing; none where a client would take it for one."""


_COMPLETION_ID = re.compile(rb'"id":"((?:chatcmpl|cmpl)-[0-9a-f]{32})"')
_COMPLETIONS = _EventFormat(_COMPLETION_ID, b"\nid: ", b"\n", b'data: {"error"')
_MESSAGES = _EventFormat(re.compile(rb'"id":"(msg_[0-9a-f]{32})"'), b"\nid: ", b"\n", b"event: error")
_RESPONSES = _EventFormat(
    re.compile(rb'"id":\s?"(resp_[0-9a-f]{48})"'), b'"sequence_number":', b"}", b"event: error"
)
_LINES = _EventFormat(
    re.compile(rb'"id":"(reply_[0-9a-f]{32})"'), b'"sequence_number":', b"}", b'{"error":', b"\n", b""
)


def _format_of(path: str) -> _EventFormat:
    if path.startswith(OLLAMA_PATH):
        return _LINES
    if path.endswith("/completions"):
        return _COMPLETIONS
    return _MESSAGES if path.endswith("/messages") else _RESPONSES


class Position:
    """The last event of one stream that its client has. Only whole events are passed on."""

    def __init__(self, kind: str, id: str = "", number: int = -1) -> None:
        """
        Args:
            kind: the path below which such replies are followed.
            id: of the reply, if it is known.
            number: of the last event that the client has.
        """
        self.id = id
        self.number = number
        self.is_interrupted = False
        """The replica said that it will not finish the reply; another one will."""
        self._kind = kind
        self._format = _format_of(kind)
        self._held = b""

    @property
    def path(self) -> str:
        """The path at which the rest of the reply is asked for."""
        return f"{self._kind}/{self.id}?stream=true&starting_after={self.number}"

    @property
    def keepalive(self) -> bytes:
        return self._format.keepalive

    def feed(self, data: bytes) -> bytes:
        """Returns what may go to the client of this data and of what was held back before."""
        if self._held:
            data, self._held = self._held + data, b""
        separator = self._format.separator
        if not data.endswith(separator) and data != KEEPALIVE:
            end = data.rfind(separator) + len(separator)
            is_none = end < len(separator)
            data, self._held = (b"", data) if is_none else (data[:end], data[end:])
        if self._format.fault in data:
            data = self._without_interruption(data)
        self._note(data)
        return data

    def restart(self) -> None:
        """Drops the part of an event that came before a connection ended: the next one sends the whole event again."""
        self._held, self.is_interrupted = b"", False

    def _note(self, events: bytes) -> None:
        if not self.id:
            match = self._format.id.search(events)
            self.id = match[1].decode() if match else ""
        # In text, quotes and ends of lines are escaped: what is looked for is never part of it.
        before, after = self._format.before, self._format.after
        at = events.rfind(before)
        if at < 0 and not (before[:1] == b"\n" and events.startswith(before[1:])):
            return
        start = at + len(before)
        number = events[start : events.find(after, start)]
        if number.isdigit():
            self.number = max(self.number, int(number))

    def _without_interruption(self, events: bytes) -> bytes:
        """Drops the event that announces an interruption, and all after it."""
        at, separator = 0, self._format.separator
        for event in events.split(separator):
            lines = [line for line in event.split(b"\n") if not line.startswith(b":")]
            is_fault = bool(lines) and lines[0].startswith(self._format.fault)
            if is_fault and any(code in event for code in _INTERRUPTIONS):
                self.is_interrupted = True
                return events[:at]
            at += len(event) + len(separator)
        return events
