"""Chat and text completions on the wire: the parts of OpenAI's format that both share, and those in which they differ.

All that is the same in every chunk of a stream is rendered once: a token costs the escaping of its text and one join.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from json.encoder import encode_basestring_ascii

from penstock.engine.planning.request import FinishReason, TokenLogprobs
from penstock.gateway.wire.frames import (
    DONE,
    ReplyWriter,
    StreamedChoice,
    ascii_json,
    timings_of,
    usage_of,
)
from penstock.gateway.wire.lanes import tier_of
from penstock.gateway.wire.logprobs import (
    Best,
    TextOffsets,
    TokenName,
    TokenText,
    finite,
    logprob_entries,
    prompt_logprobs,
)
from penstock.gateway.wire.parsing import (
    Answer,
    ArgumentsDelta,
    Call,
    CallBegun,
    Piece,
    ReasoningDelta,
    TextDelta,
    answer_of,
)
from penstock.gateway.wire.reading import PLAIN, Reading
from penstock.gateway.wire.tokenizer import TOKEN_NUMBERS
from penstock.gateway.wire.writing import ANSWERED, Delta, Head, Outputs, Reply


@dataclass(frozen=True, slots=True, kw_only=True)
class Extras:
    """The extras of a reply: its output other than texts."""

    num_top: int = 0
    """The number of most likely tokens, where log probabilities were asked for."""
    num_prompt_top: int | None = None
    """The number of most likely tokens at each place of the prompt; None if none were asked for."""
    token_ids: bool = False
    """Whether the token ids of the prompt and of each choice are said."""
    token_numbers: bool = False
    """Whether log probabilities name tokens by their ids."""
    best: Best | None = None
    """The choice of what is shown; None for all."""
    functions: bool = False
    """Whether a call is given in the older form, as a `function_call`."""


NO_EXTRAS = Extras()


@dataclass(slots=True, kw_only=True)
class _ChunkedChoice(StreamedChoice):
    index: int
    start: str
    """The beginning of each of its chunks."""
    has_called: bool = False
    offsets: TextOffsets | None = None
    """The places of its tokens, where they are said."""


class CompletionWriter(ReplyWriter[_ChunkedChoice], ABC):
    """The `gateway.wire.writing.Writer` of chat or text completions, as far as both share it."""

    name: str
    """The `object` of a whole reply."""
    chunk_name: str
    first_delta: str
    """The delta that opens a choice, "" if none does."""
    texts: Mapping[type[Piece], tuple[str, str]]
    """The delta before and after the text of a piece that is text, by the piece's type."""
    empty_delta: str
    tail = DONE
    _choices: list[_ChunkedChoice]

    def __init__(
        self,
        tokens: TokenText,
        head: Head,
        extras: Extras = NO_EXTRAS,
        *,
        reading: Reading = PLAIN,
        include_usage: bool = False,
        usage_so_far: bool = False,
        is_recorded: bool = False,
    ) -> None:
        """
        Args:
            usage_so_far: every chunk has the usage, not the last one alone.
            is_recorded: every event has its number as its id.
        """
        self.opens_early = self._is_numbered = is_recorded
        self._tokens = tokens
        self._names: TokenName = TOKEN_NUMBERS if extras.token_numbers else tokens
        """The names of tokens in log probabilities."""
        self._head = head
        self._extras = extras
        self._reading = reading
        self._include_usage = include_usage
        self._usage_so_far = usage_so_far
        self._opening = ""
        """The beginning of every chunk."""
        self._usage = ',"usage":null' if include_usage else ""
        self._tail = self._tail_of("null", "")
        self._num_open = 0
        self._ended: tuple[_ChunkedChoice, FinishReason] | None = None
        """The choice that ended last, and why."""

    # What differs

    @property
    def called(self) -> str | None:
        """The reason for which a choice ended that called a tool."""
        return None

    def piece(self, piece: Piece) -> str:
        """Returns the delta that brings a piece of a reply."""
        assert isinstance(piece, TextDelta | ReasoningDelta)
        before, after = self.texts[type(piece)]
        return f"{before}{encode_basestring_ascii(piece.text)}{after}"

    def token_ids(self, delta: Delta) -> tuple[str, str]:
        """Returns the members with token ids for a chunk's choice, and those for the chunk itself."""
        if not self._extras.token_ids:
            return "", ""
        of_choice, prompt = _member("token_ids", delta.token_ids), delta.prompt_token_ids
        return of_choice, _member("prompt_token_ids", prompt) if prompt else ""

    @abstractmethod
    def logprobs(self, reply: Reply, delta: Delta, choice: _ChunkedChoice | None = None) -> dict[str, object]:
        """Returns the log probabilities of the next tokens of a streamed choice, or of all tokens of a whole one.

        Lists that may be large are iterators.
        """

    @abstractmethod
    def choice(self, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        """Returns a whole choice."""

    # Streamed

    def begin(self, reply: Reply) -> list[bytes]:
        self._note_usage(reply)
        self._opening = _head_json(self._head, reply, self.chunk_name)
        self._num_open = sum(request.n for request in reply.requests)
        self._choices = [self._begun(index) for index in range(self._num_open)]
        self.common = (self._opening if self._num_open > 1 else self._choices[0].start).encode("ascii")
        first = f'{self.first_delta},"logprobs":null{self._tail}'
        return [self._frame(choice.start + first) for choice in self._choices if self.first_delta]

    def _begun(self, index: int) -> _ChunkedChoice:
        start, tail = f'{self._opening},"choices":[{{"index":{index},', f',"logprobs":null{self._tail}'
        around = {kind: (start + before, after + tail) for kind, (before, after) in self.texts.items()}
        parser = self._reading.parser(self._head.id, index)
        return _ChunkedChoice(parser=parser, around=around, index=index, start=start)

    def more(self, reply: Reply, index: int, delta: Delta) -> list[bytes]:
        choice = self._choices[index]
        pieces = choice.parser.feed(delta.text)
        if delta.ended:
            pieces += choice.parser.finish()
        self._note_usage(reply)
        in_choice, beside = self.token_ids(delta)
        logprobs = ascii_json(self.logprobs(reply, delta, choice)) if delta.logprobs else "null"
        frames = self._chunks(choice, pieces, logprobs + in_choice, beside)
        if delta.finish_reason in ANSWERED:
            self._num_open -= 1
            if self._num_open:
                return [*frames, self._finish(choice, delta.finish_reason, "")]
            self._ended = choice, delta.finish_reason
        return frames

    def _note_usage(self, reply: Reply) -> None:
        if self._usage_so_far:
            self._usage = f',"usage":{json.dumps(usage_of(reply))}'
            self._tail = self._tail_of("null", "")

    def _chunks(
        self, choice: _ChunkedChoice, pieces: Sequence[Piece], members: str = "null", beside: str = ""
    ) -> list[bytes]:
        """Returns a chunk for each piece.

        Args:
            members: the log probabilities of their tokens, and what else the choice says of them; they go with the
                first piece, or alone.
            beside: the members about these tokens that stand beside the choices.
        """
        deltas = [self.piece(piece) for piece in pieces]
        if not deltas and members != "null":
            deltas = [self.empty_delta]
        choice.has_called |= any(isinstance(piece, CallBegun) for piece in pieces)
        chunks = [f'{choice.start}{delta},"logprobs":null{self._tail}' for delta in deltas]
        if deltas and (members != "null" or beside):
            chunks[0] = f'{choice.start}{deltas[0]},"logprobs":{members}{self._tail_of("null", beside)}'
        return list(map(self._frame, chunks))

    def _last(self, reply: Reply) -> list[bytes]:
        """Returns the end of the choice that ended last, which has the timings, and the usage."""
        frames = []
        if self._ended is not None:
            timings = timings_of(reply)
            frames.append(self._finish(*self._ended, f',"timings":{json.dumps(timings)}' if timings else ""))
        if self._include_usage:
            usage = json.dumps(usage_of(reply))
            frames.append(self._frame(f'{self._opening},"choices":[],"usage":{usage}}}\n\n'))
        return frames

    def _finish(self, choice: _ChunkedChoice, reason: FinishReason, extra: str) -> bytes:
        called = self.called if choice.has_called else None
        tail = self._tail_of(f'"{finish_reason(reason, called)}"', extra)
        return self._frame(f'{choice.start}{self.empty_delta},"logprobs":null{tail}')

    def _tail_of(self, finish_reason: str, extra: str) -> str:
        return f',"finish_reason":{finish_reason}}}]{self._usage}{extra}}}\n\n'

    # Whole

    def whole(self, reply: Reply, outputs: Outputs) -> dict[str, object]:
        best = self._extras.best
        answers = [
            (index, delta, answer_of(self._reading.parser(self._head.id, index), delta.text))
            for index, delta in (outputs if best is None else best.chosen(outputs))
        ]
        return {
            "id": self._head.id,
            "object": self.name,
            "created": self._head.created,
            "model": self._head.model,
            "choices": (self._whole_choice(reply, *answer) for answer in answers),
            "service_tier": tier_of(reply.lane),
            "system_fingerprint": self._head.system_fingerprint,
            **self.beside(answers[0][1]),
            "usage": usage_of(reply),
            "timings": timings_of(reply),
            **({} if self._head.kv_transfer is None else {"kv_transfer_params": self._head.kv_transfer}),
        }

    def beside(self, first: Delta) -> dict[str, object]:  # noqa: ARG002
        """Returns what stands beside the choices of the prompt, which the first choice has for all."""
        return {}

    def _whole_choice(self, reply: Reply, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        choice = self.choice(index, delta, answer)
        choice["logprobs"] = self.logprobs(reply, delta) if delta.logprobs else None
        return choice | ({"token_ids": delta.token_ids} if self._extras.token_ids else {})


class ChatWriter(CompletionWriter):
    """The writer of `/v1/chat/completions`."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    first_delta = '"delta":{"role":"assistant","content":""}'
    texts: Mapping[type[Piece], tuple[str, str]] = {
        TextDelta: ('"delta":{"content":', "}"),
        ReasoningDelta: ('"delta":{"reasoning_content":', "}"),
    }
    empty_delta = '"delta":{}'

    @property
    def called(self) -> str:
        return "function_call" if self._extras.functions else "tool_calls"

    def piece(self, piece: Piece) -> str:
        if isinstance(piece, TextDelta | ReasoningDelta):
            return super().piece(piece)
        if self._extras.functions:
            part = {"name": piece.name} if isinstance(piece, CallBegun) else {}
            part["arguments"] = piece.text if isinstance(piece, ArgumentsDelta) else ""
            return f'"delta":{{"function_call":{json.dumps(part, separators=(",", ":"))}}}'
        if isinstance(piece, ArgumentsDelta):
            arguments = encode_basestring_ascii(piece.text)
            call = f'{{"index":{piece.index},"function":{{"arguments":{arguments}}}}}'
        else:
            begun = {"index": piece.index, **call_json(Call(piece.id, piece.name))}
            call = json.dumps(begun, separators=(",", ":"))
        return f'"delta":{{"tool_calls":[{call}]}}'

    def beside(self, first: Delta) -> dict[str, object]:
        members: dict[str, object] = {}
        if self._extras.num_prompt_top is not None:
            members["prompt_logprobs"] = prompt_logprobs(self._names, first, self._extras.num_prompt_top)
        if self._extras.token_ids:
            members["prompt_token_ids"] = first.prompt_token_ids
        return members

    def choice(self, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        message = _message(answer, functions=self._extras.functions)
        reason = finish_reason(delta.finish_reason, self.called if answer.calls else None)
        return {"index": index, "message": message, "finish_reason": reason}

    def logprobs(
        self,
        reply: Reply,  # noqa: ARG002
        delta: Delta,
        choice: _ChunkedChoice | None = None,  # noqa: ARG002
    ) -> dict[str, object]:
        content = logprob_entries(self._names, delta, self._extras.num_top)
        return {"content": content, "refusal": None}


class TextWriter(CompletionWriter):
    """The writer of `/v1/completions`."""

    name = chunk_name = "text_completion"
    first_delta = ""
    texts: Mapping[type[Piece], tuple[str, str]] = {TextDelta: ('"text":', "")}
    empty_delta = '"text":""'

    def choice(self, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        choice = {"index": index, "text": answer.text, "finish_reason": delta.finish_reason}
        if self._extras.num_prompt_top is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._names, delta, self._extras.num_prompt_top)
        if self._extras.token_ids:
            choice["prompt_token_ids"] = delta.prompt_token_ids
        return choice

    def token_ids(self, delta: Delta) -> tuple[str, str]:
        return "".join(super().token_ids(delta)), ""

    def logprobs(self, reply: Reply, delta: Delta, choice: _ChunkedChoice | None = None) -> dict[str, object]:
        token_ids = [*delta.prompt_token_ids, *delta.token_ids][-len(delta.logprobs) :]
        offsets = None if choice is None else choice.offsets
        if offsets is None:
            offsets = TextOffsets(self._tokens, reply.requests[0].sampling.shown_special)
        if choice is not None:
            choice.offsets = offsets
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [None if one is None else finite(one.logprob) for one in delta.logprobs],
            "top_logprobs": (None if one is None else self._top(one) for one in delta.logprobs),
            "text_offset": offsets.of(delta),
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        # Several tokens can have the same text; the most likely one is shown.
        worst_first = reversed(logprobs.top[: self._extras.num_top])
        return {self._text(token_id): finite(logprob) for token_id, logprob in worst_first}

    def _text(self, token_id: int) -> str:
        """The token's text; of one that is part of a character its bytes, as OpenAI writes them."""
        spelt = self._names.token_bytes(token_id)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)


def finish_reason(reason: FinishReason | None, called: str | None) -> str | None:
    """Returns why a choice ended, as OpenAI names it; `called` if it ended with a call of a tool."""
    if reason is FinishReason.STOP and called is not None:
        return called
    return None if reason is None else reason.value


def call_json(call: Call) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _message(answer: Answer, *, functions: bool) -> dict[str, object]:
    """Content is null if there is none beside something else."""
    message: dict[str, object] = {"role": "assistant", "content": answer.text, "refusal": None}
    if answer.reasoning:
        message["reasoning_content"] = answer.reasoning
    if answer.calls and functions:
        message["function_call"] = {"name": answer.calls[0].name, "arguments": answer.calls[0].arguments}
    elif answer.calls:
        message["tool_calls"] = [call_json(call) for call in answer.calls]
    if not answer.text and (answer.reasoning or answer.calls):
        message["content"] = None
    return message


def _member(name: str, token_ids: Sequence[int]) -> str:
    return f',"{name}":{json.dumps(list(token_ids))}'


def _head_json(head: Head, reply: Reply, object_name: str) -> str:
    fields = {
        "id": head.id,
        "object": object_name,
        "created": head.created,
        "model": head.model,
        "service_tier": tier_of(reply.lane),
        "system_fingerprint": head.system_fingerprint,
    }
    return "data: " + json.dumps(fields, separators=(",", ":"))[:-1]
