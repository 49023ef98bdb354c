"""One request on its way through the switch: to a replica, and the reply back, from another one if the first dies.

Bytes go from the replica's connection into the client's within the callback that brought them, as long as the client
takes them; else the replica's connection is not read until it does. Nothing is kept of a reply but the number of its
last event.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field, replace
from http import HTTPStatus
from typing import Protocol

from penstock.cluster.metrics import SwitchMetrics
from penstock.cluster.position import Position
from penstock.cluster.upstream import Address, Headers, Upstream, connect, request_bytes
from penstock.gateway.errors import DROPPED_HEADER, ApiError, unavailable
from penstock.gateway.http.connections import Connection, Timeouts
from penstock.gateway.http.correlation import ANTHROPIC_PATH, CORRELATION
from penstock.gateway.http.refusals import OLLAMA_PATH, OVERLOADED
from penstock.gateway.sessions.responses import writer as responses
from penstock.gateway.wire.frames import DONE, KEEPALIVE, error_event, error_frame, error_line

MEND_S = 60.0
"""The longest search for a replica that goes on with a stream."""
_ASK_AGAIN_S = 0.25
REPLICA_HEADER = b"x-penstock-replica"
"""The header that names the replica that answered or, of a stream, began the answer."""
_LLAMA_PATHS = ("/completion", "/infill")
_REFUSED = int(HTTPStatus.SERVICE_UNAVAILABLE)
_STREAMS = (b"text/event-stream", b"application/x-ndjson")


@dataclass(frozen=True, slots=True)
class ForwardedRequest:
    """A client's request, as it is sent to a replica."""

    method: str
    path: str
    target: bytes
    """The path with the query."""
    headers: Headers
    body: bytes | AsyncIterator[bytes]
    """The body, or its parts as they come; what has such parts is to be done `once`."""
    once: bool = False
    """The request is not sent again once a replica may have carried it out."""
    id: str = ""
    """The id of what only one replica has, and the others say 404 to."""


@dataclass(frozen=True, slots=True)
class Target:
    """A replica that was chosen for a request."""

    replica: str
    address: Address
    headers: Headers = ()
    """Headers that the replica gets beside the client's."""
    release: Callable[[], None] = field(default=lambda: None)
    """A function to call when the request is over at this replica."""


class Picker(Protocol):
    """Chooses replicas for one request."""

    def choose(self, excluded: frozenset[str]) -> Target:
        """Returns a replica outside of `excluded`; raises ApiError if there is none, or the request is refused."""

    def has_others(self, excluded: frozenset[str]) -> bool:
        """Whether there is a replica beside those excluded."""

    def is_lost(self, replica: str) -> bool:
        """Whether a replica has stopped sending its state."""

    def owners(self, id: str) -> Iterator[Target]:
        """Yields the replicas that may have what an id names, the likeliest first."""


