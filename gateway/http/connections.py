"""Connections that replies go out on: when they were sent something, whether they take more or are gone."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

from starlette.types import Receive, Scope, Send

ABORT = "penstock.abort"
"""ASGI extension of gateway.http.protocol: a callable that drops the connection and its unsent bytes."""

WRITABLE = "penstock.writable"
"""ASGI extension of gateway.http.protocol: a callable that says whether `send` would return without waiting."""

WRITE = "penstock.write"
"""ASGI extension of gateway.http.protocol: a callable that sends a piece of a body, while that need not wait."""

BODY_WITHIN = "penstock.body_within"
"""ASGI extension of gateway.http.protocol: a callable that gives the rest of the request's body so many seconds."""

SEND = "penstock.send"
"""ASGI extension of gateway.http.protocol: the server's own `send`. Middleware has its say when a response starts and
with its last piece; between them, each that wraps `send` would cost a coroutine a token."""

EVENT_STREAM = "text/event-stream; charset=utf-8"
_STREAM_HEADERS = {
    "content-type": EVENT_STREAM,
    "cache-control": "no-cache, no-transform",
    # Or else nginx collects 16 KiB before it lets anything through.
    "x-accel-buffering": "no",
}
_JSON = {"content-type": "application/json"}
_PIECE_BYTES = 64 * 1024


@dataclass(frozen=True, slots=True, kw_only=True)
class Timeouts:
    """The gateway's timeouts, in seconds."""

    tick_s: float = 0.25
    """The time between two looks at the requests that wait."""
    commit_after_s: float = 2.0
    """A stream's status is held back for so long, so that a refusal can still be one."""
    keepalive_s: float = 5.0
    send_stall_s: float = 30.0
    engine_stall_s: float = 30.0
    """A step loop that ended no turn for so long is taken to be stuck."""
    detached_s: float = 60.0
    """A resumable stream that nobody reads goes on for so long."""


class Connection:
    """One client's end of a reply. `gone` once it has hung up or was cut off."""

    def __init__(
        self, scope: Scope, send: Send, clock: Callable[[], float], on_cut: Callable[[], None]
    ) -> None:
        """`on_cut` is called, once, when a reader that does not read is cut off."""
        extensions = scope.get("extensions", {})
        self.committed = False
        """Whether the status line is out."""
        self.gone = False
        self.overdue = False
        """Whether nothing was sent for so long that a keep-alive is due."""
        self.last_sent_s = clock()
        self.sending_since_s: float | None = None
        self._send = send
        self._send_body: Send = extensions.get(SEND, send)
        self._writable: Callable[[], bool] = extensions.get(WRITABLE, _never)
        self._write: Callable[[bytes], None] = extensions.get(WRITE, partial(send_at_once, self._send_body))
        self._abort: Callable[[], None] | None = extensions.get(ABORT)
        self._clock = clock
        self._on_cut = on_cut
        self._news: asyncio.Future[None] | None = None
        self._loop = asyncio.get_running_loop()

    # Waiting

    @property
    def is_ready(self) -> bool:
        """Whether its task sleeps, having sent everything, and `send_now` would work."""
        return self._news is not None and self.committed and self._writable()

    def wake(self) -> None:
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    async def sleep(self) -> None:
        """Returns when somebody calls `wake`."""
        self._news = self._loop.create_future()
        try:
            await self._news
        finally:
            self._news = None

    # Sending

    async def commit(self, headers: Mapping[str, str]) -> None:
        """Starts a stream: from here on the status is 200."""
        await self._start({**_STREAM_HEADERS, **headers})

    async def _start(self, headers: Mapping[str, str]) -> None:
        await self.start(
            200, [(name.encode("latin-1"), value.encode("latin-1")) for name, value in headers.items()]
        )

    async def start(self, status: int, headers: Sequence[tuple[bytes, bytes]]) -> None:
        """Sends the head of a reply."""
        self.committed = True
        await self._send({"type": "http.response.start", "status": status, "headers": list(headers)})

    async def send_whole(self, pieces: Iterable[bytes], headers: Mapping[str, str]) -> None:
        """Sends a reply's JSON with its length; if it is long, in pieces between which others have their turn."""
        sending = iter(pieces)
        if len(body := _next_piece(sending)) < _PIECE_BYTES:
            await self._start({**headers, **_JSON, "content-length": str(len(body))})
            await self.send(body, more=False)
            return
        await self._start({**headers, **_JSON})
        while body and not self.gone:
            await self.send(body, more=True)
            await asyncio.sleep(0)
            body = _next_piece(sending)
        await self.send(b"", more=False)

    async def send(self, body: bytes, *, more: bool) -> None:
        """Waits while the client's buffers are full; `look_after` looks at the clock meanwhile."""
        self.sending_since_s = self._clock()
        send = self._send_body if more else self._send
        await send({"type": "http.response.body", "body": body, "more_body": more})
        self.last_sent_s = self.sending_since_s
        self.sending_since_s = None

    def send_now(self, body: bytes) -> None:
        """Sends without waiting; only while `is_ready`."""
        self._write(body)
        self.last_sent_s = self._clock()

    def offer(self, body: bytes) -> bool:
        """Sends a body at once while the task sleeps; False if it would have to wait, or something else goes first."""
        is_ready = self.is_ready
        if is_ready:
            self.send_now(body)
        return is_ready

    # Ending

    async def watch(self, receive: Receive, on_gone: Callable[[], None] | None = None) -> None:
        """Waits until the client hangs up."""
        while (await receive())["type"] != "http.disconnect":
            pass
        self.leave()
        if on_gone is not None:
            on_gone()

    def leave(self) -> None:
        self.gone = True
        self.wake()

    def cut(self) -> None:
        """Ends the connection of a reader that does not read."""
        if not self.gone:
            self._on_cut()
            self.abort()

    def abort(self) -> None:
        """Drops the connection in the middle of a reply."""
        self.leave()
        if self._abort is not None:
            self._abort()

    def look_after(self, now: float, timeouts: Timeouts) -> None:
        """Cuts off a reader that takes nothing, and notes when a keep-alive is due."""
        patience_s = timeouts.keepalive_s if self.committed else timeouts.commit_after_s
        if self.sending_since_s is not None:
            if now - self.sending_since_s > timeouts.send_stall_s:
                self.cut()
        elif now - self.last_sent_s >= patience_s:
            self.overdue = True
            self.wake()


def _next_piece(pieces: Iterator[bytes]) -> bytes:
    """Returns as many pieces as are worth sending together; empty after the last one."""
    taken, size = [], 0
    for piece in pieces:
        taken.append(piece)
        size += len(piece)
        if size >= _PIECE_BYTES:
            break
    return b"".join(taken)


def _never() -> bool:
    return False


def send_at_once(send: Send, body: bytes) -> None:
    """Runs a `send` that is known not to wait, with a piece of a body."""
    sending = send({"type": "http.response.body", "body": body, "more_body": True}).__await__()
    for _ in sending:
        raise RuntimeError("send waited although the connection was writable")
