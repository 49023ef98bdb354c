"""Log probabilities on the wire, as OpenAI's APIs and vLLM's spell them."""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import replace
from functools import lru_cache
from math import fsum
from typing import NamedTuple, Protocol

from typing_extensions import TypedDict

from penstock.engine.planning.request import TokenLogprobs
from penstock.engine.text.detokenizer import Spelling, make_detokenizer
from penstock.gateway.wire.writing import Delta, Outputs

_LOWEST_LOGPROB = -9999.0
"""The log probability that stands for -inf, which JSON lacks, as OpenAI has it."""


class TokenName(Hashable, Protocol):
    """The names of tokens in log probabilities."""

    def token_bytes(self, token_id: int) -> bytes: ...


class TokenText(Spelling, TokenName, Protocol):
    """The part of a tokenizer that log probabilities and the places of tokens in texts need."""


class TokenLogprob(TypedDict):
    """OpenAI's entry for a token and its log probability."""

    token: str
    logprob: float
    bytes: list[int]


class ChosenLogprob(TokenLogprob):
    """OpenAI's entry for a token that was chosen."""

    top_logprobs: list[TokenLogprob]


def logprob_entries(tokens: TokenName, delta: Delta, num_top: int) -> Iterator[ChosenLogprob]:
    """Yields the entry of each token of a choice."""
    for token_id, logprobs in zip(delta.token_ids, delta.logprobs, strict=False):
        if logprobs is not None:
            yield logprob_entry(tokens, token_id, logprobs, num_top)


def logprob_entry(tokens: TokenName, token_id: int, logprobs: TokenLogprobs, num_top: int) -> ChosenLogprob:
    """Returns the entry of a token, with the `num_top` most likely ones at its place."""
    text, own_bytes = _spelt(tokens, token_id)
    top: list[TokenLogprob] = []
    for other, logprob in logprobs.top[:num_top]:
        other_text, other_bytes = _spelt(tokens, other)
        top.append({"token": other_text, "logprob": finite(logprob), "bytes": other_bytes})
    return {"token": text, "logprob": finite(logprobs.logprob), "bytes": own_bytes, "top_logprobs": top}


@lru_cache(maxsize=32_768)
def _spelt(tokens: TokenName, token_id: int) -> tuple[str, list[int]]:
    text = tokens.token_bytes(token_id)
    return text.decode(errors="replace"), list(text)


def finite(logprob: float) -> float:
    return logprob if logprob > _LOWEST_LOGPROB else _LOWEST_LOGPROB


def prompt_logprobs(tokens: TokenName, delta: Delta, num_top: int) -> Iterator[dict[str, object] | None]:
    """vLLM's `prompt_logprobs`: by place in the prompt, the token there and the most likely ones; null at the first."""
    yield None
    for token_id, logprobs in zip(delta.prompt_token_ids[1:], delta.prompt_logprobs or (), strict=True):
        ranked = {other: (rank, logprob) for rank, (other, logprob) in enumerate(logprobs.top[:num_top], 1)}
        yield {
            str(other): {
                "logprob": finite(logprob),
                "rank": rank,
                "decoded_token": tokens.token_bytes(other).decode(errors="replace"),
            }
            for other, (rank, logprob) in ({token_id: (None, logprobs.logprob)} | ranked).items()
        }


class Best(NamedTuple):
    """The choices that are shown of each prompt: the first ones of a search, else the likeliest as a whole."""

    num: int
    of: int
    with_logprobs: bool
    """Whether the log probabilities of these choices are shown, too."""
    are_ranked: bool = False
    """Whether the best come first already."""

    def chosen(self, outputs: Outputs) -> Iterator[tuple[int, Delta]]:
        """Returns the best of whole choices, each prompt's best first; of equals, the one with the lower number."""
        ranked = sorted(outputs, key=lambda output: (output[0] // self.of, self._cost(output[1]), output[0]))
        for order, (_, delta) in enumerate(ranked):
            prompt, rank = divmod(order, self.of)
            if rank < self.num:
                yield prompt * self.num + rank, delta if self.with_logprobs else replace(delta, logprobs=[])

    def _cost(self, delta: Delta) -> float:
        if self.are_ranked:
            return 0.0
        chosen = delta.logprobs[len(delta.logprobs) - len(delta.token_ids) :]
        return -fsum(finite(one.logprob) for one in chosen if one is not None)


class TextOffsets:
    """The places of one choice's tokens in its text, counted in characters."""

    def __init__(self, tokens: TokenText, shown: frozenset[int]) -> None:
        """`shown`: the special tokens whose text is shown."""
        self._tokens = tokens
        self._detokenizer = make_detokenizer(tokens, shown)
        self._num_chars = 0
        self._num_sent = 0

    def of(self, delta: Delta) -> list[int]:
        """Returns the places of the tokens whose log probabilities a delta has; the last ones may have been cut off."""
        self._num_sent += sum(map(len, delta.texts))
        starts: list[int] = []
        if len(delta.logprobs) > len(delta.token_ids):
            starts, self._num_chars = self._in_echo(delta.prompt_token_ids, delta.texts[0])
        for token_id in delta.token_ids:
            starts.append(self._num_chars)
            self._num_chars += len(self._detokenizer.push(token_id))
        return [min(start, self._num_sent) for start in starts] if delta.ended else starts

    def _in_echo(self, prompt: Sequence[int], echo: str) -> tuple[list[int], int]:
        """Special tokens that the tokenizer put around a text are not in its echo; in that of tokens, all are."""
        starts, num_chars = self._starts(prompt, frozenset())
        if num_chars != len(echo):
            starts, _ = self._starts(prompt, self._tokens.special_ids)
        return starts, len(echo)

    def _starts(self, token_ids: Iterable[int], shown: frozenset[int]) -> tuple[list[int], int]:
        detokenizer, starts, num_chars = make_detokenizer(self._tokens, shown), [], 0
        for token_id in token_ids:
            starts.append(num_chars)
            num_chars += len(detokenizer.push(token_id))
        return starts, num_chars + len(detokenizer.flush())
