"""Fields of other servers: names of what is here, hints that change nothing, and what is refused unless it is off.

The lists follow llama.cpp's server-schema.cpp, vLLM's protocol.py, SGLang's protocol.py and the API references of
Alibaba (Qwen), Z.ai (GLM), Moonshot (Kimi), DeepSeek, Mistral, Groq and OpenRouter.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated

import orjson
from pydantic import BeforeValidator


def _as_text(arguments: object) -> object:
    """Returns the arguments of a call as JSON's text, where a client sends the object itself."""
    if isinstance(arguments, dict):
        return orjson.dumps(arguments).decode()
    return "" if arguments is None else arguments


Arguments = Annotated[str, BeforeValidator(_as_text)]

NAMES: Mapping[str, str] = {
    "ebnf": "guided_grammar",
    "n_cmpl": "n",
    "random_seed": "seed",
    "regex": "guided_regex",
    "repeat_penalty": "repetition_penalty",
    "typ_p": "typical_p",
}
"""Other names of fields, by which the same is asked."""

BUDGET_NAMES = dict.fromkeys(
    ("reasoning_budget_tokens", "thinking_budget", "thinking_budget_tokens"), "thinking_token_budget"
)

UNSET: Mapping[str, tuple[object, ...]] = {
    "max_tokens": (-1, -2),
    "seed": (-1,),
}
"""Values that stand for none: as many tokens as there is room for, and a random seed."""

HINTS = frozenset(
    {
        *("cache_control", "cache_prompt", "keep_alive", "prediction", "provider", "request_id", "route"),
        *("return_progress", "session_id", "tags", "timings_per_token", "trace", "trace_id", "usage"),
        *("chat_id", "client_metadata", "disable_tool_validation", "draft_model", "incremental_output"),
        *("models", "rid", "result_format", "transforms", "ttl", "user_id", "verbose", "verbosity"),
        # llama.cpp
        *("backend_sampling", "id_slot", "n_cache_reuse", "n_discard", "n_keep", "reasoning_control"),
        *("repeat_last_n", "response_fields", "return_tokens", "sse_ping_interval", "t_max_prompt_ms"),
        *("adaptive_decay", "dry_allowed_length", "dry_base", "dry_penalty_last_n", "dry_sequence_breakers"),
        *("dynatemp_exponent", "mirostat_eta", "mirostat_tau"),  # of samplers that are off, or else refused
        # vLLM
        *("guided_decoding_backend", "media_io_kwargs", "mm_processor_kwargs", "priority"),
        *("return_mm_kwargs", "return_prompt_text", "return_token_offsets"),
        *("routed_experts_prompt_start", "stream_interval"),
        # Reasoning
        *("reasoning_split", "stream_reasoning", "tool_stream"),
    }
)
"""What clients say to other servers about caches, routes, telemetry and speed; how long the answer should be is a hint
to models that were trained to take it."""

NEUTRAL_HINTS: Mapping[str, object] = {"repeat_last_n": -1, "id_slot": -1}
"""The values of hints that ask for what is done in any case."""

_WITHOUT_VALUE = (
    *("chat_template", "ec_transfer_params", "grammar_triggers", "guided_whitespace_pattern"),
    *("logits_processors", "logprob_token_ids", "lora", "lora_path", "negative_prompt"),
    *("plugins", "prompt_embeds", "reasoning_budget_message", "repetition_detection", "vllm_xargs"),
)
_AT_ZERO = (
    *("dry_multiplier", "dynatemp_range", "epsilon_cutoff", "eta_cutoff", "min_keep", "mirostat", "n_indent"),
    *("n_probs", "no_repeat_ngram_size", "penalty_alpha", "smoothing_factor"),
)
_AT_ONE = ("encoder_repetition_penalty", "guidance_scale", "num_beams", "tfs", "tfs_z")
_AT_FALSE = (
    *("enable_search", "grammar_lazy", "post_sampling_probs", "return_hidden_states", "safe_prompt"),
    "watermarking",
)
OFF: Mapping[str, tuple[object, ...]] = {
    **dict.fromkeys(_WITHOUT_VALUE, ()),
    **dict.fromkeys(_AT_ZERO, (0,)),
    **dict.fromkeys(_AT_ONE, (1,)),
    **dict.fromkeys(_AT_FALSE, (False,)),
    **dict.fromkeys(("do_sample", "separate_reasoning"), (True,)),
    **dict.fromkeys(("t_max_predict_ms", "top_n_sigma"), (0, -1)),
    "adaptive_target": (-1,),
    "truncation_side": ("left",),
}
"""What would change the answer and is not here, by the values that leave it off; -1 is any number below 0."""

_SAMPLERS: Mapping[str, Mapping[str, object]] = {
    "min_p": {"min_p": 0},
    "penalties": {"repetition_penalty": 1, "presence_penalty": 0, "frequency_penalty": 0},
    "temperature": {"temperature": 1},
    "top_k": {"top_k": 0},
    "top_p": {"top_p": 1},
    "typ_p": {"typical_p": 1},
    "xtc": {"xtc_probability": 0},
}
"""llama.cpp's samplers, and the fields that turn each of them off."""
SAMPLER_FIELDS = {"repeat_last_n", "samplers"}


def without_others(values: Mapping[str, object]) -> dict[str, object]:
    """Returns the values with the samplers off that `samplers` leaves out, and the penalties if they look at nothing.

    The order of samplers is this server's own.
    """
    changed, named = dict(values), values.get("samplers")
    if isinstance(named, list):
        names = {"typ_p" if name == "typical_p" else name for name in named if isinstance(name, str)}
        for name in _SAMPLERS.keys() - names:
            changed |= _SAMPLERS[name]
    if changed.get("repeat_last_n") == 0:
        changed |= _SAMPLERS["penalties"]
    return changed
