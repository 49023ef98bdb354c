"""`/v1/events` and `/v1/prefixes/events`: event streams of the server, for its page, its operators and routers.

They are slow, a few events a second whatever the load is; token streams are written by hand (see `gateway.wire`).
Nothing is computed while nobody listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from itertools import islice

import orjson
from sse_starlette import EventSourceResponse, ServerSentEvent
from sse_starlette.sse import AppStatus
from starlette.requests import Request as HttpRequest
from starlette.routing import Route

from gateway.endpoints.intake import Intake, route, salts_of
from gateway.service import Service

EVERY_S = 0.5
MAX_HASHES = 1000
"""Of blocks in one event."""

# A signal begins a drain: state and depths are worth seeing until its end, and the server ends the streams itself.
AppStatus.disable_automatic_graceful_drain()  # type: ignore[no-untyped-call]


class EventsApi:
    """The event streams of one service."""

    def __init__(self, service: Service, intake: Intake) -> None:
        self._service = service
        self._intake = intake
        self._status = b""
        self._status_s = float("-inf")

    def routes(self) -> list[Route]:
        return [route("/v1/events", GET=self.server), route("/v1/prefixes/events", GET=self.prefixes)]

    async def server(self, http: HttpRequest) -> EventSourceResponse:
        """The state of the server; with `request_id`, the place in the queue of the caller's request of that name."""
        request_id = http.query_params.get("request_id")
        tenant = self._intake.client(http).tenant.name if request_id else ""
        return _response(self._server_events(tenant, request_id))

    async def _server_events(self, tenant: str, request_id: str | None) -> AsyncIterator[ServerSentEvent]:
        async for _ in self._ticks():
            yield _event("server", self._status_now())
            if request_id and (found := self._service.dispatch.waiting(tenant, request_id)) is not None:
                yield _event("request", orjson.dumps({"request_id": request_id, **found}))

    def _status_now(self) -> bytes:
        """Made once for all who listen."""
        now = self._service.clock()
        if now - self._status_s >= EVERY_S / 2:
            self._status, self._status_s = orjson.dumps(self._service.status()), now
        return self._status

    async def prefixes(self, http: HttpRequest) -> EventSourceResponse:
        """The blocks of the caller's that are cached, then those that come and go, by their hashes."""
        return _response(self._prefix_events(salts_of(self._intake.client(http).tenant)))

    async def _prefix_events(self, salts: tuple[bytes, ...]) -> AsyncIterator[ServerSentEvent]:
        with self._service.prefixes.listening(salts) as changes:
            async for _ in self._ticks():
                for kind, hashes in (("removed", changes.removed), ("stored", changes.stored)):
                    for some in _batches(hashes):
                        yield _event(kind, orjson.dumps({"blocks": [known.hex() for known in some]}))

    async def _ticks(self) -> AsyncIterator[None]:
        """Until the last token stream of a server that drains has ended."""
        while True:
            yield
            if self._service.dispatch.draining and not len(self._service.dispatch):
                return
            await asyncio.sleep(EVERY_S)


def _response(events: AsyncIterator[ServerSentEvent]) -> EventSourceResponse:
    return EventSourceResponse(events, sep="\n", headers={"cache-control": "no-cache, no-transform"})


def _event(kind: str, data: bytes) -> ServerSentEvent:
    return ServerSentEvent(data.decode(), event=kind)


def _batches(hashes: dict[bytes, None]) -> Iterator[list[bytes]]:
    """All of them, taken out as they are told."""
    while some := list(islice(hashes, MAX_HASHES)):
        for known in some:
            del hashes[known]
        yield some
