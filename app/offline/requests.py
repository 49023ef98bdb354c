"""Makes the engine's requests from the arguments of a call, checked as the server checks bodies."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

from typing_extensions import TypedDict

from penstock.app.build import Core
from penstock.app.errors import suggestion
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.params import BeamParams, Pooling, SamplingParams
from penstock.engine.planning.request import Request
from penstock.engine.text.grammar import CompiledGrammar
from penstock.engine.text.grammars import GrammarError
from penstock.gateway.access.keys import OPEN_TENANT
from penstock.gateway.endpoints.requests import bad_words_of, salt_of
from penstock.gateway.errors import ApiError, invalid
from penstock.gateway.limits import Limits
from penstock.gateway.wire.ask import Ask, chat_ask, completion_ask
from penstock.gateway.wire.conversation import as_dict
from penstock.gateway.wire.embeddings import EmbeddingsBody
from penstock.gateway.wire.enforced import enforced_form
from penstock.gateway.wire.lanes import urgency_of
from penstock.gateway.wire.prompts import check_token_ids
from penstock.gateway.wire.sampling import (
    NEUTRAL,
    NO_TOKENS,
    MaxTokens,
    beam_tokens,
    beams_of,
    check_beams,
    keeping_of,
    output_tokens,
    sampling_params,
)
from penstock.gateway.wire.schemas import ChatBody, CompletionBody
from penstock.gateway.wire.strict import read
from penstock.gateway.wire.structured import Form

Prompt = str | Sequence[int]
"""Text, or token ids."""
Conversation = Sequence[Mapping[str, Any]]
"""Messages as OpenAI has them: `{"role": "user", "content": "Hello!"}`."""

_LIMITS = Limits()


class Sampling(TypedDict, total=False):
    """The choice of tokens: OpenAI's names and ranges, and further ones that clients of open models send."""

    max_tokens: int
    max_completion_tokens: int
    """The newer name of max_tokens, for chats."""
    temperature: float
    top_p: float
    n: int
    """Choices of each prompt."""
    seed: int
    stop: str | list[str]
    presence_penalty: float
    frequency_penalty: float
    logit_bias: Mapping[int, float]
    logprobs: int | bool
    """For prompts, how many of the most likely tokens to name besides the chosen one; for chats, whether to at all."""
    top_logprobs: int
    """For chats, how many."""
    prompt_logprobs: int
    """The number of likely tokens to report at every prompt token but the first."""
    service_tier: str
    """The lane: priority, default or flex."""
    top_k: int
    min_p: float
    typical_p: float
    top_a: float
    xtc_probability: float
    xtc_threshold: float
    repetition_penalty: float
    min_tokens: int
    ignore_eos: bool
    stop_token_ids: list[int]
    bad_words: list[str]
    allowed_token_ids: list[int]
    kv_keep: int
    """The tokens of a long prompt and answer whose keys and values are kept; 0 keeps all."""
    skip_special_tokens: bool
    include_stop_str_in_output: bool
    use_beam_search: bool
    """The `n` likeliest answers as a whole, the best one first; all of them come at the end."""
    length_penalty: float
    early_stopping: bool | Literal["never"]
    response_format: Mapping[str, Any]
    """A format that answers have to match: {"type": "json_object"}, or a json_schema."""
    structured_outputs: Mapping[str, Any]
    """A format in vLLM's words: json, regex, choice or grammar."""


