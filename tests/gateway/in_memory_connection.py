"""A connection without a socket, whose bytes and whose time are the test's."""

from __future__ import annotations

import asyncio
import http.client
import io
import socket
from collections.abc import Callable, Coroutine
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import uvicorn
from uvicorn.server import ServerState

from penstock.gateway.http.protocol import GatewayProtocol
from tests.gateway.harness import Gateway, settled

HEADER_S, BODY_S, KEEP_ALIVE_S = 10, 30, 5


@dataclass(slots=True)
class Timer:
    due_s: float
    callback: Callable[[], None]
    cancelled: bool = False

    def cancel(self) -> None:
        self.cancelled = True


@dataclass(slots=True)
class ManualLoop:
    """The running loop, but for its timers: those go off when the test says that time has passed."""

    now_s: float = 0.0
    timers: list[Timer] = field(default_factory=list)

    def call_later(self, delay_s: float, callback: Callable[..., None], *args: Any) -> Timer:
        timer = Timer(self.now_s + delay_s, lambda: callback(*args))
        self.timers.append(timer)
        return timer

    def time(self) -> float:
        return self.now_s

    def create_task(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        return asyncio.get_running_loop().create_task(work)

    def pass_s(self, seconds: float) -> None:
        self.now_s += seconds
        due = [timer for timer in self.timers if timer.due_s <= self.now_s]
        self.timers = [timer for timer in self.timers if timer.due_s > self.now_s]
        for timer in due:
            if not timer.cancelled:
                timer.callback()


class InMemoryTransport(asyncio.Transport):
    """Keeps what was written to it."""

    def __init__(self) -> None:
        super().__init__()
        self.written = b""
        self.closed = False

    def write(self, data: bytes | bytearray | memoryview[Any]) -> None:
        assert not self.closed, "written to after it was closed"
        self.written += bytes(data)

    def close(self) -> None:
        self.closed = True

    def is_closing(self) -> bool:
        return self.closed

    def get_write_buffer_size(self) -> int:
        return 0

    def pause_reading(self) -> None:
        pass

    def resume_reading(self) -> None:
        pass


class InMemoryConnection:
    """A connection that has just been accepted."""

    def __init__(self, gateway: Gateway) -> None:
        config = uvicorn.Config(
            gateway.app, log_level="critical", ws="none", timeout_keep_alive=KEEP_ALIVE_S, lifespan="off"
        )
        self.loop: Any = ManualLoop()
        self.transport = InMemoryTransport()
        self._protocol = GatewayProtocol(config, ServerState(), {}, _loop=self.loop)
        self._protocol.connection_made(self.transport)

    async def send(self, data: bytes) -> None:
        self._protocol.data_received(data)
        await settled()

    def status(self) -> int | None:
        """Returns the status of the last answer; None as long as there is none."""
        lines = [line for line in self.transport.written.split(b"\r\n") if line.startswith(b"HTTP/1.1 ")]
        return int(lines[-1].split()[1]) if lines else None

    def body(self) -> bytes:
        """Returns the whole body of the first answer."""
        with io.BytesIO(self.transport.written) as written:
            answer = http.client.HTTPResponse(
                cast(socket.socket, SimpleNamespace(makefile=lambda _: written))
            )
            answer.begin()
            return answer.read()

    def hang_up(self) -> None:
        self._protocol.connection_lost(None)
