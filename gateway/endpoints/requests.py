"""Makes the engine's requests of asks and their prompts, with what guides their answers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from penstock.engine.planning.bans import Words
from penstock.engine.planning.grammar import CompiledGrammar, Grammar
from penstock.engine.planning.prefix_index import with_hashes
from penstock.engine.planning.request import Request, SamplingParams
from penstock.engine.planning.thinking import ThinkingBudget
from penstock.gateway.endpoints.intake import Arrival
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.errors import invalid
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.reply.live import LOGPROB_BYTES
from penstock.gateway.service import Service
from penstock.gateway.sessions.prefixes.sharing import PRIVATE
from penstock.gateway.sessions.recordings.frames import MAX_KEPT_BYTES
from penstock.gateway.wire.ask import Ask, Conversation, Turn
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.enforced import enforced_form, enforced_tools
from penstock.gateway.wire.reading import PLAIN, Reading, needs_grammar
from penstock.gateway.wire.sampling import NEUTRAL, beam_tokens, beams_of, output_tokens, sampling_params
from penstock.gateway.wire.structured import Form
from penstock.gateway.wire.tokenizer import Tokenizer
from penstock.priority.lanes import Tenant

_GRAMMAR_WORK = 10
"""Writing the grammar of a tool is as much work as tokenising so many times its text."""
_REQUEST_BYTES, _BAD_WORD_BYTES = 1024, 4096
"""The bytes whose reading is as much work as making a request, or as tokenising a bad word."""
NO_OUTPUT = SamplingParams(temperature=0.0, max_tokens=0)
"""The sampling of requests for embeddings and scores."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Guidance:
    """The formats in which the answers to one prompt are read, and the bounds on their text."""

    reading: Reading = PLAIN
    grammar: CompiledGrammar | None = None
    """The grammar that each answer has to match."""
    thinking: ThinkingBudget | None = None
    """The bound on the reasoning of each answer."""


FREE = Guidance()


