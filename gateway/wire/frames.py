"""OpenAI's wire format, byte by byte.

All that is the same in every chunk of a stream is rendered once: a token costs the escaping of its text and one join.
Everything is ASCII. Clients that split lines the way str.splitlines does would cut an event at U+2028 or U+0085, and
no character is ever cut in two.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii
from typing import Any

import orjson
from starlette.responses import JSONResponse

from penstock.engine.planning.request import MAX_MARKS, DraftCount, FinishReason, Timings
from penstock.gateway.http.connections import EVENT_STREAM
from penstock.gateway.http.correlation import ANTHROPIC_PATH
from penstock.gateway.http.errors import ApiError
from penstock.gateway.http.refusals import OLLAMA_PATH, anthropic_body, ollama_body
from penstock.gateway.wire.lanes import tier_of
from penstock.gateway.wire.parsing import CallBegun, Piece, ReplyParser
from penstock.gateway.wire.reading import PLAIN, Reading
from penstock.gateway.wire.shapes import Head, Shape, finish_reason
from penstock.gateway.wire.streams import Delta, Generation
from penstock.priority.lanes import Lane


class Json(JSONResponse):
    """A JSON reply that is rendered by orjson, in a fraction of the standard library's time."""

    def render(self, content: object) -> bytes:
        return orjson.dumps(content)


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


def at_once(value: object) -> Any:
    """Returns a value whose iterators are lists."""
    if isinstance(value, Iterator):
        return list(map(at_once, value))
    if isinstance(value, dict):
        return {name: at_once(item) for name, item in value.items()}
    return value


KEEPALIVE = b": ping\n"
"""It has no blank line, at which clients that saw an `id:` would dispatch an empty event (openai-python #2722)."""
DONE = b"data: [DONE]\n\n"
OPENAI_PATH = "/v1/"


def usage_of(generation: Generation) -> dict[str, object]:
    """Returns a reply's `usage`, as completions have it."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_output,
        "total_tokens": num_prompt + num_output,
        "prompt_tokens_details": {"cached_tokens": generation.num_cached_tokens},
        "completion_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
    }


def response_usage_of(generation: Generation) -> dict[str, object]:
    """Returns a reply's `usage`, as responses and decisions have it."""
    num_prompt, num_output = generation.num_prompt_tokens, generation.num_output_tokens
    return {
        "input_tokens": num_prompt,
        "input_tokens_details": {"cached_tokens": generation.num_cached_tokens, "cache_write_tokens": 0},
        "output_tokens": num_output,
        "output_tokens_details": {"reasoning_tokens": generation.num_reasoning_tokens},
        "total_tokens": num_prompt + num_output,
    }


def timings_of(generation: Generation) -> dict[str, object]:
    """Returns a reply's `timings`; of several choices: the first token's wait, the mean pace, the sums of counts."""
    timings, predicted_s = generation.timings, generation.predicted_ttft_s
    promised_s = generation.promised_ttft_s
    first = min(timings, key=lambda t: t.first_token_s)
    drafts = _drafts(timings)
    paces = [pace for t in timings if (pace := seconds_per_output_token(t)) is not None]
    return {
        "queue_ms": _ms(first.scheduled_s - first.arrival_s),
        "ttft_ms": _ms(first.first_token_s - first.arrival_s),
        "tpot_ms": _ms(sum(paces) / len(paces)) if paces else None,
        "cached_tokens": generation.num_cached_tokens,
        "prompt_tokens": generation.num_prompt_tokens,
        "promised_ttft_ms": None if promised_s is None else _ms(promised_s),
        "predicted_ttft_ms": None if predicted_s is None else _ms(predicted_s),
        "preemptions": sum(t.num_preemptions for t in timings),
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
        "lane": generation.lane.label,
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
        "ended_ms": since(timings.finished_s),
    }


