"""Converts request bodies to the engine's SamplingParams."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from penstock.engine.planning.bans import Words
from penstock.engine.planning.grammar import Grammar
from penstock.engine.planning.request import SamplingParams
from penstock.engine.planning.thinking import ThinkingBudget
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.wire.prompts import check_token_ids
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, Sampled, as_strings

LEAST_TOP_P = 1e-6
"""The top_p used for 0, which leaves the likeliest token alone."""

_SAME = (
    *("temperature", "top_p", "top_k", "min_p", "typical_p", "top_a", "xtc_probability", "xtc_threshold"),
    *("presence_penalty", "frequency_penalty", "repetition_penalty", "min_tokens", "ignore_eos"),
)
"""The fields that have the same name in a request and in the engine, whose default a request has that gives none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplingDefaults:
    """The values for requests that give none; a checkpoint's generation_config may differ from OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    repetition_penalty: float = 1.0


_DEFAULTED = tuple(field.name for field in fields(SamplingDefaults))


class MaxTokens(NamedTuple):
    """The output tokens that were asked for, and the field that did."""

    field: str
    number: int | None
    may_be_fewer: bool = False
    """The answer ends where the context does; or else what does not fit is refused."""

    @property
    def least(self) -> int:
        """The tokens of an answer that there has to be room for."""
        return 1 if self.number is None or self.may_be_fewer else max(1, self.number)


NO_TOKENS = MaxTokens("max_tokens", 0)
DEFAULT_COMPLETION_TOKENS = 16
"""The number of tokens that OpenAI's older endpoint gives a request that names none."""


def chat_tokens(body: ChatBody) -> MaxTokens:
    """Returns the output tokens that a chat asks for, by either of OpenAI's names."""
    if body.max_tokens is None:
        return MaxTokens("max_completion_tokens", body.max_completion_tokens)
    return MaxTokens("max_tokens", body.max_tokens)


def completion_tokens(body: CompletionBody) -> MaxTokens:
    if body.max_tokens is None:
        return MaxTokens("max_tokens", DEFAULT_COMPLETION_TOKENS, may_be_fewer=True)
    return MaxTokens("max_tokens", body.max_tokens)


class Room(NamedTuple):
    """The context that a prompt leaves for its answer."""

    context_length: int
    num_prompt_tokens: int

    def output_tokens(self, asked: MaxTokens, prompt_field: str) -> int:
        """Returns how many output tokens each choice may have.

        Raises:
            ApiError: 400, if the prompt, or prompt and answer together, do not fit.
        """
        left = self.context_length - self.num_prompt_tokens
        if left < 1:
            what = f"{self.num_prompt_tokens} tokens"
            raise context_exceeded(self.context_length, what, prompt_field, self.num_prompt_tokens)
        if asked.number is not None and asked.number > left and not asked.may_be_fewer:
            what = f"{self.num_prompt_tokens} tokens and {asked.field} {asked.number}"
            raise context_exceeded(self.context_length, what, asked.field)
        return left if asked.number is None else min(asked.number, left)


def context_exceeded(context_length: int, what: str, field: str, num_tokens: int | None = None) -> ApiError:
    """Makes the 400 for a request that the context has no room for; `num_tokens` if its prompt alone is too long."""
    message = f"This model's maximum context length is {context_length} tokens, but the request has {what}."
    error = invalid(message, field, "context_length_exceeded")
    if num_tokens is not None:
        # Claude Code makes a conversation shorter when it reads this sentence.
        error.anthropic_message = f"prompt is too long: {num_tokens} tokens > {context_length - 1} maximum"
    return error


def sampling_params(
    body: Sampled,
    defaults: SamplingDefaults,
    *,
    max_tokens: int,
    num_logprobs: int | None,
    num_prompt_logprobs: int | None,
    bad_words: Words,
    shown_special: frozenset[int],
    vocab_size: int,
    grammar: Grammar | None = None,
    thinking: ThinkingBudget | None = None,
) -> SamplingParams:
    """
    Args:
        bad_words: runs of tokens that are kept out of the output.
        shown_special: special tokens whose text is shown.

    Raises:
        ApiError: 400 for token ids outside the vocabulary, or min_tokens that cannot be reached.
    """
    if (body.min_tokens or 0) > max_tokens:
        raise invalid(f"'min_tokens' is greater than the {max_tokens} tokens there can be.", "min_tokens")
    stop_token_ids = frozenset(body.stop_token_ids or ())
    check_token_ids(list(stop_token_ids), vocab_size, "stop_token_ids")
    allowed = sorted(set(body.allowed_token_ids or ()))
    check_token_ids(allowed, vocab_size, "allowed_token_ids")
    same: dict[str, Any] = {name: getattr(defaults, name) for name in _DEFAULTED}
    same |= {name: value for name in _SAME if (value := getattr(body, name)) is not None}
    same |= {"top_p": same["top_p"] or LEAST_TOP_P, "top_k": max(0, same["top_k"])}
    return SamplingParams(
        **same,
        logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_tokens=max_tokens,
        stop=as_strings(body.stop),
        shows_stop=bool(body.include_stop_str_in_output),
        stop_token_ids=stop_token_ids,
        shown_special=shown_special,
        num_logprobs=num_logprobs,
        grammar=grammar,
        thinking=thinking,
        allowed_token_ids=tuple(allowed),
        bad_words=bad_words,
        num_prompt_logprobs=num_prompt_logprobs,
    )


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    if any(not (key.isascii() and key.isdigit() and len(key) < 12) for key in bias):
        raise invalid("The keys of 'logit_bias' must be token ids.", "logit_bias")
    by_id = {int(key): value for key, value in bias.items()}
    check_token_ids(list(by_id), vocab_size, "logit_bias")
    return by_id
