"""kill -9: streams go on in the next process, no event lost and none twice, with the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Iterator
from functools import partial

import pytest
from redis import Redis

from loadtests.forked import ForkedServer
from loadtests.survival import (
    ARGUMENTS,
    NUM_STREAMS,
    Follower,
    asked_and_killed,
    client,
    come_back,
    undisturbed,
)
from penstock.app.bench.server_process import ServerProcess
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as redis:
        yield redis.url


def are_written(journals: Redis, followers: list[Follower]) -> bool:
    """Whether Redis has heard of all of them: an id is given away before that while Redis does not answer in time."""
    known = {key.rpartition(b":")[2].decode() for key in journals.scan_iter("*:journal:*", 1000)}
    return known.issuperset(follower.id for follower in followers)


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.long("ten times kill -9"))])
async def test_every_stream_goes_on_after_kill_9(redis_url: str, num_kills: int) -> None:
    arguments = ["--redis-url", redis_url, *ARGUMENTS]
    batch_id = ""
    server: ServerProcess = ForkedServer(arguments)
    journals = Redis.from_url(redis_url)
    try:
        server.wait_ready()
        expected = await undisturbed(server.url)
        for repetition in range(num_kills):
            server.wait_ready()
            batch_id = batch_id or await batch_of(server.url)
            followers = await asked_and_killed(
                server, random.Random(repetition), partial(are_written, journals)
            )
            # Importing torch is most of a start: once is enough.
            server = ForkedServer(arguments) if repetition else ServerProcess(arguments)
            server.wait_line(" starting on http")
            results = await come_back(server.url, followers, is_patient=True)
            assert not any(results), results
            assert all(follower.is_whole(expected[follower.seed]) for follower in followers)
        assert await results_of(server.url, batch_id) == expected[::2]
    except AssertionError:
        print(server.log)
        raise
    finally:
        server.stop()
        journals.close()


async def batch_of(url: str) -> str:
    """A batch that asks for what the followers of chat completions do."""
    lines = [
        {
            "custom_id": str(seed),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": {
                name: value
                for name, value in Follower(seed).body().items()
                if name not in ("stream", "stream_options")
            },
        }
        for seed in range(0, NUM_STREAMS, 2)
    ]
    content = "\n".join(map(json.dumps, lines))
    async with client(url) as http:
        upload = await http.post("/v1/files", data={"purpose": "batch"}, files={"file": content.encode()})
        file = upload.json()
        asked = {"input_file_id": file["id"], "endpoint": lines[0]["url"], "completion_window": "24h"}
        return str((await http.post("/v1/batches", json=asked)).json()["id"])


async def results_of(url: str, batch_id: str) -> list[str]:
    """The texts of a batch's results, each there once, in the order of their seeds."""
    async with client(url) as http:
        while (batch := (await http.get(f"/v1/batches/{batch_id}")).json())["status"] != "completed":
            await asyncio.sleep(0.1)
        assert batch["request_counts"] == {
            "total": NUM_STREAMS // 2,
            "completed": NUM_STREAMS // 2,
            "failed": 0,
        }
        output = (await http.get(f"/v1/files/{batch['output_file_id']}/content")).text
    results = sorted(map(json.loads, output.splitlines()), key=lambda result: int(result["custom_id"]))
    assert [int(result["custom_id"]) for result in results] == list(range(0, NUM_STREAMS, 2))
    return [result["response"]["body"]["choices"][0]["message"]["content"] for result in results]
