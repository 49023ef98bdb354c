"""The events of a response on the wire, its items, and the object that it is in each of its states.

Two events open a response, its items have theirs, one closes it. Ids follow from the response's own and the place of
the item: whoever makes the items again makes the same. Everything is ASCII (see `gateway.wire.frames`).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from json.encoder import encode_basestring_ascii
from typing import Any

import orjson

from penstock.engine.planning.request import FinishReason, Request
from penstock.gateway.errors import ApiError
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.objects import (
    Item,
    JsonObject,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from penstock.gateway.sessions.responses.schemas import ItemStatus
from penstock.gateway.wire.frames import KEEPALIVE, ascii_json, response_usage_of, timings_of
from penstock.gateway.wire.lanes import tier_of
from penstock.gateway.wire.logprobs import TokenText, logprob_entry
from penstock.gateway.wire.parsing import ArgumentsDelta, Call, CallBegun, Piece, ReasoningDelta, TextDelta
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.writing import ANSWERED, Delta, Outputs

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}
_KINDS: dict[type[Piece], str] = {
    TextDelta: "message",
    ReasoningDelta: "reasoning",
    ArgumentsDelta: "function_call",
}
"""The kind of the item that a piece is more of."""
_DELTAS = {
    "message": "response.output_text.delta",
    "reasoning": "response.reasoning_text.delta",
    "function_call": "response.function_call_arguments.delta",
}
_LAST = {"completed": "response.completed", "failed": "response.failed"}


@dataclass(slots=True)
class _Open:
    """The item that is being made."""

    kind: str
    ids: JsonObject
    """The item's id and its place, as its events say them."""
    delta: str
    """What its deltas begin with, up to the text."""
    call: Call
    """The call that the item is, if it is one."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[str] = field(default_factory=list)
    """The log probabilities of a message's tokens as JSON, if they were asked for."""


class ResponseWriter:
    """The `gateway.wire.writing.Writer` of one response."""

    media_type = ""
    keepalive = KEEPALIVE
    tail = b""
    opens_early = True

    def __init__(
        self, response_id: str, reading: Reading, tokens: TokenText, num_top: int = 0, *, seals: bool = False
    ) -> None:
        """
        Args:
            tokens, num_top: spell log probabilities, where they are asked for.
            seals: reasoning is also returned as an opaque string.
        """
        self.common = b""
        self.items: list[Item] = []
        """The items that have ended; log probabilities in them are `orjson.Fragment`s."""
        self._response_id = response_id
        self._parser = reading.parser(response_id)
        self._tokens = tokens
        self._num_top = num_top
        self._seals = seals
        self._number = 0
        """The number of the next event."""
        self._noted: list[str] = []
        """The log probabilities of tokens whose text was in no event yet."""
        self._num_items = 0
        self._open: _Open | None = None

    # Streamed

    def begin(self, reply: Recording) -> list[bytes]:
        first = "queued" if reply.details["background"] else "in_progress"
        return [
            self._event("response.created", response=beginning(reply, first)),
            self._event("response.in_progress", response=beginning(reply, "in_progress")),
        ]

    def text(self, index: int, text: str) -> list[bytes]:  # noqa: ARG002
        pieces = self._parser.feed(text)
        item = self._open
        if len(pieces) == 1 and item is not None:
            (piece,) = pieces
            if not isinstance(piece, CallBegun) and _KINDS[type(piece)] == item.kind:
                return [self._delta(item, piece.text)]
        return [frame for piece in pieces for frame in self._piece(piece)]

    def more(self, reply: Recording, index: int, delta: Delta) -> list[bytes]:  # noqa: ARG002
        answer = list(zip(delta.token_ids, delta.logprobs, strict=False))[delta.num_reasoning :]
        self._noted += [
            ascii_json(logprob_entry(self._tokens, token_id, one, self._num_top))
            for token_id, one in answer
            if one is not None
        ]
        pieces = self._parser.feed(delta.text)
        if delta.ended:
            pieces = [*pieces, *self._parser.finish()]
        frames = [frame for piece in pieces for frame in self._piece(piece)]
        if delta.ended:
            if not self._num_items and delta.finish_reason in ANSWERED:
                frames += self._begin("message")
            frames += self._end("completed" if delta.finish_reason is FinishReason.STOP else "incomplete")
        return frames

    def end(self, reply: Recording) -> list[bytes]:
        """Returns the state in which it ended; a cancelled response is an incomplete one."""
        kind = _LAST.get(status_of(reply), "response.incomplete")
        return [self._event(kind, response=response(reply))]

    def fault(self, reply: Recording, error: ApiError, position: int) -> bytes:  # noqa: ARG002
        return error_event(error, position)

    def whole(self, reply: Recording, outputs: Outputs) -> JsonObject:  # noqa: ARG002
        return response(reply)

    def _event(self, kind: str, **fields: object) -> bytes:
        number, self._number = self._number, self._number + 1
        return _event(number, kind, **fields)

    def _piece(self, piece: Piece) -> Iterator[bytes]:
        item = self._open
        if isinstance(piece, CallBegun):
            yield from self._end("completed")
            yield from self._begin("function_call", Call(piece.id, piece.name))
            return
        kind = _KINDS[type(piece)]
        if item is None or item.kind != kind:
            yield from self._end("completed")
            yield from self._begin(kind)
            item = self._open
        assert item is not None
        yield self._delta(item, piece.text)

    def _delta(self, item: _Open, text: str) -> bytes:
        """Returns the event of more text, with the log probabilities of the tokens up to here if it is a message's."""
        item.texts.append(text)
        noted, logprobs = self._noted, ""
        if noted:
            self._noted = []
        if item.kind == "message":
            item.logprobs += noted
            logprobs = f',"logprobs":[{",".join(noted)}]'
        number, self._number = self._number, self._number + 1
        frame = f'{item.delta}{encode_basestring_ascii(text)}{logprobs},"sequence_number":{number}}}\n\n'
        return frame.encode("ascii")

    # Items

    def _begin(self, kind: str, call: Call | None = None) -> Iterator[bytes]:
        ids: JsonObject = {"item_id": self._id(kind), "output_index": self._num_items}
        if kind != "function_call":
            ids["content_index"] = 0
        self._num_items += 1
        head = ascii_json({"type": _DELTAS[kind], **ids})[:-1]
        delta = f'event: {_DELTAS[kind]}\ndata: {head},"delta":'
        self.common = delta.encode("ascii")
        self._open = item = _Open(kind, ids, delta, call or Call("", ""))
        begun = self._item(item, [], [], "in_progress")
        yield self._event("response.output_item.added", output_index=ids["output_index"], item=begun)
        if kind != "function_call":
            yield self._event("response.content_part.added", **ids, part=_part(item, "", []))

    def _end(self, status: ItemStatus) -> Iterator[bytes]:
        item, self._open = self._open, None
        if item is None:
            return
        text = "".join(item.texts)
        # One fragment stands for all of its entries: they are JSON already.
        logprobs = [orjson.Fragment(",".join(item.logprobs))] if item.logprobs else []
        if item.kind == "function_call":
            members = {"name": item.call.name, "arguments": text}
            yield self._event("response.function_call_arguments.done", **item.ids, **members)
        else:
            if item.kind == "reasoning":
                yield self._event("response.reasoning_text.done", **item.ids, text=text)
            else:
                yield self._event("response.output_text.done", **item.ids, text=text, logprobs=logprobs)
            yield self._event("response.content_part.done", **item.ids, part=_part(item, text, logprobs))
        done = self._item(item, [text], logprobs, status)
        self.items.append(done)
        yield self._event("response.output_item.done", output_index=item.ids["output_index"], item=done)

    def _item(self, item: _Open, texts: Sequence[str], logprobs: Sequence[Any], status: ItemStatus) -> Item:
        item_id = item.ids["item_id"]
        if item.kind == "function_call":
            arguments = texts[0] if texts else ""
            return call_item(item_id, Call(item.call.id, item.call.name, arguments), status)
        if item.kind == "reasoning":
            return reasoning_item(item_id, texts, status, seals=self._seals)
        return message_item(item_id, "assistant", texts, status, logprobs)

    def _id(self, kind: str) -> str:
        digest = sha256(f"{self._response_id}/{self._num_items}".encode()).hexdigest()
        return f"{_PREFIXES[kind]}_{digest[:48]}"


