"""JSON in streams and replies, and what every API says of a reply: its errors, its usage, its timings.

Every stream is ASCII. Clients that split lines the way str.splitlines does would cut an event at U+2028 or U+0085, and
no character is ever cut in two.
"""

from __future__ import annotations

import codecs
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from json.encoder import encode_basestring_ascii
from typing import Generic, TypeVar

import orjson

from penstock.engine.planning.timings import MAX_MARKS, DraftCount, Timings
from penstock.gateway.errors import ApiError, anthropic_body, ollama_body
from penstock.gateway.wire.parsing import CallBegun, Piece, ReplyParser
from penstock.gateway.wire.writing import Reply


def json_pieces(value: object) -> Iterator[bytes]:
    """Yields the JSON of a value in pieces; iterators in it are lists whose entries are made one at a time."""
    if isinstance(value, Iterator):
        comma = b"["
        for item in value:
            yield comma
            yield from json_pieces(item)
            comma = b","
        yield b"]" if comma == b"," else b"[]"
    elif isinstance(value, dict) and any(isinstance(item, (Iterator, dict)) for item in value.values()):
        comma = b"{"
        for name, item in value.items():
            yield b"%b%b:" % (comma, orjson.dumps(name))
            yield from json_pieces(item)
            comma = b","
        yield b"}"
    else:
        yield orjson.dumps(value)


def ascii_json(value: object) -> str:
    """Returns JSON in ASCII, an iterator as a list: orjson's, with escapes in place of other characters."""
    text = orjson.dumps(value, default=list).decode()
    return text if text.isascii() else text.encode("ascii", _ESCAPED).decode("ascii")


def _escaped(error: UnicodeError) -> tuple[str, int]:
    assert isinstance(error, UnicodeEncodeError)
    return encode_basestring_ascii(error.object[error.start : error.end])[1:-1], error.end


_ESCAPED = "penstock.json"
codecs.register_error(_ESCAPED, _escaped)

KEEPALIVE = b": ping\n"
"""It has no blank line, at which clients that saw an `id:` would dispatch an empty event (openai-python #2722)."""
DONE = b"data: [DONE]\n\n"


def error_frame(fault: ApiError) -> bytes:
    return b"data: " + fault.body() + b"\n\n"


def error_event(fault: ApiError, request_id: str | None) -> bytes:
    """Returns Anthropic's event of an error."""
    return b"event: error\ndata: %b\n\n" % anthropic_body(fault, request_id)


def error_line(fault: ApiError) -> bytes:
    """Returns Ollama's line of an error."""
    return ollama_body(fault) + b"\n"


@dataclass(slots=True, kw_only=True)
class StreamedChoice:
    """The state of one choice of a stream."""

    parser: ReplyParser
    around: Mapping[type[Piece], tuple[str, str]] = field(default_factory=dict)
    """The frame before and after the text of a piece, by the piece's type, for pieces that are a frame each."""


_ChoiceT = TypeVar("_ChoiceT", bound=StreamedChoice)


class ReplyWriter(Generic[_ChoiceT]):
    """The ground of writers; where the reply is recorded, the events of a stream have their number as their id."""

    media_type = ""
    keepalive = KEEPALIVE
    tail = common = b""
    opens_early = False
    _is_numbered = False
    _number = 0
    """The number of the next event."""
    _choices: Sequence[_ChoiceT] = ()

    def begin(self, reply: Reply) -> list[bytes]:  # noqa: ARG002
        return []

    def text(self, index: int, text: str) -> list[bytes]:
        choice = self._choices[index]
        pieces = choice.parser.feed(text)
        if len(pieces) == 1:
            (piece,) = pieces
            around = choice.around.get(type(piece))
            if around and not isinstance(piece, CallBegun) and piece.text:
                frame = f"{around[0]}{encode_basestring_ascii(piece.text)}{around[1]}"
                if self._is_numbered:  # not by `_frame`: a call for every token
                    frame = f"id: {self._number}\n{frame}"
                    self._number += 1
                return [frame.encode("ascii")]
        return self._chunks(choice, pieces)

    def _chunks(self, choice: _ChoiceT, pieces: Sequence[Piece]) -> list[bytes]:
        """Returns the frames of pieces of a choice."""
        raise NotImplementedError

    def end(self, reply: Reply) -> list[bytes]:
        return self._last(reply) if reply.error is None else [self._error(reply, reply.error)]

    def _last(self, reply: Reply) -> list[bytes]:  # noqa: ARG002
        """Returns the last frames of a reply that came to its end."""
        return []

    def _error(self, reply: Reply, error: ApiError) -> bytes:  # noqa: ARG002
        return error_frame(error)

    def fault(self, reply: Reply, error: ApiError, position: int) -> bytes:  # noqa: ARG002
        return self._error(reply, error) + self.tail

    def _frame(self, event: str) -> bytes:
        if self._is_numbered:
            event = f"id: {self._number}\n{event}"
            self._number += 1
        return event.encode("ascii")


