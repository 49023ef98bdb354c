"""Beam search: which requests ask for it, and what cannot be had together with it."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from penstock.engine.planning.request import BeamParams
from penstock.engine.planning.windows import most_tokens_of_forks
from penstock.gateway.errors import invalid
from penstock.gateway.wire.sampling import MaxTokens, SamplingDefaults
from penstock.gateway.wire.schemas import Sampled

NEUTRAL = SamplingDefaults(temperature=0.0)
"""The defaults of a search, in place of the checkpoint's: it is for what the model itself finds likeliest."""

# What would change which answers are found, by what it may say all the same.
_EXCLUDED: Mapping[str, tuple[object, ...]] = {
    "stream": (False,),
    "temperature": (0,),
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "typical_p": (1,),
    "top_a": (0,),
    "xtc_probability": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "stop": ([],),
    "structured_outputs": (),
    "guided_json": (),
    "guided_regex": (),
    "guided_choice": (),
    "guided_grammar": (),
    "json_schema": (),
    "grammar": ("",),
    "bad_words": ([],),
    "thinking_token_budget": (),
    "allowed_token_ids": (),
    "tools": ([],),
}


def check_beams(body: Sampled, max_beams: int) -> None:
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


def width_field(body: Sampled) -> str:
    """Returns the field that says how many beams there are."""
    return "n" if body.best_of is None else "best_of"


def beams_of(body: Sampled, eos_token_ids: Iterable[int]) -> BeamParams | None:
    """Returns the search that a request asks for; None if it asks for none."""
    if not body.use_beam_search:
        return None
    ends = frozenset() if body.ignore_eos else frozenset(eos_token_ids)
    return BeamParams(
        length_penalty=1.0 if body.length_penalty is None else body.length_penalty,
        early_stopping=body.early_stopping or False,
        end_token_ids=ends | frozenset(body.stop_token_ids or ()),
    )


def beam_tokens(asked: MaxTokens, num_prompt: int, width: int, num_kv_tokens: int, block_size: int) -> int:
    """Returns the number of output tokens of each beam for which all together have room.

    Args:
        num_kv_tokens: those that the KV pool has room for.

    Raises:
        ApiError: 400, if more was asked for.
    """
    most = most_tokens_of_forks(num_kv_tokens // block_size, block_size, num_prompt, width) - num_prompt
    if most < asked.least:
        message = (
            f"The KV cache has room for {max(0, most)} tokens of each of {width} beams after this prompt of "
            f"{num_prompt} tokens."
        )
        raise invalid(message, asked.field, "context_length_exceeded")
    return most
