"""The bench's client: streams side by side, their requests one after another."""

from __future__ import annotations

import asyncio

from app.bench.client import Job, run_job
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
