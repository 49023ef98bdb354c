"""Replicas that say what a test tells them to, byte by byte, and a switch or a relay in front of them."""

from __future__ import annotations

import asyncio
import contextlib
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator

from starlette.types import ASGIApp, Receive, Scope, Send

from penstock.app.listen import bind, port_of
from penstock.app.loop import Server, uvicorn_config
from penstock.cluster.metrics import SwitchMetrics
from penstock.cluster.position import Position
from penstock.cluster.relay import ForwardedRequest, Relay, Target, none_ready
from penstock.cluster.upstream import Address
from penstock.gateway.background import meanwhile
from penstock.gateway.errors import ApiError
from penstock.gateway.http.connections import Connection, Timeouts
from penstock.gateway.http.refusals import refusal

PATIENCE_S = 10

Script = Callable[["Call"], Awaitable[None]]


class Call:
    """One request that a scripted replica got."""

    def __init__(
        self, name: str, head: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
    ) -> None:
        self.name = name
        """Of the replica."""
        self.head = head
        self.target = head.split(" ")[1]
        self.reader = reader
        self.writer = writer

    def reply(self, status: int = 200, kind: str = "text/event-stream", *headers: str) -> None:
        lines = [f"HTTP/1.1 {status} X", f"content-type: {kind}", "transfer-encoding: chunked", *headers]
        self.writer.write("\r\n".join([*lines, "", ""]).encode())

    def send(self, *bodies: bytes) -> None:
        for body in bodies:
            self.writer.write(b"%x\r\n%b\r\n" % (len(body), body))

    def end(self, *bodies: bytes) -> None:
        self.send(*bodies)
        self.writer.write(b"0\r\n\r\n")

    def refuse(self, status: int) -> None:
        self.reply(status, "application/json")
        self.end(b'{"error":{"code":"mine"}}')

    async def cut(self) -> None:
        """As a process ends that is killed: what was written arrives, and then the connection is gone."""
        await self.writer.drain()
        self.writer.close()

    async def left(self) -> None:
        """Returns when the other end has hung up."""
        with contextlib.suppress(ConnectionError):
            await asyncio.wait_for(self.reader.read(), PATIENCE_S)


@contextlib.asynccontextmanager
async def replica(
    script: Script, tls: ssl.SSLContext | None = None, name: str = ""
) -> AsyncIterator[Address]:
    """A server whose every request is answered by the script."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            head = (await reader.readuntil(b"\r\n\r\n")).decode()
            length = next(
                (line for line in head.lower().split("\r\n") if line.startswith("content-length")), ""
            )
            await reader.readexactly(int(length.partition(":")[2] or 0))
            await script(Call(name, head, reader, writer))
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0, ssl=tls)
    async with server:
        yield Address("127.0.0.1", server.sockets[0].getsockname()[1], is_tls=tls is not None)


class FixedPicker:
    """Replicas in a fixed order; a `cluster.relay.Picker`."""

    def __init__(self, *addresses: Address) -> None:
        self.targets = [Target(f"r{number}", address) for number, address in enumerate(addresses)]
        self.lost: set[str] = set()

    def choose(self, excluded: frozenset[str]) -> Target:
        for target in self.targets:
            if target.replica not in excluded:
                return target
        raise none_ready()

    def has_others(self, excluded: frozenset[str]) -> bool:
        return any(target.replica not in excluded for target in self.targets)

    def is_lost(self, replica: str) -> bool:
        return replica in self.lost

    def owners(self, id: str) -> Iterator[Target]:  # noqa: ARG002
        return iter(self.targets)


class RelayApp:
    """An app whose every request is relayed as this says."""

    def __init__(
        self, picker: FixedPicker, *, position: Callable[[], Position] | None = None, id: str = ""
    ) -> None:
        self.picker = picker
        self.metrics = SwitchMetrics()
        self.timeouts = Timeouts()
        self.stall_s = 30.0
        self.lost_s = 30.0
        self._position = position
        self._id = id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        body = b""
        while True:
            piece = await receive()
            body += piece.get("body", b"")
            if not piece.get("more_body"):
                break
        message = ForwardedRequest(
            scope["method"], scope["path"], scope["raw_path"], scope["headers"][:0], body, id=self._id
        )
        loop = asyncio.get_running_loop()
        connection = Connection(scope, send, loop.time, self.metrics.slow_readers.inc)
        position = self._position and self._position()
        relay = Relay(message, self.picker, connection, self.metrics, position)

        async def tick() -> None:
            while True:
                await asyncio.sleep(0.01)
                relay.look_after(loop.time(), self.timeouts, stall_s=self.stall_s, lost_s=self.lost_s)

        async with meanwhile(connection.watch(receive, relay.end)), meanwhile(tick()):
            try:
                await relay.run()
            except ApiError as error:
                await refusal(error, scope["path"])(scope, receive, send)
            finally:
                relay.end()


@contextlib.asynccontextmanager
async def serving(app: ASGIApp) -> AsyncIterator[Address]:
    """The app on a real port, in this event loop."""
    with bind("127.0.0.1", 0) as listener:
        server = Server(uvicorn_config(app, "off", proxies=["127.0.0.1"]))
        task = asyncio.create_task(server.serve(sockets=[listener]))
        while not server.started:
            await asyncio.sleep(0)
        try:
            yield Address("127.0.0.1", port_of(listener))
        finally:
            server.should_exit = True
            await task
