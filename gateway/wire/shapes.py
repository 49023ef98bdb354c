"""Shapes of chat and text completions: the parts of OpenAI's wire format in which the two differ."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from json.encoder import encode_basestring_ascii
from math import fsum
from typing import NamedTuple, Protocol

from typing_extensions import TypedDict

from penstock.engine.planning.request import FinishReason, TokenLogprobs
from penstock.gateway.wire.lanes import tier_of
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
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.streams import Delta
from penstock.priority.lanes import Lane

_LOWEST_LOGPROB = -9999.0
"""The log probability that stands for -inf, which JSON lacks, as OpenAI has it."""


class TokenLogprob(TypedDict):
    """OpenAI's entry for a token and its log probability."""

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
    """The fields that all chunks of one reply have."""

    id: str
    created: int
    model: str
    system_fingerprint: str | None = None
    """Equal for servers that make the same texts; None if it is not shown."""


class Best(NamedTuple):
    """The choices that are shown of each prompt: the first ones of a search, else the likeliest as a whole."""

    num: int
    of: int
    with_logprobs: bool
    """Whether the log probabilities of these choices are shown, too."""
    are_ranked: bool = False
    """Whether the best come first already."""

    def chosen(self, deltas: Iterable[tuple[int, Delta]]) -> Iterator[tuple[int, Delta]]:
        """Returns the best of whole choices, each prompt's best first; of equals, the one with the lower number."""
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
class Extras:
    """The extras of a reply: its output other than texts."""

    num_top: int = 0
    """The number of most likely tokens, where log probabilities were asked for."""
    num_prompt_top: int | None = None
    """The number of most likely tokens at each place of the prompt; None if none were asked for."""
    token_ids: bool = False
    """Whether the token ids of the prompt and of each choice are said."""
    best: Best | None = None
    """The choice of what is shown; None for all."""
    functions: bool = False
    """Whether a call is given in the older form, as a `function_call`."""


NO_EXTRAS = Extras()


