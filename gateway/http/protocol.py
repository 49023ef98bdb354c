"""HTTP/1.1 on the socket: uvicorn's httptools protocol with deadlines and bounds that it lacks.

A connection that sends nothing, or half a header, would otherwise stay open for ever (uvicorn #157), and a header may
otherwise have megabytes.
"""

from __future__ import annotations

import asyncio
import socket
from http import HTTPStatus
from typing import Any, cast

import httptools
from starlette.types import Send
from uvicorn.protocols.http.httptools_impl import STATUS_LINE, HttpToolsProtocol, RequestResponseCycle

from penstock.gateway.errors import ApiError
from penstock.gateway.http.connections import (
    ABORT,
    BODY_WITHIN,
    SEND,
    WRITABLE,
    WRITE,
    Timeouts,
    send_at_once,
)
from penstock.gateway.http.entrance import headers_too_large
from penstock.gateway.limits import Limits

_DEFAULTS = Limits()
_CHECK_PART = 0.3
"""The part of `send_stall_s` between two checks: `Connection` cuts off the reader of a stream first, and counts it."""


class _Cycle(RequestResponseCycle):
    def write(self, body: bytes) -> None:
        """Sends a piece of a body like `send`, which must not have to wait; for a stream, without a coroutine."""
        if body and self.chunked_encoding and not self.disconnected:
            self.transport.write(b"%x\r\n%b\r\n" % (len(body), body))
        else:
            send_at_once(cast(Send, self.send), body)


class _OldCycle(_Cycle):
    """Answers HTTP/1.0, which knows no chunks: without a length, a body ends with the connection."""

    _has_length = True

    async def send(self, message: Any) -> None:
        if message["type"] == "http.response.start":
            self._has_length = any(
                name.lower() == b"content-length" for name, _ in message.get("headers", ())
            )
            self.chunked_encoding = None if self._has_length else False
        elif not self._has_length:
            self.expected_content_length = len(message.get("body", b""))
        await super().send(message)


class _RequestParser(httptools.HttpRequestParser):
    """Hands the protocol the bytes after the head of a request that offers an upgrade."""

    def __init__(self, protocol: GatewayProtocol) -> None:
        super().__init__(protocol)
        self.set_dangerous_leniencies(lenient_data_after_close=True)  # as uvicorn does
        self._protocol = protocol

    def feed_data(self, data: bytes) -> None:  # type: ignore[override]  # uvicorn has nothing but bytes
        try:
            super().feed_data(data)
        except httptools.HttpParserUpgrade as stopped:
            self._protocol.decline_upgrade(data[stopped.args[0] :])


