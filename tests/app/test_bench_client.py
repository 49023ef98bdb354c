"""The bench's client: streams side by side, their requests one after another."""

from __future__ import annotations

import asyncio
import time
from dataclasses import asdict
from typing import Any

import pytest

from penstock.app.bench import client
from penstock.app.bench.client import Job, ask, exchange, measure, run_job
from penstock.app.reader import Answer, Recording
from tests.app.test_reader import HEAD, STREAM, chunked, recorded


def test_streams_run_side_by_side_and_their_requests_one_after_another() -> None:
    most = now = 0

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal most, now
        now += 1
        most = max(most, now)
        await reader.readuntil(b"}")
        while now < 2 and most < 2:  # the first waits for the second stream
            await asyncio.sleep(0)
        writer.write(HEAD + chunked(*STREAM))
        await writer.drain()
        now -= 1
        writer.close()

    async def run() -> list[Answer]:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            return await run_job(Job("127.0.0.1", port, "/", [[{}, {}], [{}, {}]]))

    answers = asyncio.run(run())
    assert [a.error for a in answers] == [None] * 4
    assert [len(a.token_times_s) for a in answers] == [3] * 4
    assert most == 2


def test_streams_that_several_processes_share_keep_their_numbers_starts_and_keys() -> None:
    jobs: list[dict[str, Any]] = []

    def run(_: str, job: Any) -> object:
        jobs.append(job)
        answers = [
            asdict(Answer(0.0, 1.0, stream=i, text=str(each[0]["n"]))) for i, each in enumerate(job["bodies"])
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

    async def exchange(*request: object) -> Recording:
        sent.append(request)
        loop.now_s += 1.0
        return recorded([HEAD + chunked(*STREAM)])

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
        writer.write(HEAD + chunked(*STREAM))
        await reader.read()  # until the client closes, which it does by itself at the end mark
        writer.close()

    async def run() -> Recording:
        server = await asyncio.start_server(answer, "127.0.0.1", 0)
        async with server:
            port = server.sockets[0].getsockname()[1]
            await exchange("127.0.0.1", port, "/", {})
            return await exchange(
                "127.0.0.1", port, "/", {}, "key", lambda recording: seen.append(recording.is_done)
            )

    before_s = time.perf_counter()
    recording = asyncio.run(run())
    assert before_s < recording.started_s <= recording.times_s[-1]
    assert seen[-1:] == [True]
    assert [b"authorization" in head for head in heads] == [False, True]
    assert b"authorization: Bearer key\r\n" in heads[1]


def test_a_measurement_tells_the_processor_time_of_its_process(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "process_time", lambda: 0.25)
    assert measure(host="127.0.0.1", port=1, path="/", bodies=[[]]) == {"cpu_s": 0.25, "answers": []}


def test_nobody_there_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="1"):
        measure(host="127.0.0.1", port=1, path="/", bodies=[[{}]])
