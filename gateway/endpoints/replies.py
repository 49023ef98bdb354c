"""Replies: they send a generation to a client, streamed or whole."""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Awaitable, Callable
from typing import Any, Generic, TypeVar

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.access.quotas import Reservation
from penstock.gateway.background import meanwhile
from penstock.gateway.http.connections import Connection
from penstock.gateway.http.errors import invalid
from penstock.gateway.off_loop import off_loop
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.reader import Reader
from penstock.gateway.wire.frames import at_once, json_pieces
from penstock.gateway.wire.streams import Stream, WholeWriter

_NUMBER_BYTES = 8
"""The bytes whose reading is as much work as writing one number of an embedding, or a score."""


Keep = Callable[[dict[str, Any]], Awaitable[None]]
"""A Keep takes a whole reply's JSON."""


SourceT = TypeVar("SourceT", Stream, Reader)


class Reply(Response, Generic[SourceT]):
    """Sends the output of a generation."""

    def __init__(
        self, service: Service, source: SourceT, reservation: Reservation | None, *, streamed: bool
    ) -> None:
        self._service = service
        self._source: SourceT = source
        self._streamed = streamed
        self._quota_headers = {} if reservation is None else reservation.headers
        self.background = None

    @abstractmethod
    def _begin(self) -> None:
        """Connects the source and starts its work."""

    @abstractmethod
    def _leave(self) -> None:
        """Detaches the connection when it is gone or has everything. Idempotent."""

    @abstractmethod
    async def _send_whole(self) -> None:
        """Sends a finished reply as a whole."""

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        connection = Connection(scope, send, service.clock, service.metrics.slow_readers.inc)
        self._source.connection = connection
        self._begin()
        async with meanwhile(connection.watch(receive, self._leave)):
            try:
                if self._streamed:
                    await self._send_stream()
                else:
                    await self._source.end()
                    self._check()
                    await self._send_whole()
            finally:
                self._leave()

    async def _end_stream(self) -> None:
        """Runs before the last piece of a stream is sent."""

    async def _send_stream(self) -> None:
        source, connection = self._source, self._source.connection
        while not source.at_end:
            await source.news()
            if connection.gone:
                return
            if not connection.committed:
                self._check()  # from here on the status is 200: an error before this is a plain one
                await connection.commit({"content-type": source.media_type, **self._quota_headers})
            body = source.take()
            if source.at_end:
                await self._end_stream()
            if connection.overdue:
                connection.overdue = False
                body = body or source.keepalive()
            if body or source.at_end:
                await connection.send(body, more=not source.at_end)

    def _check(self) -> None:
        if self._source.refusal is not None:
            raise self._source.refusal


class LiveReply(Reply[Stream]):
    """Submits a stream when the server calls the reply, and sends its output.

    Its requests are cancelled the moment their client is gone, whatever state they are in.
    """

    def __init__(
        self, service: Service, stream: Stream, writer: WholeWriter, keep: Keep | None = None
    ) -> None:
        """`keep` is given the whole reply before the last of it is sent; a stream is then a KeptStream."""
        super().__init__(service, stream, stream.reservation, streamed=stream.is_streamed)
        self._writer = writer
        self._keep = keep

    def _begin(self) -> None:
        self._service.dispatch.submit(self._source)

    def _leave(self) -> None:
        self._service.dispatch.release(self._source)

    async def _send_whole(self) -> None:
        stream = self._source
        if not stream.finished:
            return
        milliseconds = math.ceil((self._service.clock() - stream.requests[0].arrival_s) * 1000)
        headers = {**self._quota_headers, "openai-processing-ms": str(milliseconds)}
        deltas = sorted(stream.take_deltas(), key=lambda taken: taken[0])
        size = _NUMBER_BYTES * sum(len(delta.embedding or delta.scores or ()) for _, delta in deltas)
        body = await off_loop(size, self._writer.whole, stream, deltas)
        if self._keep is not None:
            await self._keep(body := at_once(body))
        await stream.connection.send_whole(json_pieces(body), headers)

    async def _end_stream(self) -> None:
        stream = self._source
        if self._keep is not None and stream.finished and stream.error is None:
            await self._keep(at_once(self._writer.whole(stream, sorted(stream.kept.items()))))


class Attached(Reply[Reader]):
    """Follows a recording: sends the events that a reader lacks and new ones, or the whole reply at its end."""

    def __init__(
        self, service: Service, reader: Reader, *, streamed: bool = True, at_once: bool = False
    ) -> None:
        """`at_once`: the status is not held back until there is something to show."""
        super().__init__(service, reader, reader.recording.reservation, streamed=streamed)
        self._at_once = at_once

    def _begin(self) -> None:
        if self._source.position >= 0:
            self._service.metrics.follows.inc()
        self._source.recording.attach(self._source)

    def _leave(self) -> None:
        recording, now = self._source.recording, self._service.clock()
        recording.detach(self._source, now)
        if recording.is_abandoned(now):
            self._service.recordings.cancel(recording)

    async def _send_stream(self) -> None:
        if self._at_once:
            await self._source.connection.commit(self._quota_headers)
        await super()._send_stream()

    async def _send_whole(self) -> None:
        if self._source.recording.settled:
            await self._source.connection.send_whole(json_pieces(self._source.whole()), self._quota_headers)


def position_asked(http: HttpRequest) -> int:
    """Returns the last event that the client has, as `starting_after` or a browser's EventSource says; -1 for none.

    Raises:
        ApiError: 400, if it is not a number.
    """
    text = http.query_params.get("starting_after") or http.headers.get("last-event-id")
    if text is None or text == "-1":
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid("'starting_after' must be the number of an event.", "starting_after")
    return int(text)
