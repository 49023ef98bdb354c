"""Clients that read nothing of their answer, on real sockets with small windows: it is not kept for ever."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest

from penstock.gateway.app import create_app
from penstock.gateway.http.protocol import GatewayProtocol
from tests.gateway.harness import Gateway, serving
from tests.gateway.raw_http import PATIENCE_S, get, post

pytestmark = pytest.mark.anyio

STALL_S = GatewayProtocol.send_stall_s
SMALL_BYTES = 4096


class Unread(GatewayProtocol):
    """A connection whose time is the test's."""

    send_buffer_bytes = SMALL_BYTES
    last: Unread

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.lost = asyncio.Event()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        type(self).last = self

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.lost.set()

    @property
    def num_unsent(self) -> int:
        return self.transport.get_write_buffer_size()


@contextlib.asynccontextmanager
async def unread(folder: Path, request: bytes) -> AsyncIterator[tuple[socket.socket, Unread]]:
    """A connection of a client that has sent a request and reads nothing, once the server cannot send any more."""
    (folder / "large.bin").write_bytes(bytes(1_000_000))
    gateway = Gateway()
    gateway.engine.max_sequence_tokens = 1_000_000
    async with serving(create_app(gateway.service, folder), Unread) as url:
        with socket.socket() as client:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
            client.setblocking(False)
            loop = asyncio.get_running_loop()
            host, _, port = url.removeprefix("http://").partition(":")
            await loop.sock_connect(client, (host, int(port)))
            await loop.sock_sendall(client, request)
            await until(lambda: hasattr(Unread, "last") and Unread.last.num_unsent > 0)
            yield client, Unread.last
            del Unread.last


async def until(is_so: Callable[[], bool]) -> None:
    async with asyncio.timeout(PATIENCE_S):
        while not is_so():
            await asyncio.sleep(0.001)


async def assert_lost_at(connection: Unread, now_s: float) -> None:
    """The connection lives until the check at that time."""
    assert not connection.lost.is_set()
    connection.check_progress(now_s)
    async with asyncio.timeout(PATIENCE_S):
        await connection.lost.wait()


REQUESTS = {
    "a file without a key": get("/static/large.bin"),
    "a plain reply": post("/detokenize", {"tokens": [9] * 100_000}),
    "a plain reply, then the end of the connection": post(
        "/detokenize", {"tokens": [9] * 100_000}, "connection: close"
    ),
}


@pytest.mark.parametrize("request_", REQUESTS.values(), ids=REQUESTS)
async def test_a_client_that_reads_nothing_is_cut_off(request_: bytes, tmp_path: Path) -> None:
    async with unread(tmp_path, request_) as (_, connection):
        begun_s, num_unsent = connection.loop.time() - STALL_S, -1
        while connection.num_unsent != num_unsent:  # the kernel takes some more on the client's behalf
            begun_s, num_unsent = begun_s + STALL_S, connection.num_unsent
            connection.check_progress(begun_s)
            connection.check_progress(begun_s + STALL_S / 2)
            await asyncio.sleep(0.001)
        await assert_lost_at(connection, begun_s + STALL_S)


async def test_a_connection_that_is_closing_is_cut_off_too(tmp_path: Path) -> None:
    """As uvicorn closes an idle one, whose client has not read its last answer."""
    async with unread(tmp_path, REQUESTS["a plain reply"]) as (_, connection):
        connection.transport.close()
        begun_s = connection.loop.time()
        connection.check_progress(begun_s)
        await assert_lost_at(connection, begun_s + STALL_S)


async def test_a_client_that_reads_slowly_has_its_whole_answer(tmp_path: Path) -> None:
    async with unread(tmp_path, REQUESTS["a file without a key"]) as (client, connection):
        loop, now_s, num_read = asyncio.get_running_loop(), 0.0, 0
        while num_read < 1_000_000:
            connection.check_progress(now_s)
            before = connection.num_unsent
            while num_read < 1_000_000 and connection.num_unsent == before:
                num_read += len(await loop.sock_recv(client, 65_536))
                await asyncio.sleep(0)
            now_s += STALL_S - 1
        assert not connection.lost.is_set()


async def test_it_is_checked_while_something_is_unsent_and_no_longer(tmp_path: Path) -> None:
    async with unread(tmp_path, REQUESTS["a plain reply"]) as (client, connection):
        assert connection._stall_check is not None
        loop = asyncio.get_running_loop()
        while connection.num_unsent:
            await loop.sock_recv(client, 65_536)
            await asyncio.sleep(0)
        connection.check_progress(loop.time())
        assert connection._stall_check is None
