"""The intake of all endpoints: a request's client, body and lane, and whether there is room for it."""

from __future__ import annotations

import contextlib
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from http import HTTPStatus
from typing import Any, TypeVar, cast

from starlette.requests import Request as HttpRequest

from penstock.engine.planning.request import Request
from penstock.gateway.access.keys import Client
from penstock.gateway.access.quotas import QuotaReservation
from penstock.gateway.endpoints.prompting import Prompting, read_ask
from penstock.gateway.errors import ApiError, model_not_found, unavailable, unsupported
from penstock.gateway.http.correlation import CORRELATION
from penstock.gateway.http.fair_threads import FairThreads
from penstock.gateway.http.refusals import OLLAMA_PATH
from penstock.gateway.limits import parse_object
from penstock.gateway.off_loop import off_loop
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.recording import Recording
from penstock.gateway.sessions.responses.threads import NO_THREAD, Thread
from penstock.gateway.store.interface import StoreUnavailable
from penstock.gateway.store.time_budget import RETRY_S
from penstock.gateway.wire.ask import Ask
from penstock.gateway.wire.lanes import Slo, slo_of, urgency_of
from penstock.gateway.wire.strict import BodyT, read
from penstock.priority.lanes import Lane, Tenant, Urgency

ResultT = TypeVar("ResultT")

_PROMPT_BYTES = 64 * 1024 * 1024
_COUNTED_BYTES = 16 * 1024 * 1024
"""The bytes of one tenant's texts that may wait to be tokenised, which is some seconds of work."""

