"""The events of a response on the wire.

Their numbers follow from the texts of its tokens alone: four open the response, each token with text has one, four
close it. All that is the same in every event of a token is rendered once. Everything is ASCII (see
`gateway.wire.frames`).
"""

from __future__ import annotations

import json
from json.encoder import encode_basestring_ascii
from typing import Any

from gateway.http.errors import ApiError
from gateway.sessions.recordings.recording import Recording
from gateway.sessions.responses.objects import (
    beginning,
    output_item,
    response,
    status_of,
    text_part,
)

_PLACE: dict[str, Any] = {"output_index": 0, "content_index": 0}
_LAST = {"completed": "response.completed", "failed": "response.failed"}


class ResponseFormat:
    """A `gateway.sessions.recordings.recording.Format`."""

    num_opening = 4
    tail = b""

    def __init__(self, recording: Recording) -> None:
        self._place = {"item_id": recording.about["item_id"], **_PLACE}
        before, after = _delta(self._place)
        self._before_text, self._after_text = before, after

    def opening(self, recording: Recording) -> list[bytes]:
        first = "queued" if recording.about["background"] else "in_progress"
        item = output_item(recording, "in_progress", [])
        return [
            _event(0, "response.created", response=beginning(recording, first)),
            _event(1, "response.in_progress", response=beginning(recording, "in_progress")),
            _event(2, "response.output_item.added", output_index=0, item=item),
            _event(3, "response.content_part.added", **self._place, part=text_part("")),
        ]

    def text(self, number: int, text: str) -> bytes:
        event = f"{self._before_text}{encode_basestring_ascii(text)}{self._after_text}{number}}}\n\n"
        return event.encode("ascii")

    def closing(self, recording: Recording, first: int) -> list[bytes]:
        """How it ends for a client that was sent every text; a cancelled response is an incomplete one."""
        status, text = status_of(recording), recording.text
        item = output_item(recording, status, [text])
        return [
            _event(first, "response.output_text.done", **self._place, text=text, logprobs=[]),
            _event(first + 1, "response.content_part.done", **self._place, part=text_part(text)),
            _event(first + 2, "response.output_item.done", output_index=0, item=item),
            _event(first + 3, _LAST.get(status, "response.incomplete"), response=response(recording)),
        ]

    def fault(self, recording: Recording, error: ApiError, number: int) -> list[bytes]:
        """One that another process goes on with has not failed: only this connection has.

        That is told under the number of the event before, so that a client goes on after it.
        """
        if recording.cancelled:
            return self.closing(recording, number)
        if recording.is_interrupted:
            return [_event(number - 1, "error", code=error.code, message=error.message, param=error.param)]
        return [_event(number, "response.failed", response=response(recording))]

    def body(self, recording: Recording) -> dict[str, object]:
        return response(recording)


def _event(number: int, kind: str, **fields: object) -> bytes:
    data = json.dumps({"type": kind, **fields, "sequence_number": number}, separators=(",", ":"))
    return f"event: {kind}\ndata: {data}\n\n".encode("ascii")


def _delta(place: dict[str, Any]) -> tuple[str, str]:
    """What comes before the text of a token and, up to the number, after it."""
    kind = "response.output_text.delta"
    head = json.dumps({"type": kind, **place, "logprobs": []}, separators=(",", ":"))[:-1]
    return f'event: {kind}\ndata: {head},"delta":', ',"sequence_number":'
