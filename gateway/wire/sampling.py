"""Converts request bodies to the engine's SamplingParams and BeamParams."""

from __future__ import annotations

import secrets
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, NamedTuple

from penstock.engine.planning.keeping import Keeping, least_kept
from penstock.engine.planning.params import BeamParams, SamplingParams
from penstock.engine.planning.windows import most_tokens_of_forks
from penstock.engine.text.bans import Words
from penstock.engine.text.grammar import Grammar
from penstock.engine.text.thinking import ThinkingBudget
from penstock.engine.text.watermark import Watermark
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.wire.prompts import check_token_ids
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, SamplingFields, as_strings

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


@dataclass(frozen=True, slots=True, kw_only=True)
class KeepLimits:
    """The bounds of `kv_keep`: the tokens of a long sequence whose keys and values are kept."""

    default: int = 0
    """For requests that do not say; 0 keeps all."""
    most: int = 1 << 31
    """The positions of the model."""
    window: int = 0
    """The longest sliding window of a layer."""
    sees_chunks: bool = False
    """Whether layers see chunks, in which no tokens can be missing."""
    block_size: int = 16

    def mistake(self, num_tokens: int) -> str:
        """Returns what is wrong with a number, to be read after its name; empty if nothing is."""
        least = least_kept(self.block_size, self.window)
        if num_tokens and self.sees_chunks:
            return "is not for this model: its layers see chunks of the text"
        if num_tokens and not least <= num_tokens <= self.most:
            return f"must be 0, which keeps all, or between {least} and {self.most} for this model"
        return ""

    def keeping(self, num_tokens: int) -> Keeping | None:
        return Keeping.of(num_tokens, self.block_size) if num_tokens else None


def keeping_of(body: SamplingFields, limits: KeepLimits) -> Keeping | None:
    """Returns the part that is kept of a request's long sequences; None if all is, as a search over beams does.

    Raises:
        ApiError: 400, if so many tokens cannot be kept.
    """
    num_tokens = limits.default if body.kv_keep is None else body.kv_keep
    if not num_tokens:
        return None
    if mistake := limits.mistake(num_tokens):
        raise invalid(f"'kv_keep' {mistake}.", "kv_keep")
    return None if body.use_beam_search else Keeping.of(num_tokens, limits.block_size)


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


def output_tokens(wanted: MaxTokens, context_length: int, num_prompt_tokens: int, prompt_field: str) -> int:
    """Returns how many output tokens each choice may have.

    Raises:
        ApiError: 400, if the prompt, or prompt and answer together, do not fit.
    """
    left = context_length - num_prompt_tokens
    if left < 1:
        raise context_exceeded(context_length, f"{num_prompt_tokens} tokens", prompt_field, num_prompt_tokens)
    if wanted.number is not None and wanted.number > left and not wanted.may_be_fewer:
        what = f"{num_prompt_tokens} tokens and {wanted.field} {wanted.number}"
        raise context_exceeded(context_length, what, wanted.field)
    return left if wanted.number is None else min(wanted.number, left)


def context_exceeded(context_length: int, what: str, field: str, num_tokens: int | None = None) -> ApiError:
    """Makes the 400 for a request that the context has no room for; `num_tokens` if its prompt alone is too long."""
    message = f"This model's maximum context length is {context_length} tokens, but the request has {what}."
    error = invalid(message, field, "context_length_exceeded")
    if num_tokens is not None:
        # Claude Code makes a conversation shorter when it reads this sentence.
        error.anthropic_message = f"prompt is too long: {num_tokens} tokens > {context_length - 1} maximum"
    return error


