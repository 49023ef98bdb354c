"""What every endpoint that takes work in does: who is it, what is asked, which lane, how much."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import TypeVar, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from engine.planning.bans import Words
from engine.planning.grammar import CompiledGrammar
from engine.planning.prefix_index import with_hashes
from engine.planning.request import Request, SamplingParams
from gateway.access.keys import Client
from gateway.access.quotas import Reservation
from gateway.endpoints.prompting import Prompting
from gateway.http.correlation import CORRELATION
from gateway.http.errors import ApiError, invalid, model_not_found, not_found, unavailable, unsupported
from gateway.http.limits import Limits, parse_object
from gateway.http.off_loop import TOKEN_BYTES, FairThreads, off_loop
from gateway.http.refusals import OLLAMA_PATH
from gateway.service import Service
from gateway.sessions.prefixes.sharing import PRIVATE
from gateway.sessions.recordings.recording import MAX_TEXT_BYTES, Recording
from gateway.store.interface import StoreUnavailable
from gateway.store.patience import INSIST_S
from gateway.wire.beams import NEUTRAL, beam_tokens, beams_of, check_beams
from gateway.wire.prompts import Tokenizer
from gateway.wire.reading import PLAIN, Reading, Thoughts
from gateway.wire.sampling import MaxTokens, Room, lane_of, sampling_params
from gateway.wire.schemas import ChatBody, CompletionBody, Sampled, check_chat
from gateway.wire.streams import LOGPROB_BYTES
from gateway.wire.strict import Body, StrictBody, read
from gateway.wire.structured import Form, answer_form, form_of
from gateway.wire.tools.use import ToolUse
from gateway.wire.writers import WholeWriter, Writer
from priority.lanes import Lane, Tenant

Read = TypeVar("Read", bound=StrictBody)
Understood = TypeVar("Understood")

REQUEST_BYTES, _BAD_WORD_BYTES = 1024, 4096
"""Making a request, or tokenising a bad word, is as much work as reading so many bytes is."""
_PROMPT_BYTES = 64 * 1024 * 1024
_COUNTED_BYTES = 16 * 1024 * 1024
"""Of one tenant's texts, what may wait to be tokenised: some seconds' work."""

CLIENT = "penstock.client"
"""In the scope of a request that the server itself sends for a client."""


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
    is_recorded: bool = False
    """The reply is kept as a whole even if it is streamed."""
    grammar: CompiledGrammar | None = None
    """What each answer has to match."""
    reading: Reading = PLAIN
    """How each answer is understood."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks for, checked and tokenised."""

    writer: WholeWriter
    stream_writer: Writer | None = None
    """The same one if the reply is streamed; None if it comes in one piece."""
    requests: list[Request]
    echoes: Sequence[str] = ()
    """The texts of the prompts, if choices begin with them."""
    in_full: bool = False
    """The reply tells more than texts; see Stream."""
    reservation: Reservation
    thoughts: Thoughts | None = None
    """Counts the reasoning in the answers."""


