"""`/v1/events` and `/v1/prefixes/events`: event streams of the server, for its page, its operators and routers.

They are slow, a few events a second whatever the load is; token streams are written by hand (see `gateway.wire`).
Nothing is computed while nobody listens.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections.abc import AsyncIterator, Iterator
from itertools import islice

import orjson
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from penstock.gateway.access.keys import Client
from penstock.gateway.endpoints.intake import Endpoints, Intake, route
from penstock.gateway.endpoints.requests import salts_of
from penstock.gateway.http.errors import invalid
from penstock.gateway.service import Service

EVERY_S = 0.5
MAP_EVERY_S = 1.0
MAP_PART = 0.002
"""The part of the time, at most, that is spent on drawing the KV blocks."""
DETAILS = ("steps", "kv", "tenants")
MAX_HASHES = 1000
"""The most hashes of blocks in one event."""

# A signal begins a drain: state and depths are worth seeing until its end, and the server ends the streams itself.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class EventsApi(Endpoints):
    """The event streams of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        super().__init__(service, intake)
        self._status = b""
        self._status_s = float("-inf")
        self._map = b""
        self._map_due_s = float("-inf")

    def routes(self) -> list[Route]:
        return [route("/v1/events", GET=self.server), route("/v1/prefixes/events", GET=self.prefixes)]

    async def server(self, http: HttpRequest) -> EventSourceResponse:
        """Streams the state of the server.

        With `request_id`, also the place in the queue of the caller's request of that name; with `detail`, also the
        engine's steps, its KV blocks, and the tenants that take most.
        """
        request_id = http.query_params.get("request_id")
        details = _details(http.query_params.get("detail"))
        return _response(self._server_events(self._intake.client(http), request_id, details))

    async def _server_events(
        self, client: Client, request_id: str | None, details: frozenset[str]
    ) -> AsyncIterator[ServerSentEvent]:
        service, told_map = self._service, b""
        with contextlib.ExitStack() as stack:
            watch = stack.enter_context(service.watching()) if "steps" in details else None
            async for _ in self._ticks():
                yield _event("server", self._status_now())
                if request_id and (found := service.dispatch.waiting(client.tenant.name, request_id)):
                    yield _event("request", orjson.dumps({"request_id": request_id, **found}))
                if "tenants" in details:
                    yield _event("tenants", orjson.dumps(service.tenants.told(client)))
                if watch is not None:
                    yield _event("steps", orjson.dumps(service.watched(watch)))
                if "kv" in details and (drawn := self._map_now()) not in (b"", told_map):
                    yield _event("kv", drawn)
                    told_map = drawn

    def _status_now(self) -> bytes:
        """Returns the status, made once for all listeners."""
        now = self._service.clock()
        if now - self._status_s >= EVERY_S / 2:
            self._status, self._status_s = orjson.dumps(self._service.status()), now
        return self._status

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

    async def prefixes(self, http: HttpRequest) -> EventSourceResponse:
        """Streams the hashes of the caller's cached blocks, then changes to them."""
        return _response(self._prefix_events(salts_of(self._intake.client(http).tenant)))

    async def _prefix_events(self, salts: tuple[bytes, ...]) -> AsyncIterator[ServerSentEvent]:
        with self._service.prefixes.listening(salts) as changes:
            async for _ in self._ticks():
                for kind, hashes in (("removed", changes.removed), ("stored", changes.stored)):
                    for some in _batches(hashes):
                        yield _event(kind, orjson.dumps({"blocks": [known.hex() for known in some]}))

    async def _ticks(self) -> AsyncIterator[None]:
        """Ticks until the last token stream of a server that drains has ended."""
        while True:
            yield
            if self._service.dispatch.draining and not len(self._service.dispatch):
                return
            await asyncio.sleep(EVERY_S)


def _details(asked: str | None) -> frozenset[str]:
    """Raises 400 if one of them is unknown."""
    details = frozenset(asked.split(",")) if asked else frozenset[str]()
    if not details <= set(DETAILS):
        raise invalid(f"detail must be a list of {', '.join(DETAILS)}, with commas between them.", "detail")
    return details


def _response(events: AsyncIterator[ServerSentEvent]) -> EventSourceResponse:
    return EventSourceResponse(events, sep="\n", headers={"cache-control": "no-cache, no-transform"})


def _event(kind: str, data: bytes) -> ServerSentEvent:
    return ServerSentEvent(data.decode(), event=kind)


def _batches(hashes: dict[bytes, None]) -> Iterator[list[bytes]]:
    """Takes the hashes out in batches."""
    while some := list(islice(hashes, MAX_HASHES)):
        for known in some:
            del hashes[known]
        yield some