def sampling_params(
    body: SamplingFields,
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
    watermark: Watermark | None = None,
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
    if body.stop_token_ids:
        check_token_ids(body.stop_token_ids, vocab_size, "stop_token_ids")
    if body.allowed_token_ids:
        check_token_ids(body.allowed_token_ids, vocab_size, "allowed_token_ids")
    same: dict[str, Any] = asdict(defaults) | {
        name: value for name in _SAME if (value := getattr(body, name)) is not None
    }
    same |= {"top_p": same["top_p"] or LEAST_TOP_P, "top_k": max(0, same["top_k"])}
    return SamplingParams(
        **same,
        logit_bias=_logit_bias(body.logit_bias, vocab_size) if body.logit_bias else {},
        seed=secrets.randbits(63) if body.seed is None else body.seed,
        max_tokens=max_tokens,
        stop=as_strings(body.stop),
        shows_stop=bool(body.include_stop_str_in_output),
        stop_token_ids=frozenset(body.stop_token_ids or ()),
        shown_special=shown_special,
        num_logprobs=num_logprobs,
        grammar=grammar,
        thinking=thinking,
        allowed_token_ids=tuple(sorted(set(body.allowed_token_ids or ()))),
        bad_words=bad_words,
        num_prompt_logprobs=num_prompt_logprobs,
        watermark=watermark,
    )


def watermark_of(body: SamplingFields, watermark: Watermark | None, *, is_for_all: bool) -> Watermark | None:
    """Returns the watermark of the answers to a request; None if they have none.

    Args:
        watermark: the server's; None if it has no key.
        is_for_all: all texts of the server have it.

    Raises:
        ApiError: 400, if a watermark is wanted that there is not, or none where all have one.
    """
    if body.watermark and watermark is None:
        raise invalid("'watermark' needs a server with --watermark-key-file.", "watermark")
    if not is_for_all:
        return watermark if body.watermark else None
    if body.watermark is False:
        raise invalid("All texts of this server have its watermark.", "watermark")
    if body.use_beam_search:
        message = "All texts of this server have its watermark, which a search of beams cannot give."
        raise invalid(message, "use_beam_search")
    return watermark


def _logit_bias(bias: dict[str, float], vocab_size: int) -> dict[int, float]:
    if any(not (key.isascii() and key.isdigit() and len(key) < 12) for key in bias):
        raise invalid("The keys of 'logit_bias' must be token ids.", "logit_bias")
    by_id = {int(key): value for key, value in bias.items()}
    check_token_ids(list(by_id), vocab_size, "logit_bias")
    return by_id


# Beam search

SEARCH_FIELDS = {"early_stopping", "length_penalty", "use_beam_search"}
NEUTRAL = SamplingDefaults(temperature=0.0)
"""The defaults of a search, in place of the checkpoint's: it is for what the model itself finds likeliest."""

# What would change which answers are found, by what it may say all the same.
_EXCLUDED: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(("stream", "watermark"), (False,)),
    **dict.fromkeys(("temperature", "min_p", "top_a", "xtc_probability", "min_tokens"), (0,)),
    **dict.fromkeys(("presence_penalty", "frequency_penalty"), (0,)),
    **dict.fromkeys(("top_p", "typical_p", "repetition_penalty"), (1,)),
    "top_k": (0, -1),
    "logit_bias": ({},),
    **dict.fromkeys(("stop", "bad_words", "tools"), ([],)),
    **dict.fromkeys(("structured_outputs", "guided_json", "guided_regex", "guided_choice"), ()),
    **dict.fromkeys(("guided_grammar", "json_schema", "thinking_token_budget", "allowed_token_ids"), ()),
    "grammar": ("",),
    "kv_keep": (0,),
}


def check_beams(body: SamplingFields, max_beams: int) -> None:
    """
    Raises:
        ApiError: 400, for a search that would be wider than `max_beams`, or with what it has no use for; without a
            search, for what only a search has a use for.
    """
    if not body.use_beam_search:
        for field, is_off in (
            ("length_penalty", body.length_penalty in (None, 1)),
            ("early_stopping", not body.early_stopping),
        ):
            if not is_off:
                raise invalid(f"'{field}' is only allowed when 'use_beam_search' is true.", field)
        return
    for field, neutral in _EXCLUDED.items():
        value = getattr(body, field, None)
        if value is not None and value not in neutral:
            raise invalid(f"'{field}' cannot be used together with 'use_beam_search'.", field)
    form = getattr(body, "response_format", None)
    if form is not None and form.type != "text":
        message = "'response_format' cannot be used together with 'use_beam_search'."
        raise invalid(message, "response_format")
    if body.max_tokens == 0:
        raise invalid("With 'use_beam_search', 'max_tokens' must be at least 1.", "max_tokens")
    if body.num_generated > max_beams:
        name = width_field(body)
        raise invalid(f"With 'use_beam_search', '{name}' may be at most {max_beams} here.", name)


def width_field(body: SamplingFields) -> str:
    """Returns the field that says how many beams there are."""
    return "n" if body.best_of is None else "best_of"


def beams_of(body: SamplingFields, eos_token_ids: Iterable[int]) -> BeamParams | None:
    """Returns the search that a request asks for; None if it asks for none."""
    if not body.use_beam_search:
        return None
    ends = frozenset() if body.ignore_eos else frozenset(eos_token_ids)
    return BeamParams(
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
        end_token_ids=ends | frozenset(body.stop_token_ids or ()),
    )


def beam_tokens(wanted: MaxTokens, num_prompt: int, width: int, num_kv_tokens: int, block_size: int) -> int:
    """Returns the number of output tokens of each beam for which all together have room.

    Args:
        num_kv_tokens: those that the KV pool has room for.

    Raises:
        ApiError: 400, if more was asked for.
    """
    most = most_tokens_of_forks(num_kv_tokens // block_size, block_size, num_prompt, width) - num_prompt
    if most < wanted.least:
        message = (
            f"The KV cache has room for {max(0, most)} tokens of each of {width} beams after this prompt of "
            f"{num_prompt} tokens."
        )
        raise invalid(message, wanted.field, "context_length_exceeded")
    return most