class Intake:
    """For one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._prompts = FairThreads(2, _PROMPT_BYTES)
        self._counts = FairThreads(1, _COUNTED_BYTES)

    def prompting(self, tenant: Tenant) -> Prompting:
        return Prompting(self._service, self.ignore, self._prompts, tenant.name)

    def counting(self, tenant: Tenant) -> Prompting:
        """Tokens for their own sake: they are made in a thread apart, so that no prompt stands behind them."""
        return Prompting(self._service, self.ignore, self._counts, tenant.name)

    def client(self, http: HttpRequest) -> Client:
        """Raises 401 if keys are configured and the request has none of them."""
        if CLIENT in http.scope:
            return cast(Client, http.scope[CLIENT])
        return self._service.access.client(http.headers.get("authorization"), http.headers.get("x-api-key"))

    async def read(self, http: HttpRequest, kind: type[Body]) -> Body:
        return await self.read_as(http, kind, lambda body, _: body)

    async def read_as(
        self, http: HttpRequest, kind: type[Read], understand: Callable[[Read, Limits], Understood]
    ) -> Understood:
        """What a body of another API's asks for."""
        # Any page may send a browser's form or text to this machine without being asked; JSON it may not. Clients of
        # Ollama often say nothing of what they send, or curl's default.
        if not http.url.path.startswith(OLLAMA_PATH) or _is_of_a_page(http):
            check_media_type(http, "application/json")
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
        self.check_beams(body)
        self.check_model(body.model)
        asked = (
            MaxTokens("max_completion_tokens", body.max_completion_tokens, may_be_fewer)
            if body.max_tokens is None
            else MaxTokens("max_tokens", body.max_tokens, may_be_fewer)
        )
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if num_logprobs is None and is_compared(body):
            num_logprobs = 0
        return Batch(
            body=body,
            prompt_field="messages",
            asked=asked,
            num_logprobs=num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            num_choices=body.num_generated,
            tenant=client.tenant,
            lane=lane_of(body.service_tier, client.tenant),
            arrival_s=arrival_s,
            grammar=await self.grammar(client.tenant, self.form(body)),
        )

    def check_beams(self, body: Sampled) -> None:
        """Raises 400 if the search that it asks for cannot be had."""
        limits = self._service.options.limits
        check_beams(body, min(limits.max_beams, self._service.engine_stats().max_num_seqs))

    def check_room(self, batch: Batch, most_tokens: int) -> None:
        """Raises 429 or 503 if no prompt of at most so many tokens, about, is let in; asked before it is tokenised."""
        self._service.dispatch.check_room(batch.lane, batch.tenant.name, batch.arrival_s, most_tokens)

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
        requests = await self.requests(batch, {f"{id}-{i}": prompt for i, prompt in enumerate(prompts)})
        return Job(
            writer=writer,
            requests=requests,
            stream_writer=writer if batch.body.stream else None,
            echoes=echoes,
            in_full=in_full,
            reservation=await self.reserve(client, requests),
            thoughts=self._service.formats.thoughts(batch.reading),
        )

    async def requests(self, batch: Batch, prompts: Mapping[str, list[int]]) -> list[Request]:
        """Makes a request of each prompt, by request id, and hashes it for all who ask what of it is cached.

        Raises:
            ApiError: 400, if a prompt does not fit, or what is said of its answer.
        """
        words, allowed = batch.body.bad_words or (), batch.body.allowed_token_ids or ()
        num_tokens = sum(map(len, prompts.values())) + len(prompts) * len(allowed)
        size = TOKEN_BYTES * num_tokens + REQUEST_BYTES * len(prompts) + _BAD_WORD_BYTES * len(words)
        return await off_loop(size, self._requests, batch, prompts)

    def _requests(self, batch: Batch, prompts: Mapping[str, list[int]]) -> list[Request]:
        words = bad_words_of(self._service.tokenizer, batch.body.bad_words or ())
        made = (self._request(batch, prompt, id, words) for id, prompt in prompts.items())
        return [with_hashes(request, self._service.options.block_size) for request in made]

    def _request(self, batch: Batch, prompt: list[int], request_id: str, bad_words: Words) -> Request:
        # A tokenizer can know tokens that the model does not.
        if max(prompt, default=0) >= self._service.vocab_size:
            raise invalid("The prompt has tokens that the model does not know.", batch.prompt_field)
        return Request(
            request_id=request_id,
            prompt_token_ids=tuple(prompt),
            sampling=self._sampling(batch, len(prompt), bad_words),
            n=batch.body.num_generated,
            beams=beams_of(batch.body, self._service.options.eos_token_ids),
            arrival_s=batch.arrival_s,
            lane=batch.lane,
            tenant=batch.tenant.name,
            salt=salt_of(batch.tenant, is_private=batch.body.store is False, asked=batch.body.cache_salt),
        )

    def _sampling(self, batch: Batch, num_prompt_tokens: int, bad_words: Words) -> SamplingParams:
        room = Room(self._service.dispatch.context_length, num_prompt_tokens)
        max_tokens = room.output_tokens(batch.asked, batch.prompt_field)
        if batch.body.use_beam_search:
            max_tokens = min(max_tokens, self._beam_tokens(batch, num_prompt_tokens))
        self._check_prompt_logprobs(batch, num_prompt_tokens)
        shows_all = batch.body.skip_special_tokens is False
        return sampling_params(
            batch.body,
            NEUTRAL if batch.body.use_beam_search else self._service.options.defaults,
            max_tokens=self._bounded(batch, max_tokens),
            num_logprobs=batch.num_logprobs,
            num_prompt_logprobs=batch.num_prompt_logprobs,
            bad_words=bad_words,
            shown_special=self._service.tokenizer.special_ids
            if shows_all
            else self._service.formats.shown(batch.reading),
            vocab_size=self._service.vocab_size,
            grammar=batch.grammar,
        )

    def _beam_tokens(self, batch: Batch, num_prompt_tokens: int) -> int:
        stats, width = self._service.engine_stats(), batch.body.num_generated
        return beam_tokens(batch.asked, num_prompt_tokens, width, stats.num_kv_tokens, stats.block_size)

    def form(self, body: ChatBody | CompletionBody) -> Form | None:
        return form_of(body, self._service.options.limits, answer_form(body.response_format))

    async def grammar(self, tenant: Tenant, form: Form | None) -> CompiledGrammar | None:
        """The grammar of an answer's form, compiled.

        Raises:
            ApiError: see Compiling.
        """
        return None if form is None else await self._service.compiling.compile(tenant.name, form)

    async def with_tools(
        self, batch: Batch, prompt: list[int], use: ToolUse, *, shows_reasoning: bool = True
    ) -> Batch:
        """The batch, whose answers to a prompt may have reasoning and calls of tools, or have to call one.

        What an answer has to match holds for what follows the reasoning, where no tool is called.

        Raises:
            ApiError: 400, if the model cannot, or cannot be held to the tools' schemas.
        """
        reading = self._service.formats.reading(prompt, use, shows_reasoning=shows_reasoning)
        answer = None if batch.grammar is None else batch.grammar.plain
        grammar = self._service.formats.grammar(prompt, reading, use, answer)
        form = None if grammar is None else Form("tools" if use.tools else "response_format", grammar)
        return replace(batch, reading=reading, grammar=await self.grammar(batch.tenant, form))

    def _bounded(self, batch: Batch, max_tokens: int) -> int:
        """The output tokens of each choice whose log probabilities can be kept until the reply is complete."""
        if batch.num_logprobs is None or (batch.body.stream and not batch.is_recorded):
            return max_tokens
        at_once = self._service.options.limits.max_logprobs
        if batch.is_recorded:
            at_once = min(at_once, MAX_TEXT_BYTES // 2 // LOGPROB_BYTES)
        most = max(1, at_once // (batch.num_choices * (1 + batch.num_logprobs)))
        if batch.asked.number is not None and max_tokens > most:
            what, way = ("that is kept", "") if batch.is_recorded else ("in one piece", ", or stream it")
            message = (
                f"A reply {what} may have at most {at_once} log probabilities: with these logprobs and choices, "
                f"{batch.asked.field} may be at most {most}. Ask for fewer{way}."
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
                sum(request.num_prompt_tokens for request in requests),
                sum(request.n * request.sampling.max_tokens for request in requests),
                requests[0].request_id,
            )
        except ApiError as error:
            self._service.metrics.note_refused(Lane(requests[0].lane), error.code or "quota")
            raise

    @contextlib.asynccontextmanager
    async def counted(self, client: Client) -> AsyncIterator[Mapping[str, str]]:
        """A request that is answered without the model, within its client's quota; gives the headers that say so.

        It counts as a request and, while it is answered, as one at work; it costs no tokens.

        Raises:
            ApiError: 429, if the quota has no room for it.
        """
        requests_only = Client(client.tenant, replace(client.quota, tokens_per_minute=None))
        lease_id = f"count-{secrets.token_hex(16)}"
        reservation = await self._service.quotas.reserve(requests_only, 0, 0, lease_id)
        try:
            yield reservation.headers
        finally:
            reservation.end(0)

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
            raise unavailable(
                f"The store did not answer for {INSIST_S:g} seconds.", "store_unavailable"
            ) from None

    async def prompt(self, batch: Batch, body: ChatBody) -> tuple[list[int], Batch]:
        """The tokens of a conversation, and the batch with what its tools come to."""
        prompt, use = await self.prompting(batch.tenant).conversation(body)
        shows_reasoning = body.include_reasoning is not False
        return prompt, await self.with_tools(batch, prompt, use, shows_reasoning=shows_reasoning)

    def ignore(self, field: str) -> None:
        """Takes a field of which nothing comes; the reply's header names it.

        Raises:
            ApiError: 400, if the operator wants such fields refused.
        """
        if self._service.options.strict:
            raise unsupported(field)
        if (asked := CORRELATION.get()) is not None:
            asked.ignored.append(field)


def is_compared(body: Sampled) -> bool:
    """Whether the log probabilities of its choices say which are shown."""
    return body.num_generated > (body.n or 1) and not body.use_beam_search


def salt_of(tenant: Tenant, *, is_private: bool = False, asked: str | None = None) -> bytes:
    """What a tenant's blocks are hashed with: nobody finds, or times, another's prompts.

    Those of private prompts (`store: false`, or a salt that was `asked` for) are apart, for their tokens never leave
    the process.
    """
    if asked is not None:
        return tenant.name.encode() + b"\0salt:" + asked.encode(errors="surrogatepass") + PRIVATE
    return tenant.name.encode() + (PRIVATE if is_private else b"")


def bad_words_of(tokenizer: Tokenizer, words: Sequence[str]) -> Words:
    """The tokens that these words are, at the start of a text and after a space."""
    texts = [text for word in words for text in (word, " " + word.lstrip())]
    return tuple(dict.fromkeys(filter(None, (tuple(tokenizer.encode(text)) for text in texts))))


def salts_of(tenant: Tenant) -> tuple[bytes, bytes]:
    """Of all its blocks."""
    return salt_of(tenant), salt_of(tenant, is_private=True)


def check_media_type(http: HttpRequest, wanted: str) -> None:
    """Raises 415 if the body is something else, or compressed."""
    encoding = http.headers.get("content-encoding", "identity")
    if encoding != "identity":
        message = f"The request has 'Content-Encoding: {encoding}', and this server reads bodies as they are."
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_content_encoding")
    if http.headers.get("content-type", "").partition(";")[0].strip().lower() != wanted:
        message = f"The request must have the header 'Content-Type: {wanted}'."
        raise ApiError(HTTPStatus.UNSUPPORTED_MEDIA_TYPE, message, code="unsupported_media_type")


def _is_of_a_page(http: HttpRequest) -> bool:
    """Whether a page may have sent it: browsers say where from."""
    return "origin" in http.headers or "sec-fetch-site" in http.headers


def route(path: str, **handlers: Callable[[HttpRequest], Awaitable[Response]]) -> Route:
    """One route for all methods of a path, so that a 405 names them all."""

    async def handle(http: HttpRequest) -> Response:
        return await handlers["GET" if http.method == "HEAD" else http.method](http)

    return Route(path, handle, methods=list(handlers))
