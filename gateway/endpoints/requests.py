"""Makes the engine's requests of asks: their prompts, what guides their answers, and the salts of their blocks."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any

from penstock.engine.planning.params import Branch, SamplingParams
from penstock.engine.planning.prefix_index import PRIVATE, with_hashes
from penstock.engine.planning.request import Request
from penstock.engine.text.bans import Words
from penstock.engine.text.grammar import CompiledGrammar, Grammar
from penstock.engine.text.thinking import ThinkingBudget
from penstock.gateway.endpoints.intake import Inbound, Intake
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.errors import invalid
from penstock.gateway.off_loop import TOKEN_BYTES, off_loop
from penstock.gateway.reply.generation import LOGPROB_BYTES
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.frames import MAX_KEPT_BYTES
from penstock.gateway.sessions.responses.threads import NO_THREAD, Thread
from penstock.gateway.wire.ask import Ask, ChatPrompt, Turn
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.enforced import enforced_form, enforced_tools
from penstock.gateway.wire.labels import LabelSteps, label_branches
from penstock.gateway.wire.questions import Question, Questions
from penstock.gateway.wire.reading import PLAIN, Reading, needs_grammar
from penstock.gateway.wire.sampling import (
    NEUTRAL,
    beam_tokens,
    beams_of,
    context_exceeded,
    keeping_of,
    output_tokens,
    sampling_params,
    watermark_of,
)
from penstock.gateway.wire.structured import Form
from penstock.gateway.wire.tokenizer import Tokenizer
from penstock.priority.lanes import Tenant

_GRAMMAR_WORK = 10
"""Writing the grammar of a tool is as much work as tokenising so many times its text."""
_REQUEST_BYTES, _BAD_WORD_BYTES, _OPTION_BYTES = 1024, 4096, 64
"""The bytes whose reading is as much work as making a request, tokenising a bad word, or one possible answer."""
_NO_END = (
    "Another answer begins with this one, and the model's configuration names no token that ends an answer."
)
_NO_OUTPUT = SamplingParams(temperature=0.0, max_tokens=0)
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


@dataclass(frozen=True, slots=True, kw_only=True)
class RequestGroup:
    """The requests of an arrival, and what is known of their answers."""

    requests: list[Request]
    reading: Reading = PLAIN
    echoes: Sequence[str] = ()
    """The texts of the prompts, if choices begin with them."""
    steps: Sequence[Sequence[LabelSteps]] = ()
    """The steps of each question's labels."""


