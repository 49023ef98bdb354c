"""Ollama's API: the writers of its replies, which are one JSON object on each line."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from datetime import UTC, datetime
from functools import partial
from json.encoder import encode_basestring_ascii
from typing import Any

from penstock.gateway.errors import ApiError
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.embeddings import shortened
from penstock.gateway.wire.frames import ReplyWriter, StreamedChoice, ascii_json, error_line, timings_of
from penstock.gateway.wire.logprobs import TokenText, logprob_entries
from penstock.gateway.wire.parsing import (
    Answer,
    ArgumentsDelta,
    CallBegun,
    Piece,
    ReasoningDelta,
    TextDelta,
    answer_of,
    joined,
)
from penstock.gateway.wire.reading import PLAIN, Reading
from penstock.gateway.wire.writing import Delta, Head, Outputs, Reply


class LineWriter(ReplyWriter[StreamedChoice]):
    """The `gateway.wire.writing.Writer` of a reply to `/api/chat` or `/api/generate`."""

    media_type = "application/x-ndjson"

    def __init__(
        self,
        head: Head,
        *,
        is_chat: bool,
        tells_context: bool = False,
        reading: Reading = PLAIN,
        tokens: TokenText | None = None,
        num_top: int = 0,
        is_recorded: bool = False,
    ) -> None:
        """
        Args:
            tells_context: whether its end has the tokens of prompt and answer; a stream is then kept.
            tokens, num_top: spell log probabilities, where they are asked for.
            is_recorded: every line has the reply's id and its own number.
        """
        self._tokens = tokens
        self._num_top = num_top
        self._head = {"model": head.model, "created_at": timestamp(head.created)}
        if is_recorded:
            self._head["id"] = head.id
        self._is_chat = is_chat
        self._tells_context = tells_context
        self._new_parser = partial(reading.parser, head.id)
        self._choice = StreamedChoice(parser=self._new_parser())
        self._choices = (self._choice,)
        self._is_numbered = is_recorded
        self._calls: list[Piece] = []
        """The pieces of the call that is being written; it is sent when it is whole."""
        self._ending = Delta()
        """The last delta."""
        self._before, _, self._after = self._line(Answer()).partition('""')
        self._around: Mapping[type[Piece], tuple[str, str]] = (
            {} if is_recorded else {TextDelta: (self._before, self._after)}
        )
        self._choice.around = self._around
        self.common = self._before.encode("ascii")
        self.keepalive = f'{self._before}""{self._after}'.encode("ascii")
        """A line with no new text: an empty line would be no JSON to clients."""

    # Streamed

    def more(self, reply: Reply, index: int, delta: Delta) -> list[bytes]:  # noqa: ARG002
        pieces = self._choice.parser.feed(delta.text)
        lines = self._with_logprobs(pieces, delta) if delta.logprobs else self._pieces(pieces)
        if delta.ended:
            self._ending = delta
            lines += [*self._pieces(self._choice.parser.finish()), *self._whole_call()]
        return list(map(self._frame, lines))

    def _last(self, reply: Reply) -> list[bytes]:
        delta = reply.kept.get(0, self._ending)
        line = {**self._head, **self._said(Answer()), **self._ended(reply, delta)}
        return [self._frame(ascii_json(line) + "\n")]

    def _error(self, reply: Reply, error: ApiError) -> bytes:  # noqa: ARG002
        return error_line(error)

    def fault(self, reply: Reply, error: ApiError, position: int) -> bytes:  # noqa: ARG002
        return f"{ascii_json({'error': error.message, 'code': error.code})}\n".encode()

    def _frame(self, event: str) -> bytes:
        if self._is_numbered:
            event = f'{event[:-2]},"sequence_number":{self._number}}}\n'
            self._number += 1
        return event.encode("ascii")

    def _chunks(self, choice: StreamedChoice, pieces: Iterable[Piece]) -> list[bytes]:  # noqa: ARG002
        return list(map(self._frame, self._pieces(pieces)))

    def _with_logprobs(self, pieces: Sequence[Piece], delta: Delta) -> list[str]:
        """Returns the line of what is new, with the log probabilities of its tokens, and those of calls."""
        shown = [piece for piece in pieces if isinstance(piece, TextDelta | ReasoningDelta)]
        line = {**self._head, **self._said(joined(shown)), **self._logprobs(delta), "done": False}
        return [ascii_json(line) + "\n", *self._pieces(piece for piece in pieces if piece not in shown)]

    def _logprobs(self, delta: Delta) -> dict[str, object]:
        if self._tokens is None:
            return {}
        return {"logprobs": logprob_entries(self._tokens, delta, self._num_top)}

    def _pieces(self, pieces: Iterable[Piece]) -> list[str]:
        return [line for piece in pieces for line in self._piece(piece)]

    def _piece(self, piece: Piece) -> list[str]:
        if isinstance(piece, ArgumentsDelta):
            self._calls.append(ArgumentsDelta(0, piece.text))
            return []
        lines = self._whole_call()
        if isinstance(piece, CallBegun):
            self._calls, self._choice.around = [piece], {}
        elif isinstance(piece, TextDelta):
            lines.append(f"{self._before}{encode_basestring_ascii(piece.text)}{self._after}")
        else:
            lines.append(self._line(Answer(reasoning=piece.text)))
        return lines

    def _whole_call(self) -> list[str]:
        pieces, self._calls, self._choice.around = self._calls, [], self._around
        return [self._line(joined(pieces))] if pieces else []

    def _line(self, answer: Answer) -> str:
        return ascii_json({**self._head, **self._said(answer), "done": False}) + "\n"

    # Whole

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        ((_, delta),) = outputs
        answer = answer_of(self._new_parser(), delta.text)
        return {**self._head, **self._said(answer), **self._logprobs(delta), **self._ended(reply, delta)}

    def _ended(self, reply: Reply, delta: Delta) -> dict[str, object]:
        ending = _ending(reply, delta)
        if self._tells_context:
            ending["context"] = [*reply.requests[0].prompt_token_ids, *delta.token_ids]
        return ending

    def _said(self, answer: Answer) -> dict[str, object]:
        members: dict[str, object] = {"role": "assistant", "content": answer.text}
        if not self._is_chat:
            members = {"response": answer.text}
        if answer.reasoning:
            members["thinking"] = answer.reasoning
        if answer.calls:
            members["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.input}}
                for call in answer.calls
            ]
        return {"message": members} if self._is_chat else members


class NormalEmbeddingWriter:
    """The writer of a reply to `/api/embed`, whose embeddings have a length of 1."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        dimensions, timings = self._ask.dimensions, reply.timings
        arrival_s = timings[0].arrival_s
        return {
            "model": self._ask.model,
            "embeddings": (
                shortened(delta.embedding or [], dimensions, is_normalised=True) for _, delta in outputs
            ),
            "total_duration": _ns(max(one.finished_s for one in timings) - arrival_s),
            "load_duration": _ns(min(one.scheduled_s for one in timings) - arrival_s),
            "prompt_eval_count": reply.num_prompt_tokens,
        }