class Relay:
    """One request and its reply; a `cluster.upstream.ReplyListener`."""

    def __init__(
        self,
        request: ForwardedRequest,
        picker: Picker,
        connection: Connection,
        metrics: SwitchMetrics,
        position: Position | None = None,
    ) -> None:
        """`position` is given if the reply is a stream that another replica can go on with."""
        self.connection = connection
        self._request = request
        self._picker = picker
        self._metrics = metrics
        self._position = position
        self._upstream: Upstream | None = None
        self._replica = ""
        self._was_sent = False
        self._was_refused = False
        """A replica refused the request for its load."""
        self._status = 0
        self._kind = 0
        """The status; the same one for all refusals of a replica that has no room or is not ready."""
        self._headers: Headers = ()
        self._waiting = b""
        """The bytes that came from the replica and were not passed on yet."""
        self._is_over = False
        """The replica's connection has ended."""
        self._is_whole = False
        self._is_stream = False
        """The replica's reply is a stream."""
        self._streams = False
        """The client was promised a stream."""
        self._has_begun = False
        """The client has bytes that the beginning of another reply would not fit behind."""
        self._is_mending = False

    async def run(self) -> None:
        """Returns when the client has its reply, or is gone.

        Raises:
            ApiError: it was refused, and the client has nothing yet.
        """
        excluded: frozenset[str] = frozenset()
        while self._may_ask and (target := self._next_target(excluded)):
            if excluded:
                self._metrics.retries.inc()
            excluded |= {target.replica}
            try:
                if await self._ask(target, self._request, self._passed_over(excluded)):
                    return
            finally:
                target.release()
            self._was_refused |= self._kind == _REFUSED
        await self._rescue()

    def end(self) -> None:
        """Closes the replica's connection, since the client is gone or has everything."""
        if self._upstream is not None:
            self._upstream.close()
            self._upstream = None

    def look_after(self, now: float, timeouts: Timeouts, *, stall_s: float, lost_s: float) -> None:
        """Lets a client that waits for another replica know, and gives up a replica that is silent."""
        self.connection.look_after(now, timeouts)
        upstream = self._upstream
        if upstream is None or self._waiting:
            return
        silent_s = now - upstream.heard_s
        # A stream is never silent for so long; who computes a whole reply may be.
        if (
            silent_s > lost_s
            if self._picker.is_lost(self._replica)
            else self._is_stream and silent_s > stall_s
        ):
            upstream.close()
            self.on_end(is_whole=False)

    # As a listener

    def on_head(self, status: int, headers: Headers) -> None:
        self._status, self._headers = status, headers
        self._kind = _kind(status, headers)
        self._is_stream = any(
            name == b"content-type" and value.startswith(_STREAMS) for name, value in headers
        )
        self.connection.wake()

    def on_body(self, body: bytes) -> None:
        if self._position is not None and self._is_stream:
            body = self._position.feed(body)
            if self._position.is_interrupted:
                self._is_over = True
                self.connection.wake()
            if not body:
                return
        if not self._waiting and self.connection.offer(body):
            if not self._has_begun:
                self._note_sent(body)
            return
        self._waiting += body
        if self._upstream is not None:
            self._upstream.pause()
        self.connection.wake()

    def on_end(self, *, is_whole: bool) -> None:
        self._is_over = True
        self._is_whole = is_whole and not (self._position is not None and self._position.is_interrupted)
        self.connection.wake()

    # One replica

    @property
    def _may_ask(self) -> bool:
        """Whether a replica may be asked: the first one, or another one after the last."""
        was_refused = self._kind in (HTTPStatus.NOT_FOUND, _REFUSED)
        may_be_done = self._request.once and self._was_sent and not was_refused
        return not (may_be_done or self._has_begun or self.connection.gone)

    def _next_target(self, excluded: frozenset[str]) -> Target | None:
        """Returns the next replica to ask; None if there is none and the reply has begun."""
        try:
            return self._picker.choose(excluded)
        except ApiError:
            if self.connection.committed:
                return None
            if self._was_refused or not excluded:
                raise
            raise _lost() from None

    def _passed_over(self, excluded: frozenset[str]) -> tuple[int, ...]:
        """Returns the kinds of replies in whose place another replica is asked: once, or until one has the id."""
        if not self._picker.has_others(excluded) or not isinstance(self._request.body, bytes):
            return ()
        if self._request.id:
            return (HTTPStatus.NOT_FOUND, _REFUSED)
        return () if self._was_refused else (_REFUSED,)

    async def _ask(
        self, target: Target, request: ForwardedRequest, passed_over: tuple[int, ...] = ()
    ) -> bool:
        """Passes one replica's reply on; False if the reply did not come to its end.

        Args:
            passed_over: the kinds of replies that are not passed on.
        """
        self._turn_to(target)
        try:
            await self._send(target, request)
            del request  # its body, which nobody needs from here on unless it is sent again
            if not await self._head() or self._kind in passed_over:
                return False
            if not self.connection.committed:
                await self._start()
            elif not self._is_stream:
                return False
            return await self._pass_on()
        except OSError:
            return False
        finally:
            self.end()

    def _turn_to(self, target: Target) -> None:
        """Forgets the reply of the replica before."""
        self._status, self._kind, self._waiting, self._was_sent = 0, 0, b"", False
        self._is_over = self._is_whole = self._is_stream = False
        self._replica = target.replica
        if self._position is not None:
            self._position.restart()
        self._metrics.requests(target.replica).inc()

    async def _send(self, target: Target, request: ForwardedRequest) -> None:
        """Raises OSError if nothing could be sent."""
        headers = [*request.headers, *target.headers]
        body = request.body if isinstance(request.body, bytes) else None
        data = request_bytes(request.method, request.target, target.address, headers, body)
        self._upstream = await connect(target.address, data, self, is_head=request.method == "HEAD")
        self._was_sent = True
        if not isinstance(request.body, bytes):
            await self._upstream.upload(request.body)

    async def _start(self) -> None:
        """Sends the client the head of the reply, less the date, which the server that sends it says itself."""
        headers = [header for header in self._headers if header[0] != b"date"]
        replica = self._replica.encode("latin-1", "replace")
        await self.connection.start(self._status, [*headers, (REPLICA_HEADER, replica)])
        self._streams = self._is_stream
        if not self._is_stream:
            self._begin()

    async def _head(self) -> bool:
        """Waits for the head of the reply; False if there will be none."""
        while not self._status and not self._is_over and not self.connection.gone:
            await self._sleep()
        return self._status > 0 and not self.connection.gone

    async def _pass_on(self) -> bool:
        connection = self.connection
        while not connection.gone:
            body, self._waiting = self._waiting, b""
            is_over, is_whole = self._is_over, self._is_whole
            if body or is_whole:
                await connection.send(body, more=not is_whole)
                self._note_sent(body)
            if self._waiting or self._is_over != is_over:  # it came meanwhile
                continue
            if is_over:
                return is_whole
            if self._upstream is not None:
                self._upstream.resume()
            await self._sleep()
        return False

    async def _sleep(self) -> None:
        """Waits for news; a client that waits for another replica is sent a comment now and then."""
        connection = self.connection
        await connection.sleep()
        if connection.overdue:
            connection.overdue = False
            if self._is_mending and self._position is not None and self._position.keepalive:
                await connection.send(self._position.keepalive, more=True)

    def _note_sent(self, body: bytes) -> None:
        """Notes that the client has the beginning of a reply: a comment alone is none, and any reply fits behind it."""
        if not self._has_begun and body not in (b"", KEEPALIVE):
            self._begin()

    def _begin(self) -> None:
        self._has_begun = True
        self._request = replace(self._request, body=b"")

    # When it died

    async def _rescue(self) -> None:
        """Ends a reply whose replica is gone, by another replica or with an error."""
        connection = self.connection
        if not (connection.committed or connection.gone):
            raise _unsure() if self._request.once and self._was_sent else _lost()
        position = self._position if self._streams else None
        if position is not None and position.id and await self._mend(position):
            self._metrics.mended.inc()
            return
        if connection.gone:
            return
        self._metrics.broken.inc()
        if last := last_words(self._request.path) if self._streams else b"":
            await connection.send(last, more=False)
        else:
            connection.abort()

    async def _mend(self, position: Position) -> bool:
        """Goes on with the stream at the replica that takes it over, within the same reply."""
        self._is_mending = True
        loop = asyncio.get_running_loop()
        give_up_s = loop.time() + MEND_S
        headers = [header for header in self._request.headers if header[0] != b"content-type"]
        while loop.time() < give_up_s and not self.connection.gone:
            for target in self._picker.owners(position.id):
                rest = ForwardedRequest("GET", position.path, position.path.encode(), headers, b"")
                if await self._ask(target, rest):
                    return True
                if self.connection.gone:
                    return False
            loop.call_later(_ASK_AGAIN_S, self.connection.wake)
            await self._sleep()
        return False


