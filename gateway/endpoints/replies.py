"""Replies: a generation on its way to its client, streamed or whole."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from engine.planning.request import Request
from gateway.access.quotas import Reservation
from gateway.http.background import meanwhile
from gateway.http.connections import Connection
from gateway.http.errors import log_fault
from gateway.service import Service
from gateway.wire.frames import DONE, KEEPALIVE, StreamWriter, error_frame, json_pieces, timings_of, usage_of
from gateway.wire.shapes import Head, Shape
from gateway.wire.streams import Stream


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks for, checked and tokenised."""

    head: Head
    shape: Shape
    requests: list[Request]
    stream: bool
    include_usage: bool
    echoes: Sequence[str] = ()
    """The texts of the prompts, if choices begin with them."""
    reservation: Reservation


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
        stream = Stream(job.requests, connection, streamed=job.stream, echoes=job.echoes)
        stream.reservation = self._job.reservation
        service.dispatch.submit(stream)
        release = partial(service.dispatch.release, stream)
        async with meanwhile(connection.watch(receive, release)):
            try:
                if self._job.stream:
                    await self._send_stream(stream)
                else:
                    await self._send_whole(stream)
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
        await stream.connection.send_whole(json_pieces(self._body(stream)), headers)

    def _body(self, stream: Stream) -> dict[str, object]:
        body = self._job.shape.body(self._job.head, sorted(stream.take(), key=lambda taken: taken[0]))
        return {**body, "usage": usage_of(stream).as_json(), "timings": timings_of(stream)}

    async def _send_stream(self, stream: Stream) -> None:
        connection = stream.connection
        writer = StreamWriter(self._job.shape, self._job.head, include_usage=self._job.include_usage)
        stream.pass_on = partial(self._pass_on, connection, writer)
        while True:
            await stream.news()
            if connection.gone:
                return
            if not connection.committed:
                await self._commit(stream)
            ended = stream.ended
            if body := self._frames(stream, writer):
                await connection.send(body, more=not ended)
            if ended:
                return

    def _pass_on(self, connection: Connection, writer: StreamWriter, index: int, text: str) -> bool:
        """Sends a token from within the step's delivery: nothing waits, no task wakes up. False: not now."""
        if not connection.is_writable():
            return False
        if body := writer.text(index, text):
            connection.send_now(body)
        return True

    async def _commit(self, stream: Stream) -> None:
        """There is something to show: from here on the status is 200. An error before this is a plain one."""
        if stream.error is not None:
            raise stream.error
        await stream.connection.commit(self._quota_headers)

    def _frames(self, stream: Stream, writer: StreamWriter) -> bytes:
        """All that there is to say now; nothing, if a character is incomplete."""
        frames = self._chunks(stream, writer)
        if stream.error is not None:
            log_fault(stream.error)
            frames += [error_frame(stream.error), DONE]
        elif stream.finished:
            if self._job.include_usage:
                frames.append(writer.usage(usage_of(stream)))
            frames.append(DONE)
        if stream.connection.overdue:
            stream.connection.overdue = False
            frames = frames or [KEEPALIVE]
        return b"".join(frames)

    def _chunks(self, stream: Stream, writer: StreamWriter) -> list[bytes]:
        frames, endings = [], []
        for index, delta in stream.take():
            frames.append(writer.chunk(index, delta))
            if delta.finish_reason is not None:
                endings.append((index, delta.finish_reason))
        for number, (index, reason) in enumerate(endings, start=1):
            is_last = stream.finished and number == len(endings)
            timings = timings_of(stream) if is_last else None
            frames.append(writer.finish(index, reason, timings))
        return frames
