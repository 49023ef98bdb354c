"""Ollama's API: the writers of its replies, which are one JSON object on each line."""

from __future__ import annotations

import json
from collections.abc import Iterable
from datetime import UTC, datetime
from json.encoder import encode_basestring_ascii

from penstock.gateway.http.errors import ApiError
from penstock.gateway.http.refusals import OLLAMA_PATH
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.embeddings import shortened
from penstock.gateway.wire.frames import last_frames, timings_of
from penstock.gateway.wire.parsing import (
    Answer,
    ArgumentsDelta,
    Call,
    CallBegun,
    Piece,
    ReasoningDelta,
    ReplyParser,
    TextDelta,
    answer_of,
)
from penstock.gateway.wire.shapes import Head, TokenText, chosen_logprob
from penstock.gateway.wire.streams import Delta, Generation


class LineWriter:
    """The `gateway.wire.streams.Writer` of a reply to `/api/chat` or `/api/generate`."""

    media_type = "application/x-ndjson"

    def __init__(
        self,
        head: Head,
        *,
        is_chat: bool,
        tells_context: bool = False,
        parser: ReplyParser,
        tokens: TokenText | None = None,
        num_top: int = 0,
    ) -> None:
        """
        Args:
            tells_context: whether its end has the tokens of prompt and answer; a stream is then a KeptStream.
            parser: finds thoughts and calls of tools in the text.
            tokens, num_top: spell log probabilities, where they are asked for.
        """
        self._tokens = tokens
        self._num_top = num_top
        self._head = {"model": head.model, "created_at": timestamp(head.created)}
        self._is_chat = is_chat
        self._tells_context = tells_context
        self._parser = parser
        self._call: Call | None = None
        """The call that is being written; it is sent when it is whole."""
        self._before, _, self._after = self._line(Answer()).partition('""')

    # Streamed

    def text(self, index: int, text: str) -> bytes:  # noqa: ARG002
        return self._pieces(self._parser.feed(text))

    def news(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> bytes:
        lines = []
        for index, delta in deltas:
            lines.append(self._told(delta) if delta.logprobs else self.text(index, delta.text))
            if delta.finish_reason is not None and generation.error is None:
                lines.append(self._end(generation, delta))
        return b"".join(lines)

    def fault(self, error: ApiError) -> bytes:
        return last_frames(error, OLLAMA_PATH)

    def keepalive(self) -> bytes:
        """Returns a line with no new text: an empty line would be no JSON to clients."""
        return self._more("").encode("ascii")

    def _told(self, delta: Delta) -> bytes:
        """Returns the line of what is new, with the log probabilities of its tokens."""
        pieces = self._parser.feed(delta.text)
        shown = [piece for piece in pieces if isinstance(piece, TextDelta | ReasoningDelta)]
        answer = Answer()
        answer.add(shown)
        line = {**self._head, **self._said(answer), **self._logprobs(delta), "done": False}
        calls = self._pieces(piece for piece in pieces if piece not in shown)
        return f"{json.dumps(line)}\n".encode("ascii") + calls

    def _logprobs(self, delta: Delta) -> dict[str, object]:
        if self._tokens is None:
            return {}
        pairs = zip(delta.token_ids, delta.logprobs, strict=False)
        told = [chosen_logprob(self._tokens, token, found, self._num_top) for token, found in pairs if found]
        return {"logprobs": told}

    def _pieces(self, pieces: Iterable[Piece]) -> bytes:
        return "".join(map(self._piece, pieces)).encode("ascii")

    def _piece(self, piece: Piece) -> str:
        match piece:
            case TextDelta(text):
                return self._told_call() + self._more(text)
            case ReasoningDelta(text):
                return self._told_call() + self._line(Answer(reasoning=text))
            case CallBegun(id=id, name=name):
                told, self._call = self._told_call(), Call(id, name)
                return told
            case ArgumentsDelta(text=text):
                assert self._call is not None
                self._call.arguments += text
                return ""

    def _more(self, text: str) -> str:
        return f"{self._before}{encode_basestring_ascii(text)}{self._after}"

    def _told_call(self) -> str:
        call, self._call = self._call, None
        return "" if call is None else self._line(Answer(calls=[call]))

    def _line(self, answer: Answer) -> str:
        line = {**self._head, **self._said(answer), "done": False}
        return json.dumps(line, separators=(",", ":")) + "\n"

    def _end(self, generation: Generation, delta: Delta) -> bytes:
        last = self._pieces(self._parser.finish())
        line = {**self._head, **self._said(Answer()), **self._ending(generation, delta)}
        return last + f"{self._told_call()}{json.dumps(line)}\n".encode("ascii")

    # Whole

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> dict[str, object]:
        ((_, delta),) = deltas
        answer = answer_of(self._parser, delta.text)
        return {
            **self._head,
            **self._said(answer),
            **self._logprobs(delta),
            **self._ending(generation, delta),
        }

    def _ending(self, generation: Generation, delta: Delta) -> dict[str, object]:
        ending = _ending(generation, delta)
        if self._tells_context:
            told = generation.kept.get(0, delta).token_ids
            ending["context"] = [*generation.requests[0].prompt_token_ids, *told]
        return ending

    def _said(self, answer: Answer) -> dict[str, object]:
        said: dict[str, object] = {"role": "assistant", "content": answer.text}
        if not self._is_chat:
            said = {"response": answer.text}
        if answer.reasoning:
            said["thinking"] = answer.reasoning
        if answer.calls:
            said["tool_calls"] = [
                {"id": call.id, "function": {"name": call.name, "arguments": call.input}}
                for call in answer.calls
            ]
        return {"message": said} if self._is_chat else said


class EmbedWriter:
    """The writer of a reply to `/api/embed`, whose embeddings have a length of 1."""

    def __init__(self, ask: Ask) -> None:
        self._ask = ask

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> dict[str, object]:
        dimensions, timings = self._ask.dimensions, generation.timings
        arrival_s = timings[0].arrival_s
        return {
            "model": self._ask.model,
            "embeddings": [
                shortened(delta.embedding or [], dimensions, is_normalised=True) for _, delta in deltas
            ],
            "total_duration": _ns(max(one.finished_s for one in timings) - arrival_s),
            "load_duration": _ns(min(one.scheduled_s for one in timings) - arrival_s),
            "prompt_eval_count": generation.num_prompt_tokens,
        }


class EmbeddingWriter:
    """The writer of a reply to `/api/embeddings`: the embedding as the model has it."""

    def whole(self, generation: Generation, deltas: Iterable[tuple[int, Delta]]) -> dict[str, object]:  # noqa: ARG002
        ((_, delta),) = deltas
        return {"embedding": delta.embedding or []}


def unasked(model: str, created: int, *, is_chat: bool) -> dict[str, object]:
    """Returns the answer to a body that asks for nothing but that the model be loaded."""
    said: dict[str, object] = {"response": ""}
    if is_chat:
        said = {"message": {"role": "assistant", "content": ""}}
    return {"model": model, "created_at": timestamp(created), **said, "done": True, "done_reason": "load"}


def timestamp(seconds: int) -> str:
    """Returns seconds since 1970 as RFC 3339 has them."""
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


def _ending(generation: Generation, delta: Delta) -> dict[str, object]:
    """Returns the fields of the last line; in Ollama, too, loading lasts as long as a request waits for its turn."""
    (timings,) = generation.timings
    return {
        "done": True,
        "done_reason": delta.finish_reason,
        "total_duration": _ns(timings.finished_s - timings.arrival_s),
        "load_duration": _ns(timings.scheduled_s - timings.arrival_s),
        "prompt_eval_count": generation.num_prompt_tokens,
        "prompt_eval_duration": _ns(timings.first_token_s - timings.scheduled_s),
        "eval_count": generation.num_output_tokens,
        "eval_duration": _ns(timings.finished_s - timings.first_token_s),
        "timings": timings_of(generation),
    }


def _ns(seconds: float) -> int:
    return round(seconds * 1e9)
