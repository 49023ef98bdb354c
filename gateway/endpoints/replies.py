"""Replies: a generation on its way to its client, streamed or whole."""

from __future__ import annotations

import math
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from gateway.endpoints.intake import Job
from gateway.http.background import meanwhile
from gateway.http.connections import Connection
from gateway.http.errors import log_fault
from gateway.http.off_loop import off_loop
from gateway.service import Service
from gateway.wire.frames import json_pieces
from gateway.wire.streams import Stream
from gateway.wire.writers import Writer

_NUMBER_BYTES = 8
"""What is made of a number of an embedding, or of a score, is as much work as reading so many bytes."""


class Reply(Response):
    """Submits a job when the server asks for the reply, and sends what comes of it.

    The job is cancelled the moment its client is gone, whatever state it is in.
    """

    def __init__(self, service: Service, job: Job) -> None:
        self._service = service
        self._job = job
        self._quota_headers = job.reservation.headers
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        service = self._service
        connection = Connection(scope, send, service.clock, service.metrics.slow_readers.inc)
        job = self._job
        writer = job.stream_writer
        stream = Stream(
            job.requests, connection, streamed=writer is not None, echoes=job.echoes, in_full=job.in_full
        )
        stream.reservation, stream.thoughts = job.reservation, job.thoughts
        service.dispatch.submit(stream)
        release = partial(service.dispatch.release, stream)
        async with meanwhile(connection.watch(receive, release)):
            try:
                if writer is None:
                    await self._send_whole(stream)
                else:
                    await self._send_stream(stream, writer)
            finally:
                release()

    async def _send_whole(self, stream: Stream) -> None:
        await stream.end()
        if stream.error is not None:
            raise stream.error
        if not stream.finished:
            return
        arrival_s = stream.requests[0].arrival_s
        milliseconds = math.ceil((self._service.clock() - arrival_s) * 1000)
        headers = {**self._quota_headers, "openai-processing-ms": str(milliseconds)}
        deltas = sorted(stream.take(), key=lambda taken: taken[0])
        size = _NUMBER_BYTES * sum(len(delta.embedding or delta.scores or ()) for _, delta in deltas)
        body = await off_loop(size, self._job.writer.whole, stream, deltas)
        await stream.connection.send_whole(json_pieces(body), headers)

    async def _send_stream(self, stream: Stream, writer: Writer) -> None:
        connection = stream.connection
        stream.text = writer.text
        while True:
            await stream.news()
            if connection.gone:
                return
            if not connection.committed:
                await self._commit(stream, writer)
            ended = stream.ended
            if body := self._frames(stream, writer):
                await connection.send(body, more=not ended)
            if ended:
                return

    async def _commit(self, stream: Stream, writer: Writer) -> None:
        """There is something to show: from here on the status is 200. An error before this is a plain one."""
        if stream.error is not None:
            raise stream.error
        await stream.connection.commit({"content-type": writer.media_type, **self._quota_headers})

    def _frames(self, stream: Stream, writer: Writer) -> bytes:
        """All that there is to say now; nothing, if a character is incomplete."""
        frames = writer.news(stream, stream.take())
        if stream.error is not None:
            log_fault(stream.error)
            frames += writer.fault(stream.error)
        if stream.connection.overdue:
            stream.connection.overdue = False
            frames = frames or writer.keepalive()
        return frames