def _drafts(timings: list[Timings]) -> dict[str, DraftCount]:
    """Sums up the drafts of all choices, by proposer."""
    sums: dict[str, DraftCount] = {}
    for choice in timings:
        for name, count in choice.drafts.items():
            sums.setdefault(name, DraftCount()).add(count)
    return sums


def _experts_per_layer(timings: list[Timings]) -> float | None:
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


@dataclass(slots=True)
class _Choice:
    """The state of one choice of a stream."""

    parser: ReplyParser
    start: str
    """The beginning of each of its chunks."""
    around: Mapping[type[Piece], tuple[str, str]]
    """The chunk before and after the text of a piece, by the piece's type."""
    has_begun: bool = False
    has_called: bool = False
    """Whether it has called a tool."""


class StreamWriter:
    """The `gateway.wire.streams.Writer` of a reply of chat or text completions."""

    media_type = EVENT_STREAM

    def __init__(
        self,
        shape: Shape,
        head: Head,
        *,
        include_usage: bool,
        usage_so_far: bool = False,
        reading: Reading = PLAIN,
    ) -> None:
        """`usage_so_far`: every chunk has it, not the last one alone."""
        self._shape = shape
        self._head = head
        self._reading = reading
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far
        self._opening = ""
        """The beginning of every chunk."""
        self._usage = ',"usage":null' if include_usage else ""
        self._tail = self._tail_of("null", "")
        self._choices: dict[int, _Choice] = {}

    def begin(self, lane: Lane) -> None:
        """Notes the lane of the reply before anything is written."""
        self._opening = self._opening or _head_json(self._head, lane, self._shape.chunk_name)

    def news(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> bytes:
        self.begin(generation.lane)
        frames, endings = [], []
        if self._usage_so_far:
            self._usage = f',"usage":{json.dumps(usage_of(generation))}'
            self._tail = self._tail_of("null", "")
        for index, delta in deltas:
            frames.append(self.chunk(index, delta))
            if delta.finish_reason is not None:
                endings.append((index, delta.finish_reason))
        for number, (index, reason) in enumerate(endings, start=1):
            is_last = generation.finished and number == len(endings)
            timings = timings_of(generation) if is_last else None
            has_calls = self._choice(index).has_called
            frames.append(self.finish(index, reason, timings, has_calls=has_calls))
        if generation.finished and generation.error is None:
            if self._include_usage:
                frames.append(self.usage(generation))
            frames.append(DONE)
        return b"".join(frames)

    def fault(self, error: ApiError) -> bytes:
        return last_frames(error, OPENAI_PATH)

    def keepalive(self) -> bytes:
        return KEEPALIVE

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> dict[str, object]:
        choices = self._shape.answers(self._head.id, deltas, self._reading)
        body = self._shape.whole(self._head, generation.lane, choices)
        return {**body, "usage": usage_of(generation), "timings": timings_of(generation)}

    def chunk(self, index: int, delta: Delta) -> bytes:
        """Returns the chunks with one choice's new output, without its end."""
        in_choice, beside = self._shape.token_ids(delta)
        known = self._logprobs(index, delta) + in_choice
        parser = self._choice(index).parser
        pieces = parser.feed(delta.text)
        if delta.finish_reason is not None:
            pieces += parser.finish()
        return self._pieces(index, pieces, known, beside)

    def text(self, index: int, text: str) -> bytes:
        """Returns the chunks of new text of a choice; empty if there is nothing to show."""
        choice = self._choices.get(index) or self._choice(index)
        pieces = choice.parser.feed(text)
        if len(pieces) == 1 and choice.has_begun:
            (piece,) = pieces
            if not isinstance(piece, CallBegun) and (around := choice.around.get(type(piece))):
                return f"{around[0]}{encode_basestring_ascii(piece.text)}{around[1]}".encode("ascii")
        return self._pieces(index, pieces)

    def piece(self, index: int, piece: Piece | None, delta: Delta | None = None) -> bytes:
        """Returns the chunk of a piece that was parsed elsewhere, if any, and of its tokens' log probabilities."""
        known = "null" if delta is None else self._logprobs(index, delta)
        return self._pieces(index, [] if piece is None else [piece], known)

    def _logprobs(self, index: int, delta: Delta) -> str:
        return json.dumps(self._shape.logprobs(index, delta), default=list) if delta.logprobs else "null"

    def _pieces(self, index: int, pieces: Sequence[Piece], known: str = "null", beside: str = "") -> bytes:
        """Returns a chunk for each piece.

        Args:
            known: the log probabilities of their tokens, and what else the choice says of them; they go with the
                first piece, or alone.
            beside: what is said of these tokens beside the choices.
        """
        choice = self._choice(index)
        opened, choice.has_begun = "" if choice.has_begun else self._first_chunk(choice), True
        deltas = [self._shape.piece(piece) for piece in pieces]
        if not deltas and known != "null":
            deltas = [self._shape.empty_delta]
        choice.has_called |= any(isinstance(piece, CallBegun) for piece in pieces)
        chunks = [f'{choice.start}{delta},"logprobs":null{self._tail}' for delta in deltas]
        if deltas and (known != "null" or beside):
            chunks[:1] = [f'{choice.start}{deltas[0]},"logprobs":{known}{self._tail_of("null", beside)}']
        return "".join([opened, *chunks]).encode("ascii")

    def _choice(self, index: int) -> _Choice:
        found = self._choices.get(index)
        if found is None:
            start, tail = f'{self._opening},"choices":[{{"index":{index},', f',"logprobs":null{self._tail}'
            around = {
                kind: (start + before, after + tail) for kind, (before, after) in self._shape.texts.items()
            }
            parser = self._reading.parser(self._head.id, index)
            found = self._choices[index] = _Choice(parser, start, around)
        return found

    def _first_chunk(self, choice: _Choice) -> str:
        """Returns the chunk that opens a choice; empty if none does."""
        first = self._shape.first_delta
        return first and f'{choice.start}{first},"logprobs":null{self._tail}'

    def finish(
        self, index: int, reason: FinishReason, timings: dict[str, object] | None, *, has_calls: bool = False
    ) -> bytes:
        """Returns the last chunk of a choice; the last choice's has the timings."""
        extra = f',"timings":{json.dumps(timings)}' if timings else ""
        start = f'{self._opening},"choices":[{{"index":{index},{self._shape.empty_delta}'
        tail = self._tail_of(f'"{finish_reason(reason, self._shape.called if has_calls else None)}"', extra)
        return f'{start},"logprobs":null{tail}'.encode("ascii")

    def usage(self, generation: Generation) -> bytes:
        body = f'{self._opening},"choices":[],"usage":{json.dumps(usage_of(generation))}}}\n\n'
        return body.encode("ascii")

    def _tail_of(self, finish_reason: str, extra: str) -> str:
        return f',"finish_reason":{finish_reason}}}]{self._usage}{extra}}}\n\n'


def error_frame(error: ApiError) -> bytes:
    return b"data: " + error.body() + b"\n\n"


def last_frames(error: ApiError, path: str) -> bytes:
    """Returns the last frames of a failed stream, in the API of that path."""
    if path.startswith(OLLAMA_PATH):
        return ollama_body(error) + b"\n"
    if path.startswith(ANTHROPIC_PATH):
        return b"event: error\ndata: %b\n\n" % anthropic_body(error)
    return error_frame(error) + DONE


def _head_json(head: Head, lane: Lane, object_name: str) -> str:
    fields = {
        "id": head.id,
        "object": object_name,
        "created": head.created,
        "model": head.model,
        "service_tier": tier_of(lane),
        "system_fingerprint": head.system_fingerprint,
    }
    return "data: " + json.dumps(fields, separators=(",", ":"))[:-1]
