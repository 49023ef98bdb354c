"""Measures the cost of each event that a switch passes on: `python -m loadtests.passing`.

A fake replica sends events of 170 bytes, one to every stream each 10 ms, as the steps of an engine bring them, and
its state. They are read directly, through a relay that only copies bytes, and through a switch, as plain and as
resumable streams. Told is the processor time of the process in the middle, for an event, choosing included.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import multiprocessing
import time
from collections.abc import Awaitable, Callable, Iterator
from multiprocessing.connection import Connection as Pipe
from typing import ClassVar, cast

from lab.bench.routing import fake_snapshot
from penstock.app.bench.client import exchange
from penstock.app.checkpoint import find_checkpoint
from penstock.app.listen import bind, port_of
from penstock.app.loop import Server, loop_factory, settle_garbage, uvicorn_config
from penstock.cluster.switch import Switch, SwitchOptions
from penstock.cluster.upstream import Address
from penstock.engine.model.checkpoint import read_tokenizer
from penstock.gateway.endpoints.state import state_line
from penstock.gateway.wire.frames import DONE
from penstock.gateway.wire.prompts import Prompts
from penstock.priority.routing.state import Change

_SECRET = "for fake streams"
_IDENTITY = "fake"
_EVERY_S = 0.01
_PUSH_S = 0.25
_NUM_STREAMS = 16
_EVENT = (
    b'id: %d\ndata: {"id":"chatcmpl-0123456789abcdef0123456789abcdef","object":"chat.completion.chunk",'
    b'"choices":[{"index":0,"delta":{"content":" word"}}]}\n\n'
)
_HEAD = b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\ntransfer-encoding: chunked\r\n\r\n"


def _chunk(body: bytes) -> bytes:
    return b"%x\r\n%b\r\n" % (len(body), body)


class _Replica(asyncio.Protocol):
    """Answers every request with events until it was told how many; all streams have theirs at the same time."""

    streams: ClassVar[list[_Replica]] = []

    def __init__(self, num_events: int, identity: str) -> None:
        self._identity = identity
        self._num_events = num_events
        self._number = 0
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        assert self._transport is not None
        if data.startswith(b"POST"):
            self._transport.write(_HEAD)
            self.streams.append(self)
        elif data.startswith(b"GET"):
            self._transport.write(_HEAD)
            self._push()

    def _push(self) -> None:
        assert self._transport is not None
        if self._transport.is_closing():
            return
        snapshot = fake_snapshot("fake", self._identity)
        change = Change(epoch=snapshot.epoch, number=self._number, load=snapshot.load)
        message = snapshot if self._number == 0 else change
        self._transport.write(_chunk(state_line(message)))
        self._number += 1
        asyncio.get_running_loop().call_later(_PUSH_S, self._push)

    def step(self) -> None:
        assert self._transport is not None
        if self._number < self._num_events:
            self._transport.write(_chunk(_EVENT % self._number))
            self._number += 1
            return
        self._transport.write(_chunk(DONE) + b"0\r\n\r\n")
        self.streams.remove(self)


class _Copy(asyncio.Protocol):
    """One end of a relay that only copies bytes; the end at the client's makes the other one."""

    def __init__(self, upstream: Address | None, other: _Copy | None = None) -> None:
        self._upstream = upstream
        self._other = other
        self._transport: asyncio.Transport | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        if self._other is None:
            self._opening = asyncio.create_task(self._open(data))
        elif self._other._transport is not None:
            self._other._transport.write(data)

    def connection_lost(self, exc: Exception | None) -> None:  # noqa: ARG002
        if self._other is not None and self._other._transport is not None:
            self._other._transport.close()

    async def _open(self, request: bytes) -> None:
        assert self._upstream is not None
        other, upstream = _Copy(None, self), self._upstream
        await asyncio.get_running_loop().create_connection(lambda: other, upstream.host, upstream.port)
        self._other = other
        assert other._transport is not None
        other._transport.write(request)


