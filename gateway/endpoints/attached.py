"""A connection that follows a recording, from any of its events on."""

from __future__ import annotations

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.http.background import meanwhile
from gateway.http.connections import Connection
from gateway.http.errors import ApiError, invalid
from gateway.service import Service
from gateway.sessions.recordings.recording import Format, Reader, Recording
from gateway.wire.frames import KEEPALIVE, json_pieces


class Attached(Response):
    """Sends the events after `position`, and those that come, until the last; or the whole reply at its end."""

    def __init__(
        self,
        service: Service,
        recording: Recording,
        format: Format,
        position: int = -1,
        *,
        streamed: bool = True,
        at_once: bool = False,
    ) -> None:
        """`at_once`: the status is not held back until there is something to show."""
        self._service = service
        self._recording = recording
        self._format = format
        self._position = position
        self._streamed = streamed
        self._at_once = at_once
        reservation = recording.reservation
        self._quota_headers = {} if reservation is None else reservation.headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        if self._position >= 0:
            service.metrics.follows.inc()
        connection = Connection(scope, send, service.clock, service.metrics.slow_readers.inc)
        reader = Reader(self._recording, self._format, connection, self._position)
        self._recording.attach(reader)
        async with meanwhile(connection.watch(receive)):
            try:
                if self._streamed:
                    await self._send_stream(reader)
                else:
                    await self._send_whole(reader)
            finally:
                self._recording.detach(reader, service.clock())
                if self._recording.is_abandoned(service.clock()):
                    service.recordings.cancel(self._recording)

    async def _send_stream(self, reader: Reader) -> None:
        connection = reader.connection
        if self._at_once:
            await self._commit(connection)
        while not reader.at_end:
            await reader.news()
            if connection.gone:
                return
            if not connection.committed:
                await self._commit(connection)
            body = self._frames(reader)
            if connection.overdue:
                connection.overdue = False
                body = body or KEEPALIVE
            if body or reader.at_end:
                await connection.send(body, more=not reader.at_end)

    def _frames(self, reader: Reader) -> bytes:
        """All that there is to say now."""
        try:
            return b"".join(reader.take())
        except ApiError as error:  # it was too slow: what it lacks is forgotten
            return b"".join(reader.give_up(error))

    async def _commit(self, connection: Connection) -> None:
        """From here on the status is 200. An error before this is a plain one."""
        held_back = not self._at_once and self._position < 0
        if held_back and self._recording.settled and self._recording.error is not None:
            raise self._recording.error
        await connection.commit(self._quota_headers)

    async def _send_whole(self, reader: Reader) -> None:
        while not (self._recording.settled or reader.connection.gone):
            await reader.connection.sleep()
        if not self._recording.settled:
            return
        if self._recording.error is not None:
            raise self._recording.error
        await reader.connection.send_whole(
            json_pieces(self._format.body(self._recording)), self._quota_headers
        )


def position_asked(http: HttpRequest) -> int:
    """Number of the last event that the client has: `starting_after`, or what a browser's EventSource sends; else -1.

    Raises:
        ApiError: 400, if it is not a number.
    """
    text = http.query_params.get("starting_after") or http.headers.get("last-event-id")
    if text is None or text == "-1":
        return -1
    if not (text.isascii() and text.isdigit() and len(text) < 10):
        raise invalid("'starting_after' must be the number of an event.", "starting_after")
    return int(text)