class Requests:
    """Makes requests for one engine. They have no id and no time of arrival yet.

    What it is given may be one prompt or conversation, or many. A wrong argument is a TypeError or a ValueError.
    """

    def __init__(self, core: Core) -> None:
        self._core = core
        self._prompts = core.model.prompts
        self._vocab_size = min(core.model.config.vocab_size, core.model.tokenizer.vocab_size)

    def of_prompts(self, prompts: Prompt | Sequence[Prompt], sampling: Sampling) -> list[Request]:
        return _each(self._of_prompt, _listed(prompts), _checked(sampling))

    def of_conversations(
        self, conversations: Conversation | Sequence[Conversation], sampling: Sampling
    ) -> list[Request]:
        return _each(self._of_conversation, _listed(conversations), _checked(sampling))

    def of_either(
        self,
        given: Prompt | Conversation | Sequence[Prompt] | Sequence[Conversation],
        sampling: Sampling,
    ) -> list[Request]:
        listed = _listed(given)
        is_chat = any(isinstance(part, Mapping) for one in listed[:1] for part in one)
        return _each(self._of_conversation if is_chat else self._of_prompt, listed, _checked(sampling))

    def of_texts(self, texts: Prompt | Sequence[Prompt]) -> list[Request]:
        """For their embeddings."""
        return _each(self._of_text, _listed(texts), {})

    def _of_prompt(self, prompt: object, values: Mapping[str, Any]) -> Request:
        body = read(CompletionBody, {**values, "prompt": prompt}, _LIMITS)
        token_ids = self._token_ids(body.prompt, "prompt")
        return self._sampled(completion_ask(body, _LIMITS), token_ids)

    def _of_text(self, text: object, values: Mapping[str, Any]) -> Request:
        body = read(EmbeddingsBody, {**values, "input": text}, _LIMITS)
        token_ids = self._token_ids(body.input, "input")
        self._check_room(token_ids, "input", NO_TOKENS)
        nothing = SamplingParams(temperature=0.0, max_tokens=0)
        return _request(token_ids, nothing, body.service_tier, pooling=self._core.model.embedding.pooling)

    def _of_conversation(self, messages: object, values: Mapping[str, Any]) -> Request:
        body = read(ChatBody, {**values, "messages": messages}, _LIMITS)
        ask = chat_ask(body, _LIMITS)
        return self._sampled(ask, self._prompts.chat([as_dict(message) for message in body.messages]))

    def _sampled(self, ask: Ask, token_ids: list[int]) -> Request:
        body, tokenizer, stats = ask.sampling, self._core.model.tokenizer, self._core.engine.stats()
        assert body is not None
        check_beams(body, min(_LIMITS.max_beams, stats.max_num_seqs))
        beams = beams_of(body, self._core.model.config.eos_token_ids)
        keeping = keeping_of(body, self._core.keep)
        max_tokens = self._check_room(token_ids, ask.field, ask.max_tokens, keeping)
        if beams is not None:
            width = body.num_generated
            most = beam_tokens(ask.max_tokens, len(token_ids), width, stats.num_kv_tokens, stats.block_size)
            max_tokens = min(max_tokens, most)
        sampling = sampling_params(
            body,
            self._core.model.defaults if beams is None else NEUTRAL,
            max_tokens=max_tokens,
            num_logprobs=ask.num_logprobs,
            num_prompt_logprobs=ask.num_prompt_logprobs,
            bad_words=bad_words_of(tokenizer, body.bad_words or ()),
            shown_special=tokenizer.special_ids if body.skip_special_tokens is False else frozenset(),
            vocab_size=self._vocab_size,
            grammar=self._grammar(ask.form),
        )
        return _request(token_ids, sampling, ask.service_tier, n=body.n or 1, beams=beams, keeping=keeping)

    def _token_ids(self, prompt: str | Sequence[object], name: str) -> list[int]:
        token_ids = (
            self._prompts.text(prompt)
            if isinstance(prompt, str)
            else [token_id for token_id in prompt if isinstance(token_id, int)]
        )
        if not isinstance(prompt, str) and len(token_ids) < len(prompt):
            raise invalid("A prompt is a text or a list of token ids.", name)
        if not token_ids:
            raise invalid(f"'{name}' must not be empty.", name)
        return token_ids

    def _check_room(
        self, token_ids: list[int], name: str, asked: MaxTokens, keeping: Keeping | None = None
    ) -> int:
        """The most output tokens after a prompt; `name` is what it is called."""
        check_token_ids(token_ids, self._vocab_size, name)
        return output_tokens(asked, self._core.engine.longest(keeping), len(token_ids), name)

    def _grammar(self, form: Form | None) -> CompiledGrammar | None:
        if form is None:
            return None
        form, _ = enforced_form(form)
        try:
            return self._core.grammars.compile(OPEN_TENANT.name, form.grammar)
        except GrammarError as error:
            raise invalid(f"Invalid '{form.field}': {error}.", form.field) from None


def _request(
    token_ids: list[int],
    sampling: SamplingParams,
    service_tier: str | None,
    n: int = 1,
    beams: BeamParams | None = None,
    pooling: Pooling | None = None,
    keeping: Keeping | None = None,
) -> Request:
    return Request(
        request_id="",
        prompt_token_ids=tuple(token_ids),
        sampling=sampling,
        n=n,
        beams=beams,
        lane=urgency_of(service_tier, OPEN_TENANT).lane,
        tenant=OPEN_TENANT.name,
        salt=salt_of(OPEN_TENANT),
        pooling=pooling,
        keeping=keeping,
    )


def _each(
    read_one: Callable[[Any, Mapping[str, Any]], Request], given: Sequence[Any], values: Mapping[str, Any]
) -> list[Request]:
    requests = []
    for number, one in enumerate(given):
        try:
            requests.append(read_one(one, {"model": "-", **values}))
        except ApiError as error:
            place = f"number {number} of {len(given)}: " if len(given) > 1 else ""
            raise ValueError(place + error.message) from None
    return requests


def _checked(sampling: Mapping[str, Any]) -> dict[str, Any]:
    """Raises TypeError for a name that there is not."""
    for name in sampling.keys() - Sampling.__optional_keys__:
        raise TypeError(f"unexpected keyword argument {name!r}{suggestion(name, Sampling.__optional_keys__)}")
    bias = sampling.get("logit_bias")
    if isinstance(bias, Mapping):
        return {**sampling, "logit_bias": {str(token_id): number for token_id, number in bias.items()}}
    return dict(sampling)


def _listed(given: Iterable[Any]) -> list[Any]:
    """Prompts or conversations, where one may have been given alone."""
    listed = [given] if isinstance(given, str) else list(given)
    return [listed] if listed and isinstance(listed[0], int | Mapping) else listed