class GatewayProtocol(HttpToolsProtocol):
    """The protocol for `uvicorn.Config(http=GatewayProtocol)`; subclasses may set other bounds."""

    header_deadline_s = 10.0
    body_deadline_s = 30.0
    max_header_bytes = _DEFAULTS.max_header_bytes
    max_headers = _DEFAULTS.max_headers
    max_pipelined = 8
    """The requests that may wait behind the current one before the connection is no longer read."""
    send_stall_s = Timeouts().send_stall_s
    """A client that takes nothing of an answer for so long is cut off; uvicorn would keep the answer for ever."""
    send_buffer_bytes = 128 * 1024
    """The kernel's send buffer; the gateway cannot see how much of it a slow reader has left unread."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.parser = _RequestParser(self)
        self._deadline: asyncio.TimerHandle | None = None
        self._in_header = True
        self._received_bytes = 0
        self._parsed_bytes = 0
        self._refusal: ApiError | None = None
        self._cycles: list[RequestResponseCycle] = []
        """The requests of this connection that are not answered yet, in order; the last may still be arriving."""
        self._deaf = False
        """Whether further bytes are ignored because they are not HTTP; earlier requests are still answered."""
        self._num_unsent = 0
        """The bytes that the client had not taken at the last check."""
        self._unsent_since_s = 0.0
        self._stall_check: asyncio.TimerHandle | None = None
        """The next check; None while there is nothing to wait for."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        connection = transport.get_extra_info("socket")
        if connection is not None:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, self.send_buffer_bytes)
        self._expect_within(self.header_deadline_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self._clear_deadline()
        if self._stall_check is not None:
            self._stall_check.cancel()
        super().connection_lost(exc)
        for cycle in self._cycles:  # uvicorn tells the newest only
            cycle.disconnected = True
            cycle.message_event.set()

    def data_received(self, data: bytes) -> None:
        if self._deaf:
            return
        # The parser keeps a header to itself until it is complete, so that what comes in is counted, too.
        self._received_bytes += len(data) if self._in_header else 0
        super().data_received(data)
        if self.transport.is_closing():
            return
        if self._in_header and self._received_bytes > self.max_header_bytes:
            self._refuse(headers_too_large())
        elif self._deadline is None and self._is_idle:
            # Bytes that begin no message have stopped uvicorn's keep-alive timer all the same.
            self._expect_within(self.header_deadline_s)

    def on_message_begin(self) -> None:
        super().on_message_begin()
        self._extensions: dict[str, Any] = {
            ABORT: self.transport.abort,
            BODY_WITHIN: self._expect_body_within,
            WRITABLE: self._is_writable,
        }
        self.scope["extensions"] = self._extensions
        self._parsed_bytes = 0
        self._expect_within(self.header_deadline_s)

    def on_url(self, url: bytes) -> None:
        self._count(len(url))
        super().on_url(url)

    def on_header(self, name: bytes, value: bytes) -> None:
        self._count(len(name) + len(value))
        super().on_header(name, value)
        if len(self.headers) > self.max_headers:
            self._give_up(headers_too_large())

    def on_headers_complete(self) -> None:
        is_old = self.parser.get_http_version() == "1.0"
        self._check_headers(is_old)
        if self.parser.should_upgrade():
            return  # see `decline_upgrade`
        self._in_header = False
        self._expect_within(self.body_deadline_s)
        super().on_headers_complete()
        if self.cycle is not None:
            self.cycle.__class__ = _OldCycle if is_old else _Cycle
            self._extensions |= {WRITE: cast(_Cycle, self.cycle).write, SEND: self.cycle.send}
        self._cycles = [cycle for cycle in self._cycles if not cycle.response_complete]
        if self.cycle is not None:
            self._cycles.append(self.cycle)
        if 0 < len(self.pipeline) < self.max_pipelined:
            self.flow.resume_reading()  # or else nobody would notice that the client hangs up

    def _check_headers(self, is_old: bool) -> None:
        """Refuses headers that are ambiguous or cannot be understood."""
        if self.parser.should_upgrade() and not self._offers_http_2():
            self._give_up(_wrong("There is nothing to upgrade to.", "upgrade_not_supported"))
        num_hosts = sum(name == b"host" for name, _ in self.headers)
        if num_hosts > 1 or not (num_hosts or is_old):
            self._give_up(_wrong("A request must have one Host header.", "invalid_host"))
        codings = [value.strip().lower() for name, value in self.headers if name == b"transfer-encoding"]
        if codings not in ([], [b"chunked"]):
            message = "The only Transfer-Encoding that this server knows is 'chunked'."
            self._give_up(_wrong(message, "unknown_transfer_encoding", HTTPStatus.NOT_IMPLEMENTED))

    def _offers_http_2(self) -> bool:
        return [value.strip().lower() for name, value in self.headers if name == b"upgrade"] == [b"h2c"]

    def decline_upgrade(self, rest: bytes) -> None:
        """Parses a request again without its upgrade offer, which a server may ignore (RFC 9110, 7.8), and the rest.

        Java's HttpClient offers HTTP/2 with every request; a parser that has seen an offer reads no body.
        """
        method, version = self.parser.get_method(), self.parser.get_http_version().encode()
        offered = (b"upgrade", b"http2-settings")
        lines = [b"%b: %b" % header for header in self.headers if header[0] not in (b"connection", *offered)]
        wanted = [
            value for name, value in self.headers if name == b"connection" and b"close" in value.lower()
        ]
        lines += [b"connection: close"] if wanted else []
        head = b"\r\n".join([b"%b %b HTTP/%b" % (method, self.url, version), *lines, b"", b""])
        self.parser = _RequestParser(self)
        self.parser.feed_data(head + rest)

    def on_message_complete(self) -> None:
        if self.parser.should_upgrade():
            return
        self._clear_deadline()
        self._in_header = True
        self._received_bytes = 0
        super().on_message_complete()

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_progress()

    def on_response_complete(self) -> None:
        super().on_response_complete()
        self._expect_progress()

    def check_progress(self, now_s: float) -> None:
        """Aborts the connection if its client has taken nothing for `send_stall_s`, even while it is closing."""
        self._stall_check = None
        num_unsent = self.transport.get_write_buffer_size()
        if num_unsent != self._num_unsent:
            self._num_unsent, self._unsent_since_s = num_unsent, now_s
        if num_unsent and now_s - self._unsent_since_s >= self.send_stall_s:
            self.transport.abort()
        elif num_unsent:
            self._stall_check = self.loop.call_later(
                _CHECK_PART * self.send_stall_s, lambda: self.check_progress(self.loop.time())
            )

    def _expect_progress(self) -> None:
        if self._stall_check is None:
            self.check_progress(self.loop.time())

    def send_400_response(self, msg: str) -> None:  # noqa: ARG002
        """Refuses a request; uvicorn calls it when the parser gave up, or was made to."""
        error = ApiError(HTTPStatus.BAD_REQUEST, "This is not a valid HTTP request.", code="invalid_http")
        self._refuse(self._refusal or error)

    def _is_writable(self) -> bool:
        return not self.flow.write_paused

    @property
    def _is_idle(self) -> bool:
        return (self.cycle is None or self.cycle.response_complete) and self.timeout_keep_alive_task is None

    def _count(self, num_bytes: int) -> None:
        self._parsed_bytes += num_bytes
        if self._parsed_bytes > self.max_header_bytes:
            self._give_up(headers_too_large())

    def _give_up(self, error: ApiError) -> None:
        """Makes the parser stop: it turns what its callbacks raise into an error of its own."""
        self._refusal = error
        raise error

    def _refuse(self, error: ApiError) -> None:
        """Answers without the app, unless it is answering, and hangs up."""
        self._clear_deadline()
        if earlier := self._answering():
            # Their answers go out whole; what came after them is dropped.
            self._deaf = True
            self.pipeline.clear()
            earlier[-1].keep_alive = False
            return
        if self.cycle is None or self.cycle.response_complete or not self.cycle.response_started:
            self.transport.write(_render(error))
        self.transport.close()
        self._expect_progress()

    def _expect_within(self, seconds: float) -> None:
        self._clear_deadline()
        self._deadline = self.loop.call_later(seconds, self._on_deadline)

    def _expect_body_within(self, seconds: float) -> None:
        if self.cycle is not None and self.cycle.more_body:
            self._expect_within(seconds)

    def _clear_deadline(self) -> None:
        if self._deadline is not None:
            self._deadline.cancel()
            self._deadline = None

    def _answering(self) -> list[RequestResponseCycle]:
        """Returns the requests that have arrived whole and are not answered yet."""
        return [cycle for cycle in self._cycles if not cycle.response_complete and not cycle.more_body]

    def _on_deadline(self) -> None:
        if self._answering():  # the client may take its time while it is served
            self._expect_within(self.header_deadline_s)
            return
        if not self.transport.is_closing():
            message = "The request took too long to arrive."
            self._refuse(ApiError(HTTPStatus.REQUEST_TIMEOUT, message, code="request_timeout"))


def _wrong(message: str, code: str, status: int = HTTPStatus.BAD_REQUEST) -> ApiError:
    return ApiError(status, message, code=code, close=True)


def _render(error: ApiError) -> bytes:
    body = error.body()
    head = f"content-type: application/json\r\ncontent-length: {len(body)}\r\nconnection: close\r\n\r\n"
    return STATUS_LINE[error.status] + head.encode("ascii") + body
