"""The bodies of llama.cpp's API: text completions with fields of its own."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, ClassVar

from pydantic import BeforeValidator

from penstock.gateway.errors import invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.ask import Ask, Infill, ReplyOptions, text_ask
from penstock.gateway.wire.completions import Extras
from penstock.gateway.wire.dialects import UNSET
from penstock.gateway.wire.sampling import MaxTokens
from penstock.gateway.wire.schemas import Biases, ChatBody, CompletionBody, check_counts
from penstock.gateway.wire.strict import Many, Most, TolerantBody

_HONOURED = {"response_fields", "return_tokens"}
_LEFT_OUT = {"n_indent", "t_max_predict_ms"}
"""What its editors always send: a completion that is longer than they would have it is still one."""
_BANNED = -100.0


def _by_token(bias: object) -> object:
    """Returns biases by token where they come as pairs; false bans a token."""
    if not isinstance(bias, list):
        return bias
    biases: dict[str, object] = {}
    for i, pair in enumerate(bias):
        if not (isinstance(pair, list) and len(pair) == 2 and type(pair[0]) is int):
            raise invalid(f"'logit_bias[{i}]' must be a token id and a bias.", f"logit_bias[{i}]")
        biases[str(pair[0])] = _BANNED if pair[1] is False else pair[1]
    return biases


class LlamaBody(CompletionBody):
    """`POST /completion`."""

    NOT_SUPPORTED = frozenset({"best_of", "echo", "prompt_logprobs", "suffix", "use_beam_search"})
    OFF: ClassVar[Mapping[str, tuple[object, ...]]] = {
        name: values for name, values in CompletionBody.OFF.items() if name not in _LEFT_OUT
    }
    UNSET: ClassVar[Mapping[str, tuple[object, ...]]] = UNSET
    IGNORED = CompletionBody.IGNORED - _HONOURED | _LEFT_OUT
    NEUTRAL: ClassVar[Mapping[str, object]] = {**CompletionBody.NEUTRAL, "t_max_predict_ms": -1}

    model: str = ""
    logit_bias: Annotated[Biases | None, BeforeValidator(_by_token), Most("max_logit_bias")] = None
    response_fields: Annotated[Many[str], Most(64)] | None = None
    """The fields that the reply is to have, those of objects in it as `timings/prompt_n`."""
    return_tokens: bool | None = None


class ExtraFile(TolerantBody):
    """Another file of the project."""

    text: str
    filename: str | None = None


class InfillBody(LlamaBody):
    """`POST /infill`: the text between two others, of which `prompt` is the beginning."""

    prompt: str = ""
    input_prefix: str
    input_suffix: str
    input_extra: Annotated[Many[ExtraFile], Most("max_content_parts")] | None = None


class TemplateBody(ChatBody):
    """`POST /apply-template`."""

    model: str = ""


def llama_ask(body: LlamaBody, limits: Limits) -> Ask:
    check_counts(body, limits)
    ask = text_ask(body, limits)
    assert isinstance(ask.input, tuple)
    return replace(
        ask,
        input=tuple(replace(texts, parse_special=True) for texts in ask.input),
        max_tokens=MaxTokens("n_predict", body.max_tokens, may_be_fewer=True),
        num_logprobs=body.logprobs or None,
        reply_options=ReplyOptions(extras=Extras(token_ids=bool(body.return_tokens or body.logprobs))),
    )


def infill_ask(body: InfillBody, limits: Limits) -> Ask:
    files = [(extra.filename or "file", extra.text) for extra in body.input_extra or ()]
    infill = Infill(prefix=body.input_prefix, suffix=body.input_suffix, middle=body.prompt, files=files)
    return replace(llama_ask(body, limits), field="input_prefix", input=infill, truncate=None)
