"""Anthropic's Messages API: the writer of its replies."""

from __future__ import annotations

import json
from collections.abc import Iterable
from json.encoder import encode_basestring_ascii

from penstock.engine.planning.request import FinishReason
from penstock.gateway.http.connections import EVENT_STREAM
from penstock.gateway.http.correlation import ANTHROPIC_PATH
from penstock.gateway.http.errors import ApiError
from penstock.gateway.wire.frames import last_frames, timings_of
from penstock.gateway.wire.parsing import (
    Answer,
    ArgumentsDelta,
    CallBegun,
    Piece,
    ReasoningDelta,
    ReplyParser,
    TextDelta,
    answer_of,
)
from penstock.gateway.wire.shapes import Head
from penstock.gateway.wire.streams import Delta, Generation
from penstock.priority.lanes import Lane

_PING = b'event: ping\ndata: {"type":"ping"}\n\n'
_TIERS = {Lane.INTERACTIVE: "priority", Lane.STANDARD: "standard", Lane.BATCH: "batch"}


class MessageWriter:
    """The `gateway.wire.streams.Writer` of one message."""

    media_type = EVENT_STREAM

    def __init__(self, head: Head, max_tokens: int, parser: ReplyParser) -> None:
        """
        Args:
            max_tokens: as it was asked for; the context may have room for less.
            parser: finds thoughts and calls of tools in the text.
        """
        self._head = head
        self._max_tokens = max_tokens
        self._parser = parser
        self._has_begun = False
        self._kind = ""
        """The kind of the block that is open; empty before the first."""
        self._number = -1
        """The number of the block that is open."""
        self._opening = ""
        """The beginning of a delta of that block, up to its text."""
        self._has_called = False

    # Streamed

    def text(self, index: int, text: str) -> bytes:  # noqa: ARG002
        return self._pieces(self._parser.feed(text))

    def news(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> bytes:
        events = [] if self._has_begun else [self._begin(generation)]
        for index, delta in deltas:
            events.append(self.text(index, delta.text))
            if delta.finish_reason is not None and generation.error is None:
                events.append(self._end(generation, delta))
        return b"".join(events)

    def fault(self, error: ApiError) -> bytes:
        return last_frames(error, ANTHROPIC_PATH)

    def keepalive(self) -> bytes:
        return _PING

    def _begin(self, generation: Generation) -> bytes:
        self._has_begun = True
        usage = {
            "input_tokens": generation.num_prompt_tokens,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": 0,
            "output_tokens": 0,
            "service_tier": _TIERS[generation.lane],
        }
        return _event("message_start", message=self._message([], None, None, usage)).encode("ascii")

    def _end(self, generation: Generation, delta: Delta) -> bytes:
        last = self._pieces(self._parser.finish())
        reason = {"stop_reason": self._stop_reason(generation, delta), "stop_sequence": delta.stop}
        events = (
            self._close(),
            _event("message_delta", delta=reason, usage=_usage(generation), timings=timings_of(generation)),
            _event("message_stop"),
        )
        return last + "".join(events).encode("ascii")

    def _pieces(self, pieces: Iterable[Piece]) -> bytes:
        return "".join(map(self._piece, pieces)).encode("ascii")

    def _piece(self, piece: Piece) -> str:
        match piece:
            case TextDelta(text):
                return self._more("text", text)
            case ReasoningDelta(text):
                return self._more("thinking", text)
            case ArgumentsDelta(text=text):
                return self._more("tool_use", text)
            case CallBegun(id=id, name=name):
                self._has_called = True
                return self._open("tool_use", id=id, name=name, input={})

    def _more(self, kind: str, text: str) -> str:
        if not text:
            return ""
        opened = "" if kind == self._kind else self._open(kind, **_EMPTY[kind])
        return f"{opened}{self._opening}{encode_basestring_ascii(text)}}}}}\n\n"

    def _open(self, kind: str, **fields: object) -> str:
        """Ends the block before, and begins one."""
        closed = self._close()
        self._kind, self._number = kind, self._number + 1
        start = _event("content_block_start", index=self._number, content_block={"type": kind, **fields})
        event = _event("content_block_delta", index=self._number, delta=_DELTAS[kind])
        self._opening = event.removesuffix('""}}\n\n')
        return closed + start + ("" if self._number else _PING.decode())

    def _close(self) -> str:
        return _event("content_block_stop", index=self._number) if self._kind else ""

    # Whole

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> dict[str, object]:
        ((_, delta),) = deltas
        answer = answer_of(self._parser, delta.text)
        self._has_called = bool(answer.calls)
        reason, usage = self._stop_reason(generation, delta), _usage(generation)
        usage["service_tier"] = _TIERS[generation.lane]
        message = self._message(_content(answer), reason, delta.stop, usage)
        return {**message, "timings": timings_of(generation)}

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

    def _stop_reason(self, generation: Generation, delta: Delta) -> str:
        if delta.finish_reason is FinishReason.LENGTH:
            had_room = generation.requests[0].sampling.max_tokens == self._max_tokens
            return "max_tokens" if had_room else "model_context_window_exceeded"
        if delta.stop is not None:
            return "stop_sequence"
        return "tool_use" if self._has_called else "end_turn"


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


def _usage(generation: Generation) -> dict[str, object]:
    """Anthropic counts what was found in the cache apart from the other tokens of the prompt."""
    return {
        "input_tokens": generation.num_prompt_tokens - generation.num_cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": generation.num_cached_tokens,
        "output_tokens": generation.num_output_tokens,
        "output_tokens_details": {"thinking_tokens": generation.num_reasoning_tokens},
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
