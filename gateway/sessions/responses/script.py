"""Scripts of responses: their items, one after the other, and the events that begin, fill and end each."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from hashlib import sha256

from penstock.engine.planning.request import FinishReason, TokenLogprobs
from penstock.gateway.sessions.responses.objects import (
    ITEM_DONE,
    Item,
    JsonObject,
    OutputText,
    call_item,
    message_item,
    reasoning_item,
    reasoning_part,
    text_part,
)
from penstock.gateway.sessions.responses.schemas import ItemStatus, ReasoningText
from penstock.gateway.wire.parsing import ArgumentsDelta, Call, CallBegun, Piece, ReplyParser, TextDelta
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.shapes import ChosenLogprob, TokenText, chosen_logprob

_PREFIXES = {"message": "msg", "reasoning": "rs", "function_call": "fc"}


@dataclass(frozen=True, slots=True)
class ItemEvent:
    """An event that begins or ends an item, without its number."""

    kind: str
    fields: JsonObject


@dataclass(frozen=True, slots=True)
class ItemDelta:
    """More of an item."""

    kind: str
    before: str
    """The part that is the same in all such events of the item, as it is sent."""
    text: str
    after: str
    """The part after the text: the log probabilities of its tokens, in a message."""


@dataclass(slots=True)
class _Open:
    """The item that is being made."""

    kind: str
    place: JsonObject
    """The item's id and its place."""
    delta: tuple[str, str]
    """The kind of its deltas, and what they begin with."""
    call: Call
    """The call that the item is, if it is one."""
    seals: bool
    """Whether reasoning is given as an opaque string, too."""
    texts: list[str] = field(default_factory=list)
    logprobs: list[ChosenLogprob] = field(default_factory=list)
    """The log probabilities of a message's tokens, if they were asked for."""

    def item(self, status: ItemStatus) -> Item:
        """Returns the item as it is by now; empty while it is in progress."""
        item_id, texts = self.place["item_id"], ["".join(self.texts)] if status != "in_progress" else []
        if self.kind == "function_call":
            return call_item(item_id, Call(self.call.id, self.call.name, "".join(self.texts)), status)
        if self.kind == "reasoning":
            return reasoning_item(item_id, texts, status, seals=self.seals)
        return message_item(item_id, "assistant", texts, status, self.logprobs)

    def part(self, text: str) -> OutputText | ReasoningText:
        return reasoning_part(text) if self.kind == "reasoning" else text_part(text, self.logprobs)


class ResponseScript:
    """A `gateway.sessions.recordings.recording.Script`.

    Ids follow from the response's own and the place of the item: whoever makes the items again makes the same.
    """

    def __init__(
        self,
        response_id: str,
        parser: ReplyParser,
        tokens: TokenText,
        num_top: int = 0,
        *,
        seals: bool = False,
    ) -> None:
        """`tokens` and `num_top` spell log probabilities, where they are asked for; see _Open of `seals`."""
        self._seals = seals
        self._response_id = response_id
        self._parser = parser
        self._tokens = tokens
        self._num_top = num_top
        self._noted: list[ChosenLogprob] = []
        """The log probabilities of tokens whose text was in no event yet."""
        self._num_items = 0
        self._open: _Open | None = None

    def note(
        self,
        token_ids: Sequence[int],
        logprobs: Sequence[TokenLogprobs],
        index: int,  # noqa: ARG002
        num_reasoning: int,
    ) -> None:
        """Keeps the log probabilities of what is said to the user: reasoning is left out."""
        for token_id, found in list(zip(token_ids, logprobs, strict=True))[num_reasoning:]:
            self._noted.append(chosen_logprob(self._tokens, token_id, found, self._num_top))

    def feed(self, text: str, index: int = 0) -> list[ItemEvent | ItemDelta]:  # noqa: ARG002
        return list(self._events(self._parser.feed(text)))

    def finish(self, reason: FinishReason, index: int = 0) -> list[ItemEvent | ItemDelta]:  # noqa: ARG002
        events = list(self._events(self._parser.finish()))
        if not self._num_items and reason in (FinishReason.STOP, FinishReason.LENGTH):
            events += self._begin("message")
        return [*events, *self._end("completed" if reason is FinishReason.STOP else "incomplete")]

    def _events(self, pieces: Iterable[Piece]) -> Iterator[ItemEvent | ItemDelta]:
        for piece in pieces:
            if isinstance(piece, CallBegun):
                yield from self._end("completed")
                yield from self._begin("function_call", Call(piece.id, piece.name))
                continue
            if not isinstance(piece, ArgumentsDelta):
                kind = "message" if isinstance(piece, TextDelta) else "reasoning"
                if self._open is None or self._open.kind != kind:
                    yield from self._end("completed")
                    yield from self._begin(kind)
            assert self._open is not None
            self._open.texts.append(piece.text)
            yield ItemDelta(*self._open.delta, piece.text, self._told_logprobs(self._open))

    def _told_logprobs(self, item: _Open) -> str:
        """Returns the log probabilities of the tokens up to here, as a member; those of calls are not told."""
        noted, self._noted = self._noted, []
        if item.kind != "message":
            return ""
        item.logprobs += noted
        return f',"logprobs":{json.dumps(noted, separators=(",", ":"))}'

    def _begin(self, kind: str, call: Call | None = None) -> Iterator[ItemEvent]:
        place: JsonObject = {"item_id": self._id(kind), "output_index": self._num_items}
        if kind != "function_call":
            place["content_index"] = 0
        self._num_items += 1
        self._open = opened = _Open(kind, place, _delta(kind, place), call or Call("", ""), self._seals)
        item = opened.item("in_progress")
        yield ItemEvent("response.output_item.added", {"output_index": place["output_index"], "item": item})
        if kind != "function_call":
            yield ItemEvent("response.content_part.added", {**place, "part": opened.part("")})

    def _end(self, status: ItemStatus) -> Iterator[ItemEvent]:
        ended, self._open = self._open, None
        if ended is None:
            return
        text, place = "".join(ended.texts), ended.place
        if ended.kind == "function_call":
            yield ItemEvent("response.function_call_arguments.done", {**place, "arguments": text})
        else:
            if ended.kind == "reasoning":
                yield ItemEvent("response.reasoning_text.done", {**place, "text": text})
            else:
                yield ItemEvent(
                    "response.output_text.done", {**place, "text": text, "logprobs": ended.logprobs}
                )
            yield ItemEvent("response.content_part.done", {**place, "part": ended.part(text)})
        yield ItemEvent(ITEM_DONE, {"output_index": place["output_index"], "item": ended.item(status)})

    def _id(self, kind: str) -> str:
        digest = sha256(f"{self._response_id}/{self._num_items}".encode()).hexdigest()
        return f"{_PREFIXES[kind]}_{digest[:48]}"


def script(tokens: TokenText, response_id: str, details: JsonObject) -> ResponseScript:
    """`tokens` spells log probabilities."""
    parser = Reading(**details["reading"]).parser(response_id)
    num_top, seals = details["echo"]["top_logprobs"], details.get("seals", False)
    return ResponseScript(response_id, parser, tokens, num_top, seals=seals)


def _delta(kind: str, place: JsonObject) -> tuple[str, str]:
    name = {
        "message": "response.output_text.delta",
        "reasoning": "response.reasoning_text.delta",
        "function_call": "response.function_call_arguments.delta",
    }[kind]
    fields = {"type": name, **place}
    return name, f'event: {name}\ndata: {json.dumps(fields, separators=(",", ":"))[:-1]},"delta":'