class RequestMaker:
    """Makes the requests of one service."""

    def __init__(self, service: Service, ignore: Callable[[str], None]) -> None:
        """`ignore` is called with each part of a schema that is left out; it may raise 400."""
        self._service = service
        self._ignore = ignore

    async def answer_grammar(self, came: Arrival) -> CompiledGrammar | None:
        """Returns the grammar that answers without calls have to match; raises as Compiling does, or as `ignore`."""
        if came.ask.form is None:
            return None
        form, left_out = await off_loop(len(came.ask.form.grammar.text), enforced_form, came.ask.form)
        for field in left_out:
            self._ignore(field)
        return await self._service.compiling.compile(came.tenant.name, form)

    async def guidance(
        self, came: Arrival, prompting: Prompting, prompt: list[int], answer: CompiledGrammar | None
    ) -> Guidance:
        """Returns the guidance of the answers to a prompt.

        An answer has to match its grammar after its reasoning, where no tool is called.

        Raises:
            ApiError: 400, if the model cannot call tools, or cannot be held to their schemas.
        """
        ask, formats = came.ask, self._service.formats
        if not isinstance(ask.input, Conversation | Turn):
            return Guidance(grammar=answer)
        reading = formats.reading(prompt, ask.tools, shows_reasoning=ask.shows_reasoning)
        form = await self._form(came, prompting, prompt, reading, answer and answer.plain)
        compile_form = self._service.compiling.compile
        return Guidance(
            reading=reading,
            grammar=None if form is None else await compile_form(came.tenant.name, form),
            thinking=None if ask.reasoning is None else self._thinking(ask.reasoning, prompt, reading),
        )

    async def _form(
        self, came: Arrival, prompting: Prompting, prompt: list[int], reading: Reading, answer: Grammar | None
    ) -> Form | None:
        """Returns the form of a whole reply, reasoning and then calls or an answer; None if it is free."""
        use, formats = came.ask.tools, self._service.formats
        if not needs_grammar(use, answer):
            grammar = None if answer is None else formats.grammar(prompt, reading, use, answer)
            return None if grammar is None else Form("response_format", grammar)

        def write() -> tuple[Grammar | None, list[str]]:
            held, left_out = enforced_tools(use)
            return formats.grammar(prompt, reading, held, answer, came.tenant.name), left_out

        grammar, left_out = await prompting.run(_GRAMMAR_WORK * use.num_chars, write)
        for field in left_out:
            self._ignore(field)
        return None if grammar is None else Form("tools", grammar)

    def _thinking(self, reasoning: Reasoned, prompt: list[int], reading: Reading) -> ThinkingBudget | None:
        prompts = self._service.prompts
        number = reasoning.budget(prompts.variables, self._service.dispatch.context_length)
        if number is None:
            return None
        return self._service.formats.budget(prompt, reading, number, prompts.around_closing)

    async def requests(
        self, came: Arrival, prompts: Mapping[str, list[int]], guidance: Guidance = FREE
    ) -> list[Request]:
        """Makes a request of each prompt, by request id, with the hashes of its blocks.

        Raises:
            ApiError: 400, if a prompt does not fit, or a bound on its answer.
        """
        sampling = came.ask.sampling
        words = (sampling and sampling.bad_words) or ()
        num_allowed = len((sampling and sampling.allowed_token_ids) or ())
        num_tokens = sum(map(len, prompts.values())) + len(prompts) * num_allowed
        size = TOKEN_BYTES * num_tokens + _REQUEST_BYTES * len(prompts) + _BAD_WORD_BYTES * len(words)
        return await off_loop(size, self._requests, came, prompts, guidance, words)

    def request(self, came: Arrival, id: str, prompt: Sequence[int], **fields: Any) -> Request:
        """Returns a request with the fields that all requests of an arrival have in common."""
        return Request(
            request_id=id,
            prompt_token_ids=tuple(prompt),
            arrival_s=came.at_s,
            lane=came.urgency.lane,
            tried_lane=came.urgency.tried,
            ttft_s=came.urgency.ttft_s,
            tenant=came.tenant.name,
            salt=ask_salt(came.ask, came.tenant),
            **fields,
        )

    def sampling(
        self,
        ask: Ask,
        num_prompt_tokens: int,
        guidance: Guidance = FREE,
        bad_words: Words = (),
        *,
        is_recorded: bool = False,
    ) -> SamplingParams:
        """Returns how the tokens of answers to a prompt of that length are chosen; raises 400 if it does not fit."""
        body, options = ask.sampling, self._service.options
        assert body is not None
        context_length = self._service.dispatch.context_length
        max_tokens = output_tokens(ask.max_tokens, context_length, num_prompt_tokens, ask.field)
        if body.use_beam_search:
            stats = self._service.engine_stats()
            most = beam_tokens(
                ask.max_tokens, num_prompt_tokens, body.num_generated, stats.num_kv_tokens, stats.block_size
            )
            max_tokens = min(max_tokens, most)
        self._check_prompt_logprobs(ask, num_prompt_tokens)
        shows_all = body.skip_special_tokens is False
        return sampling_params(
            body,
            NEUTRAL if body.use_beam_search else options.defaults,
            max_tokens=self._bounded(ask, max_tokens, is_recorded=is_recorded or ask.kept.stored is not None),
            num_logprobs=ask.num_logprobs,
            num_prompt_logprobs=ask.num_prompt_logprobs,
            bad_words=bad_words,
            shown_special=self._service.tokenizer.special_ids
            if shows_all
            else self._service.formats.shown(guidance.reading),
            vocab_size=self._service.vocab_size,
            grammar=guidance.grammar,
            thinking=None if body.use_beam_search else guidance.thinking,
        )

    def _requests(
        self, came: Arrival, prompts: Mapping[str, list[int]], guidance: Guidance, words: Sequence[str]
    ) -> list[Request]:
        bad_words = bad_words_of(self._service.tokenizer, words) if words else ()
        options = self._service.options
        made = []
        for id, prompt in prompts.items():
            # A tokenizer can know tokens that the model does not.
            if max(prompt, default=0) >= self._service.vocab_size:
                raise invalid("The prompt has tokens that the model does not know.", came.ask.field)
            fields = self._fields(came, len(prompt), guidance, bad_words)
            made.append(with_hashes(self.request(came, id, prompt, **fields), options.block_size))
        return made

    def _fields(
        self, came: Arrival, num_prompt_tokens: int, guidance: Guidance, bad_words: Words
    ) -> dict[str, Any]:
        body, options = came.ask.sampling, self._service.options
        if body is None:
            return {"sampling": NO_OUTPUT, "pooling": options.embedding.pooling}
        sampling = self.sampling(
            came.ask, num_prompt_tokens, guidance, bad_words, is_recorded=came.is_recorded
        )
        beams = beams_of(body, options.eos_token_ids) if body.use_beam_search else None
        return {"sampling": sampling, "n": body.num_generated, "beams": beams}

    def _bounded(self, ask: Ask, max_tokens: int, *, is_recorded: bool) -> int:
        """Returns how many output tokens a choice may have if their log probabilities are kept until the end."""
        if ask.num_logprobs is None or (ask.streams and not is_recorded):
            return max_tokens
        at_once = self._service.options.limits.max_logprobs
        if is_recorded:
            at_once = min(at_once, MAX_KEPT_BYTES // 2 // LOGPROB_BYTES)
        most = max(1, at_once // (ask.num_choices * (1 + ask.num_logprobs)))
        if ask.max_tokens.number is not None and max_tokens > most:
            what, way = ("that is kept", "") if is_recorded else ("in one piece", ", or stream it")
            message = (
                f"A reply {what} may have at most {at_once} log probabilities: with these logprobs and choices, "
                f"{ask.max_tokens.field} may be at most {most}. Ask for fewer{way}."
            )
            raise invalid(message, ask.max_tokens.field)
        return min(max_tokens, most)

    def _check_prompt_logprobs(self, ask: Ask, num_prompt_tokens: int) -> None:
        """Bounds the log probabilities of prompts, which come in one piece, streamed or not."""
        if ask.num_prompt_logprobs is None:
            return
        at_once = self._service.options.limits.max_logprobs
        if num_prompt_tokens * ask.num_choices * (1 + ask.num_prompt_logprobs) > at_once:
            message = f"The prompts of a request may have at most {at_once} log probabilities. Ask for fewer."
            raise invalid(message, ask.field)


def ask_salt(ask: Ask, tenant: Tenant) -> bytes:
    """Returns the hash salt of the blocks of an ask's prompts."""
    body = ask.sampling
    if body is None:
        return salt_of(tenant)
    return salt_of(tenant, is_private=body.store is False, asked=body.cache_salt)


def salt_of(tenant: Tenant, *, is_private: bool = False, asked: str | None = None) -> bytes:
    """Returns the hash salt of a tenant's blocks, so that nobody can find, or time, another's prompts.

    Those of private prompts (`store: false`, or a salt that was `asked` for) are apart, for their tokens never leave
    the process.
    """
    if asked is not None:
        return tenant.name.encode() + b"\0salt:" + asked.encode(errors="surrogatepass") + PRIVATE
    return tenant.name.encode() + (PRIVATE if is_private else b"")


def salts_of(tenant: Tenant) -> tuple[bytes, bytes]:
    """Returns the salts of all of a tenant's blocks, those of private prompts included."""
    return salt_of(tenant), salt_of(tenant, is_private=True)


def bad_words_of(tokenizer: Tokenizer, words: Sequence[str]) -> Words:
    """Returns the tokens of these words, at the start of a text and after a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(filter(None, (tuple(tokenizer.encode(text)) for text in texts))))
