"""One request to one replica, over its own connection; its reply is parsed, and read as fast as the client takes it.

A connection on the same machine or rack costs a tenth of a millisecond. One for each request means that a connection
refused is proof that nobody listens, that a client's leaving is told by hanging up, and that no request is lost to a
connection that was about to be closed.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Protocol, cast

import httptools

CONNECT_S = 2.0
Headers = Sequence[tuple[bytes, bytes]]

_HOP_BY_HOP = frozenset(
    b"connection keep-alive te trailer transfer-encoding upgrade http2-settings "
    b"proxy-authenticate proxy-authorization proxy-connection".split()
)


@dataclass(frozen=True, slots=True)
class Address:
    host: str
    port: int
    is_tls: bool = False

    @property
    def authority(self) -> str:
        return f"[{self.host}]:{self.port}" if ":" in self.host else f"{self.host}:{self.port}"

    def __str__(self) -> str:
        return f"{'https' if self.is_tls else 'http'}://{self.authority}"


class ReplyListener(Protocol):
    """The receiver of a reply."""

    def on_head(self, status: int, headers: Headers) -> None: ...

    def on_body(self, body: bytes) -> None: ...

    def on_end(self, *, is_whole: bool) -> None:
        """Called once, when the reply is over; `is_whole` if it came to its proper end."""


class Upstream(asyncio.Protocol):
    """The connection to a replica, from the request to the end of its reply."""

    def __init__(self, listener: ReplyListener, *, is_head: bool = False) -> None:
        """With `is_head` the reply has no body, whatever its headers say."""
        self._clock = asyncio.get_running_loop().time
        self.heard_s = self._clock()
        """The time at which something came last."""
        self._listener = listener
        self._is_head = is_head
        self._transport: asyncio.Transport
        self._headers: list[tuple[bytes, bytes]] = []
        self._body: list[bytes] = []
        self.on_body = self._body.append
        """The parser's callback: a built-in, so that an event calls nothing in Python."""
        self._is_over = False
        self._writable = asyncio.Event()
        self._writable.set()
        self._parser = httptools.HttpResponseParser(self)

    def close(self) -> None:
        """Closes the connection; the listener is told nothing more."""
        self._is_over = True
        self._writable.set()
        self._transport.abort()

    def pause(self) -> None:
        if not self._is_over:
            self._transport.pause_reading()

    def resume(self) -> None:
        if not self._is_over:
            self._transport.resume_reading()

    async def upload(self, parts: AsyncIterator[bytes]) -> None:
        """Sends the body of a request in chunks, as fast as the replica takes it, unless the reply is there before."""
        async for part in parts:
            if self._is_over:
                return
            self._transport.write(b"%x\r\n%b\r\n" % (len(part), part))
            await self._writable.wait()
        self._transport.write(b"0\r\n\r\n")

    # As an asyncio.Protocol

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)  # that of uvloop is no subclass

    def data_received(self, data: bytes) -> None:
        self.heard_s = self._clock()
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade):
            self._end(is_whole=False)
            return
        if self._body:
            self._tell_body()

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        self._end(is_whole=False)

    # As a parser's listener

    def on_message_begin(self) -> None:
        self._headers.clear()

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and not self._is_over:
            self._listener.on_head(status, end_to_end(self._headers))
            if self._is_head:
                self._end(is_whole=True)

    def on_message_complete(self) -> None:
        if self._parser.get_status_code() >= 200:
            self._tell_body()
            self._end(is_whole=True)

    def _tell_body(self) -> None:
        if self._body and not self._is_over:
            body = self._body[0] if len(self._body) == 1 else b"".join(self._body)
            self._body.clear()
            self._listener.on_body(body)

    def _end(self, *, is_whole: bool) -> None:
        if not self._is_over:
            self.close()
            self._listener.on_end(is_whole=is_whole)


@cache
def tls_context() -> ssl.SSLContext:
    """Returns a context that trusts the system's authorities, or those that SSL_CERT_FILE names."""
    return ssl.create_default_context()


async def connect(
    address: Address, request: bytes, listener: ReplyListener, *, is_head: bool = False
) -> Upstream:
    """Opens a connection and sends a request.

    Raises:
        OSError: nobody listens there, it took too long, or its certificate is not to be trusted; nothing was sent.
    """
    loop = asyncio.get_running_loop()
    try:
        async with asyncio.timeout(CONNECT_S):
            transport, upstream = await loop.create_connection(
                lambda: Upstream(listener, is_head=is_head),
                address.host,
                address.port,
                ssl=tls_context() if address.is_tls else None,
            )
    except TimeoutError:
        raise OSError(f"{address} did not answer within {CONNECT_S:g} s") from None
    transport.write(request)
    return upstream


def request_bytes(
    method: str, target: bytes, address: Address, headers: Headers, body: bytes | None
) -> bytes:
    """Returns the bytes of a request whose connection is not used again; if `body` is None, it follows in chunks."""
    host = b"host: " + address.authority.encode()
    lines = [b"%b %b HTTP/1.1" % (method.encode(), target), host, b"connection: close"]
    lines += [b"%b: %b" % header for header in headers]
    if body is None:
        lines.append(b"transfer-encoding: chunked")
    elif body or method in ("POST", "PUT", "PATCH"):
        lines.append(b"content-length: %d" % len(body))
    return b"\r\n".join([*lines, b"", body or b""])


def end_to_end(headers: Headers) -> list[tuple[bytes, bytes]]:
    """Returns the headers that are for the other end, not for one connection (RFC 9110, 7.6.1)."""
    return [header for header in headers if header[0] not in _HOP_BY_HOP]
