"""The intake of all endpoints: a request's client, body and lane, and whether there is room for it."""

from __future__ import annotations

import contextlib
import secrets
import time
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar, cast

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import Route

from penstock.engine.planning.grammar import CompiledGrammar
from penstock.engine.planning.request import Request
from penstock.engine.planning.thinking import ThinkingBudget
from penstock.gateway.access.keys import Client
from penstock.gateway.access.quotas import Reservation
from penstock.gateway.endpoints.params import (
    Arrival,
    GenerationParams,
    RequestMaker,
    Understood,
    asked_tokens,
    is_compared,
)
from penstock.gateway.endpoints.prompting import Prompting
from penstock.gateway.endpoints.replies import Keep, LiveReply
from penstock.gateway.http.correlation import CORRELATION
from penstock.gateway.http.errors import ApiError, model_not_found, not_found, unavailable, unsupported
from penstock.gateway.http.limits import Limits, parse_object
from penstock.gateway.http.off_loop import FairThreads, off_loop
from penstock.gateway.http.refusals import OLLAMA_PATH
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.store.interface import StoreUnavailable
from penstock.gateway.store.patience import INSIST_S
from penstock.gateway.wire.beams import check_beams
from penstock.gateway.wire.efforts import Reasoned
from penstock.gateway.wire.lanes import Tiered, slo_of, urgency_of
from penstock.gateway.wire.reading import Reading
from penstock.gateway.wire.schemas import ChatBody, CompletionBody, Sampled, check_chat
from penstock.gateway.wire.shapes import Head
from penstock.gateway.wire.streams import KeptStream, Stream, Writer
from penstock.gateway.wire.strict import Body, StrictBody, read
from penstock.gateway.wire.structured import Form, answer_form, form_of
from penstock.gateway.wire.tools.use import ToolUse
from penstock.priority.lanes import Lane, Tenant, Urgency

Read = TypeVar("Read", bound=StrictBody)

_PROMPT_BYTES = 64 * 1024 * 1024
_COUNTED_BYTES = 16 * 1024 * 1024
"""The bytes of one tenant's texts that may wait to be tokenised, which is some seconds of work."""

CLIENT = "penstock.client"
"""The scope's name for the client, in a request that the server itself sends for one."""


