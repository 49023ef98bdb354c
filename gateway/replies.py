"""Replies: a generation on its way to its client, streamed or whole."""

from __future__ import annotations

import asyncio
import contextlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from starlette.responses import Response
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from engine.request import Request
from gateway.service import Service
from gateway.shapes import Head, Shape
from gateway.streams import Stream
from gateway.wire import DONE, KEEPALIVE, StreamWriter, Usage, error_frame, timings_json
from priority.lanes import Lane

ABORT = "penstock.abort"
"""ASGI extension of gateway.protocol: a callable that drops the connection and what is still unsent."""

WRITABLE = "penstock.writable"
"""ASGI extension of gateway.protocol: a callable that says whether `send` would return without waiting."""

_SERVER_SEND = "penstock.server_send"

_STREAM_START = {
    "type": "http.response.start",
    "status": 200,
    "headers": [
        (b"content-type", b"text/event-stream; charset=utf-8"),
        (b"cache-control", b"no-cache, no-transform"),
        # Or else nginx collects 16 KiB before it lets anything through.
        (b"x-accel-buffering", b"no"),
    ],
}


Writable = Callable[[], bool]


class ServerSendMiddleware:
    """The outermost layer: keeps the server's own `send` for the bodies of streams.

    Middleware has had its say when a response has started; each that wraps `send` would cost a coroutine a token.
    """

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await self.app({**scope, _SERVER_SEND: send}, receive, send)


def _never() -> bool:
    return False


def _send_at_once(send: Send, message: Message) -> None:
    """Runs a `send` that is known not to wait."""
    sending = send(message).__await__()
    for _ in sending:
        raise RuntimeError("send waited although the connection was writable")


@dataclass(frozen=True, slots=True, kw_only=True)
class Job:
    """What one HTTP request asks for, checked and tokenised."""

    head: Head
    lane: Lane
    shape: Shape
    requests: list[Request]
    stream: bool
    include_usage: bool


class Reply(Response):
    """Submits a job when the server asks for the reply, and sends what comes of it.

    The job is cancelled the moment its client is gone, whatever state it is in.
    """

    def __init__(self, service: Service, job: Job) -> None:
        self._service = service
        self._job = job
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        stream = Stream(self._job.requests, streamed=self._job.stream, cut=self._cutter(scope))
        self._service.submit(stream)
        watcher = asyncio.create_task(self._release_at_disconnect(stream, receive))
        try:
            if self._job.stream:
                writable = scope.get("extensions", {}).get(WRITABLE, _never)
                await self._send_stream(stream, send, scope[_SERVER_SEND], writable)
            else:
                await self._send_whole(stream, scope, receive, send)
        finally:
            self._service.release(stream)
            watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await watcher

    def _cutter(self, scope: Scope) -> Callable[[], None]:
        abort = scope.get("extensions", {}).get(ABORT)

        def cut() -> None:
            self._service.metrics.slow_readers.inc()
            if abort is not None:
                abort()

        return cut

    async def _release_at_disconnect(self, stream: Stream, receive: Receive) -> None:
        while (await receive())["type"] != "http.disconnect":
            pass
        self._service.release(stream)

    async def _send_whole(self, stream: Stream, scope: Scope, receive: Receive, send: Send) -> None:
        await stream.end()
        if stream.error is not None:
            raise stream.error
        if not stream.finished:
            return
        arrival_s = stream.requests[0].arrival_s
        milliseconds = math.ceil((self._service.clock() - arrival_s) * 1000)
        headers = {"openai-processing-ms": str(milliseconds)}
        body = json.dumps(self._body(stream)).encode()
        await Response(body, headers=headers, media_type="application/json")(scope, receive, send)

    def _body(self, stream: Stream) -> dict[str, object]:
        body = self._job.shape.body(self._job.head, sorted(stream.take(), key=lambda taken: taken[0]))
        return {**body, "usage": self._usage(stream).as_json(), "timings": self._timings(stream)}

    def _timings(self, stream: Stream) -> dict[str, object]:
        return timings_json(stream.timings, self._usage(stream), self._job.lane, stream.predicted_ttft_s)

    def _usage(self, stream: Stream) -> Usage:
        return Usage(
            prompt_tokens=sum(len(request.prompt_token_ids) for request in stream.requests),
            completion_tokens=stream.num_output_tokens,
            cached_tokens=stream.num_cached_tokens,
        )

    async def _send_stream(self, stream: Stream, send: Send, send_body: Send, writable: Writable) -> None:
        writer = StreamWriter(self._job.shape, self._job.head, include_usage=self._job.include_usage)
        stream.pass_on = partial(self._pass_on, stream, writer, send_body, writable)
        while not stream.left:
            await stream.news()
            if stream.left:
                return
            if not stream.committed:
                await self._commit(stream, send)
            ended = stream.ended
            if body := self._frames(stream, writer):
                await self._send_body(stream, send_body, body, more=not ended)
            if ended:
                return

    def _pass_on(
        self,
        stream: Stream,
        writer: StreamWriter,
        send: Send,
        writable: Writable,
        index: int,
        text: str,
    ) -> bool:
        """Sends a token from within the step's delivery: nothing waits, no task wakes up. False: not now."""
        if not stream.committed or not writable():
            return False
        if body := writer.text(index, text):
            _send_at_once(send, {"type": "http.response.body", "body": body, "more_body": True})
            stream.last_sent_s = self._service.clock()
        return True

    async def _send_body(self, stream: Stream, send: Send, body: bytes, *, more: bool) -> None:
        """Waits while the client's buffers are full; the service looks at the clock meanwhile."""
        stream.sending_since_s = self._service.clock()
        await send({"type": "http.response.body", "body": body, "more_body": more})
        stream.last_sent_s = stream.sending_since_s
        stream.sending_since_s = None

    async def _commit(self, stream: Stream, send: Send) -> None:
        """There is something to show: from here on the status is 200. An error before this is a plain one."""
        if stream.error is not None:
            raise stream.error
        stream.committed = True
        await send(_STREAM_START)

    def _frames(self, stream: Stream, writer: StreamWriter) -> bytes:
        """All that there is to say now; nothing, if a character is incomplete."""
        frames = self._chunks(stream, writer)
        if stream.error is not None:
            frames += [error_frame(stream.error), DONE]
        elif stream.finished:
            if self._job.include_usage:
                frames.append(writer.usage(self._usage(stream)))
            frames.append(DONE)
        if stream.overdue:
            stream.overdue = False
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
            timings = self._timings(stream) if is_last else None
            frames.append(writer.finish(index, reason, timings))
        return frames
