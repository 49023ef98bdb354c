"""The bench's client: streams side by side, their requests one after another."""

from __future__ import annotations

import asyncio
from dataclasses import asdict
from typing import Any

import pytest

from app.bench.client import Job, ask, measure, run_job
from app.bench.reader import Answer
from tests.app.test_bench_reader import HEAD, STREAM, chunked


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


def test_nobody_there_is_an_error_at_once() -> None:
    with pytest.raises(OSError, match="1"):
        measure(host="127.0.0.1", port=1, path="/", bodies=[[{}]])
