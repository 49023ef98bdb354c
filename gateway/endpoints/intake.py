"""What every endpoint that takes work in does: who is it, what is asked, which lane, which tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar

import anyio
import anyio.to_thread
from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from engine.planning.grammar import Grammar
from engine.planning.grammars import GrammarError
from engine.planning.request import Request, SamplingParams
from gateway.access.keys import Client
from gateway.access.quotas import Reservation
from gateway.http.correlation import CORRELATION
from gateway.http.errors import ApiError, invalid, model_not_found, not_found, unavailable, unsupported
from gateway.http.limits import Limits, parse_object
from gateway.http.off_loop import TOKENIZING, off_loop
from gateway.service import Service
from gateway.sessions.prefixes.sharing import PRIVATE
from gateway.sessions.recordings.recording import Recording
from gateway.store.interface import StoreUnavailable
from gateway.wire.conversation import as_dict, chat_tools, check_messages, num_chars_of
from gateway.wire.embeddings import EmbeddingsBody
from gateway.wire.prompts import Tokenizer, check_token_ids
from gateway.wire.reading import PLAIN, Reading
from gateway.wire.sampling import MaxTokens, Room, context_exceeded, lane_of, sampling_params
from gateway.wire.schemas import (
    Body,
    ChatBody,
    CompletionBody,
    Message,
    Sampled,
    StrictBody,
    check_chat,
    read,
)
from gateway.wire.structured import Form, answer_form, form_of
from gateway.wire.tools.use import NO_TOOLS, ToolUse
from gateway.wire.writers import Writer
from priority.lanes import Lane, Tenant

Read = TypeVar("Read", bound=StrictBody)
Understood = TypeVar("Understood")

_COMPILING = anyio.CapacityLimiter(1)
"""Grammars are compiled one after another."""
MESSAGE_CHARS = 100
"""The work that a template has with one message, beside its text."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Batch:
    """What the requests of one body have in common."""

    body: Sampled
    prompt_field: str
    asked: MaxTokens
    num_logprobs: int | None
    num_prompt_logprobs: int | None = None
    num_choices: int
    """Of all its prompts together."""
    tenant: Tenant
    lane: Lane
    arrival_s: float
    grammar: Grammar | None = None
    """What each answer has to match."""
    reading: Reading = PLAIN
    """How each answer is understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks for, checked and tokenised."""

    writer: Writer
    requests: list[Request]
    stream: bool
    echoes: Sequence[str] = ()
    """The texts of the prompts, if choices begin with them."""
    in_full: bool = False
    """The reply tells more than texts; see Stream."""
    reservation: Reservation


