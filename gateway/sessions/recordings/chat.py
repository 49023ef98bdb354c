"""Chat completions as recordings: the usual chunks, each with its number as the event's id."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from engine.planning.request import FinishReason, TokenLogprobs
from gateway.http.errors import ApiError
from gateway.sessions.recordings.recording import Recording
from gateway.wire.frames import DONE, StreamWriter, error_frame, usage_of
from gateway.wire.parsing import Answer, CallBegun, Piece, ReplyParser
from gateway.wire.reading import Reading
from gateway.wire.shapes import ChatShape, Head, TokenText
from gateway.wire.streams import Delta

KIND = "chat"


def about(head: Head, reading: Reading, *, stream: bool, include_usage: bool) -> dict[str, Any]:
    """What a recording has to know of the request."""
    return {
        "model": head.model,
        "service_tier": head.service_tier,
        "stream": stream,
        "include_usage": include_usage,
        "reading": asdict(reading),
    }


def script(reply_id: str, about: dict[str, Any]) -> ChatScript:
    return ChatScript(Reading(**about["reading"]).parser(reply_id))


class ChatScript:
    """A `gateway.sessions.recordings.recording.Script`: the pieces of the reply."""

    def __init__(self, parser: ReplyParser) -> None:
        self._parser = parser

    def feed(self, text: str) -> list[Piece]:
        return self._parser.feed(text)

    def note(self, token_ids: Sequence[int], logprobs: Sequence[TokenLogprobs]) -> None:
        raise NotImplementedError("none are asked for")

    def finish(self, _: FinishReason) -> list[Piece]:
        return self._parser.finish()


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

    def event(self, number: int, event: Piece) -> bytes:
        return _numbered(number, self._writer.piece(0, event))

    def closing(self, recording: Recording, first: int) -> list[bytes]:
        assert recording.finish_reason is not None
        has_calls = any(isinstance(event, CallBegun) for event in recording.events_from(0))
        end = self._writer.finish(0, recording.finish_reason, recording.timings_json, has_calls=has_calls)
        frames = [_numbered(first, end)]
        if self._include_usage:
            frames.append(_numbered(first + 1, self._writer.usage(usage_of(recording))))
        return frames

    def fault(self, _recording: Recording, error: ApiError, _number: int) -> list[bytes]:
        return [error_frame(error)]

    def body(self, recording: Recording) -> dict[str, object]:
        answer = Answer()
        answer.add(recording.events)
        body = self._shape.whole(self._head, [(0, Delta(finish_reason=recording.finish_reason), answer)])
        return {**body, "usage": usage_of(recording).as_json(), "timings": recording.timings_json}


def _numbered(number: int, frame: bytes) -> bytes:
    return b"id: %d\n%b" % (number, frame)
