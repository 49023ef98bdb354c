"""The position of a client in a recorded reply, read off the events that pass, so that another replica can go on."""

from __future__ import annotations

import re

from penstock.gateway.sessions.recordings.recording import INTERRUPTED
from penstock.gateway.wire.frames import KEEPALIVE

_COMPLETION_ID = re.compile(rb'"id":"((?:chatcmpl|cmpl)-[0-9a-f]{32})"')
_RESPONSE_ID = re.compile(rb'"id":\s?"(resp_[0-9a-f]{48})"')
_INTERRUPTIONS = tuple(code.encode() for code in INTERRUPTED)


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
        self._is_completion = kind.endswith("/completions")
        self._marks = (b"\nid: ", b"\n") if self._is_completion else (b'"sequence_number":', b"}")
        """The bytes before and behind the number of an event."""
        self._fault = b'data: {"error"' if self._is_completion else b"event: error"
        """The beginning of an event that ends a stream early."""
        self._held = b""

    @property
    def path(self) -> str:
        """The path at which the rest of the reply is asked for."""
        return f"{self._kind}/{self.id}?stream=true&starting_after={self.number}"

    def feed(self, data: bytes) -> bytes:
        """Returns what may go to the client of this data and of what was held back before."""
        if self._held:
            data, self._held = self._held + data, b""
        if not data.endswith(b"\n\n") and data != KEEPALIVE:
            end = data.rfind(b"\n\n") + 2
            data, self._held = (b"", data) if end == 1 else (data[:end], data[end:])
        if self._fault in data:
            data = self._without_interruption(data)
        self._note(data)
        return data

    def restart(self) -> None:
        """Drops the part of an event that came before a connection ended: the next one sends the whole event again."""
        self._held, self.is_interrupted = b"", False

    def _note(self, events: bytes) -> None:
        if not self.id:
            found = (_COMPLETION_ID if self._is_completion else _RESPONSE_ID).search(events)
            self.id = found[1].decode() if found else ""
        # In text, quotes and ends of lines are escaped: what is looked for is never part of it.
        mark, end = self._marks
        at = events.rfind(mark)
        if at < 0 and not (self._is_completion and events.startswith(mark[1:])):
            return
        start = at + len(mark)
        number = events[start : events.find(end, start)]
        if number.isdigit():
            self.number = max(self.number, int(number))

    def _without_interruption(self, events: bytes) -> bytes:
        """Drops the event that announces an interruption, and all after it."""
        at = 0
        for event in events.split(b"\n\n"):
            lines = [line for line in event.split(b"\n") if not line.startswith(b":")]
            if lines[0].startswith(self._fault) and any(code in event for code in _INTERRUPTIONS):
                self.is_interrupted = True
                return events[:at]
            at += len(event) + 2
        return events