def usage_of(reply: Reply) -> dict[str, object]:
    """Returns a reply's `usage`, as completions have it."""
    num_prompt, num_output = reply.num_prompt_tokens, reply.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": reply.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": reply.num_reasoning_tokens},
    }


def response_usage_of(reply: Reply) -> dict[str, object]:
    """Returns a reply's `usage`, as responses and decisions have it."""
    num_prompt, num_output = reply.num_prompt_tokens, reply.num_output_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": reply.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": reply.num_reasoning_tokens},
        "total_tokens": num_prompt + num_output,
    }


def timings_of(reply: Reply) -> dict[str, object] | None:
    """Returns a reply's `timings`; of several choices: the first token's wait, the mean pace, the sums of counts.

    None if nobody knows them, since another process made the reply and did not write down its end.
    """
    if reply.timings_json is not None or not reply.timings:
        return reply.timings_json
    timings, predicted_s = reply.timings, reply.predicted_ttft_s
    promised_s = reply.promised_ttft_s
    first = min(timings, key=lambda t: t.first_token_s)
    drafts = _drafts(timings)
    paces = [pace for t in timings if (pace := seconds_per_output_token(t)) is not None]
    return {
        "queue_ms": _ms(first.scheduled_s - first.arrival_s),
        "ttft_ms": _ms(first.first_token_s - first.arrival_s),
        "tpot_ms": _ms(sum(paces) / len(paces)) if paces else None,
        "cached_tokens": reply.num_cached_tokens,
        "fetched_tokens": max((t.num_fetched_tokens for t in timings), default=0),
        "prompt_tokens": reply.num_prompt_tokens,
        "promised_ttft_ms": None if promised_s is None else _ms(promised_s),
        "predicted_ttft_ms": None if predicted_s is None else _ms(predicted_s),
        "preemptions": sum(t.num_preemptions for t in timings),
        "kv_dropped_tokens": sum(t.num_kv_dropped for t in timings),
        "draft_tokens": sum(count.num_drafted for count in drafts.values()),
        "accepted_tokens": sum(count.num_accepted for count in drafts.values()),
        "drafts": {
            name: {
                "draft_tokens": count.num_drafted,
                "accepted_tokens": count.num_accepted,
                "drafted_by_position": count.drafted,
                "accepted_by_position": count.accepted,
            }
            for name, count in sorted(drafts.items())
        },
        "experts_per_layer": _experts_per_layer(timings),
        "timeline": _timeline(first),
        "lane": reply.lane.label,
    }


def _timeline(timings: Timings) -> dict[str, object]:
    """Returns the events of one choice with their times since arrival; each list is bounded."""

    def since(at_s: float) -> float:
        return round(1000 * (at_s - timings.arrival_s), 1)

    return {
        "prefills": [(since(at_s), number) for at_s, number in timings.prefills],
        "preempted_ms": [since(at_s) for at_s in timings.preempted_s[:MAX_MARKS]],
        "resumed_ms": [since(at_s) for at_s in timings.resumed_s[:MAX_MARKS]],
        "drafts": [(since(at_s), *numbers) for at_s, *numbers in timings.draft_steps],
        "ended_ms": _ms(timings.finished_s - timings.arrival_s),
    }


def _drafts(timings: Sequence[Timings]) -> dict[str, DraftCount]:
    """Sums up the drafts of all choices, by proposer."""
    sums: dict[str, DraftCount] = {}
    for choice in timings:
        for name, count in choice.drafts.items():
            sums.setdefault(name, DraftCount()).add(count)
    return sums


def _experts_per_layer(timings: Sequence[Timings]) -> float | None:
    """Returns how many experts a layer read in the steps after the first token, whoever's tokens chose them.

    None in a model without experts, where they are not counted, and if there was no such step.
    """
    num_layers = sum(t.experts.num_layers for t in timings)
    return round(sum(t.experts.num_touched for t in timings) / num_layers, 2) if num_layers else None


def seconds_per_output_token(timings: Timings) -> float | None:
    """Returns the mean time of the tokens after the first; None if there are none."""
    if timings.num_output_tokens < 2:
        return None
    return (timings.finished_s - timings.first_token_s) / (timings.num_output_tokens - 1)


def _ms(seconds: float) -> float:
    return round(seconds * 1000, 3)