def last_words(path: str) -> bytes:
    """Returns the bytes that end a stream whose replica died, in the API's format; nothing if it has none for that."""
    error = _lost()
    if path.startswith("/v1/responses"):
        return responses.error_event(error, 0)
    if path.startswith(OLLAMA_PATH):
        return error_line(error)
    if path.startswith(ANTHROPIC_PATH):
        http = CORRELATION.get()
        return error_event(error, None if http is None else http.request_id)
    if path in _LLAMA_PATHS:
        return error_frame(error)
    return error_frame(error) + DONE if "/completions" in path else b""


def _kind(status: int, headers: Headers) -> int:
    """Returns the kind of a reply. A 429 that is no tenant's own limit names the reason of a refusal by load."""
    is_overload = any(name == DROPPED_HEADER.encode() for name, _ in headers)
    return _REFUSED if status == OVERLOADED or is_overload else status


def none_ready() -> ApiError:
    return unavailable("No replica is ready.", "no_replica")


def _lost() -> ApiError:
    return unavailable("The replica that answered this request was lost.", "replica_lost")


def _unsure() -> ApiError:
    message = (
        "The replica that was sent this request was lost. Whether it carried the request out is not known."
    )
    return ApiError(HTTPStatus.BAD_GATEWAY, message, type="server_error", code="replica_lost")
