"""Calls over gRPC as requests of the gateway: each enters as an HTTP request does, and its messages go out as bodies.

So a call has a name and a line in the access log, its metadata are the headers that keys, promises and traces are read
from, and the same limits hold.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Awaitable, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import Any
from urllib.parse import unquote

import grpc
import orjson
from google.protobuf.message import DecodeError
from starlette.requests import Request as HttpRequest
from starlette.types import Message, Receive, Scope, Send

from penstock.gateway.errors import ApiError, internal, invalid
from penstock.gateway.http.connections import ABORT, Connection
from penstock.gateway.http.correlation import log_failed, log_fault
from penstock.gateway.http.entrance import Entrance, forget_body
from penstock.gateway.off_loop import off_loop
from penstock.gateway.service import Service

_CODES: Mapping[int, grpc.StatusCode] = {
    400: grpc.StatusCode.INVALID_ARGUMENT,
    401: grpc.StatusCode.UNAUTHENTICATED,
    403: grpc.StatusCode.PERMISSION_DENIED,
    404: grpc.StatusCode.NOT_FOUND,
    408: grpc.StatusCode.DEADLINE_EXCEEDED,
    409: grpc.StatusCode.ABORTED,
    413: grpc.StatusCode.RESOURCE_EXHAUSTED,
    429: grpc.StatusCode.RESOURCE_EXHAUSTED,
    431: grpc.StatusCode.RESOURCE_EXHAUSTED,
    500: grpc.StatusCode.INTERNAL,
    501: grpc.StatusCode.UNIMPLEMENTED,
    503: grpc.StatusCode.UNAVAILABLE,
    504: grpc.StatusCode.DEADLINE_EXCEEDED,
}
_NAMES = {"api-key": "x-api-key"}
"""Headers by the names that they may have in metadata."""
_EXCHANGE = "penstock.exchange"
"""The scope's name for the exchange that it belongs to."""
_MAX_MESSAGE_CHARS = 1000
"""Clients take a few kilobytes of metadata, and a message may quote what they sent."""
_HTTP_ALONE = frozenset({"connection", "content-length", "content-type"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Call:
    """One call on its way through the gateway."""

    http: HttpRequest
    message: Any
    """The request."""
    connection: Connection
    headers: dict[str, str] = field(default_factory=dict)
    """The metadata that go out before the first reply."""


Method = Callable[[Call], AsyncGenerator[bytes, None]]
"""A method yields its replies, one or several."""


class Calls:
    """The calls of one service."""

    def __init__(self, service: Service, methods: Mapping[str, tuple[Method, Any]]) -> None:
        """`methods` are the method and the class of its requests, by path."""
        self._service = service
        self._methods = methods
        limits, note_refused = service.options.limits, service.tenants.note_refused
        self._entrance = Entrance(self._answer, limits, note_refused=note_refused)

    def handler(self, path: str, *, streams: bool) -> Any:
        """Returns gRPC's handler of a method."""

        async def stream(body: bytes, context: Any) -> None:
            await self._serve(_Exchange(path, body, context, context.write), context)

        async def answer(body: bytes, context: Any) -> bytes:
            replies: list[bytes] = []

            async def keep(reply: bytes) -> None:
                replies.append(reply)

            await self._serve(_Exchange(path, body, context, keep), context)
            return replies[0]

        if streams:
            return grpc.unary_stream_rpc_method_handler(stream)
        return grpc.unary_unary_rpc_method_handler(answer)

    async def _serve(self, exchange: _Exchange, context: Any) -> None:
        """Serves one call; one that fails ends with the status of its error."""
        try:
            await self._entrance(exchange.scope, exchange.receive, exchange.send)
        except asyncio.CancelledError:
            if exchange.error is None:
                raise
        if (error := exchange.error) is not None:
            if exchange.opening is not None:
                await exchange.opening
            code = _CODES.get(error.status, grpc.StatusCode.UNKNOWN)
            await context.abort(code, _message(error), exchange.trailers(error))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        exchange: _Exchange = scope[_EXCHANGE]
        connection = Connection(scope, send, self._service.clock, self._service.metrics.slow_readers.inc)
        try:
            await self._send_replies(HttpRequest(scope, receive), connection)
        except ApiError as error:
            if not connection.committed:  # else it was logged when the stream ended
                log_fault(error)
            exchange.error = error
        except Exception as error:
            log_failed(f"{type(error).__name__}: {error}", error)
            exchange.error = internal()
        if exchange.error is not None and not connection.committed:
            await connection.start(exchange.error.status, [])
        await connection.send(b"", more=False)

    async def _send_replies(self, http: HttpRequest, connection: Connection) -> None:
        method, request = self._methods[http.scope["path"]]
        body = await http.body()
        try:
            message = await off_loop(len(body), request.FromString, body)
        except DecodeError:
            raise invalid("The request could not be parsed.", None, "invalid_message") from None
        call = Call(http=http, message=message, connection=connection)
        async with aclosing(method(call)) as replies:
            async for reply in replies:
                if not connection.committed:
                    forget_body(http)
                    headers = [(name.encode(), value.encode()) for name, value in call.headers.items()]
                    await connection.start(HTTPStatus.OK, headers)
                await connection.send(reply, more=True)


class _Exchange:
    """One call as ASGI has requests: its path, metadata and message come in, and replies go out."""

    def __init__(
        self, path: str, body: bytes, context: Any, write: Callable[[bytes], Awaitable[None]]
    ) -> None:
        self.error: ApiError | None = None
        """The error that the call ends with."""
        self.opening: asyncio.Future[None] | None = None
        """Is done when the metadata before the first reply are sent."""
        self._body: bytes | None = body
        self._context = context
        self._write = write
        self._headers: dict[str, str] = {}
        self._status = 0
        self._task = asyncio.current_task()
        given = ((name, value) for name, value in context.invocation_metadata() if isinstance(value, str))
        self.scope: Scope = {
            "type": "http",
            "method": "POST",
            "path": path,
            "query_string": b"",
            "headers": [(_NAMES.get(name, name).encode(), value.encode()) for name, value in given],
            "client": _address(context.peer()),
            "extensions": {ABORT: self._cut},
            _EXCHANGE: self,
        }

    async def receive(self) -> Message:
        """Gives the body; a client that goes away cancels the task."""
        if self._body is None:
            await asyncio.get_running_loop().create_future()
        body, self._body = self._body, None
        return {"type": "http.request", "body": body, "more_body": False}

    async def send(self, message: Message) -> None:
        if message["type"] == "http.response.start":
            self._status = message["status"]
            self._headers = {name.decode(): value.decode() for name, value in message["headers"]}
            if self._status == HTTPStatus.OK:
                # A call that is cut in the middle of this could not send its status.
                sending = self._context.send_initial_metadata(_metadata(self._headers))
                self.opening = asyncio.ensure_future(sending)
                self.opening.add_done_callback(_forget)
                await asyncio.shield(self.opening)
        elif self._status == HTTPStatus.OK and message["more_body"]:  # a reply may be empty; the end is none
            await self._write(message["body"])
        elif message["body"]:  # the entrance refused it
            self.error = ApiError(self._status, orjson.loads(message["body"])["error"]["message"])

    def _cut(self) -> None:
        """Ends the call of a client that does not read."""
        assert self._task is not None
        message = "The client read too slowly."
        self.error = ApiError(HTTPStatus.TOO_MANY_REQUESTS, message, code="slow_reader")
        self._task.cancel()

    def trailers(self, error: ApiError) -> Sequence[tuple[str, str]]:
        """Returns the metadata that an error goes out with."""
        code = {"penstock-error-code": error.code} if error.code else {}
        return _metadata({**self._headers, **error.headers(), **code})


def _forget(sent: asyncio.Future[None]) -> None:
    """Takes note of a failure: the client is gone."""
    if not sent.cancelled():
        sent.exception()


def _message(error: ApiError) -> str:
    """Returns the error's message, which names the field: a status has no other place for it."""
    is_named = error.param is None or error.param in error.message
    message = error.message if is_named else f"{error.param}: {error.message}"
    return message[:_MAX_MESSAGE_CHARS]


def _metadata(headers: Mapping[str, str]) -> Sequence[tuple[str, str]]:
    return tuple((name, value) for name, value in headers.items() if name not in _HTTP_ALONE)


def _address(peer: str) -> tuple[str, int] | None:
    """Returns the address in gRPC's name of a client, such as `ipv6:%5B::1%5D:50000`."""
    _, _, address = unquote(peer).partition(":")
    host, _, port = address.rpartition(":")
    return (host.strip("[]"), int(port)) if port.isdigit() else None
