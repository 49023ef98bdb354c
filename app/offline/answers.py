"""Answers to prompts and conversations: whole ones, and the pieces of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from penstock.engine.planning.request import Output, TokenLogprobs
from penstock.engine.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class TokenLogprob:
    """One token, and how likely it was before any of the sampling's processing."""

    token_id: int
    token: str
    logprob: float
    top: tuple[TokenLogprob, ...] = ()
    """The most likely ones in its place, best first."""


@dataclass(slots=True)
class Choice:
    """One text that was generated."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    """stop or length."""
    logprobs: list[TokenLogprob] | None = None
    """The log probabilities by token, if they were requested."""

    def add(self, piece: Piece) -> None:
        self.text += piece.text
        self.token_ids += piece.token_ids
        self.finish_reason = piece.finish_reason
        if piece.logprobs is not None:
            self.logprobs = (self.logprobs or []) + piece.logprobs


@dataclass(slots=True)
class Piece:
    """A new piece of one choice."""

    prompt: int
    """The number of its prompt or conversation in the list that was given."""
    choice: int
    text: str
    """Whole characters; may be empty while one is incomplete, or could become a stop string."""
    token_ids: list[int]
    finish_reason: str | None
    """stop or length with the last piece of a choice, else None."""
    logprobs: list[TokenLogprob] | None


@dataclass(slots=True)
class Answer:
    """The whole answer to one prompt or conversation."""

    prompt_token_ids: tuple[int, ...]
    choices: list[Choice]
    num_cached_tokens: int = 0
    """Prompt tokens whose KV was in the prefix cache."""
    prompt_logprobs: list[TokenLogprob] | None = None
    """The log probabilities of the prompt's tokens from the second one on, if they were requested."""

    @property
    def text(self) -> str:
        """The text of the first choice."""
        return self.choices[0].text


def piece_of(number: int, output: Output, tokenizer: Tokenizer) -> Piece:
    """The piece of a choice of prompt `number` that an output brings."""
    logprobs = None if output.logprobs is None else named(output.token_ids, output.logprobs, tokenizer)
    reason = output.finish_reason and output.finish_reason.value
    return Piece(number, output.index, output.text, output.token_ids, reason, logprobs)


def named(
    token_ids: Sequence[int], found: Iterable[TokenLogprobs], tokenizer: Tokenizer
) -> list[TokenLogprob]:
    """Log probabilities with the tokens that they are of."""
    pairs = zip(token_ids, found, strict=True)
    return [_token(tokenizer, token_id, each.logprob, each.top) for token_id, each in pairs]


def _token(
    tokenizer: Tokenizer, token_id: int, logprob: float, top: Iterable[tuple[int, float]] = ()
) -> TokenLogprob:
    text = tokenizer.token_bytes(token_id).decode(errors="replace")
    return TokenLogprob(token_id, text, logprob, tuple(_token(tokenizer, *other) for other in top))
