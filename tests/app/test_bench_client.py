"""The bench's client: streams side by side, their requests one after another, and servers that misbehave."""

from __future__ import annotations

import asyncio
import json
import socket
import time
from collections.abc import Awaitable, Callable
from dataclasses import asdict
from typing import Any

import pytest

from penstock.app.bench import client
from penstock.app.bench.client import Job, ask, exchange, measure, run_job
from penstock.app.reader import TimedAnswer, TimedBytes
from tests.app.test_reader import HEAD, STREAM, chunked, recorded

Script = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]
"""Serves a connection whose request has been read."""
BUSY = (
    b'HTTP/1.1 503 Service Unavailable\r\nretry-after: 1\r\n\r\n{"error": {"message": "The server is full."}}'
)
WHOLE = HEAD + chunked(*STREAM)


def sends(data: bytes) -> Script:
    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(data)
        await writer.drain()

    return script


def resets(data: bytes) -> Script:
    """Breaks the connection after this instead of closing it."""

    async def script(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await sends(data)(_, writer)
        writer.get_extra_info("socket").setsockopt(
            socket.SOL_SOCKET, socket.SO_LINGER, b"\x01\x00\x00\x00\x00\x00\x00\x00"
        )
        writer.transport.abort()

    return script


def answers_to(*scripts: Script, streams: int = 1) -> list[TimedAnswer]:
    """A connection for each script, one request after another in so many streams."""
    turns = iter(scripts)

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        script = next(turns)
        await reader.readuntil(b"}")
        await script(reader, writer)
        writer.close()

    async def run() -> list[TimedAnswer]:
        async with asyncio.timeout(60), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            return await run_job(Job("127.0.0.1", port, "/", [[{}] * (len(scripts) // streams)] * streams))

    return asyncio.run(run())


def test_streams_run_side_by_side_and_their_requests_one_after_another() -> None:
    both = asyncio.Barrier(2)

    async def together(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await both.wait()
        await sends(WHOLE)(reader, writer)

    answers = answers_to(*[together] * 4, streams=2)
    assert [answer.error for answer in answers] == [None] * 4
    assert [len(answer.token_times_s) for answer in answers] == [3] * 4
    assert [answer.stream for answer in answers] == [0, 0, 1, 1]


def test_requests_after_a_failed_one_are_still_sent() -> None:
    failing = [sends(BUSY), resets(b""), resets(WHOLE[: WHOLE.index(b"data:") + 30]), sends(WHOLE[:-30])]
    error_frame = b"data: " + json.dumps({"error": {"code": "engine_failed"}}).encode() + b"\n\n"
    failing += [sends(HEAD + chunked(error_frame, b"data: [DONE]\n\n"))]
    *failed, whole = answers_to(*failing, sends(WHOLE))
    assert all(answer.error for answer in failed)
    assert failed[0].was_refused
    assert failed[3].error == "the stream ended without [DONE]"
    assert "engine_failed" in str(failed[4].error)
    assert (whole.error, len(whole.token_times_s)) == (None, 3)


def test_streams_that_several_processes_share_keep_their_numbers_starts_and_keys() -> None:
    jobs: list[dict[str, Any]] = []

    def run(_: str, job: Any) -> object:
        jobs.append(job)
        answers = [
            asdict(TimedAnswer(0.0, 1.0, stream=i, text=str(each[0]["n"])))
            for i, each in enumerate(job["bodies"])
        ]
        return {"answers": answers}

    bodies: list[list[dict[str, object]]] = [[{"n": i}] for i in range(5)]
    job = Job("127.0.0.1", 1, "/", bodies, [0.5 * i for i in range(5)], keys=list("abcde"))
    answers = ask(run, job, 2)
    assert [(a.stream, a.text) for a in answers] == [(i, str(i)) for i in range(5)]
    assert sorted((job["starts_s"], job["keys"]) for job in jobs) == [
        ([0.0, 1.0, 2.0], ["a", "c", "e"]),
        ([0.5, 1.5], ["b", "d"]),
    ]


class FrozenClock(asyncio.SelectorEventLoop):
    now_s = 5.0

    def time(self) -> float:
        return self.now_s


def test_a_stream_begins_when_it_is_to_and_begins_nothing_after_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    loop, delays, sent = FrozenClock(), list[float](), list[tuple[object, ...]]()

    async def sleep(delay_s: float) -> None:
        delays.append(delay_s)

    async def exchange(*request: object) -> TimedBytes:
        sent.append(request)
        loop.now_s += 1.0
        return recorded([WHOLE])

    monkeypatch.setattr(asyncio, "sleep", sleep)
    monkeypatch.setattr(client, "exchange", exchange)
    job = Job("h", 1, "/", [[{"n": n} for n in range(5)]], [2.0], stop_s=1.0, keys=["key"])
    with asyncio.Runner(loop_factory=lambda: loop) as runner:
        assert [answer.error for answer in runner.run(run_job(job))] == [None] * 2
    assert delays == [2.0]
    assert sent == [("h", 1, "/", {"n": 0}, "key"), ("h", 1, "/", {"n": 1}, "key")]


def test_an_exchange_is_watched_piece_by_piece_and_has_its_key() -> None:
    heads: list[bytes] = []
    seen: list[bool] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        heads.append(await reader.readuntil(b"\r\n\r\n"))
        writer.write(WHOLE)
        await reader.read()  # until the client closes, which it does by itself at the end mark
        writer.close()

    async def run() -> TimedBytes:
        async with asyncio.timeout(60), await asyncio.start_server(answer, "127.0.0.1", 0) as server:
            port = server.sockets[0].getsockname()[1]
            await exchange("127.0.0.1", port, "/", {})
            return await exchange(
                "127.0.0.1", port, "/", {}, "key", lambda recording: seen.append(recording.is_done)
            )

    before_s = time.perf_counter()
    recording = asyncio.run(run())
    assert before_s < recording.started_s <= recording.times_s[-1]
    assert seen[-1:] == [True]
    assert [b"authorization: Bearer key\r\n" in head for head in heads] == [False, True]


def test_nobody_there_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="1"):
        measure(host="127.0.0.1", port=1, path="/", bodies=[[{}]])
