"""kill -9: streams go on in the next process, no event lost and none twice, with the text of an undisturbed run."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
import pytest
from redis import Redis

from app.bench.server_process import ServerProcess
from loadtests.forked import ForkedServer
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio

NUM_STREAMS = 50
MAX_TOKENS = 32


@pytest.fixture(scope="module")
def redis_url() -> Iterator[str]:
    with RedisServer() as redis:
        yield redis.url


@dataclass
class Follower:
    """A client that keeps its reply's id and the number of its last event, and what it was told.

    Those with an even seed ask for chat completions, the others for responses in the background.
    """

    seed: int
    id: str = ""
    position: int = -1
    text: str = ""
    done: bool = False
    numbers: list[int] = field(default_factory=list)

    @property
    def path(self) -> str:
        return "/v1/responses" if self.seed % 2 else "/v1/chat/completions"

    def body(self) -> dict[str, Any]:
        words = f"Tell me a story about knight number {self.seed}."
        common = {
            "model": "penstock-demo",
            "seed": self.seed,
            "temperature": 1.0,
            "ignore_eos": True,
            "stream": True,
        }
        if self.seed % 2:
            return {**common, "input": words, "max_output_tokens": MAX_TOKENS, "background": True}
        messages = [{"role": "user", "content": words}]
        options = {"resumable": True}
        return {**common, "messages": messages, "max_tokens": MAX_TOKENS, "stream_options": options}

    async def ask(self, http: httpx.AsyncClient, on_event: Callable[[], None]) -> None:
        async with http.stream("POST", self.path, json=self.body()) as reply:
            await self._read(reply, on_event)

    async def go_on(self, http: httpx.AsyncClient) -> None:
        """Follows the reply again, as often as the server says that it cannot tell yet."""
        while True:
            path = f"{self.path}/{self.id}?stream=true&starting_after={self.position}"
            async with http.stream("GET", path) as reply:
                if reply.status_code != 503:
                    return await self._read(reply, lambda: None)
            await asyncio.sleep(int(reply.headers["retry-after-ms"]) / 1000)

    async def _read(self, reply: httpx.Response, on_event: Callable[[], None]) -> None:
        if reply.status_code != 200:
            raise AssertionError((await reply.aread()).decode())
        number = -1
        async for line in reply.aiter_lines():
            if line.startswith("id: "):
                number = int(line.removeprefix("id: "))
            elif line == "data: [DONE]":
                self.done = True
            elif line.startswith("data: "):
                self._take(number, json.loads(line.removeprefix("data: ")))
                on_event()

    def _take(self, number: int, event: dict[str, Any]) -> None:
        assert "error" not in event, event
        if self.seed % 2:
            number = event["sequence_number"]
            self.id = self.id or event["response"]["id"]
            self.text += event["delta"] if event["type"] == "response.output_text.delta" else ""
            self.done = event["type"] in ("response.completed", "response.incomplete")
        else:
            self.id = event["id"]
            self.text += event["choices"][0]["delta"].get("content", "")
        self.numbers.append(number)
        self.position = number


class Interrupted:
    """Kills a server when all clients know their ids, and have had so many more events together.

    Redis must have heard of all of them: an id is given away before that while Redis does not answer in time.
    """

    def __init__(
        self, victim: Callable[[], ServerProcess], followers: list[Follower], after: int, journals: Redis
    ) -> None:
        self.is_over = False
        self._victim = victim
        self._followers = followers
        self._left = after
        self._journals = journals

    def count(self) -> None:
        if not self.is_over and all(follower.id for follower in self._followers):
            self._left -= 1
            if self._left < 0 and self._are_written():
                self.is_over = True
                self._victim().process.kill()

    def _are_written(self) -> bool:
        known = {key.rpartition(b":")[2].decode() for key in self._journals.scan_iter("*:journal:*", 1000)}
        return known.issuperset(follower.id for follower in self._followers)


async def undisturbed(url: str) -> list[str]:
    followers = [Follower(seed) for seed in range(NUM_STREAMS)]
    async with client(url) as http:
        await asyncio.gather(*(follower.ask(http, lambda: None) for follower in followers))
    assert all(follower.done for follower in followers)
    return [follower.text for follower in followers]


def client(url: str) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=url, timeout=60, limits=httpx.Limits(max_connections=NUM_STREAMS + 10))


@pytest.mark.parametrize("num_kills", [1, pytest.param(10, marks=pytest.mark.long("ten times kill -9"))])
async def test_every_stream_goes_on_after_kill_9(redis_url: str, num_kills: int) -> None:
    arguments = ["--redis-url", redis_url, "--replica", "the-one", "--warm-up-tokens", "0"]
    batch_id = ""
    server: ServerProcess = ForkedServer(arguments)
    journals = Redis.from_url(redis_url)
    try:
        server.wait_ready()
        expected = await undisturbed(server.url)
        for repetition in range(num_kills):
            server.wait_ready()
            batch_id = batch_id or await batch_of(server.url)
            after = random.Random(repetition).randint(0, NUM_STREAMS * MAX_TOKENS * 3 // 4)
            followers = await asked_and_killed(server, after, journals)
            # Importing torch is most of a start: once is enough.
            server = ForkedServer(arguments) if repetition else ServerProcess(arguments)
            server.wait_line(" starting on http")
            async with client(server.url) as http:
                await asyncio.gather(*(follower.go_on(http) for follower in followers if not follower.done))
            for follower in followers:
                assert follower.done
                assert follower.numbers == list(range(len(follower.numbers)))
                assert follower.text == expected[follower.seed]
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


async def asked_and_killed(server: ServerProcess, after: int, journals: Redis) -> list[Follower]:
    """Asks all at once, and kills the server when they have had `after` events together."""
    followers = [Follower(seed) for seed in range(NUM_STREAMS)]
    interrupted = Interrupted(lambda: server, followers, after, journals)
    async with client(server.url) as http:
        asking = (follower.ask(http, interrupted.count) for follower in followers)
        results = await asyncio.gather(*asking, return_exceptions=True)
    assert all(result is None or isinstance(result, httpx.HTTPError) for result in results), results
    assert server.wait() != 0
    return followers