class Intake:
    """The intake of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self.requests = RequestMaker(service).requests
        self._prompts = FairThreads(2, _PROMPT_BYTES)
        self._counts = FairThreads(1, _COUNTED_BYTES)

    def prompting(self, tenant: Tenant, lane: Lane) -> Prompting:
        return self._prompting(tenant, lane, self._prompts)

    def counting(self, tenant: Tenant) -> Prompting:
        """Returns a Prompting for counting tokens, in a separate thread so that no prompt has to wait for it."""
        return self._prompting(tenant, tenant.sure_lane, self._counts)

    def _prompting(self, tenant: Tenant, lane: Lane, threads: FairThreads) -> Prompting:
        note_refused = partial(self._service.metrics.note_refused, lane)
        return Prompting(
            self._service.prompts,
            self._service.options.limits,
            threads,
            tenant.name,
            context_length=self._service.dispatch.context_length,
            vocab_size=self._service.vocab_size,
            ignore=self.ignore,
            note_refused=note_refused,
        )

    def client(self, http: HttpRequest) -> Client:
        """Raises 401 if keys are configured and the request has none of them."""
        if CLIENT in http.scope:
            return cast(Client, http.scope[CLIENT])
        headers = http.headers
        client = self._service.access.client(headers.get("authorization"), headers.get("x-api-key"))
        if (asked := CORRELATION.get()) is not None:
            asked.tenant = client.tenant.name
        return client

    def tenant(self, http: HttpRequest) -> str:
        """Returns the name of the client's tenant, and raises like `client`."""
        return self.client(http).tenant.name

    async def begin(
        self, http: HttpRequest, kind: type[Read], understand: Callable[[Read, Limits], Understood]
    ) -> Arrival[Understood]:
        """Reads a request for work.

        Raises:
            ApiError: 401 without a key where there are some; 503 if no work is taken; 4xx for the body and headers.
        """
        at_s, client, slo = self._service.clock(), self.client(http), slo_of(http.headers)
        self._service.dispatch.check_open()
        body = await self.read_as(http, kind, understand)
        return Arrival(at_s, client, body, len(await http.body()), slo)

    async def read(self, http: HttpRequest, kind: type[Body]) -> Body:
        return await self.read_as(http, kind, as_sent)

    async def read_as(
        self, http: HttpRequest, kind: type[Read], understand: Callable[[Read, Limits], Understood]
    ) -> Understood:
        """Reads a body of any API and translates it."""
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
        self, came: Arrival[Any], body: ChatBody, *, may_be_fewer: bool = False
    ) -> GenerationParams:
        """Checks what a chat asks for.

        Args:
            may_be_fewer: where the context has no room for all tokens that it asks for, there are fewer.

        Raises:
            ApiError: 400; 404 for another model; 403 for a lane that is not allowed.
        """
        check_chat(body, self._service.options.limits)
        self.check_beams(body)
        self.check_model(body.model)
        num_logprobs = (body.top_logprobs or 0) if body.logprobs else None
        if num_logprobs is None and is_compared(body):
            num_logprobs = 0
        return GenerationParams(
            body=body,
            prompt_field="messages",
            asked=asked_tokens(body, may_be_fewer=may_be_fewer),
            num_logprobs=num_logprobs,
            num_prompt_logprobs=body.prompt_logprobs,
            num_choices=body.num_generated,
            client=came.client,
            urgency=self.urgency(came, body),
            arrival_s=came.at_s,
            grammar=await self.grammar(came.tenant, self.form(body)),
        )

    def admit(self, came: Arrival[Any], body: Tiered) -> Urgency:
        """Returns how urgent a request is.

        Raises:
            ApiError: 404 for another model; 400 or 403 as `urgency_of`; 429 or 503 if its lane has no room for it.
        """
        self.check_model(body.model)
        urgency = self.urgency(came, body)
        self._service.dispatch.check_room(urgency, came.tenant.name, came.at_s, came.num_bytes)
        return urgency

    def urgency(self, came: Arrival[Any], body: Tiered) -> Urgency:
        streams, policies = isinstance(body, Sampled) and bool(body.stream), self._service.options.policies
        return urgency_of(body.service_tier, came.tenant, streams=streams, slo=came.slo, policies=policies)

    def check_beams(self, body: Sampled) -> None:
        """Raises 400 if the search that it asks for cannot be had."""
        limits = self._service.options.limits
        check_beams(body, min(limits.max_beams, self._service.engine_stats().max_num_seqs))

    def check_room(self, params: GenerationParams, most_tokens: int) -> None:
        """Raises 429 or 503 if no prompt of at most so many tokens, about, is let in; asked before it is tokenised."""
        self._service.dispatch.check_room(params.urgency, params.tenant.name, params.arrival_s, most_tokens)

    def head(self, id: str, model: str) -> Head:
        return Head(
            id=id,
            created=int(time.time()),
            model=model,
            system_fingerprint=self._service.options.system_fingerprint,
        )

    async def reply(
        self,
        params: GenerationParams,
        prompts: list[list[int]],
        id: str,
        writer: Writer,
        *,
        echoes: Sequence[str] = (),
        in_full: bool = False,
        keep: Keep | None = None,
        keeps: bool = False,
    ) -> LiveReply:
        """Returns the reply that a writer makes of the answers to prompts.

        Args:
            keep: is given the whole reply before the last of it is sent.
            keeps: whether a stream keeps what it brings; with `keep` it does.

        Raises:
            ApiError: 400, if a prompt does not fit; 429, if it is more than the client's quota has left.
        """
        requests = await self.requests(params, {f"{id}-{i}": prompt for i, prompt in enumerate(prompts)})
        stream = (KeptStream if params.body.stream and (keeps or keep) else Stream)(
            requests,
            await self.reserve(params.client, requests),
            writer if params.body.stream else None,
            thoughts=self._service.formats.thoughts(params.reading),
            echoes=echoes,
            in_full=in_full,
        )
        return LiveReply(self._service, stream, writer, keep)

    def form(self, body: ChatBody | CompletionBody) -> Form | None:
        return form_of(body, self._service.options.limits, answer_form(body.response_format))

    async def grammar(self, tenant: Tenant, form: Form | None) -> CompiledGrammar | None:
        """Compiles the grammar of an answer's form; raises as Compiling does."""
        return None if form is None else await self._service.compiling.compile(tenant.name, form)

    async def with_tools(
        self, params: GenerationParams, prompt: list[int], use: ToolUse, *, shows_reasoning: bool = True
    ) -> GenerationParams:
        """Returns the params with how answers to a prompt are read, and with what bounds their reasoning and calls.

        What an answer has to match holds for what follows the reasoning, where no tool is called.

        Raises:
            ApiError: 400, if the model cannot, or cannot be held to the tools' schemas.
        """
        reading = self._service.formats.reading(prompt, use, shows_reasoning=shows_reasoning)
        answer = None if params.grammar is None else params.grammar.plain
        grammar = self._service.formats.grammar(prompt, reading, use, answer)
        form = None if grammar is None else Form("tools" if use.tools else "response_format", grammar)
        return replace(
            params,
            reading=reading,
            grammar=await self.grammar(params.tenant, form),
            thinking=self._thinking(params.body, prompt, reading),
        )

    def _thinking(self, body: Sampled, prompt: list[int], reading: Reading) -> ThinkingBudget | None:
        service = self._service
        if not isinstance(body, Reasoned):
            return None
        number = body.budget(service.prompts.variables, service.dispatch.context_length)
        if number is None:
            return None
        return service.formats.budget(prompt, reading, number, service.prompts.around_closing)

    async def reserve(self, client: Client, requests: Sequence[Request]) -> Reservation:
        """Reserves room for these requests in the client's quota; raises 429 if there is none."""
        with self._noting_refusals(Lane(requests[0].lane)):
            return await self._service.quotas.reserve(
                client,
                sum(request.num_prompt_tokens for request in requests),
                sum(request.n * request.sampling.max_tokens for request in requests),
                requests[0].request_id,
            )

    @contextlib.contextmanager
    def _noting_refusals(self, lane: Lane) -> Iterator[None]:
        try:
            yield
        except ApiError as error:
            self._service.metrics.note_refused(lane, str(error.code))
            raise

    @contextlib.asynccontextmanager
    async def counted(self, client: Client) -> AsyncIterator[Mapping[str, str]]:
        """Counts a request that needs no model against its client's quota; gives the quota's headers.

        It counts as a request and, while it is answered, as one at work; it costs no tokens.

        Raises:
            ApiError: 429, if the quota has no room for it.
        """
        requests_only = replace(client, quota=client.quota.of_requests())
        lease_id = f"count-{secrets.token_hex(16)}"
        with self._noting_refusals(client.tenant.sure_lane):
            reservation = await self._service.quotas.reserve(requests_only, 0, 0, lease_id)
        try:
            yield reservation.headers
        finally:
            reservation.end(0)

    async def recording(self, tenant: str, recording_id: str) -> Recording:
        """Returns the tenant's recording; raises 404 if there is none, 503 if that cannot be said now."""
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

    async def prompt(
        self, params: GenerationParams, body: ChatBody, before: Sequence[int] = ()
    ) -> tuple[list[int], GenerationParams]:
        """Returns the tokens of a conversation, and the params with what its tools come to; see Prompting."""
        prompt, use = await self.prompting(params.tenant, params.urgency.lane).conversation(body, before)
        return prompt, await self.with_tools(params, prompt, use, shows_reasoning=body.shows_reasoning)

    def ignore(self, field: str) -> None:
        """Accepts a field that is ignored; the reply's header names it.

        Raises:
            ApiError: 400, if the operator wants such fields refused.
        """
        if self._service.options.strict:
            raise unsupported(field)
        if (asked := CORRELATION.get()) is not None and field not in asked.ignored:
            asked.ignored.append(field)


def as_sent(body: Read, _: Limits) -> Read:
    """Returns the body itself, which is one of OpenAI's."""
    return body


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
    """Returns whether a page may have sent a request: browsers say where from."""
    return "origin" in http.headers or "sec-fetch-site" in http.headers


Handler = Callable[[HttpRequest], Awaitable[Response]]


def route(path: str, **handlers: Handler) -> Route:
    """Makes one route for all methods of a path, so that a 405 names them all."""

    async def handle(http: HttpRequest) -> Response:
        return await handlers["GET" if http.method == "HEAD" else http.method](http)

    return Route(path, handle, methods=list(handlers))


class Endpoints(ABC):
    """Some endpoints of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake

    @abstractmethod
    def routes(self) -> list[Route]: ...
