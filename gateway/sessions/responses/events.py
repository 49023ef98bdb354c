"""The events of a response on the wire.

Their numbers follow from the texts of its tokens alone: two open the response, its items have theirs (see
`gateway.sessions.responses.script`), one closes it. All that is the same in every delta of an item is rendered once.
Everything is ASCII (see `gateway.wire.frames`).
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii

from penstock.gateway.http.errors import ApiError
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.objects import beginning, response, status_of
from penstock.gateway.sessions.responses.script import ItemDelta, ItemEvent

_LAST = {"completed": "response.completed", "failed": "response.failed"}


class ResponseFormat:
    """A `gateway.sessions.recordings.recording.Format`."""

    num_opening = 2
    tail = b""

    def opening(self, recording: Recording) -> list[bytes]:
        first = "queued" if recording.details["background"] else "in_progress"
        return [
            _event(0, "response.created", response=beginning(recording, first)),
            _event(1, "response.in_progress", response=beginning(recording, "in_progress")),
        ]

    def event(self, number: int, event: ItemEvent | ItemDelta) -> bytes:
        if isinstance(event, ItemEvent):
            return _event(number, event.kind, **event.fields)
        frame = f'{event.before}{encode_basestring_ascii(event.text)}{event.after},"sequence_number":{number}}}\n\n'
        return frame.encode("ascii")

    def closing(self, recording: Recording, first: int) -> list[bytes]:
        """Returns how it ends for a client that was sent every item; a cancelled response is an incomplete one."""
        kind = _LAST.get(status_of(recording), "response.incomplete")
        return [_event(first, kind, response=response(recording))]

    def fault(self, recording: Recording, error: ApiError, number: int) -> list[bytes]:
        """Returns the failure of the response, or of this connection alone if another process goes on with it.

        That is told under the number of the event before, so that a client goes on after it.
        """
        if recording.cancelled:
            return self.closing(recording, number)
        if recording.is_interrupted:
            return [error_event(error, number - 1)]
        return [_event(number, "response.failed", response=response(recording))]

    def body(self, recording: Recording) -> dict[str, object]:
        return response(recording)


def error_event(error: ApiError, number: int) -> bytes:
    """Returns the event that tells a client that its connection failed, and not the response."""
    return _event(number, "error", code=error.code, message=error.message, param=error.param)


def _event(number: int, kind: str, **fields: object) -> bytes:
    data = json.dumps({"type": kind, **fields, "sequence_number": number}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode("ascii")