class Shape(ABC):
    """The wire format of one reply of chat or text completions, as far as both share it."""

    name: str
    """The `object` of a whole reply."""
    chunk_name: str
    first_delta: str
    """The delta that opens a choice, "" if none does."""
    texts: Mapping[type[Piece], tuple[str, str]]
    """The delta before and after the text of a piece that is text, by the piece's type."""
    empty_delta: str
    called: str
    """The reason for which a choice ended that called a tool."""

    def __init__(self, tokens: TokenText, extras: Extras = NO_EXTRAS) -> None:
        self.tokens = tokens
        self.extras = extras

    def piece(self, piece: Piece) -> str:
        """Returns the delta that brings a piece of a reply."""
        assert isinstance(piece, TextDelta | ReasoningDelta)
        before, after = self.texts[type(piece)]
        return f"{before}{encode_basestring_ascii(piece.text)}{after}"

    def token_ids(self, delta: Delta) -> tuple[str, str]:
        """Returns the members with token ids for a chunk's choice, and those for the chunk itself."""
        if not self.extras.token_ids:
            return "", ""
        own, prompt = _member("token_ids", delta.token_ids), delta.prompt_token_ids
        return own, _member("prompt_token_ids", prompt) if prompt else ""

    @abstractmethod
    def logprobs(self, index: int, delta: Delta) -> dict[str, object]:
        """Returns the log probabilities of a choice's next tokens; lists that may be large are iterators."""

    @abstractmethod
    def choice(self, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        """Returns a whole choice."""

    def answers(
        self, reply_id: str, deltas: Iterable[tuple[int, Delta]], reading: Reading
    ) -> list[tuple[int, Delta, Answer]]:
        """Returns the choices that are shown, and what their texts say."""
        shown = deltas if self.extras.best is None else self.extras.best.chosen(deltas)
        return [(i, delta, answer_of(reading.parser(reply_id, i), delta.text)) for i, delta in shown]

    def whole(
        self, head: Head, lane: Lane, choices: Sequence[tuple[int, Delta, Answer]]
    ) -> dict[str, object]:
        """Returns a whole reply; lists that may be large are iterators, see `gateway.wire.frames.json_pieces`."""
        return {
            "id": head.id,
            "object": self.name,
            "created": head.created,
            "model": head.model,
            "choices": (self._whole_choice(*choice) for choice in choices),
            "service_tier": tier_of(lane),
            "system_fingerprint": head.system_fingerprint,
        }

    def _whole_choice(self, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        choice = self.choice(index, delta, answer)
        choice["logprobs"] = self.logprobs(index, delta) if delta.logprobs else None
        return choice | ({"token_ids": delta.token_ids} if self.extras.token_ids else {})


class ChatShape(Shape):
    """The shape of `/v1/chat/completions`."""

    name = "chat.completion"
    chunk_name = "chat.completion.chunk"
    first_delta = '"delta":{"role":"assistant","content":""}'
    texts: Mapping[type[Piece], tuple[str, str]] = {
        TextDelta: ('"delta":{"content":', "}"),
        ReasoningDelta: ('"delta":{"reasoning_content":', "}"),
    }
    empty_delta = '"delta":{}'

    def __init__(self, tokens: TokenText, extras: Extras = NO_EXTRAS) -> None:
        super().__init__(tokens, extras)
        self.called = "function_call" if extras.functions else "tool_calls"

    def piece(self, piece: Piece) -> str:
        if isinstance(piece, TextDelta | ReasoningDelta):
            return super().piece(piece)
        if self.extras.functions:
            return _function_delta(piece)
        if isinstance(piece, ArgumentsDelta):
            arguments = encode_basestring_ascii(piece.text)
            call = f'{{"index":{piece.index},"function":{{"arguments":{arguments}}}}}'
        else:
            begun = {"index": piece.index, **call_json(Call(piece.id, piece.name))}
            call = json.dumps(begun, separators=(",", ":"))
        return f'"delta":{{"tool_calls":[{call}]}}'

    def whole(
        self, head: Head, lane: Lane, choices: Sequence[tuple[int, Delta, Answer]]
    ) -> dict[str, object]:
        _, first, _ = choices[0]
        body = super().whole(head, lane, choices)
        if self.extras.num_prompt_top is not None:
            body["prompt_logprobs"] = prompt_logprobs(self.tokens, first, self.extras.num_prompt_top)
        if self.extras.token_ids:
            body["prompt_token_ids"] = first.prompt_token_ids
        return body

    def choice(self, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        message = _message(answer, functions=self.extras.functions)
        reason = finish_reason(delta.finish_reason, self.called if answer.calls else None)
        return {"index": index, "message": message, "finish_reason": reason}

    def logprobs(self, index: int, delta: Delta) -> dict[str, object]:  # noqa: ARG002
        pairs = zip(delta.token_ids, delta.logprobs, strict=False)
        num_top = self.extras.num_top
        content = (
            chosen_logprob(self.tokens, token_id, found, num_top)
            for token_id, found in pairs
            if found is not None
        )
        return {"content": content, "refusal": None}


class CompletionShape(Shape):
    """The shape of `/v1/completions`."""

    name = chunk_name = "text_completion"
    first_delta = ""
    texts: Mapping[type[Piece], tuple[str, str]] = {TextDelta: ('"text":', "")}
    empty_delta = '"text":""'
    called = ""

    def __init__(self, tokens: TokenText, extras: Extras = NO_EXTRAS) -> None:
        super().__init__(tokens, extras)
        self._offsets: dict[int, int] = {}
        """The number of characters that were spelt out, by choice."""

    def choice(self, index: int, delta: Delta, answer: Answer) -> dict[str, object]:
        choice = {"index": index, "text": answer.text, "finish_reason": delta.finish_reason}
        if self.extras.num_prompt_top is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.tokens, delta, self.extras.num_prompt_top)
        if self.extras.token_ids:
            choice["prompt_token_ids"] = delta.prompt_token_ids
        return choice

    def token_ids(self, delta: Delta) -> tuple[str, str]:
        return "".join(super().token_ids(delta)), ""

    def logprobs(self, index: int, delta: Delta) -> dict[str, object]:
        token_ids = [*delta.prompt_token_ids, *delta.token_ids][-len(delta.logprobs) :]
        return {
            "tokens": [self._text(token_id) for token_id in token_ids],
            "token_logprobs": [None if found is None else _finite(found.logprob) for found in delta.logprobs],
            "top_logprobs": (None if found is None else self._top(found) for found in delta.logprobs),
            "text_offset": self._advance(index, token_ids),
        }

    def _top(self, logprobs: TokenLogprobs) -> dict[str, float]:
        # Several tokens can have the same text; the most likely one is shown.
        worst_first = reversed(logprobs.top[: self.extras.num_top])
        return {self._text(token_id): _finite(logprob) for token_id, logprob in worst_first}

    def _text(self, token_id: int) -> str:
        """The token's text; of one that is part of a character its bytes, as OpenAI writes them."""
        spelt = self.tokens.token_bytes(token_id)
        try:
            return spelt.decode()
        except UnicodeDecodeError:
            return "bytes:" + "".join(f"\\x{byte:02x}" for byte in spelt)

    def _advance(self, index: int, token_ids: Sequence[int]) -> list[int]:
        """Returns the place at which each token's text begins, and goes on to their end."""
        texts = (self.tokens.token_bytes(token_id).decode(errors="replace") for token_id in token_ids)
        *starts, end = accumulate(map(len, texts), initial=self._offsets.get(index, 0))
        self._offsets[index] = end
        return starts


def chosen_logprob(tokens: TokenText, token_id: int, logprobs: TokenLogprobs, num_top: int) -> ChosenLogprob:
    """OpenAI's entry for one token, with the most likely ones at its place."""
    top = [_logprob(tokens, other, logprob) for other, logprob in logprobs.top[:num_top]]
    return {**_logprob(tokens, token_id, logprobs.logprob), "top_logprobs": top}


def _logprob(tokens: TokenText, token_id: int, logprob: float) -> TokenLogprob:
    text = tokens.token_bytes(token_id)
    return {"token": text.decode(errors="replace"), "logprob": _finite(logprob), "bytes": list(text)}


def finish_reason(reason: FinishReason | None, called: str | None) -> str | None:
    """Returns why a choice ended, as OpenAI names it; `called` if it ended with a call of a tool."""
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
