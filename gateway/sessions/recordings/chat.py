"""Chat completions as recordings: the usual chunks, each with its number as the event's id."""

from __future__ import annotations

from typing import Any

from gateway.http.errors import ApiError
from gateway.sessions.recordings.recording import Recording
from gateway.wire.frames import DONE, StreamWriter, error_frame, usage_of
from gateway.wire.shapes import ChatShape, Head, TokenText
from gateway.wire.streams import Delta

KIND = "chat"


def about(head: Head, *, stream: bool, include_usage: bool) -> dict[str, Any]:
    """What a recording has to know of the request."""
    return {
        "model": head.model,
        "service_tier": head.service_tier,
        "stream": stream,
        "include_usage": include_usage,
    }


class ChatFormat:
    """The events of one chat completion."""

    num_opening = 1
    tail = DONE

    def __init__(self, recording: Recording, tokens: TokenText) -> None:
        self._head = Head(
            id=recording.id,
            created=recording.created,
            model=recording.about["model"],
            service_tier=recording.about["service_tier"],
        )
        self._shape = ChatShape(tokens)
        self._include_usage: bool = recording.about["include_usage"]
        self._writer = StreamWriter(self._shape, self._head, include_usage=self._include_usage)
        self._role = self._writer.text(0, "")

    def opening(self, _: Recording) -> list[bytes]:
        return [_numbered(0, self._role)]

    def text(self, number: int, text: str) -> bytes:
        return _numbered(number, self._writer.text(0, text))

    def closing(self, recording: Recording, first: int) -> list[bytes]:
        assert recording.finish_reason is not None
        frames = [_numbered(first, self._writer.finish(0, recording.finish_reason, recording.timings_json))]
        if self._include_usage:
            frames.append(_numbered(first + 1, self._writer.usage(usage_of(recording))))
        return frames

    def fault(self, _recording: Recording, error: ApiError, _number: int) -> list[bytes]:
        return [error_frame(error)]

    def body(self, recording: Recording) -> dict[str, object]:
        delta = Delta(text=recording.text, finish_reason=recording.finish_reason)
        body = self._shape.body(self._head, [(0, delta)])
        return {**body, "usage": usage_of(recording).as_json(), "timings": recording.timings_json}


def _numbered(number: int, frame: bytes) -> bytes:
    return b"id: %d\n%b" % (number, frame)
