"""The switch: takes requests in, chooses a replica for each, and passes bytes."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
from collections import defaultdict, deque
from collections.abc import AsyncIterator, Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from http import HTTPStatus
from math import inf
from time import perf_counter
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.routing import compile_path
from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.cluster.members import AwakeClock, Member, Members
from penstock.cluster.metrics import SwitchMetrics
from penstock.cluster.position import Position
from penstock.cluster.prefill import compute, tell_of_progress
from penstock.cluster.queries import QueryReader, owner_tag
from penstock.cluster.relay import ForwardedRequest, Relay, Target, none_ready
from penstock.cluster.upstream import Address, end_to_end
from penstock.engine.planning.params import Pooling
from penstock.gateway.access.idempotency import RESUMABLE_HEADER
from penstock.gateway.access.keys import Access, Client
from penstock.gateway.background import every, meanwhile
from penstock.gateway.endpoints.answering import position_asked
from penstock.gateway.endpoints.files import UPLOAD_S
from penstock.gateway.endpoints.operation import Operation, Passing
from penstock.gateway.endpoints.operations import OPERATIONS
from penstock.gateway.endpoints.prefill import PrefillOrder, PullOrder
from penstock.gateway.endpoints.state import SECRET_HEADER
from penstock.gateway.errors import ApiError, not_found, refused, unavailable
from penstock.gateway.http.connections import BODY_WITHIN, Connection, Timeouts
from penstock.gateway.http.correlation import CORRELATION, SOURCE_HEADER, TICKET_HEADER
from penstock.gateway.http.entrance import Entrance, forget_body
from penstock.gateway.http.hosts import FORWARDED_HOST, FORWARDED_PROTO
from penstock.gateway.http.json_response import JsonResponse
from penstock.gateway.http.refusals import OLLAMA_PATH, answer_fault, refusal
from penstock.gateway.instruments import CONTENT_TYPE
from penstock.gateway.limits import Limits, parse_object
from penstock.gateway.off_loop import off_loop
from penstock.gateway.sessions.owners import tag_in
from penstock.gateway.tickets import source_of, ticket_of
from penstock.gateway.wire.lanes import slo_of
from penstock.gateway.wire.prompts import Prompts
from penstock.gateway.wire.schemas import ChatBody
from penstock.priority.routing.router import Placement, RouteQuery, Router
from penstock.priority.verdict import Refusal

STALL_S = 30.0
"""The silence after which a replica is given up in a stream, which is never without a comment for so long."""
LOST_S = 10.0
"""The silence after which a replica is given up in any reply, if its stream of state has ended."""
_UNKNOWN = Operation(Passing.ANY, summary="A replica will say what is wrong")
_WITH_PARAMETERS = [(compile_path(path)[0], of) for path, of in OPERATIONS.items() if "{" in path]
_UPLOADS = frozenset(path for path, of in OPERATIONS.items() if any(each.is_form for each in of.values()))
"""The paths whose bodies are passed on as they come."""
_CHOOSE = "/choose"
"""The prefix of the paths at which other proxies ask where a request goes."""
_NGINX_LOCATION = "@replica"
"""The location in which an nginx that has asked goes on with the request (deploy/nginx-switch.conf)."""
MOST_CHOSEN = 32
"""The places of one tenant that are kept for other proxies, which do not say whether they send the requests."""
_FORWARDED_FOR = "x-forwarded-for"
"""Where the client is, as far as the switch believes those before it."""
_NOT_PASSED_ON = frozenset(
    (
        *(b"host", b"content-length", b"expect", b"x-request-id"),
        *(name.encode() for name in (TICKET_HEADER, SOURCE_HEADER, SECRET_HEADER)),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class SwitchOptions:
    """The options that the operator sets."""

    secret: str
    identity: str
    """The identity of the model that every replica has to serve."""
    block_size: int
    pooling: Pooling = Pooling.LAST
    """The way in which embeddings are made of a prompt."""
    clients: Mapping[bytes, Client] = field(default_factory=dict)
    """The clients that the replicas know, by the digest of their keys."""
    allowed_hosts: tuple[str, ...] = ()
    overload_status: int = HTTPStatus.SERVICE_UNAVAILABLE
    """The status of refusals by load."""
    limits: Limits = field(default_factory=Limits)
    timeouts: Timeouts = field(default_factory=Timeouts)


class Switch:
    """One switch; an ASGI application by `app`."""

    def __init__(self, options: SwitchOptions, prompts: Prompts, router: Router | None = None) -> None:
        """`router` chooses the replicas; another one than the usual is for comparisons."""
        self.options = options
        self.access = Access(options.clients)
        self.metrics = SwitchMetrics()
        self.draining = False
        """No new request is taken in."""
        self.router = router or Router()
        self.clock = AwakeClock()
        name = secrets.token_hex(8)
        self.members = Members(
            self.router, name, options.secret, options.identity, options.block_size, self.clock
        )
        self.name = name
        self._queries = QueryReader(prompts, options.block_size, options.limits, options.pooling)
        self._relays: dict[Relay, None] = {}
        self._releases: dict[str, deque[Callable[[], None]]] = defaultdict(deque)
        """The functions that give up the last places of each tenant that other proxies were told of."""
        self._empty = asyncio.Event()
        self._empty.set()
        self._num_any = 0

    def app(self) -> ASGIApp:
        return Entrance(self._answer, self.options.limits, self.options.allowed_hosts, _UPLOADS)

    @contextlib.asynccontextmanager
    async def running(self, addresses: Iterable[Address]) -> AsyncIterator[None]:
        """Listens to the replicas and looks after the clients while it is entered."""
        tick = every(self.options.timeouts.tick_s, self._tick, "looking after the streams")
        async with meanwhile(tick), self.members.running(addresses):
            yield

    async def drained(self, timeout_s: float) -> None:
        """Returns when no request is on its way any more, or after the timeout."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(timeout_s):
                await self._empty.wait()

    async def _tick(self) -> None:
        self.clock()
        self.members.look_over()
        now = asyncio.get_running_loop().time()
        for relay in list(self._relays):
            relay.look_after(now, self.options.timeouts, stall_s=STALL_S, lost_s=LOST_S)

    # Requests

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        http = HttpRequest(scope, receive)
        clock = asyncio.get_running_loop().time
        connection = Connection(scope, send, clock, self.metrics.slow_readers.inc)
        try:
            reply = await self._own_reply(http)
            if reply is not None:
                await reply(scope, receive, send)
                return
            await self._pass_on(http, connection, receive)
        except ApiError as error:
            if not connection.committed:
                await refusal(error, scope["path"], self.options.overload_status)(scope, receive, send)
        except Exception as error:
            if connection.committed:
                connection.abort()
                raise
            await (await answer_fault(http, error))(scope, receive, send)

    async def _own_reply(self, http: HttpRequest) -> Response | None:
        """Returns the reply to a request for the switch itself; None if it is for a replica."""
        path: str = http.scope["path"]
        if path == "/health":
            return JsonResponse({"status": "ok"})
        if path == "/ready":
            state = "draining" if self.draining else "ready" if self.members.live else "no replica is ready"
            is_ready = state == "ready"
            return JsonResponse(
                {"status": state}, HTTPStatus.OK if is_ready else HTTPStatus.SERVICE_UNAVAILABLE
            )
        if path == "/metrics":
            self.metrics.streams.set(len(self._relays))
            self.metrics.replicas.set(len(self.members.live))
            return Response(self.metrics.render(), headers={"content-type": CONTENT_TYPE})
        if path.startswith(_CHOOSE + "/"):
            return await self._choose(http, path.removeprefix(_CHOOSE))
        return None

    async def _choose(self, http: HttpRequest, path: str) -> Response:
        """Tells another proxy where a request is to go, and reserves its place there."""
        self._check_open()
        releases = self._releases[self._client(http).tenant.name]
        route = await self._route(http, path)
        target = route.choose(frozenset())
        added = {name.decode(): value.decode() for name, value in target.headers}
        if added:
            releases.append(target.release)
        if len(releases) > MOST_CHOSEN:
            releases.popleft()()
        answer = {"replica": target.replica, "address": str(target.address)}
        headers = {f"x-penstock-{name}": value.encode().decode("latin-1") for name, value in answer.items()}
        headers |= {"x-penstock-authority": target.address.authority, "x-accel-redirect": _NGINX_LOCATION}
        if route.once:
            headers["x-penstock-once"] = "1"
        return JsonResponse({**answer, "headers": added}, headers={**headers, **added})

    async def _pass_on(self, http: HttpRequest, connection: Connection, receive: Receive) -> None:
        self._check_open()
        path, read = http.scope["path"], asyncio.Event()
        operation, _ = _operation(http.method, path)
        is_open = operation.is_open or operation is _UNKNOWN
        if not is_open:
            self._client(http)  # before a byte of the body is kept
        parts = _parts(http, read) if operation.is_form else None
        if parts is None:
            read.set()
        route = await self._route(http, path)
        request = _forwarded(http, parts or (b"" if is_open else await http.body()), route)
        relay = Relay(request, route, connection, self.metrics, route.position)
        forget_body(http)

        async def watch() -> None:
            await read.wait()
            await connection.watch(receive, relay.end)

        with self._on_its_way(relay):
            async with meanwhile(watch()):
                await route.compute_prompt(connection)
                await relay.run()

    def _check_open(self) -> None:
        if self.draining:
            raise unavailable("The switch is shutting down.", "server_shutting_down", close=True)

    def _client(self, http: HttpRequest) -> Client:
        client = self.access.client(http.headers.get("authorization"), http.headers.get("x-api-key"))
        if (request := CORRELATION.get()) is not None:
            request.tenant = client.tenant.name
        return client

    async def _route(self, http: HttpRequest, path: str) -> _Route:
        """Raises 404 for what a replica says to its switches alone, 403 for a lane that the client may not use."""
        operation, id = _operation(http.method, path)
        passing = operation.passing
        if Passing.OWN in passing:
            raise not_found(f"Unknown request URL: {path}.")
        if Passing.BY_PROMPT in passing:
            return await self._route_by_prompt(http, path, operation)
        position = None
        if Passing.BY_ID | Passing.RECORDED in passing:
            position = Position(path.removesuffix(f"/{id}"), id, position_asked(http))
        return _Route(
            switch=self,
            id=id if Passing.BY_ID in passing else "",
            position=position,
            once=Passing.ONCE in passing,
        )

    async def _route_by_prompt(self, http: HttpRequest, path: str, operation: Operation) -> _Route:
        began_s = perf_counter()
        client, raw = self._client(http), await http.body()
        try:
            body = await off_loop(len(raw), parse_object, raw, self.options.limits)
        except ApiError:  # the replica will say so
            body = {}
        assert operation.body is not None
        read = await self._queries.read(
            operation.body, body, len(raw), client.tenant, slo_of(http.headers), self.router.policies
        )
        self.metrics.choice_seconds.observe(perf_counter() - began_s)
        has_key = "idempotency-key" in http.headers
        is_recorded = (
            Passing.RECORDED in operation.passing
            and body.get("stream", path.startswith(OLLAMA_PATH)) is True
            and (has_key or http.headers.get(RESUMABLE_HEADER) == "true" or _outlives(body))
        )
        # It would be in the conversation, or kept, twice: what a dead replica began another one takes over.
        stays = body.get("conversation") is not None or body.get("background") is True
        stays = stays or (operation.body is ChatBody and body.get("store") is True)
        return _Route(
            switch=self,
            query=read.query,
            order=read.order,
            owner=owner_tag(body),
            position=Position(path) if is_recorded else None,
            once=stays and not has_key,
        )

    @contextlib.contextmanager
    def _on_its_way(self, relay: Relay) -> Iterator[None]:
        self._relays[relay] = None
        self._empty.clear()
        try:
            yield
        finally:
            relay.end()
            del self._relays[relay]
            if not self._relays:
                self._empty.set()

    def next_of(self, members: list[Member]) -> Member:
        """Returns one member after another."""
        self._num_any += 1
        return members[self._num_any % len(members)]


@dataclass(slots=True, kw_only=True)
class _Route:
    """The route of one request; a `cluster.relay.Picker`."""

    switch: Switch
    query: RouteQuery | None = None
    """The request to the model; None for what any replica can answer as well as any other."""
    order: PrefillOrder | None = None
    """Its prompt, which another replica may compute."""
    owner: str | None = None
    """The tag of a replica that is to be asked first."""
    taker: str = ""
    """The replica that has taken KV for the request, which is asked before that one."""
    id: str = ""
    """The id of what only one replica has."""
    position: Position | None = None
    """The client's position in a stream that is recorded."""
    once: bool = False
    """The request makes something that stays; see `ForwardedRequest`."""

    def choose(self, excluded: frozenset[str]) -> Target:
        if self.query is not None:
            return self._by_forecast(self.query, excluded)
        for target in self.owners(self.id) if self.id else ():
            if target.replica not in excluded:
                return target
        return self._any(excluded)

    async def compute_prompt(self, connection: Connection) -> None:
        """Has a replica for prompts compute a long one, which the replica that serves the request takes from there.

        If none does, the one that serves it computes it itself.
        """
        query, order, switch = self.query, self.order, self.switch
        if query is None or order is None:
            return
        found = switch.router.choose_prefill(query, switch.clock())
        if found is None:
            return
        target, told = self._target_of(found), replace(query, source=found.replica)
        try:
            async with self._taking_kv(told, order, target):
                is_there = await compute(order, target, switch.options.secret, connection, found.forecast_s)
            if is_there:
                self.query = told
                switch.metrics.computed_elsewhere.inc()
        finally:
            target.release()

    @contextlib.asynccontextmanager
    async def _taking_kv(self, query: RouteQuery, order: PrefillOrder, source: Target) -> AsyncIterator[None]:
        """While this is entered, the replica that is to serve the request takes its prompt's KV from the source.

        Its place there is reserved until then, so that other prompts go elsewhere. The request is placed when its
        prompt is whole: whether it is in time is seen by what is left to take then.
        """
        switch = self.switch

        def note_told(num_blocks: int) -> None:
            switch.metrics.early_tokens.inc(num_blocks * switch.options.block_size)

        place = self._chosen(replace(query, ttft_s=inf), frozenset())
        if isinstance(place, Refusal):
            yield
            return
        self.taker = place.replica
        pull = PullOrder(
            token_ids=order.token_ids,
            salt=order.salt,
            tenant=order.tenant,
            lane=order.lane,
            source=str(source.address),
        )
        address, secret = switch.members.live[place.replica].address, switch.options.secret
        num_there = partial(switch.router.num_held, source.replica, query.hashes)
        telling = tell_of_progress(pull, address, secret, len(query.hashes), num_there, note_told)
        try:
            async with meanwhile(telling):
                yield
        finally:
            switch.router.note_done(place.ticket)

    def has_others(self, excluded: frozenset[str]) -> bool:
        return any(self.id or not member.is_draining for member in self._beside(excluded))

    def is_lost(self, replica: str) -> bool:
        return replica not in self.switch.members.live

    def owners(self, id: str) -> Iterator[Target]:
        tag = tag_in(id)
        live = self.switch.members.live.values()
        return map(_target, sorted(live, key=lambda member: member.tag != tag))

    def _any(self, excluded: frozenset[str]) -> Target:
        beside = self._beside(excluded)
        if not beside:
            raise none_ready()
        return _target(self.switch.next_of([one for one in beside if not one.is_draining] or beside))

    def _by_forecast(self, query: RouteQuery, excluded: frozenset[str]) -> Target:
        choice = self._chosen(query, excluded)
        if isinstance(choice, Refusal):
            raise self._refused(choice)
        self.switch.metrics.prompt_tokens.inc(query.num_prompt)
        self.switch.metrics.cached_tokens.inc(choice.num_cached)
        self.switch.metrics.pulled_tokens.inc(choice.num_pulled)
        return self._target_of(choice)

    def _chosen(self, query: RouteQuery, excluded: frozenset[str]) -> Placement | Refusal:
        """Returns the replica that is to be asked first, if it is in time, or that of the earliest forecast."""
        router, live, now = self.switch.router, self.switch.members.live, self.switch.clock()
        owners = (name for name, member in live.items() if member.tag == self.owner)
        for first in (self.taker, next(owners, "")):
            if first in live and first not in excluded:
                choice = router.choose(query, now, live.keys() - {first})
                if not isinstance(choice, Refusal):
                    return choice
        return router.choose(query, now, excluded)

    def _target_of(self, choice: Placement) -> Target:
        """Returns the replica of choice, with the headers that tell it of its place and of where to take KV from."""
        switch = self.switch
        live = switch.members.live
        ticket = ticket_of(switch.options.secret, switch.name, choice.ticket)
        headers = [(TICKET_HEADER.encode(), ticket.encode())]
        if choice.source is not None and choice.source in live:
            source = source_of(switch.options.secret, ticket, str(live[choice.source].address))
            headers.append((SOURCE_HEADER.encode(), source.encode()))
        release = partial(switch.router.note_done, choice.ticket)
        return Target(choice.replica, live[choice.replica].address, headers, release)

    def _refused(self, why: Refusal) -> ApiError:
        self.switch.metrics.refused(why.reason).inc()
        if why.reason == "no_replica":
            return none_ready()
        return refused(str(why), why.reason, why.retry_after_s, tenant_limit=why.tenant_limit)

    def _beside(self, excluded: frozenset[str]) -> list[Member]:
        return [member for name, member in self.switch.members.live.items() if name not in excluded]


def _operation(method: str, path: str) -> tuple[Operation, str]:
    """Returns the operation, by the gateway's table, and the first parameter of the path, or ""."""
    method = "GET" if method == "HEAD" else method
    if path in OPERATIONS:
        return OPERATIONS[path].get(method, _UNKNOWN), ""
    for pattern, operations in _WITH_PARAMETERS:
        if match := pattern.match(path):
            return operations.get(method, _UNKNOWN), match[1]
    return _UNKNOWN, ""


def _target(member: Member) -> Target:
    return Target(member.name, member.address)


async def _parts(http: HttpRequest, read: asyncio.Event) -> AsyncIterator[bytes]:
    """Yields the body of an upload as it comes; `read` is set at its end."""
    http.scope.get("extensions", {}).get(BODY_WITHIN, lambda _: None)(UPLOAD_S)
    async for part in http.stream():
        if part:
            yield part
    read.set()


def _forwarded(http: HttpRequest, body: bytes | AsyncIterator[bytes], route: _Route) -> ForwardedRequest:
    target = http.scope["raw_path"]
    if query := http.scope["query_string"]:
        target += b"?" + query
    request = CORRELATION.get()
    assert request is not None
    added = {"x-request-id": request.request_id}
    if request.address:
        added[_FORWARDED_FOR] = request.address
    origin = {FORWARDED_HOST: http.headers.get("host", ""), FORWARDED_PROTO: http.url.scheme}
    added |= {name: value for name, value in origin.items() if name not in http.headers}
    headers = [header for header in end_to_end(http.scope["headers"]) if header[0] not in _NOT_PASSED_ON]
    headers += [(name.encode(), value.encode("latin-1")) for name, value in added.items()]
    return ForwardedRequest(http.method, http.scope["path"], target, headers, body, route.once, route.id)


def _outlives(body: Mapping[str, Any]) -> bool:
    """Whether the reply outlives its process: it is in the background or resumable."""
    options = body.get("stream_options")
    return body.get("background") is True or (isinstance(options, dict) and options.get("resumable") is True)