class PlainEmbeddingWriter:
    """The writer of a reply to `/api/embeddings`: the embedding as the model has it."""

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:  # noqa: ARG002
        ((_, delta),) = outputs
        return {"embedding": delta.embedding or []}


def unasked(model: str, created: int, *, is_chat: bool) -> dict[str, object]:
    """Returns the answer to a body that asks for nothing but that the model be loaded."""
    members: dict[str, object] = {"response": ""}
    if is_chat:
        members = {"message": {"role": "assistant", "content": ""}}
    return {"model": model, "created_at": timestamp(created), **members, "done": True, "done_reason": "load"}


def timestamp(seconds: int) -> str:
    """Returns seconds since 1970 as RFC 3339 has them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _ending(reply: Reply, delta: Delta) -> dict[str, object]:
    """Returns the fields of the last line; in Ollama, too, loading lasts as long as a request waits for its turn."""
    timings: Any = timings_of(reply)
    queue_ms, ttft_ms, ended_ms = (
        (timings["queue_ms"], timings["ttft_ms"], timings["timeline"]["ended_ms"]) if timings else (0, 0, 0)
    )
    return {
        "done": True,
        "done_reason": delta.finish_reason,
        "total_duration": _ns(ended_ms / 1000),
        "load_duration": _ns(queue_ms / 1000),
        "prompt_eval_count": reply.num_prompt_tokens,
        "prompt_eval_duration": _ns((ttft_ms - queue_ms) / 1000),
        "eval_count": reply.num_output_tokens,
        "eval_duration": _ns((ended_ms - ttft_ms) / 1000),
        "timings": timings,
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
