"""The types between a body that was read and the engine's requests, and how answers are chosen and bounded."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

from penstock.engine.planning.bans import Words
from penstock.engine.planning.grammar import CompiledGrammar
from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import Request, SamplingParams
from penstock.engine.planning.thinking import ThinkingBudget
from penstock.gateway.access.keys import Client
from penstock.gateway.http.errors import invalid
from penstock.gateway.http.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.reply.live import LOGPROB_BYTES
from penstock.gateway.service import Service
from penstock.gateway.sessions.prefixes.sharing import PRIVATE
from penstock.gateway.sessions.recordings.frames import MAX_KEPT_BYTES
from penstock.gateway.wire.beams import NEUTRAL, beam_tokens, beams_of
from penstock.gateway.wire.lanes import Slo
from penstock.gateway.wire.reading import PLAIN, Reading
from penstock.gateway.wire.sampling import MaxTokens, Room, sampling_params
from penstock.gateway.wire.schemas import ChatBody, Sampled
from penstock.gateway.wire.tokenizer import Tokenizer
from penstock.priority.lanes import Tenant, Urgency

Understood = TypeVar("Understood")

REQUEST_BYTES, _BAD_WORD_BYTES = 1024, 4096
"""The bytes whose reading is as much work as making a request, or as tokenising a bad word."""


@dataclass(frozen=True, slots=True)
class Arrival(Generic[Understood]):
    """A request whose body was read, before anybody asked whether there is room for it."""

    at_s: float
    client: Client
    body: Understood
    num_bytes: int
    """The size of the body as it was sent."""
    slo: Slo
    """The promises that its headers ask for."""

    @property
    def tenant(self) -> Tenant:
        return self.client.tenant


@dataclass(frozen=True, slots=True, kw_only=True)
class GenerationParams:
    """The parameters that the requests of one body have in common."""

    body: Sampled
    prompt_field: str
    asked: MaxTokens
    num_logprobs: int | None
    num_prompt_logprobs: int | None = None
    num_choices: int
    """The number of choices of all its prompts together."""
    client: Client
    urgency: Urgency
    arrival_s: float
    is_recorded: bool = False
    """Whether the reply is recorded as a whole, even if it is streamed."""
    grammar: CompiledGrammar | None = None
    """The grammar that each answer has to match."""
    reading: Reading = PLAIN
    """The formats in which each answer is read."""
    thinking: ThinkingBudget | None = None
    """The bound on the reasoning of each answer."""

    @property
    def tenant(self) -> Tenant:
        return self.client.tenant


class RequestMaker:
    """Makes the requests of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    async def requests(self, params: GenerationParams, prompts: Mapping[str, list[int]]) -> list[Request]:
        """Makes a request of each prompt, by request id, and hashes it for all who ask what of it is cached.

        Raises:
            ApiError: 400, if a prompt does not fit, or what is said of its answer.
        """
        words, allowed = params.body.bad_words or (), params.body.allowed_token_ids or ()
        num_tokens = sum(map(len, prompts.values())) + len(prompts) * len(allowed)
        size = TOKEN_BYTES * num_tokens + REQUEST_BYTES * len(prompts) + _BAD_WORD_BYTES * len(words)
        return await off_loop(size, self._requests, params, prompts)

    def _requests(self, params: GenerationParams, prompts: Mapping[str, list[int]]) -> list[Request]:
        words = bad_words_of(self._service.tokenizer, params.body.bad_words or ())
        made = (self._request(params, prompt, id, words) for id, prompt in prompts.items())
        return [with_hashes(request, self._service.options.block_size) for request in made]

    def _request(
        self, params: GenerationParams, prompt: list[int], request_id: str, bad_words: Words
    ) -> Request:
        # A tokenizer can know tokens that the model does not.
        if max(prompt, default=0) >= self._service.vocab_size:
            raise invalid("The prompt has tokens that the model does not know.", params.prompt_field)
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=self._sampling(params, len(prompt), bad_words),
            n=params.body.num_generated,
            beams=beams_of(params.body, self._service.options.eos_token_ids),
            arrival_s=params.arrival_s,
            lane=params.urgency.lane,
            tried_lane=params.urgency.tried,
            ttft_s=params.urgency.ttft_s,
            tenant=params.tenant.name,
            salt=salt_of(params.tenant, is_private=params.body.store is False, asked=params.body.cache_salt),
        )

    def _sampling(self, params: GenerationParams, num_prompt_tokens: int, bad_words: Words) -> SamplingParams:
        room = Room(self._service.dispatch.context_length, num_prompt_tokens)
        max_tokens = room.output_tokens(params.asked, params.prompt_field)
        if params.body.use_beam_search:
            max_tokens = min(max_tokens, self._beam_tokens(params, num_prompt_tokens))
        self._check_prompt_logprobs(params, num_prompt_tokens)
        shows_all = params.body.skip_special_tokens is False
        return sampling_params(
            params.body,
            NEUTRAL if params.body.use_beam_search else self._service.options.defaults,
            max_tokens=self._bounded(params, max_tokens),
            num_logprobs=params.num_logprobs,
            num_prompt_logprobs=params.num_prompt_logprobs,
            bad_words=bad_words,
            shown_special=self._service.tokenizer.special_ids
            if shows_all
            else self._service.formats.shown(params.reading),
            vocab_size=self._service.vocab_size,
            grammar=params.grammar,
            thinking=None if params.body.use_beam_search else params.thinking,
        )

    def _beam_tokens(self, params: GenerationParams, num_prompt_tokens: int) -> int:
        stats, width = self._service.engine_stats(), params.body.num_generated
        return beam_tokens(params.asked, num_prompt_tokens, width, stats.num_kv_tokens, stats.block_size)

    def _bounded(self, params: GenerationParams, max_tokens: int) -> int:
        """Returns how many output tokens a choice may have if their log probabilities are kept until the end."""
        if params.num_logprobs is None or (params.body.stream and not params.is_recorded):
            return max_tokens
        at_once = self._service.options.limits.max_logprobs
        if params.is_recorded:
            at_once = min(at_once, MAX_KEPT_BYTES // 2 // LOGPROB_BYTES)
        most = max(1, at_once // (params.num_choices * (1 + params.num_logprobs)))
        if params.asked.number is not None and max_tokens > most:
            what, way = ("that is kept", "") if params.is_recorded else ("in one piece", ", or stream it")
            message = (
                f"A reply {what} may have at most {at_once} log probabilities: with these logprobs and choices, "
                f"{params.asked.field} may be at most {most}. Ask for fewer{way}."
            )
            raise invalid(message, params.asked.field)
        return min(max_tokens, most)

    def _check_prompt_logprobs(self, params: GenerationParams, num_prompt_tokens: int) -> None:
        """Bounds the log probabilities of prompts, which come in one piece, streamed or not."""
        if params.num_prompt_logprobs is None:
            return
        at_once = self._service.options.limits.max_logprobs
        if num_prompt_tokens * params.num_choices * (1 + params.num_prompt_logprobs) > at_once:
            message = f"The prompts of a request may have at most {at_once} log probabilities. Ask for fewer."
            raise invalid(message, params.prompt_field)


def asked_tokens(body: ChatBody, *, may_be_fewer: bool = False) -> MaxTokens:
    """Returns the output tokens that a chat asks for, by either of OpenAI's names."""
    if body.max_tokens is None:
        return MaxTokens("max_completion_tokens", body.max_completion_tokens, may_be_fewer)
    return MaxTokens("max_tokens", body.max_tokens, may_be_fewer)


def is_compared(body: Sampled) -> bool:
    """Returns whether the log probabilities of the choices decide which are shown."""
    return body.num_generated > (body.n or 1) and not body.use_beam_search


def salt_of(tenant: Tenant, *, is_private: bool = False, asked: str | None = None) -> bytes:
    """Returns the hash salt of a tenant's blocks, so that nobody can find, or time, another's prompts.

    Those of private prompts (`store: false`, or a salt that was `asked` for) are apart, for their tokens never leave
    the process.
    """
    if asked is not None:
        return tenant.name.encode() + b"\0salt:" + asked.encode(errors="surrogatepass") + PRIVATE
    return tenant.name.encode() + (PRIVATE if is_private else b"")


def bad_words_of(tokenizer: Tokenizer, words: Sequence[str]) -> Words:
    """Returns the tokens of these words, at the start of a text and after a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(filter(None, (tuple(tokenizer.encode(text)) for text in texts))))


def salts_of(tenant: Tenant) -> tuple[bytes, bytes]:
    """Returns the salts of all of a tenant's blocks, those of private prompts included."""
    return salt_of(tenant), salt_of(tenant, is_private=True)