class RequestMaker:
    """Makes the requests of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    async def make(self, inbound: Inbound, reply_id: str, thread: Thread = NO_THREAD) -> RequestGroup:
        """Makes the requests of an arrival.

        Args:
            thread: the one that a turn continues.

        Raises:
            ApiError: 400, if a prompt or a bound on its answer does not fit, or the model cannot do what is asked for.
        """
        ask, prompting = inbound.ask, self._intake.prompting(inbound.tenant, inbound.urgency.lane)
        if isinstance(ask.input, Questions):
            return await self._scored(inbound, ask.input, prompting, reply_id)
        answer = await self._answer_grammar(inbound)
        prompts = await prompting.prompts(ask, thread)
        guidance = await self._guidance(inbound, prompting, prompts[0], answer)
        ids = [reply_id] if inbound.is_recorded else [f"{reply_id}-{i}" for i in range(len(prompts))]
        requests = await self._requests(inbound, dict(zip(ids, prompts, strict=True)), guidance)
        echoes = await self._echoes(ask, prompts) if ask.reply_options.echo else ()
        return RequestGroup(requests=requests, reading=guidance.reading, echoes=echoes)

    async def _echoes(self, ask: Ask, prompts: list[list[int]]) -> Sequence[str]:
        """Returns the text of each prompt: as it was sent, or spelt out."""
        assert isinstance(ask.input, tuple)
        if texts := ask.input[0].texts:
            return texts
        decode = partial(self._service.tokenizer.decode, skip_special=False)
        return await off_loop(TOKEN_BYTES * sum(map(len, prompts)), lambda: list(map(decode, prompts)))

    # Guidance

    async def _answer_grammar(self, inbound: Inbound) -> CompiledGrammar | None:
        """Returns the grammar that answers without calls have to match; raises as Compiling does, or as `ignore`."""
        if inbound.ask.form is None:
            return None
        form, left_out = await off_loop(len(inbound.ask.form.grammar.text), enforced_form, inbound.ask.form)
        for field in left_out:
            self._intake.ignore(field)
        return await self._service.compiling.compile(inbound.tenant.name, form)

    async def _guidance(
        self, inbound: Inbound, prompting: Prompting, prompt: list[int], answer: CompiledGrammar | None
    ) -> Guidance:
        """Returns the guidance of the answers to a prompt.

        An answer has to match its grammar after its reasoning, where no tool is called.

        Raises:
            ApiError: 400, if the model cannot call tools, or cannot be held to their schemas.
        """
        ask, formats = inbound.ask, self._service.formats
        if not isinstance(ask.input, ChatPrompt | Turn):
            return Guidance(grammar=answer)
        reading = formats.reading(prompt, ask.tools, shows_reasoning=ask.shows_reasoning)
        form = await self._form(inbound, prompting, prompt, reading, answer and answer.plain)
        compile_form = self._service.compiling.compile
        return Guidance(
            reading=reading,
            grammar=None if form is None else await compile_form(inbound.tenant.name, form),
            thinking=None if ask.reasoning is None else self._thinking(ask.reasoning, prompt, reading),
        )

    async def _form(
        self,
        inbound: Inbound,
        prompting: Prompting,
        prompt: list[int],
        reading: Reading,
        answer: Grammar | None,
    ) -> Form | None:
        """Returns the form of a whole reply, reasoning and then calls or an answer; None if it is free."""
        use, formats = inbound.ask.tools, self._service.formats
        if not needs_grammar(use, answer):
            grammar = None if answer is None else formats.grammar(prompt, reading, use, answer)
            return None if grammar is None else Form("response_format", grammar)

        def write() -> tuple[Grammar | None, list[str]]:
            held, left_out = enforced_tools(use)
            return formats.grammar(prompt, reading, held, answer, inbound.tenant.name), left_out

        grammar, left_out = await prompting.run(_GRAMMAR_WORK * use.num_chars, write)
        for field in left_out:
            self._intake.ignore(field)
        return None if grammar is None else Form("tools", grammar)

    def _thinking(self, reasoning: Reasoned, prompt: list[int], reading: Reading) -> ThinkingBudget | None:
        prompts = self._service.prompts
        number = reasoning.budget(prompts.variables, self._service.dispatch.context_length)
        if number is None:
            return None
        return self._service.formats.budget(prompt, reading, number, prompts.around_closing)

    # Requests

    async def _requests(
        self, inbound: Inbound, prompts: Mapping[str, list[int]], guidance: Guidance
    ) -> list[Request]:
        """Makes a request of each prompt, by request id, with the hashes of its blocks."""
        sampling = inbound.ask.sampling
        words = (sampling and sampling.bad_words) or ()
        num_allowed = len((sampling and sampling.allowed_token_ids) or ())

        def make() -> list[Request]:
            bad_words = bad_words_of(self._service.tokenizer, words) if words else ()
            return [self._request(inbound, id, prompt, guidance, bad_words) for id, prompt in prompts.items()]

        num_tokens = sum(map(len, prompts.values())) + len(prompts) * num_allowed
        size = TOKEN_BYTES * num_tokens + _REQUEST_BYTES * len(prompts) + _BAD_WORD_BYTES * len(words)
        return await off_loop(size, make)

    def _request(
        self, inbound: Inbound, id: str, prompt: list[int], guidance: Guidance, bad_words: Words
    ) -> Request:
        body, options = inbound.ask.sampling, self._service.options
        # A tokenizer can know tokens that the model does not.
        if max(prompt, default=0) >= self._service.vocab_size:
            raise invalid("The prompt has tokens that the model does not know.", inbound.ask.field)
        fields: dict[str, Any] = {"sampling": _NO_OUTPUT, "pooling": options.embedding.pooling}
        if body is None:
            self._check_whole([len(prompt)], inbound.ask.field)
        else:
            sampling = self.sampling(
                inbound.ask, len(prompt), guidance, bad_words, is_recorded=inbound.is_recorded
            )
            beams = beams_of(body, options.eos_token_ids) if body.use_beam_search else None
            keeping = keeping_of(body, options.keep)
            fields = {"sampling": sampling, "n": body.num_generated, "beams": beams, "keeping": keeping}
        return with_hashes(_common(inbound, id, prompt, **fields), options.block_size)

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
        context_length = self._service.dispatch.longest(keeping_of(body, options.keep))
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
            max_tokens=self._bounded(
                ask, max_tokens, is_recorded=is_recorded or ask.retention.stored is not None
            ),
            num_logprobs=ask.num_logprobs,
            num_prompt_logprobs=ask.num_prompt_logprobs,
            bad_words=bad_words,
            shown_special=self._service.tokenizer.special_ids
            if shows_all
            else self._service.formats.shown(guidance.reading),
            vocab_size=self._service.vocab_size,
            grammar=guidance.grammar,
            thinking=None if body.use_beam_search else guidance.thinking,
            watermark=watermark_of(body, options.watermark, is_for_all=options.watermarks_all)
            if body.watermark is not None or options.watermarks_all
            else None,
        )

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

    # Questions

    async def _scored(
        self, inbound: Inbound, questions: Questions, prompting: Prompting, reply_id: str
    ) -> RequestGroup:
        """Makes one request whose one pass over the input scores the answers of all questions."""
        shared, rests = await prompting.branched(questions, inbound.ask.field)
        closing = self._service.formats.closing([*shared, *rests[0]])
        rests = [rest + closing for rest in rests]
        prompt, rests = (shared + rests[0], [[]]) if len(rests) == 1 else (shared, rests)
        branches, steps = await self._branches(questions.questions, rests, prompting)
        request = _common(inbound, reply_id, prompt, sampling=_NO_OUTPUT, n=len(branches), branches=branches)
        size = TOKEN_BYTES * request.num_prompt_tokens
        return RequestGroup(
            requests=[await off_loop(size, self._checked, request, inbound.ask.field)], steps=steps
        )

    async def _branches(
        self, questions: Sequence[Question], rests: list[list[int]], prompting: Prompting
    ) -> tuple[tuple[Branch, ...], list[list[LabelSteps]]]:
        ends = self._service.options.eos_token_ids

        def branches() -> tuple[tuple[Branch, ...], list[list[LabelSteps]]]:
            labels = [self._labels(question) for question in questions]
            self._check_number(len(questions), sum(len(label) - 1 for texts in labels for label in texts))
            return label_branches(list(zip(rests, labels, strict=True)), ends)

        options = [option for question in questions for option in question.options]
        num_chars = sum(len(option.label) for option in options)
        least = num_chars // self._service.options.limits.max_bytes_per_token - len(options)
        self._check_number(len(questions), least)
        return await prompting.run(num_chars + _OPTION_BYTES * len(options), branches)

    def _check_number(self, num_questions: int, num_tokens: int) -> None:
        """Raises 400 for too many questions and tokens of answers, of which those after each first one count."""
        most = self._service.options.limits.max_branches
        if num_questions + num_tokens > most:
            message = (
                f"The questions, and the tokens of their answers after each first one, may be at most {most}."
            )
            raise invalid(message, "questions")

    def _labels(self, question: Question) -> list[list[int]]:
        """
        Raises:
            ApiError: 400, if the tokens of two answers are the same, or one has none; or if one begins with another,
                and the model has no token to end an answer with.
        """
        labels = [self._service.tokenizer.encode(option.label) for option in question.options]
        seen: set[tuple[int, ...]] = {()}
        for number, label in enumerate(map(tuple, labels)):
            if label in seen:
                message = "The model's tokenizer cannot tell this answer from another one, or from none."
                raise invalid(message, question.option_field(number))
            seen.add(label)
        if not self._service.options.eos_token_ids:
            ordered = sorted((tuple(label), number) for number, label in enumerate(labels))
            for (label, number), (longer, _) in pairwise(ordered):
                if longer[: len(label)] == label:
                    raise invalid(_NO_END, question.option_field(number))
        return labels

    def _checked(self, request: Request, field: str) -> Request:
        """Returns the request with the hashes of its prompt; raises 400 if it does not fit into the context."""
        lengths = [len(request.prompt_token_ids)]
        for branch in request.branches[1:]:
            lengths.append(lengths[branch.parent] + len(branch.token_ids))
        self._check_whole(lengths, field)
        given = (request.prompt_token_ids, *(branch.token_ids for branch in request.branches))
        scored = (branch.candidates for branch in request.branches)
        if any(max(tokens, default=0) >= self._service.vocab_size for tokens in (*given, *scored)):
            raise invalid("The request has tokens that the model does not know.", field)
        return with_hashes(request, self._service.options.block_size)

    def _check_whole(self, lengths: Sequence[int], field: str) -> None:
        """Raises 400 if one of these inputs, of which everything is kept, does not fit into the context."""
        context_length = self._service.dispatch.longest(None)
        if max(lengths) >= context_length:
            raise context_exceeded(context_length, f"{max(lengths)} tokens", field)


def _common(inbound: Inbound, id: str, prompt: Sequence[int], **fields: Any) -> Request:
    """Returns a request with the fields that all requests of an arrival have in common."""
    return Request(
        request_id=id,
        prompt_token_ids=tuple(prompt),
        arrival_s=inbound.at_s,
        lane=inbound.urgency.lane,
        tried_lane=inbound.urgency.tried,
        ttft_s=inbound.urgency.ttft_s,
        tenant=inbound.tenant.name,
        salt=ask_salt(inbound.ask, inbound.tenant),
        **fields,
    )


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
