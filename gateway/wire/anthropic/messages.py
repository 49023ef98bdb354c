"""Anthropic's Messages API: the writer of its replies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii

from penstock.engine.planning.request import FinishReason
from penstock.gateway.errors import ApiError
from penstock.gateway.wire.frames import ReplyWriter, StreamedChoice, error_event, timings_of
from penstock.gateway.wire.parsing import (
    Answer,
    ArgumentsDelta,
    CallBegun,
    Piece,
    ReasoningDelta,
    TextDelta,
    answer_of,
)
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.writing import ANSWERED, Delta, Head, Outputs, Reply
from penstock.priority.lanes import Lane

_PING = 'event: ping\ndata: {"type":"ping"}\n\n'
_TIERS = {Lane.INTERACTIVE: "priority", Lane.STANDARD: "standard", Lane.BATCH: "batch"}


class MessageWriter(ReplyWriter[StreamedChoice]):
    """The `gateway.wire.writing.Writer` of one message."""

    keepalive = _PING.encode()
    opens_early = True

    def __init__(self, head: Head, max_tokens: int, reading: Reading, *, is_recorded: bool = False) -> None:
        """
        Args:
            max_tokens: as it was asked for; the context may have room for less.
            is_recorded: every event has its number as its id.
        """
        self._is_numbered = is_recorded
        self._head = head
        self._max_tokens = max_tokens
        self._reading = reading
        self._choice = StreamedChoice(parser=reading.parser(head.id))
        self._choices = (self._choice,)
        self._kind = ""
        """The kind of the block that is open; empty before the first."""
        self._block = -1
        """The number of the block that is open."""
        self._opening = ""
        """The beginning of a delta of that block, up to its text."""
        self._has_called = False
        self._ending = Delta()
        """The last delta."""

    # Streamed

    def begin(self, reply: Reply) -> list[bytes]:
        usage = {
            "input_tokens": reply.num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "service_tier": _TIERS[reply.lane],
        }
        return [self._frame(_event("message_start", message=self._message([], None, None, usage)))]

    def more(self, reply: Reply, index: int, delta: Delta) -> list[bytes]:  # noqa: ARG002
        frames = self._chunks(self._choice, self._choice.parser.feed(delta.text))
        if delta.ended:
            self._ending = delta
            frames += self._chunks(self._choice, self._choice.parser.finish())
        return frames + (list(map(self._frame, self._close())) if delta.finish_reason in ANSWERED else [])

    def _last(self, reply: Reply) -> list[bytes]:
        reason = {
            "stop_reason": self._stop_reason(reply, self._ending, has_called=self._has_called),
            "stop_sequence": self._ending.stop,
        }
        last = _event("message_delta", delta=reason, usage=_usage(reply), timings=timings_of(reply))
        return [self._frame(last), self._frame(_event("message_stop"))]

    def _error(self, reply: Reply, error: ApiError) -> bytes:
        return error_event(error, reply.correlation)

    def fault(self, reply: Reply, error: ApiError, position: int) -> bytes:
        # The comment is for a switch, which goes on with an interrupted stream elsewhere.
        comment = f": {error.code}\n" if error.code else ""
        return comment.encode() + super().fault(reply, error, position)

    def _chunks(self, choice: StreamedChoice, pieces: Iterable[Piece]) -> list[bytes]:  # noqa: ARG002
        return [self._frame(event) for piece in pieces for event in self._piece(piece)]

    def _piece(self, piece: Piece) -> list[str]:
        if isinstance(piece, CallBegun):
            self._has_called = True
            return self._open("tool_use", id=piece.id, name=piece.name, input={})
        if not piece.text:
            return []
        kind = _KINDS[type(piece)]
        opened = [] if kind == self._kind else self._open(kind, **_EMPTY[kind])
        return [*opened, f"{self._opening}{encode_basestring_ascii(piece.text)}}}}}\n\n"]

    def _open(self, kind: str, **fields: object) -> list[str]:
        """Ends the block before, and begins one."""
        closed = self._close()
        self._kind, self._block = kind, self._block + 1
        start = _event("content_block_start", index=self._block, content_block={"type": kind, **fields})
        event = _event("content_block_delta", index=self._block, delta=_DELTAS[kind])
        self._opening = event.removesuffix('""}}\n\n')
        self._choice.around = {_PIECES[kind]: (self._opening, "}}\n\n")}
        self.common = self._opening.encode("ascii")
        return [*closed, start] if self._block else [*closed, start, _PING]

    def _close(self) -> list[str]:
        return [_event("content_block_stop", index=self._block)] if self._kind else []

    # Whole

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        ((_, delta),) = outputs
        answer = answer_of(self._reading.parser(self._head.id), delta.text)
        reason = self._stop_reason(reply, delta, has_called=bool(answer.calls))
        usage = {**_usage(reply), "service_tier": _TIERS[reply.lane]}
        message = self._message(_content(answer), reason, delta.stop, usage)
        return {**message, "timings": timings_of(reply)}

    def _message(
        self, content: list[object], reason: str | None, stop: str | None, usage: dict[str, object]
    ) -> dict[str, object]:
        return {
            "id": self._head.id,
            "type": "message",
            "role": "assistant",
            "model": self._head.model,
            "content": content,
            "stop_reason": reason,
            "stop_sequence": stop,
            "usage": usage,
        }

    def _stop_reason(self, reply: Reply, delta: Delta, *, has_called: bool) -> str:
        if delta.finish_reason is FinishReason.LENGTH:
            had_room = reply.requests[0].sampling.max_tokens == self._max_tokens
            return "max_tokens" if had_room else "model_context_window_exceeded"
        if delta.stop is not None:
            return "stop_sequence"
        return "tool_use" if has_called else "end_turn"


_KINDS: dict[type[Piece], str] = {
    TextDelta: "text",
    ReasoningDelta: "thinking",
    ArgumentsDelta: "tool_use",
}
"""The kind of the block that a piece is more of."""
_PIECES = {kind: piece for piece, kind in _KINDS.items()}
_EMPTY: dict[str, dict[str, object]] = {
    "text": {"text": ""},
    "thinking": {"thinking": "", "signature": ""},
}
"""The blocks as they begin."""
_DELTAS = {
    "text": {"type": "text_delta", "text": ""},
    "thinking": {"type": "thinking_delta", "thinking": ""},
    "tool_use": {"type": "input_json_delta", "partial_json": ""},
}
"""The deltas of blocks; what they add stands last."""


def _event(name: str, **fields: object) -> str:
    return f"event: {name}\ndata: {json.dumps({'type': name, **fields}, separators=(',', ':'))}\n\n"


def _usage(reply: Reply) -> dict[str, object]:
    """Anthropic counts what was found in the cache apart from the other tokens of the prompt."""
    return {
        "input_tokens": reply.num_prompt_tokens - reply.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": reply.num_cached_tokens,
        "output_tokens": reply.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": reply.num_reasoning_tokens},
    }


def _content(answer: Answer) -> list[object]:
    content: list[object] = []
    if answer.reasoning:
        content.append({"type": "thinking", "thinking": answer.reasoning, "signature": ""})
    if answer.text:
        content.append({"type": "text", "text": answer.text})
    calls: list[object] = [
        {"type": "tool_use", "id": call.id, "name": call.name, "input": call.input} for call in answer.calls
    ]
    return content + calls
