"""Where chat and text completions differ on the wire."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from json.encoder import encode_basestring_ascii
from math import fsum
from typing import NamedTuple, Protocol

from typing_extensions import TypedDict

from engine.planning.request import FinishReason, TokenLogprobs
from gateway.wire.parsing import (
    Answer,
    ArgumentsDelta,
    Call,
    CallBegun,
    Piece,
    ReasoningDelta,
    TextDelta,
    answer_of,
)
from gateway.wire.reading import Reading
from gateway.wire.streams import Delta

_LOWEST_LOGPROB = -9999.0
"""JSON has no -inf; OpenAI says this instead."""


class TokenLogprob(TypedDict):
    """OpenAI's entry for a token."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    top_logprobs: list[TokenLogprob]


class TokenText(Protocol):
    """The part of a tokenizer that log probabilities are spelt with."""

    def token_bytes(self, token_id: int) -> bytes: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class Head:
    """What all chunks of one reply say."""

    id: str
    created: int
    model: str
    service_tier: str


class Best(NamedTuple):
    """The choices that are shown of each prompt: the first ones of a search, else the likeliest as a whole."""

    num: int
    of: int
    with_logprobs: bool
    """Whether these are shown, too."""
    are_ranked: bool = False
    """The best come first already."""

    def chosen(self, deltas: Iterable[tuple[int, Delta]]) -> Iterator[tuple[int, Delta]]:
        """The best of whole choices, the best one of each prompt first; of equals, the one with the lower number."""
        ranked = sorted(
            deltas, key=lambda numbered: (numbered[0] // self.of, self._place(numbered[1]), numbered[0])
        )
        for place, (_, delta) in enumerate(ranked):
            prompt, rank = divmod(place, self.of)
            if rank < self.num:
                yield prompt * self.num + rank, delta if self.with_logprobs else replace(delta, logprobs=[])

    def _place(self, delta: Delta) -> float:
        return 0.0 if self.are_ranked else -_sum(delta)


def _sum(delta: Delta) -> float:
    found = delta.logprobs[len(delta.logprobs) - len(delta.token_ids) :]
    return fsum(_finite(one.logprob) for one in found if one is not None)


@dataclass(frozen=True, slots=True, kw_only=True)
class Told:
    """What a reply tells beside its texts."""

    num_top: int = 0
    """Most likely tokens where log probabilities were asked for."""
    num_prompt_top: int | None = None
    """The same of the prompt; None if nothing of it was asked for."""
    token_ids: bool = False
    """Those of the prompt and of each choice."""
    best: Best | None = None
    """Which choices are shown; None for all."""
    functions: bool = False
    """A call is told in the older form, as a `function_call`."""


NOTHING = Told()


class Shape(Protocol):
    """Where chat and text completions differ."""

    chunk_object: str
    first_delta: str
    """The delta that opens a choice, "" if none does."""
    texts: Mapping[type[Piece], tuple[str, str]]
    """What stands before and after the text in the delta of a piece that is text, by the piece's type."""
    empty_delta: str
    called: str
    """Why a choice ended that called a tool."""

    def piece(self, piece: Piece) -> str:
        """The delta that brings a piece of a reply."""

    def logprobs(self, index: int, delta: Delta) -> str: ...

    def token_ids(self, delta: Delta) -> tuple[str, str]:
        """What a chunk says of them in its choice, and beside its choices."""

    def body(self, head: Head, deltas: Iterable[tuple[int, Delta]], reading: Reading) -> dict[str, object]:
        """A reply in one piece; lists that may be large are iterators, for `gateway.wire.frames.json_pieces`."""


class ChatShape:
    """`/v1/chat/completions`."""

    chunk_object = "chat.completion.chunk"
    first_delta = '"delta":{"role":"assistant","content":""}'
    texts: Mapping[type[Piece], tuple[str, str]] = {
        TextDelta: ('"delta":{"content":', "}"),
        ReasoningDelta: ('"delta":{"reasoning_content":', "}"),
    }
    empty_delta = '"delta":{}'

    def __init__(self, tokens: TokenText, told: Told = NOTHING) -> None:
        self._tokens = tokens
        self._told = told
        self.called = "function_call" if told.functions else "tool_calls"

    def piece(self, piece: Piece) -> str:
        if isinstance(piece, TextDelta | ReasoningDelta):
            return _text_delta(self.texts, piece)
        if self._told.functions:
            return _function_delta(piece)
        if isinstance(piece, ArgumentsDelta):
            arguments = encode_basestring_ascii(piece.text)
            call = f'{{"index":{piece.index},"function":{{"arguments":{arguments}}}}}'
        else:
            begun = {"index": piece.index, **call_json(Call(piece.id, piece.name))}
            call = json.dumps(begun, separators=(",", ":"))
        return f'"delta":{{"tool_calls":[{call}]}}'

    def logprobs(self, index: int, delta: Delta) -> str:  # noqa: ARG002
        return json.dumps(self._logprobs(delta), default=list)

    def body(self, head: Head, deltas: Iterable[tuple[int, Delta]], reading: Reading) -> dict[str, object]:
        shown = deltas if self._told.best is None else self._told.best.chosen(deltas)
        choices = [
            (index, delta, answer_of(reading.parser(head.id, index), delta.text)) for index, delta in shown
        ]
        return self.whole(head, choices)

    def whole(self, head: Head, choices: Sequence[tuple[int, Delta, Answer]]) -> dict[str, object]:
        """The same of choices whose texts are understood already."""
        _, first, _ = choices[0]
        body = _body(head, "chat.completion", (self._choice(*choice) for choice in choices))
        if self._told.num_prompt_top is not None:
            body["prompt_logprobs"] = prompt_logprobs(self._tokens, first, self._told.num_prompt_top)
        if self._told.token_ids:
            body["prompt_token_ids"] = first.prompt_token_ids
        return body

    def token_ids(self, delta: Delta) -> tuple[str, str]:
        if not self._told.token_ids:
            return "", ""
        prompt = delta.prompt_token_ids
        return _member("token_ids", delta.token_ids), _member("prompt_token_ids", prompt) if prompt else ""

    def _choice(self, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "message": _message(answer, functions=self._told.functions),
            "logprobs": self._logprobs(delta) if delta.logprobs else None,
            "finish_reason": finish_reason(delta.finish_reason, self.called if answer.calls else None),
        }
        return choice | ({"token_ids": delta.token_ids} if self._told.token_ids else {})

    def _logprobs(self, delta: Delta) -> dict[str, object]:
        pairs = zip(delta.token_ids, delta.logprobs, strict=False)
        num_top = self._told.num_top
        content = (
            chosen_logprob(self._tokens, token_id, found, num_top)
            for token_id, found in pairs
            if found is not None
        )
        return {"content": content, "refusal": None}


class CompletionShape:
    """`/v1/completions`."""

    chunk_object = "text_completion"
    first_delta = ""
    texts: Mapping[type[Piece], tuple[str, str]] = {TextDelta: ('"text":', "")}
    empty_delta = '"text":""'
    called = ""

    def __init__(self, tokens: TokenText, told: Told = NOTHING) -> None:
        self._tokens = tokens
        self._told = told
        self._offsets: dict[int, int] = {}
        """Characters already spelt out, by choice."""

    def piece(self, piece: Piece) -> str:
        assert isinstance(piece, TextDelta)
        return _text_delta(self.texts, piece)

    def logprobs(self, index: int, delta: Delta) -> str:
        return json.dumps(self._logprobs(index, delta), default=list)

    def body(
        self,
        head: Head,
        deltas: Iterable[tuple[int, Delta]],
        reading: Reading,  # noqa: ARG002
    ) -> dict[str, object]:
        shown = deltas if self._told.best is None else self._told.best.chosen(deltas)
        return _body(head, "text_completion", (self._choice(index, delta) for index, delta in shown))

    def whole(self, head: Head, choices: Sequence[tuple[int, Delta, Answer]]) -> dict[str, object]:
        """The same of choices whose texts are understood already."""
        shown = (self._choice(index, delta) for index, delta, _ in choices)
        return _body(head, "text_completion", shown)

    def _choice(self, index: int, delta: Delta) -> dict[str, object]:
        choice: dict[str, object] = {
            "index": index,
            "text": delta.text,
            "logprobs": self._logprobs(index, delta) if delta.logprobs else None,
            "finish_reason": delta.finish_reason,
        }
        if self._told.num_prompt_top is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self._tokens, delta, self._told.num_prompt_top)
        if self._told.token_ids:
            choice |= {"token_ids": delta.token_ids, "prompt_token_ids": delta.prompt_token_ids}
        return choice

    def token_ids(self, delta: Delta) -> tuple[str, str]:
        if not self._told.token_ids:
            return "", ""
        prompt = delta.prompt_token_ids
        in_choice = _member("token_ids", delta.token_ids)
        return in_choice + (_member("prompt_token_ids", prompt) if prompt else ""), ""

    def _logprobs(self, index: int, delta: Delta) -> dict[str, object]:
        tokens = [
            self._text(token_id)
            for token_id in [*delta.prompt_token_ids, *delta.token_ids][-len(delta.logprobs) :]
        ]
        return {
            "tokens": tokens,
            "token_logprobs": [None if found is None else _finite(found.logprob) for found in delta.logprobs],
            "top_logprobs": (None if found is None else self._top(found) for found in delta.logprobs),
            "text_offset": self._advance(index, tokens),
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        # Several tokens can look the same as text; the most likely one is shown.
        worst_first = reversed(logprobs.top[: self._told.num_top])
        return {self._text(token_id): _finite(logprob) for token_id, logprob in worst_first}

    def _text(self, token_id: int) -> str:
        return self._tokens.token_bytes(token_id).decode(errors="replace")

    def _advance(self, index: int, tokens: list[str]) -> list[int]:
        offset = self._offsets.get(index, 0)
        offsets = []
        for token in tokens:
            offsets.append(offset)
            offset += len(token)
        self._offsets[index] = offset
        return offsets


def _text_delta(texts: Mapping[type[Piece], tuple[str, str]], piece: TextDelta | ReasoningDelta) -> str:
    before, after = texts[type(piece)]
    return f"{before}{encode_basestring_ascii(piece.text)}{after}"


def chosen_logprob(tokens: TokenText, token_id: int, logprobs: TokenLogprobs, num_top: int) -> ChosenLogprob:
    """OpenAI's entry for one token, with the most likely ones at its place."""
    top = [_logprob(tokens, other, logprob) for other, logprob in logprobs.top[:num_top]]
    return {**_logprob(tokens, token_id, logprobs.logprob), "top_logprobs": top}


def _logprob(tokens: TokenText, token_id: int, logprob: float) -> TokenLogprob:
    text = tokens.token_bytes(token_id)
    return {"token": text.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(text)}


def finish_reason(reason: FinishReason | None, called: str | None) -> str | None:
    """Why a choice ended, as OpenAI names it; `called` if it ended with a call of a tool."""
    if reason is FinishReason.STOP and called is not None:
        return called
    return None if reason is None else reason.value


def call_json(call: Call) -> dict[str, object]:
    function = {"name": call.name, "arguments": call.arguments}
    return {"id": call.id, "type": "function", "function": function}


def _function_delta(piece: CallBegun | ArgumentsDelta) -> str:
    if isinstance(piece, CallBegun):
        return _function(name=piece.name, arguments="")
    return _function(arguments=piece.text)


def _function(**call: str) -> str:
    return f'"delta":{{"function_call":{json.dumps(call, separators=(",", ":"))}}}'


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


def prompt_logprobs(tokens: TokenText, delta: Delta, num_top: int) -> Iterator[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`: by place in the prompt, the token there and the most likely ones; null at the first."""
    yield None
    for token_id, found in zip(delta.prompt_token_ids[1:], delta.prompt_logprobs or (), strict=True):
        ranked = {other: (rank, logprob) for rank, (other, logprob) in enumerate(found.top[:num_top], 1)}
        yield {
            str(other): {
                "logprob": _finite(logprob),
                "rank": rank,
                "decoded_token": tokens.token_bytes(other).decode(errors="replace"),
            }
            for other, (rank, logprob) in ({token_id: (None, found.logprob)} | ranked).items()
        }


def _member(name: str, token_ids: Sequence[int]) -> str:
    return f',"{name}":{json.dumps(list(token_ids))}'


def _finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def _body(head: Head, object_name: str, choices: Iterator[dict[str, object]]) -> dict[str, object]:
    return {
        "id": head.id,
        "object": object_name,
        "created": head.created,
        "model": head.model,
        "choices": choices,
        "service_tier": head.service_tier,
    }
