"""The measurement of what passing an event on costs: its fake replica, its relay, its switch, and what it tells."""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from pathlib import Path
from typing import Any, cast

import pytest

from loadtests import passing
from loadtests.passing import cpu_s, fake_replica, main, measure
from penstock.app.bench.client import exchange
from penstock.app.reader import body_pieces
from penstock.cluster.upstream import Address
from tests.loadtests.scripted import ScriptedServer, chat

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


def test_the_relay_closes_both_ends() -> None:
    async def run() -> None:
        async with (
            running(passing._replica, 10**9, "i") as replica,
            running(passing._copying, replica) as copier,
        ):
            reader, writer = await asyncio.open_connection(copier.host, copier.port)
            writer.write(b"POST / HTTP/1.1\r\n\r\n")
            await reader.readuntil(b"id: 3\n")
            (stream,) = passing._Replica.streams
            assert stream._transport is not None
            writer.close()
            while not stream._transport.is_closing():
                await asyncio.sleep(0.01)
            passing._Replica.streams.clear()

    asyncio.run(run())


def test_a_replica_tells_its_state_and_then_its_load_four_times_a_second() -> None:
    async def run() -> None:
        async with running(passing._replica, 3, "the identity") as replica:
            reader, writer = await asyncio.open_connection(replica.host, replica.port)
            writer.write(b"GET / HTTP/1.1\r\n\r\n")
            assert await reader.readexactly(len(HEAD)) == HEAD
            messages, times_s = [], []
            for _ in range(3):
                size = int(await reader.readline(), 16)
                messages.append(json.loads((await reader.readexactly(size + 2))[:-2]))
                times_s.append(time.perf_counter())
            writer.close()
        first, *changes = messages
        assert (first["replica"], first["model"]) == ("fake", "the identity")
        assert [change["number"] for change in changes] == [1, 2]
        assert all(
            change["epoch"] == first["epoch"] and change["load"] == first["load"] for change in changes
        )
        assert 0.2 < times_s[-1] - times_s[0] < 2.4

    asyncio.run(run())


def test_all_streams_come_through_the_switch() -> None:
    async def run() -> list[int]:
        async with (
            running(passing._replica, 5, "fake") as replica,
            running(passing._switch, replica) as switch,
        ):
            return [await passing._read_all(switch, resumable=resumable) for resumable in (False, True)]

    assert asyncio.run(run()) == [16 * 6, 16 * 6]


def test_sixteen_streams_are_asked_for_at_once() -> None:
    with ScriptedServer(chat("a", "b")) as server:
        address = Address("127.0.0.1", server.port)
        assert asyncio.run(passing._read_all(address, resumable=True)) == 16 * 4
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me about a fox. " * 8}],
        "stream": True,
        "stream_options": {"resumable": True},
    }
    assert server.asked == [("POST", "/v1/chat/completions", body)] * 16
    cut = chat("a").removesuffix(b"data: [DONE]\n\n")
    with ScriptedServer(chat("a"), cut, chat("b")) as server, pytest.raises(ConnectionError, match="cut"):
        asyncio.run(passing._read_all(Address("127.0.0.1", server.port), resumable=True))


def test_a_fake_replica_is_a_process_that_ends() -> None:
    with fake_replica(40, "i") as (address, pid):
        assert asyncio.run(read(address)) == EVENTS
        assert Path(f"/proc/{pid}/status").exists()
        assert 0 < cpu_s(pid) < 60
    assert not Path(f"/proc/{pid}").exists()


def test_the_time_of_a_process_is_its_processors() -> None:
    before_s = time.process_time()
    assert before_s <= cpu_s(os.getpid()) <= time.process_time()


def test_the_cost_of_an_event_is_in_microseconds(monkeypatch: pytest.MonkeyPatch) -> None:
    used_s = iter([10.0, 10.5])
    asked: list[object] = []

    async def read_all(address: Address, *, resumable: bool) -> int:
        asked.append((address, resumable))
        return 1_000

    monkeypatch.setattr(passing, "cpu_s", lambda pid: next(used_s) if pid == 7 else 0.0)
    monkeypatch.setattr(passing, "_read_all", read_all)
    assert measure(Address("here", 1), 7, resumable=True) == pytest.approx(500.0)
    assert asked == [(Address("here", 1), True)]


@pytest.mark.parametrize(
    ("given", "num_events", "rounds"), [([], 300, 3), (["--events", "7", "--rounds", "2"], 7, 2)]
)
def test_the_command_measures_plain_resumable_and_copied_in_every_round(
    given: list[str],
    num_events: int,
    rounds: int,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    log: list[object] = []

    @contextmanager
    def process(part: Callable[..., object], *arguments: object) -> Iterator[tuple[object, int]]:
        log.append((part, *arguments))
        yield part, 7
        log.append("ends")

    def scripted(part: object, pid: int, *, resumable: bool) -> float:
        assert pid == 7
        return 12.34 + 10 * resumable + 20 * (part is passing._copying)

    monkeypatch.setattr(passing, "_process", process)
    monkeypatch.setattr(passing, "measure", scripted)
    monkeypatch.setattr(sys, "argv", ["passing", *given])
    main()
    replica = passing._replica
    assert log == [
        (replica, num_events, "fake"), (passing._copying, replica), (passing._switch, replica), *["ends"] * 3,
    ]  # fmt: skip
    assert capsys.readouterr().out == "an event: 12.3 us plain, 22.3 us resumable; copied 32.3 us\n" * rounds
