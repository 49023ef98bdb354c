"""The measurement of what passing an event on costs: its fake replica, its relay, its switch, and what it tells."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from loadtests import passing
from loadtests.passing import cpu_s, fake_replica
from penstock.app.bench.client import exchange
from penstock.app.reader import body_pieces
from penstock.cluster.upstream import Address

HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"
EVENTS = [
    b'id: %d\ndata: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n' % number
    for number in range(40)
] + [b"data: [DONE]\n\n"]


@asynccontextmanager
async def running(part: Callable[..., Awaitable[None]], *arguments: object) -> AsyncIterator[Address]:
    """A part of the measurement in this process, which otherwise has one of its own."""
    ports: asyncio.Queue[int] = asyncio.Queue()

    class Pipe:
        def send(self, port: int) -> None:
            ports.put_nowait(port)

    task = asyncio.ensure_future(part(cast(Any, Pipe()), *arguments))
    try:
        async with asyncio.timeout(60):
            yield Address("127.0.0.1", await ports.get())
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture(autouse=True)
def streams() -> Iterator[list[passing._Replica]]:
    yield passing._Replica.streams
    assert passing._Replica.streams == []


async def read(address: Address) -> list[bytes]:
    """The pieces of a stream."""
    recording = await exchange(address.host, address.port, "/", {})
    data = bytes(recording.data)
    assert data.startswith(HEAD)
    assert data.endswith(b"0\r\n\r\n")
    return [piece for piece, _ in body_pieces(data, len(HEAD))]


def test_a_replica_sends_all_events_of_all_streams_at_the_same_time_and_a_relay_copies_them() -> None:
    async def run() -> None:
        async with (
            running(passing._replica, 40, "i") as replica,
            running(passing._copying, replica) as copier,
        ):
            began_s = time.perf_counter()
            found = await asyncio.gather(read(replica), read(replica), read(copier))
            assert 0.35 < time.perf_counter() - began_s < 20
            assert [*found] == [EVENTS] * 3

    asyncio.run(run())


def test_all_streams_come_through_the_switch() -> None:
    async def run() -> list[int]:
        async with (
            running(passing._replica, 5, "fake") as replica,
            running(passing._switch, replica) as switch,
        ):
            return [await passing._read_all(switch, resumable=resumable) for resumable in (False, True)]

    assert asyncio.run(run()) == [16 * 6, 16 * 6]


def test_a_fake_replica_is_a_process_that_ends() -> None:
    with fake_replica(40, "i") as (address, pid):
        assert asyncio.run(read(address)) == EVENTS
        assert Path(f"/proc/{pid}/status").exists()
        assert 0 < cpu_s(pid) < 60
    assert not Path(f"/proc/{pid}").exists()