class Intake:
    """For one service."""

    def __init__(self, service: Service) -> None:
        self._service = service

    def client(self, http: HttpRequest) -> Client:
        """Raises 401 if keys are configured and the request has none of them."""
        return self._service.access.client(http.headers.get("authorization"), http.headers.get("x-api-key"))

    async def read(self, http: HttpRequest, kind: type[Body]) -> Body:
        return await self.read_as(http, kind, lambda body, _: body)

    async def read_as(
        self, http: HttpRequest, kind: type[Read], understand: Callable[[Read, Limits], Understood]
    ) -> Understood:
        """What a body of another API's asks for."""
        media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
        if media_type != "application/json":
            # Any page may send a browser's form or text to this machine without being asked; JSON it may not.
            raise ApiError(
                HTTPStatus.UNSUPPORTED_MEDIA_TYPE,
                "The request must have the header 'Content-Type: application/json'.",
                code="unsupported_media_type",
            )
        body, limits = await http.body(), self._service.options.limits
        return await off_loop(
            len(body), lambda: understand(read(kind, parse_object(body, limits), limits, self.ignore), limits)
        )

    def check_model(self, name: str) -> None:
        if name not in self._service.options.models:
            raise model_not_found(name)

    async def chat(
        self, client: Client, body: ChatBody, arrival_s: float, *, may_be_fewer: bool = False
    ) -> Batch:
        """What a chat asks for, checked.

        Args:
            may_be_fewer: where the context has no room for all tokens that it asks for, there are fewer.

        Raises:
            ApiError: 400; 404 for another model; 403 for a lane that is not allowed.
        """
        check_chat(body, self._service.options.limits)
        self.check_model(body.model)
        asked = (
            MaxTokens("max_completion_tokens", body.max_completion_tokens, may_be_fewer)
            if body.max_tokens is None
            else MaxTokens("max_tokens", body.max_tokens, may_be_fewer)
        )
        return Batch(
            body=body,
            prompt_field="messages",
            asked=asked,
            num_logprobs=(body.top_logprobs or 0) if body.logprobs else None,
            num_prompt_logprobs=body.prompt_logprobs,
            num_choices=body.n or 1,
            tenant=client.tenant,
            lane=lane_of(body.service_tier, client.tenant),
            arrival_s=arrival_s,
            grammar=await self.grammar(client.tenant, self.form(body)),
        )

    def check_room(self, batch: Batch) -> None:
        """Raises 429 or 503 if its lane is full; asked before a prompt is tokenised."""
        self._service.dispatch.check_room(batch.lane, batch.tenant.name)

    async def job(
        self,
        client: Client,
        batch: Batch,
        prompts: list[list[int]],
        id: str,
        writer: Writer,
        *,
        echoes: Sequence[str] = (),
        in_full: bool = False,
    ) -> Job:
        """
        Raises:
            ApiError: 400, if a prompt does not fit; 429, if it is more than the client's quota has left.
        """
        requests = [self.request(batch, prompt, f"{id}-{number}") for number, prompt in enumerate(prompts)]
        return Job(
            writer=writer,
            requests=requests,
            stream=bool(batch.body.stream),
            echoes=echoes,
            in_full=in_full,
            reservation=await self.reserve(client, requests),
        )

    def request(self, batch: Batch, prompt: list[int], request_id: str) -> Request:
        # A tokenizer can know tokens that the model does not.
        if max(prompt, default=0) >= self._service.vocab_size:
            raise invalid("The prompt has tokens that the model does not know.", batch.prompt_field)
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=self._sampling(batch, len(prompt)),
            n=batch.body.n or 1,
            arrival_s=batch.arrival_s,
            lane=batch.lane,
            tenant=batch.tenant.name,
            salt=salt_of(batch.tenant, is_private=batch.body.store is False, asked=batch.body.cache_salt),
        )

    def _sampling(self, batch: Batch, num_prompt_tokens: int) -> SamplingParams:
        room = Room(self._service.dispatch.context_length, num_prompt_tokens)
        max_tokens = room.output_tokens(batch.asked, batch.prompt_field)
        self._check_prompt_logprobs(batch, num_prompt_tokens)
        shows_all = batch.body.skip_special_tokens is False
        return sampling_params(
            batch.body,
            self._service.options.defaults,
            max_tokens=self._bounded(batch, max_tokens),
            num_logprobs=batch.num_logprobs,
            num_prompt_logprobs=batch.num_prompt_logprobs,
            banned=banned_tokens(self._service.tokenizer, batch.body.bad_words or ()),
            shown_special=self._service.tokenizer.special_ids
            if shows_all
            else self._service.formats.shown(batch.reading),
            vocab_size=self._service.vocab_size,
            grammar=batch.grammar,
        )

    def form(self, body: ChatBody | CompletionBody) -> Form | None:
        return form_of(body, self._service.options.limits, answer_form(body.response_format))

    async def grammar(self, tenant: Tenant, form: Form | None) -> Grammar | None:
        """The grammar of an answer's form, compiled.

        Raises:
            ApiError: 400 that names the field, if it is none that an answer can be held to.
        """
        if form is None:
            return None
        grammars = self._service.grammars
        if grammars.knows(tenant.name, form.grammar):
            return form.grammar
        try:
            await anyio.to_thread.run_sync(grammars.compile, tenant.name, form.grammar, limiter=_COMPILING)
        except GrammarError as error:
            raise invalid(f"Invalid '{form.field}': {error}.", form.field, "invalid_grammar") from None
        return form.grammar

    async def with_tools(
        self, batch: Batch, prompt: list[int], use: ToolUse, *, shows_reasoning: bool = True
    ) -> Batch:
        """The batch, whose answers to a prompt may have reasoning and calls of tools, or have to call one.

        Raises:
            ApiError: 400, if the model cannot, or cannot be held to the tools' schemas.
        """
        reading = self._service.formats.reading(prompt, use, shows_reasoning=shows_reasoning)
        if not use.required:
            return replace(batch, reading=reading)
        form = Form("tools", self._service.formats.grammar(reading, use))
        return replace(batch, reading=reading, grammar=await self.grammar(batch.tenant, form))

    def _bounded(self, batch: Batch, max_tokens: int) -> int:
        """The output tokens of each choice whose log probabilities can be kept until the reply is complete."""
        if batch.num_logprobs is None or batch.body.stream:
            return max_tokens
        at_once = self._service.options.limits.max_logprobs
        most = max(1, at_once // (batch.num_choices * (1 + batch.num_logprobs)))
        if batch.asked.number is not None and max_tokens > most:
            message = (
                f"A reply in one piece may have at most {at_once} log probabilities: with these logprobs and choices, "
                f"{batch.asked.field} may be at most {most}. Ask for fewer, or stream it."
            )
            raise invalid(message, batch.asked.field)
        return min(max_tokens, most)

    def _check_prompt_logprobs(self, batch: Batch, num_prompt_tokens: int) -> None:
        """They come in one piece, streamed or not."""
        if batch.num_prompt_logprobs is None:
            return
        at_once = self._service.options.limits.max_logprobs
        if num_prompt_tokens * batch.num_choices * (1 + batch.num_prompt_logprobs) > at_once:
            message = f"The prompts of a request may have at most {at_once} log probabilities. Ask for fewer."
            raise invalid(message, batch.prompt_field)

    async def reserve(self, client: Client, requests: Sequence[Request]) -> Reservation:
        """Room for these requests in the quota of who sends them.

        Raises:
            ApiError: 429, if there is none.
        """
        try:
            return await self._service.quotas.reserve(
                client,
                sum(len(request.prompt_token_ids) for request in requests),
                sum(request.n * request.sampling.max_tokens for request in requests),
                requests[0].request_id,
            )
        except ApiError as error:
            self._service.metrics.note_refused(Lane(requests[0].lane), error.code or "quota")
            raise

    async def recording(self, tenant: str, recording_id: str) -> Recording:
        """
        Raises:
            ApiError: 404, if the tenant has none of this id; 503, if that cannot be said now.
        """
        recording = await self.find_recording(tenant, recording_id)
        if recording is None:
            self._service.dispatch.check_open()  # what was interrupted is known when the model is loaded
            raise not_found(f"There is no reply '{recording_id}'.", "id")
        return recording

    async def find_recording(self, tenant: str, recording_id: str) -> Recording | None:
        """Raises 503 if it cannot be said now whether there is one."""
        try:
            return await self._service.recordings.find(tenant, recording_id)
        except StoreUnavailable:
            raise unavailable("The store is not there.", "store_unavailable") from None

    async def encode_chat(
        self,
        messages: list[Message],
        use: ToolUse = NO_TOOLS,
        variables: Mapping[str, Any] | None = None,
        *,
        add_generation_prompt: bool = True,
        continues: bool = False,
    ) -> list[int]:
        """The tokens of a conversation; with `continues`, its last message has no end."""
        check_messages(messages)
        num_chars = num_chars_of(messages, use)
        self.check_length(num_chars, "messages")

        def encode() -> list[int]:
            return self._service.prompts.chat(
                [as_dict(message) for message in messages],
                add_generation_prompt=add_generation_prompt,
                continues=continues,
                tools=use.tools,
                variables=variables,
            )

        return await off_loop(num_chars + MESSAGE_CHARS * len(messages), encode, threads=TOKENIZING)

    async def prompt(self, batch: Batch, body: ChatBody) -> tuple[list[int], Batch]:
        """The tokens of a conversation, and the batch with what its tools come to."""
        prompt, use = await self.conversation(body)
        shows_reasoning = body.include_reasoning is not False
        return prompt, await self.with_tools(batch, prompt, use, shows_reasoning=shows_reasoning)

    async def conversation(self, body: ChatBody) -> tuple[list[int], ToolUse]:
        """The tokens of a conversation, and the tools that are in it."""
        use, continues = chat_tools(body), bool(body.continue_final_message)
        prompt = await self.encode_chat(
            body.messages,
            use,
            self.variables(body.chat_template_kwargs, body.reasoning_effort),
            add_generation_prompt=body.add_generation_prompt is not False and not continues,
            continues=continues,
        )
        return truncated(prompt, body), use

    def variables(self, given: Mapping[str, Any] | None, reasoning_effort: str | None) -> dict[str, Any]:
        """What the chat template is told beside messages and tools.

        Raises:
            ApiError: 400 for what is not the client's to tell.
        """
        variables, known = dict(given or {}), self._service.prompts.variables
        self._service.prompts.check_variables(variables, "chat_template_kwargs")
        if reasoning_effort is not None:
            switches = [name for name in ("enable_thinking", "thinking") if name in known]
            if "reasoning_effort" in known:
                variables.setdefault("reasoning_effort", reasoning_effort)
            elif reasoning_effort == "none" and switches:
                variables = dict.fromkeys(switches, False) | variables
            else:
                self.ignore("reasoning_effort")
        return variables

    def ignore(self, field: str) -> None:
        """Takes a field of which nothing comes; the reply's header names it.

        Raises:
            ApiError: 400, if the operator wants such fields refused.
        """
        if self._service.options.strict:
            raise unsupported(field)
        if (asked := CORRELATION.get()) is not None:
            asked.ignored.append(field)

    async def encode_prompts(self, body: CompletionBody) -> list[list[int]]:
        texts, token_ids = await off_loop(4 * len(body.prompt), _split_prompt, body.prompt)
        limits, num_prompts = self._service.options.limits, len(texts) + len(token_ids)
        if not num_prompts or num_prompts > limits.max_prompts:
            raise invalid(f"'prompt' must be 1 to {limits.max_prompts} prompts.", "prompt")
        if num_prompts * (body.n or 1) > limits.max_choices:
            raise invalid(f"'n' times the prompts must be at most {limits.max_choices}.", "n")
        if body.suffix is not None and token_ids:
            raise invalid("'suffix' needs a 'prompt' of text.", "suffix")
        token_ids = [truncated(prompt, body) for prompt in token_ids]
        for prompt in token_ids:
            await off_loop(4 * len(prompt), self.check_prompt_ids, prompt)
        if body.suffix:
            return [await self._encode_around(text, body.suffix) for text in texts]
        add_special = body.add_special_tokens is not False
        encoded = [await self.encode_text(text, "prompt", add_special=add_special) for text in texts]
        return token_ids or [truncated(prompt, body) for prompt in encoded]

    async def _encode_around(self, text: str, suffix: str) -> list[int]:
        """The tokens that ask for what is between two texts."""
        self.check_length(len(text) + len(suffix), "prompt")
        return await off_loop(
            len(text) + len(suffix), self._service.prompts.around, text, suffix, threads=TOKENIZING
        )

    async def encode_inputs(self, body: EmbeddingsBody) -> list[list[int]]:
        texts, token_ids = await off_loop(4 * len(body.input), _split_prompt, body.input)
        most, add_special = self._service.options.limits.max_inputs, body.add_special_tokens is not False
        if not 1 <= len(texts) + len(token_ids) <= most:
            raise invalid(f"'input' must be 1 to {most} texts.", "input")
        prompts = token_ids or [
            await self.encode_text(text, "input", add_special=add_special) for text in texts
        ]
        prompts = [truncated(prompt, body) for prompt in prompts]
        for prompt in prompts:
            await off_loop(4 * len(prompt), self.check_prompt_ids, prompt, "input")
        return prompts

    async def encode_text(self, text: str, field: str, *, add_special: bool = True) -> list[int]:
        self.check_length(len(text), field)
        encode = partial(self._service.prompts.text, add_special=add_special)
        token_ids = await off_loop(len(text), encode, text, threads=TOKENIZING)
        if not token_ids:
            raise invalid(f"'{field}' must not be empty.", field)
        return token_ids

    def check_prompt_ids(self, prompt: Sequence[int], field: str = "prompt") -> None:
        if not prompt:
            raise invalid(f"'{field}' must not have an empty list of tokens.", field)
        if len(prompt) >= self._service.dispatch.context_length:
            raise context_exceeded(self._service.dispatch.context_length, f"{len(prompt)} tokens", field)
        check_token_ids(prompt, self._service.vocab_size, field)

    def check_length(self, num_chars: int, field: str) -> None:
        """Refuses what is too long whatever its tokens are, before it is tokenised."""
        context_length = self._service.dispatch.context_length
        if num_chars > context_length * self._service.options.limits.max_bytes_per_token:
            raise context_exceeded(context_length, f"{num_chars} characters", field)


def salt_of(tenant: Tenant, *, is_private: bool = False, asked: str | None = None) -> bytes:
    """What a tenant's blocks are hashed with: nobody finds, or times, another's prompts.

    Those of private prompts (`store: false`, or a salt that was `asked` for) are apart, for their tokens never leave
    the process.
    """
    if asked is not None:
        return tenant.name.encode() + b"\0salt:" + asked.encode(errors="surrogatepass") + PRIVATE
    return tenant.name.encode() + (PRIVATE if is_private else b"")


def truncated(prompt: list[int], body: Sampled | EmbeddingsBody) -> list[int]:
    """The last tokens of a prompt, as many as the body asks for."""
    return prompt if body.truncate_prompt_tokens is None else prompt[-body.truncate_prompt_tokens :]


def banned_tokens(tokenizer: Tokenizer, words: Sequence[str]) -> list[int]:
    """The tokens that these words are, at the start of a text and after a space.

    Raises:
        ApiError: 400 for a word that is several tokens.
    """
    banned: list[int] = []
    for place, word in enumerate(words):
        inside = tokenizer.encode(word)
        if len(inside) != 1:
            message = f"'{word}' is {len(inside)} tokens; only words of one token can be kept from an answer."
            raise invalid(message, f"bad_words[{place}]")
        after_space = tokenizer.encode(" " + word.lstrip())
        banned += inside + (after_space if len(after_space) == 1 else [])
    return banned


def salts_of(tenant: Tenant) -> tuple[bytes, bytes]:
    """Of all its blocks."""
    return salt_of(tenant), salt_of(tenant, is_private=True)


def _split_prompt(prompt: str | list[str] | list[int] | list[list[int]]) -> tuple[list[str], list[list[int]]]:
    """The four forms of `prompt` as texts or as token ids."""
    if isinstance(prompt, str):
        return [prompt], []
    if prompt and isinstance(prompt[0], int):
        return [], [[token_id for token_id in prompt if isinstance(token_id, int)]]
    texts = [text for text in prompt if isinstance(text, str)]
    return texts, [token_ids for token_ids in prompt if isinstance(token_ids, list)]


def route(path: str, **handlers: Callable[[HttpRequest], Awaitable[Response]]) -> Route:
    """One route for all methods of a path, so that a 405 names them all."""

    async def handle(http: HttpRequest) -> Response:
        return await handlers["GET" if http.method == "HEAD" else http.method](http)

    return Route(path, handle, methods=list(handlers))