async def _listen(factory: Callable[[], asyncio.Protocol], pipe: Pipe) -> None:
    with bind("127.0.0.1", 0) as listener:
        server = await asyncio.get_running_loop().create_server(factory, sock=listener)
        pipe.send(port_of(listener))
        async with server:
            await server.serve_forever()


async def _replica(pipe: Pipe, num_events: int, identity: str) -> None:
    async def steps() -> None:
        while True:
            await asyncio.sleep(_EVERY_S)
            for stream in list(_Replica.streams):
                stream.step()

    stepping = asyncio.create_task(steps())
    await _listen(lambda: _Replica(num_events, identity), pipe)
    stepping.cancel()


async def _copying(pipe: Pipe, upstream: Address) -> None:
    await _listen(lambda: _Copy(upstream), pipe)


async def _switch(pipe: Pipe, upstream: Address) -> None:

    prompts = Prompts(read_tokenizer(find_checkpoint(None)))
    switch = Switch(SwitchOptions(secret=_SECRET, identity=_IDENTITY, block_size=16), prompts)
    with bind("127.0.0.1", 0) as listener:
        server = Server(uvicorn_config(switch.app(), lifespan="off"))
        async with switch.running([upstream]):
            while not switch.members.live:
                await asyncio.sleep(0.01)
            settle_garbage()
            pipe.send(port_of(listener))
            await server.serve(sockets=[listener])


def _run(main: Callable[..., Awaitable[None]], *args: object) -> None:
    with asyncio.Runner(loop_factory=loop_factory()) as runner, contextlib.suppress(KeyboardInterrupt):
        runner.run(main(*args))  # type: ignore[arg-type]


@contextlib.contextmanager
def _process(main: Callable[..., Awaitable[None]], *args: object) -> Iterator[tuple[Address, int]]:
    """Where it listens, and its process."""
    context = multiprocessing.get_context("spawn")
    ours, theirs = context.Pipe()
    process = context.Process(target=_run, args=(main, theirs, *args), daemon=True)
    process.start()
    try:
        if not ours.poll(60):
            raise RuntimeError("a process did not start")
        yield Address("127.0.0.1", ours.recv()), process.pid or 0
    finally:
        process.kill()
        process.join()


def fake_replica(num_events: int, identity: str) -> contextlib.AbstractContextManager[tuple[Address, int]]:
    """A replica named "fake" whose every stream has so many events, and its process."""
    return _process(_replica, num_events, identity)


def cpu_s(pid: int) -> float:
    """Processor time of a process until now (the clock's number is that of clock_getcpuclockid(3))."""
    return time.clock_gettime((~pid << 3) | 2)


async def _read_all(address: Address, *, resumable: bool) -> int:
    """All streams at once, to their ends; the number of events."""
    body = {
        "model": "m",
        "messages": [{"role": "user", "content": "Tell me about a fox. " * 8}],
        "stream": True,
        "stream_options": {"resumable": resumable},
    }
    recordings = await asyncio.gather(
        *(exchange(address.host, address.port, "/v1/chat/completions", body) for _ in range(_NUM_STREAMS))
    )
    if not all(recording.is_done for recording in recordings):
        raise ConnectionError("a stream was cut")
    return sum(recording.data.count(b"\n\n") for recording in recordings)


def measure(address: Address, pid: int, *, resumable: bool) -> float:
    """Processor time of the process for one event, in us."""
    with asyncio.Runner(loop_factory=loop_factory()) as runner:
        used_s = cpu_s(pid)
        num_events = runner.run(_read_all(address, resumable=resumable))
        return (cpu_s(pid) - used_s) / num_events * 1e6


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--events", type=int, default=300, help="of each stream")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    with (
        fake_replica(options.events, _IDENTITY) as (replica, _),
        _process(_copying, replica) as copier,
        _process(_switch, replica) as switch,
    ):
        for _ in range(options.rounds):
            plain, resumable = measure(*switch, resumable=False), measure(*switch, resumable=True)
            copied = measure(*copier, resumable=False)
            print(f"an event: {plain:.1f} us plain, {resumable:.1f} us resumable; copied {copied:.1f} us")


if __name__ == "__main__":
    main()