CLIENT = "penstock.client"
"""The scope's name for the client, in a request that the server itself sends for one."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Inbound:
    """A request that was read and translated."""

    at_s: float
    client: Client
    body: Any
    ask: Ask
    num_bytes: int
    """The size of the body as it was sent."""
    urgency: Urgency
    is_recorded: bool = False
    """Whether the reply is recorded as a whole, even if it is streamed."""

    @property
    def tenant(self) -> Tenant:
        return self.client.tenant


class Intake:
    """The intake of one service."""

    def __init__(self, service: Service) -> None:
        self._service = service
        self._prompts = FairThreads(2, _PROMPT_BYTES)
        self._counts = FairThreads(1, _COUNTED_BYTES)

    def prompting(self, tenant: Tenant, lane: Lane | None = None) -> Prompting:
        """Returns the maker of a tenant's prompts.

        Args:
            lane: None, if their tokens are only counted: in a separate thread, so that no prompt has to wait for it.
        """
        refused_in = tenant.sure_lane if lane is None else lane
        return Prompting(
            self._service.prompts,
            self._service.options.limits,
            self._counts if lane is None else self._prompts,
            tenant.name,
            context_length=self._service.dispatch.context_length,
            vocab_size=self._service.vocab_size,
            ignore=self.ignore,
            note_refused=partial(self._service.metrics.note_refused, refused_in),
        )

    def client(self, http: HttpRequest) -> Client:
        """Raises 401 if keys are configured and the request has none of them."""
        if CLIENT in http.scope:
            return cast(Client, http.scope[CLIENT])
        headers = http.headers
        client = self._service.access.client(headers.get("authorization"), headers.get("x-api-key"))
        if (correlation := CORRELATION.get()) is not None:
            correlation.tenant = client.tenant.name
        return client

    def tenant(self, http: HttpRequest) -> str:
        """Returns the name of the client's tenant, and raises like `client`."""
        return self.client(http).tenant.name

    async def begin(
        self, http: HttpRequest, kind: type[BodyT], values: Mapping[str, object] | None = None
    ) -> Inbound:
        """Reads and translates a request for the model.

        Args:
            values: the fields of its body, if that is no JSON.

        Raises:
            ApiError: 401 without a key where there are some; 503 if no work is taken; 4xx for the body and headers.
        """
        client = self.client(http)
        self._service.dispatch.check_open()
        return await self._arrival(http, kind, client, slo_of(http.headers), values)

    async def counted_prompts(
        self,
        http: HttpRequest,
        kind: type[BodyT],
        find_thread: Callable[[str, Ask], Awaitable[Thread]] | None = None,
    ) -> tuple[Inbound, list[list[int]], Mapping[str, str]]:
        """Reads a request whose prompts are wanted, and not their answers.

        Args:
            find_thread: finds the tenant's thread that a turn continues.

        Returns:
            the request, its prompts, and the quota's headers.
        """
        async with self.counted(http) as (client, counting, headers):
            inbound = await self._arrival(http, kind, client)
            self.check_model(inbound.ask.model)
            thread = NO_THREAD if find_thread is None else await find_thread(client.tenant.name, inbound.ask)
            return inbound, await counting.prompts(inbound.ask, thread), headers

    async def _arrival(
        self,
        http: HttpRequest,
        kind: type[BodyT],
        client: Client,
        slo: Slo | None = None,
        values: Mapping[str, object] | None = None,
    ) -> Inbound:
        """Returns a request with the lane that it asks for; without `slo`, with one that its tenant may use."""
        at_s = self._service.clock()

        def work(values: Mapping[str, object]) -> tuple[BodyT, Ask]:
            return read_ask(kind, values, self._service.options.limits, self.ignore)

        if values is None:
            num_bytes, (body, ask) = await self._parsed(http, work)
        else:
            num_bytes = len(await http.body())
            body, ask = await off_loop(num_bytes, work, values)
        if not ask.model:
            model = self._service.options.models[0]
            body, ask = body.model_copy(update={"model": model}), replace(ask, model=model)
        if slo is None:
            urgency = Urgency(client.tenant.sure_lane)
        else:
            tier, policies = ask.service_tier, self._service.options.policies
            urgency = urgency_of(tier, client.tenant, streams=ask.streams, slo=slo, policies=policies)
        return Inbound(at_s=at_s, client=client, body=body, ask=ask, num_bytes=num_bytes, urgency=urgency)

    async def read(self, http: HttpRequest, kind: type[BodyT]) -> BodyT:
        """Returns a checked body that asks nothing of the model."""
        limits = self._service.options.limits
        _, body = await self._parsed(http, lambda values: read(kind, values, limits, self.ignore))
        return body

    async def _parsed(
        self, http: HttpRequest, work: Callable[[dict[str, object]], ResultT]
    ) -> tuple[int, ResultT]:
        """Returns the size of a JSON body, and the result of work on it."""
        # Any page may send a browser's form or text to this machine without being asked; JSON it may not. Clients of
        # Ollama often say nothing of what they send, or curl's default.
        if not http.url.path.startswith(OLLAMA_PATH) or _is_of_a_page(http):
            check_media_type(http, "application/json")
        body, limits = await http.body(), self._service.options.limits
        return len(body), await off_loop(len(body), lambda: work(parse_object(body, limits)))

    def check_model(self, name: str | None) -> None:
        """Raises 404 for a name that is not the model's; a body that gives none means the only one there is."""
        if name is not None and name not in self._service.options.models:
            raise model_not_found(name)

    async def reserve(self, client: Client, requests: Sequence[Request]) -> QuotaReservation:
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
    async def counted(self, http: HttpRequest) -> AsyncIterator[tuple[Client, Prompting, Mapping[str, str]]]:
        """Counts a request that needs no model against its client's quota.

        It counts as a request and, while it is answered, as one at work; it costs no tokens.

        Yields:
            the client, the maker of its prompts, and the quota's headers.

        Raises:
            ApiError: 401, if the client has no key; 429, if the quota has no room for the request.
        """
        client = self.client(http)
        requests_only = replace(client, quota=client.quota.of_requests())
        with self._noting_refusals(client.tenant.sure_lane):
            reservation = await self._service.quotas.reserve(
                requests_only, 0, 0, f"count-{secrets.token_hex(16)}"
            )
        try:
            yield client, self.prompting(client.tenant), reservation.headers
        finally:
            reservation.end(0)

    async def count(self, client: Client) -> Mapping[str, str]:
        """Counts a request that looks something up; see `Quotas.count`."""
        with self._noting_refusals(client.tenant.sure_lane):
            return await self._service.quotas.count(client)

    async def find_recording(self, tenant: str, recording_id: str) -> Recording | None:
        """Raises 503 if it cannot be said now whether there is one."""
        try:
            return await self._service.recordings.find(tenant, recording_id)
        except StoreUnavailable:
            raise unavailable(
                f"The store did not answer for {RETRY_S:g} seconds.", "store_unavailable"
            ) from None

    def ignore(self, field: str) -> None:
        """Accepts a field that is ignored; the reply's header names it.

        Raises:
            ApiError: 400, if the operator wants such fields refused.
        """
        if self._service.options.strict:
            raise unsupported(field)
        if (correlation := CORRELATION.get()) is not None and field not in correlation.ignored:
            correlation.ignored.append(field)


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


class Endpoints:
    """Some endpoints of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake
