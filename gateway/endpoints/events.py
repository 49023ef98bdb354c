"""`/v1/events` and `/v1/prefixes/events`: event streams of the server, for its page, its operators and routers.

They are slow, a few events a second whatever the load is; token streams are written by hand (see `gateway.wire`).
Nothing is computed while nobody listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Mapping
from typing import Annotated, Any

import orjson
from pydantic import Field
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.requests import Request as HttpRequest
from starlette.types import Receive, Scope, Send
from typing_extensions import TypedDict

from penstock.gateway.access.keys import Client
from penstock.gateway.endpoints.intake import Endpoints, Intake
from penstock.gateway.endpoints.operation import ANY, EVENTS, serves
from penstock.gateway.endpoints.requests import salts_of
from penstock.gateway.errors import invalid, refused
from penstock.gateway.service import Service

EVERY_S = 0.5
MAP_EVERY_S = 1.0
MAP_PART = 0.002
"""The part of the time, at most, that is spent on drawing the KV blocks."""
DETAILS = ("steps", "kv", "tenants")
_OF_EVERYBODY = frozenset({"steps", "kv"})
"""The details that show the work for all tenants, and are for operators alone."""
_PROMISED = ("forecast_ttft_ms", "promised_ttft_ms")
MOST_LISTENERS = 64
"""The event streams that one tenant may have open."""
MAX_HASHES = 1000
"""The most hashes of blocks in one event."""

# A signal begins a drain: state and depths are worth seeing until its end, and the server ends the streams itself.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class EventsQuery(TypedDict, total=False):
    request_id: str
    detail: Annotated[str, Field(pattern=f"^({'|'.join(DETAILS)})(,({'|'.join(DETAILS)}))*$")]


class EventsApi(Endpoints):
    """The event streams of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._status: Mapping[str, Any] = {}
        self._whole_status = b""
        self._status_s = float("-inf")
        self._map = b""
        self._map_due_s = float("-inf")
        self._listeners: Counter[str] = Counter()
        """The open event streams by tenant."""

    @serves("GET /v1/events", ANY, query=EventsQuery, answers=(EVENTS,), statuses=(429,))
    async def server(self, http: HttpRequest) -> EventSourceResponse:
        """Tell of the server's state; of a request that waits; in detail, of steps, KV blocks and tenants.

        With `request_id`, also the place in the queue of the caller's request of that name; with `detail`, also the
        engine's steps, its KV blocks, and the tenants that take most.
        """
        client, request_id = self._intake.client(http), http.query_params.get("request_id")
        details = _details(http.query_params.get("detail"), client)
        return await self._listened(client, self._server_events(client, request_id, details))

    async def _listened(self, client: Client, events: AsyncIterator[ServerSentEvent]) -> EventSourceResponse:
        """Raises 429 if that is one request, or one event stream, too many of the client's."""
        await self._intake.count(client)
        if self._listeners[client.tenant.name] >= MOST_LISTENERS:
            message = f"You have {MOST_LISTENERS} event streams open, and no more are allowed."
            raise refused(message, "too_many_event_streams", 5.0, tenant_limit=True)
        return _Listened(self._listeners, client.tenant.name, events)

    async def _server_events(
        self, client: Client, request_id: str | None, details: frozenset[str]
    ) -> AsyncIterator[ServerSentEvent]:
        service, sent_map = self._service, b""
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(service.watches.watching()) if "steps" in details else None
            async for _ in self._ticks():
                yield _event("server", self._status_for(client))
                if request_id and (standing := service.dispatch.waiting(client.tenant.name, request_id)):
                    yield _event("request", orjson.dumps({"request_id": request_id, **standing}))
                if "tenants" in details:
                    yield _event("tenants", orjson.dumps(service.tenants.event_data(client)))
                if watch is not None:
                    yield _event("steps", orjson.dumps(watch()))
                if "kv" in details and (drawn := self._map_now()) not in (b"", sent_map):
                    yield _event("kv", drawn)
                    sent_map = drawn

    def _status_for(self, client: Client) -> bytes:
        """Returns the status, made once for all listeners; tenants are shown their own streams and the promises."""
        now = self._service.clock()
        if now - self._status_s >= EVERY_S / 2:
            self._status, self._status_s = self._service.status(), now
            self._whole_status = orjson.dumps(self._status)
        if client.is_operator:
            return self._whole_status
        load = self._service.tenants.load(client.tenant.name)
        lanes = {
            name: {figure: lane[figure] for figure in _PROMISED}
            for name, lane in self._status["lanes"].items()
        }
        view = {"state": self._status["state"], "streams": load.waiting + load.running, "lanes": lanes}
        return orjson.dumps(view)

    def _map_now(self) -> bytes:
        """Returns the block map, made once for all listeners and less often; empty before there is one."""
        now = self._service.clock()
        if now >= self._map_due_s:
            began_s = time.thread_time()
            drawn = self._service.block_map()
            self._map = b"" if drawn is None else orjson.dumps(drawn)
            took_s = time.thread_time() - began_s
            self._map_due_s = now + max(MAP_EVERY_S - EVERY_S / 2, took_s / MAP_PART)
        return self._map

    @serves("GET /v1/prefixes/events", ANY, answers=(EVENTS,), statuses=(429,))
    async def prefixes(self, http: HttpRequest) -> EventSourceResponse:
        """Tell of blocks as they are stored and removed.

        The hashes of the caller's cached blocks come first, then changes to them.
        """
        client = self._intake.client(http)
        return await self._listened(client, self._prefix_events(salts_of(client.tenant)))

    async def _prefix_events(self, salts: tuple[bytes, ...]) -> AsyncIterator[ServerSentEvent]:
        with self._service.prefixes.listening(salts) as changes:
            async for _ in self._ticks():
                most = MAX_HASHES
                while most == MAX_HASHES or changes.is_behind:
                    stored, removed = changes.take(MAX_HASHES)
                    for kind, hashes in (("removed", removed), ("stored", stored)):
                        if hashes:
                            yield _event(kind, orjson.dumps({"blocks": [block.hex() for block in hashes]}))
                    most = max(len(stored), len(removed))
                    await asyncio.sleep(0)  # others have their turn

    async def _ticks(self) -> AsyncIterator[None]:
        """Ticks until the last token stream of a server that drains has ended."""
        while True:
            yield
            if self._service.dispatch.draining and not len(self._service.dispatch):
                return
            await asyncio.sleep(EVERY_S)


def _details(detail: str | None, client: Client) -> frozenset[str]:
    """Raises 400 if one of them is unknown, or not for this client."""
    details = frozenset(detail.split(",")) if detail else frozenset[str]()
    if not details <= set(DETAILS):
        raise invalid(f"detail must be a list of {', '.join(DETAILS)}, with commas between them.", "detail")
    if details & _OF_EVERYBODY and not client.is_operator:
        message = (
            "detail=steps and detail=kv show the work for all tenants: they need a key with role=operator."
        )
        raise invalid(message, "detail", "operators_only")
    return details


class _Listened(EventSourceResponse):
    """An event stream that counts as one of its tenant's while it is sent."""

    def __init__(self, listeners: Counter[str], tenant: str, events: AsyncIterator[ServerSentEvent]) -> None:
        super().__init__(events, sep="\n", headers={"cache-control": "no-cache, no-transform"})
        self._all = listeners
        self._tenant = tenant

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        self._all[self._tenant] += 1
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._all[self._tenant] -= 1
            self._all += Counter()  # those that are 0 are dropped


def _event(kind: str, data: bytes) -> ServerSentEvent:
    return ServerSentEvent(data.decode(), event=kind)
