"""Replies: they send a generation to a client, streamed or whole."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Awaitable, Callable, Iterator
from functools import partial
from typing import Any

from starlette.requests import Request as HttpRequest
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from penstock.gateway.access.quotas import Reservation
from penstock.gateway.background import meanwhile
from penstock.gateway.errors import invalid
from penstock.gateway.http.connections import Connection
from penstock.gateway.reply.live import Live
from penstock.gateway.reply.whole import whole, whole_json
from penstock.gateway.service import Service
from penstock.gateway.sessions.recordings.recording import Reader
from penstock.gateway.wire.frames import json_pieces
from penstock.gateway.wire.writing import Writer

_PIECE_BYTES = 64 * 1024

Keep = Callable[[dict[str, Any], int], Awaitable[None]]
"""A Keep takes a whole reply's JSON and its size in bytes."""


class Sender(Response):
    """Sends the output of a reply to one reader, as a stream or as a whole."""

    def __init__(
        self,
        service: Service,
        reader: Live | Reader,
        reservation: Reservation | None,
        *,
        begin: Callable[[], None],
        leave: Callable[[], None],
        streamed: bool,
        at_once: bool = False,
        arrival_s: float | None = None,
        keep: Keep | None = None,
    ) -> None:
        """
        Args:
            begin: connects the reader and starts its work.
            leave: detaches the connection when it is gone or has everything; idempotent.
            at_once: the status is not held back until there is something to show.
            arrival_s: when the request came that a whole reply answers; None if that is not told.
            keep: is given the whole reply before the last of it is sent.
        """
        self._service = service
        self._reader = reader
        self._writer: Writer[Any] = reader.writer
        self._quota_headers = {} if reservation is None else reservation.headers
        self._begin = begin
        self._leave = leave
        self._streamed = streamed
        self._at_once = at_once
        self._arrival_s = arrival_s
        self._keep = keep
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        connection = Connection(scope, send, service.clock, service.metrics.slow_readers.inc)
        self._reader.connection = connection
        self._begin()
        async with meanwhile(connection.watch(receive, self._leave)):
            try:
                if self._streamed:
                    await self._send_stream(connection)
                else:
                    await self._send_whole(connection)
            finally:
                self._leave()

    async def _send_stream(self, connection: Connection) -> None:
        reader = self._reader
        if self._at_once:
            await self._commit(connection)
        while not reader.at_end:
            await reader.news()
            if connection.gone:
                return
            if not connection.committed:
                self._check()  # from here on the status is 200: an error before this is a plain one
                await self._commit(connection)
            body = reader.take()
            if reader.at_end and reader.finished and reader.refusal is None and self._keep is not None:
                await self._kept(self._keep)
            if connection.overdue:
                connection.overdue = False
                body = body or self._writer.keepalive
            if body or reader.at_end:
                await connection.send(body, more=not reader.at_end)
            if reader.is_behind:
                await asyncio.sleep(0)

    async def _commit(self, connection: Connection) -> None:
        media_type = self._writer.media_type
        await connection.commit(
            {**({"content-type": media_type} if media_type else {}), **self._quota_headers}
        )

    async def _send_whole(self, connection: Connection) -> None:
        await self._reader.end()
        self._check()
        if not self._reader.finished:
            return
        headers = dict(self._quota_headers)
        if self._arrival_s is not None:
            milliseconds = math.ceil((self._service.clock() - self._arrival_s) * 1000)
            headers["openai-processing-ms"] = str(milliseconds)
        reader = self._reader
        if self._keep is not None:
            body = await self._kept(self._keep)
            pieces: Iterator[bytes] = (
                body[start : start + _PIECE_BYTES] for start in range(0, len(body), _PIECE_BYTES)
            )
        else:
            pieces = json_pieces(await whole(self._writer, reader.reply, reader.outputs()))
        await connection.send_whole(pieces, headers)

    def _check(self) -> None:
        if self._reader.refusal is not None:
            raise self._reader.refusal

    async def _kept(self, keep: Keep) -> bytes:
        """Has the whole reply kept, and returns its JSON."""
        reader = self._reader
        body, completion = await whole_json(self._writer, reader.reply, reader.outputs())
        await keep(completion, len(body))
        return body


def live(service: Service, reply: Live, keep: Keep | None = None) -> Sender:
    """Returns what submits a reply when the server calls it, and sends its output.

    Its requests are cancelled the moment their client is gone, whatever state they are in.

    Args:
        keep: is given the whole reply before the last of it is sent; a stream then `keeps` it.
    """
    return Sender(
        service,
        reply,
        reply.reservation,
        begin=partial(service.dispatch.submit, reply),
        leave=partial(service.dispatch.release, reply),
        streamed=reply.is_streamed,
        arrival_s=reply.requests[0].arrival_s,
        keep=keep,
    )


def follow(service: Service, reader: Reader, *, streamed: bool = True, at_once: bool = False) -> Sender:
    """Returns what sends the events that a reader lacks and new ones, or the whole reply at its end."""
    recording = reader.recording

    def begin() -> None:
        if reader.position >= 0:
            service.metrics.follows.inc()
        recording.attach(reader)

    def leave() -> None:
        recording.detach(reader, service.clock())
        if recording.is_abandoned(service.clock()):
            service.recordings.cancel(recording)

    return Sender(
        service,
        reader,
        recording.reservation,
        begin=begin,
        leave=leave,
        streamed=streamed,
        at_once=at_once,
    )


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