def _part(item: _Open, text: str, logprobs: Sequence[Any]) -> Any:
    return reasoning_part(text) if item.kind == "reasoning" else text_part(text, logprobs)


def make_writer(tokens: TokenText, request: Request, created: int, details: JsonObject) -> ResponseWriter:  # noqa: ARG001
    """A `gateway.sessions.recordings.kinds.WriterMaker`, once it has the `tokens` that spell log probabilities."""
    num_top, seals = details["echo"]["top_logprobs"], details.get("seals", False)
    return ResponseWriter(request.request_id, Reading(**details["reading"]), tokens, num_top, seals=seals)


def error_event(error: ApiError, number: int) -> bytes:
    """Returns the event that tells a client that its connection failed, and not the response."""
    return _event(number, "error", code=error.code, message=error.message, param=error.param)


def _event(number: int, kind: str, **fields: object) -> bytes:
    data = ascii_json({"type": kind, **fields, "sequence_number": number})
    return f"event: {kind}\ndata: {data}\n\n".encode("ascii")


# Objects


def status_of(recording: Recording) -> str:
    if not recording.ended or recording.is_interrupted:
        return "queued" if recording.details["background"] and not recording.started else "in_progress"
    if recording.cancelled:
        return "cancelled"
    if recording.error is not None or recording.finish_reason is None:
        return "failed"
    return "incomplete" if recording.finish_reason is FinishReason.LENGTH else "completed"


def beginning(recording: Recording, status: str) -> JsonObject:
    """Returns the response as it was before the first token."""
    sampling = recording.request.sampling
    return {
        "id": recording.id,
        "object": "response",
        "created_at": recording.created,
        "status": status,
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        "temperature": sampling.temperature,
        "top_p": sampling.top_p,
        "service_tier": tier_of(recording.lane),
        **recording.details["echo"],
    }


def response(recording: Recording) -> JsonObject:
    """Returns the response as it is now; its output is there when it has ended."""
    status = status_of(recording)
    members = beginning(recording, status)
    if status in ("queued", "in_progress"):
        return members
    members["output"] = output_items(recording)
    if status == "failed":
        return members | {"error": _error(recording.error)}
    members["usage"] = response_usage_of(recording)
    if status == "incomplete":
        members["incomplete_details"] = {"reason": "max_output_tokens"}
    timings = timings_of(recording)
    return members if timings is None else members | {"timings": timings}


def output_items(recording: Recording) -> list[Item]:
    """Returns the items of a response that has ended."""
    assert isinstance(recording.writer, ResponseWriter)
    return recording.writer.items


def plain(value: Any) -> Any:
    """Returns items, or a response with them, whose log probabilities are plain objects."""
    return orjson.loads(orjson.dumps(value))


def _error(error: ApiError | None) -> JsonObject:
    if error is None:
        return {"code": "server_error", "message": "The server ended the request."}
    code = "rate_limit_exceeded" if error.type == "rate_limit_error" else "server_error"
    return {"code": code, "message": error.message}
