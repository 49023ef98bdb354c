"""Redis in trouble, under load: who asks does not notice, the operator does, and what was made meanwhile is kept."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from lab.bench.redis_process import SlowLine
from loadtests.forked import ForkedServer
from penstock.app.bench.server_process import ServerProcess
from penstock.gateway.access.keys import digest_of
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio

CHAT = "/v1/chat/completions"
FREE = {"authorization": "Bearer sk-of-one-without-bounds"}
BOUNDED = {"authorization": "Bearer sk-of-one-with-bounds"}
WAIT_S = 60.0
SLOW_S = 0.15


Trouble = tuple[Callable[[], None], Callable[[], None]]
"""How it begins, and how it ends."""


class StoppedRedis:
    """A Redis that is stopped and comes back with nothing in it, and then one that is paused."""

    def __init__(self) -> None:
        self.redis = RedisServer()
        self.url = self.redis.url

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self.redis:
            yield

    def troubles(self) -> list[Trouble]:
        return [(self.redis.stop, self.redis.start), (self.redis.pause, self.redis.resume)]


class SlowRedis(StoppedRedis):
    """Every answer comes, but too late."""

    def __init__(self) -> None:
        super().__init__()
        self.line = SlowLine(self.redis.url)
        self.url = self.line.url

    @contextlib.contextmanager
    def running(self) -> Iterator[None]:
        with self.redis, self.line:
            yield

    def troubles(self) -> list[Trouble]:
        return [(self._delay(SLOW_S), self._delay(0.0))]

    def _delay(self, seconds: float) -> Callable[[], None]:
        return lambda: setattr(self.line, "delay_s", seconds)


@dataclass
class Reply:
    """The text and the end of a stream; only a complete one has `finish_reason`."""

    id: str = ""
    text: str = ""
    finish_reason: str | None = None
    numbers: list[int] = field(default_factory=list)
    """The numbers of its events, if events are numbered."""


async def filled_lines(reply: httpx.Response) -> AsyncIterator[str]:
    async for line in reply.aiter_lines():
        if line:
            yield line


async def read_stream(reply: httpx.Response) -> Reply:
    if reply.status_code != 200:
        raise AssertionError((await reply.aread()).decode())
    told, done = Reply(), False
    async for line in filled_lines(reply):
        assert not done, line
        if line == "data: [DONE]":
            done = True
        elif line.startswith("id: "):
            told.numbers.append(int(line.removeprefix("id: ")))
        elif line.startswith("data: "):
            chunk = json.loads(line.removeprefix("data: "))
            assert "error" not in chunk, chunk
            told.id = chunk["id"]
            told.text += chunk["choices"][0]["delta"].get("content", "")
            told.finish_reason = chunk["choices"][0]["finish_reason"]
    assert done
    assert told.finish_reason in ("stop", "length")
    return told


def body(number: int, **fields: object) -> dict[str, object]:
    return {
        "model": "penstock-demo",
        "messages": [{"role": "user", "content": f"Tell me a story about knight number {number}."}],
        "max_tokens": 24,
        "seed": number,
        **fields,
    }


class Load:
    """Clients that ask one thing after another; the first reply that is not as it should be ends the test."""

    def __init__(self, http: httpx.AsyncClient) -> None:
        self.http = http
        self._numbers = itertools.count()
        self._stopping = False
        self._rounds: dict[str, int] = {}
        self._news = asyncio.Condition()

    async def plain(self) -> None:
        request = self.http.stream("POST", CHAT, json=body(next(self._numbers), stream=True), headers=FREE)
        async with request as reply:
            await read_stream(reply)

    async def resumable(self) -> Reply:
        options = {"stream": True, "stream_options": {"resumable": True}}
        request = self.http.stream("POST", CHAT, json=body(next(self._numbers), **options), headers=BOUNDED)
        async with request as reply:
            told = await read_stream(reply)
        assert told.numbers == list(range(len(told.numbers)))
        return told

    async def bounded(self) -> None:
        reply = await self.http.post(CHAT, json=body(next(self._numbers)), headers=BOUNDED)
        assert reply.status_code == 200, reply.text
        assert int(reply.headers["x-ratelimit-remaining-requests"]) > 0
        assert reply.json()["choices"][0]["message"]["content"]

    async def sent_twice(self) -> None:
        number = next(self._numbers)
        headers = {**FREE, "idempotency-key": f"number {number}"}
        replies = [await self.http.post(CHAT, json=body(number), headers=headers) for _ in range(2)]
        assert [reply.status_code for reply in replies] == [200, 200], [reply.text for reply in replies]
        assert replies[0].json() == replies[1].json()

    async def turn(self, previous: str | None) -> str:
        """The id of a response that follows another one."""
        asked = {
            "model": "penstock-demo",
            "input": f"My number is {next(self._numbers)}.",
            "max_output_tokens": 16,
            "previous_response_id": previous,
        }
        reply = await self.http.post("/v1/responses", json=asked, headers=BOUNDED)
        assert reply.status_code == 200, reply.text
        answer: dict[str, Any] = reply.json()
        assert answer["previous_response_id"] == previous
        return str(answer["id"])

    async def conversation(self) -> None:
        previous = None
        for _ in range(4):
            previous = await self.turn(previous)

    async def ready(self) -> None:
        reply = await self.http.get("/ready")
        assert reply.status_code == 200, reply.text

    @property
    def kinds(self) -> list[Callable[[], Awaitable[object]]]:
        return [self.plain, self.resumable, self.bounded, self.sent_twice, self.conversation, self.ready]

    async def repeat(self, kind: Callable[[], Awaitable[object]]) -> None:
        name = kind.__name__
        while not self._stopping:
            await kind()
            async with self._news:
                self._rounds[name] = self._rounds.get(name, 0) + 1
                self._news.notify_all()

    async def more(self, rounds: int) -> None:
        """Returns when each kind has been through so many more whole rounds."""
        before = dict(self._rounds)
        wanted = rounds + 1  # the one that is under way began earlier
        async with asyncio.timeout(WAIT_S), self._news:
            await self._news.wait_for(
                lambda: all(
                    self._rounds.get(kind.__name__, 0) - before.get(kind.__name__, 0) >= wanted
                    for kind in self.kinds
                )
            )

    def stop(self) -> None:
        self._stopping = True


def client(server: ServerProcess) -> httpx.AsyncClient:
    return httpx.AsyncClient(base_url=server.url, timeout=WAIT_S)


@contextlib.asynccontextmanager
async def load_on(server: ServerProcess) -> AsyncIterator[Load]:
    async with client(server) as http:
        load = Load(http)
        async with asyncio.TaskGroup() as clients:
            for kind in load.kinds:
                clients.create_task(load.repeat(kind))
            yield load
            load.stop()


class Operator:
    """Looks at the metrics and the log."""

    def __init__(self, server: ServerProcess, http: httpx.AsyncClient) -> None:
        self._server = server
        self._http = http

    async def metric(self, name: str) -> float:
        """All its values together."""
        text = (await self._http.get("/metrics")).text
        samples = (sample for family in text_string_to_metric_families(text) for sample in family.samples)
        return sum(sample.value for sample in samples if sample.name == f"penstock_{name}")

    async def wait_metric(self, name: str, condition: Callable[[float], bool]) -> None:
        await until(lambda: self._holds(name, condition))

    async def _holds(self, name: str, condition: Callable[[float], bool]) -> bool:
        return condition(await self.metric(name))

    async def wait_news(self, word: str) -> None:
        """Until the last thing that the log says of Redis is this, "gone" or "back", and the gauge says the same."""
        await until(lambda: self._is_told(word))

    async def _is_told(self, word: str) -> bool:
        return self.news[-1:] == [word] and await self.metric("store_up") == (word == "back")

    @property
    def news(self) -> list[str]:
        words = (("gone", " Redis is gone"), ("back", " Redis is back"))
        return [word for line in self._server.lines for word, part in words if part in line]


async def until(condition: Callable[[], Awaitable[bool]]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not await condition():
            await asyncio.sleep(0.02)


@dataclass
class Made:
    """The objects that a client may ask for again later."""

    reply: Reply
    response_id: str

    @classmethod
    async def on(cls, load: Load) -> Made:
        return cls(await load.resumable(), await load.turn(None))

    async def is_kept(self, redis: RedisServer) -> bool:
        """Whether Redis knows all of it, the end of the reply included."""
        keys = redis.all_keys()
        journals = [key for key in keys if key.endswith(f"journal:{self.reply.id}")]
        is_recorded = any(key.endswith(self.response_id) and ":record:" in key for key in keys)
        return is_recorded and any(redis.call("HEXISTS", key, "end") for key in journals)

    async def check(self, http: httpx.AsyncClient) -> None:
        """It can be followed, and gone on with."""
        async with http.stream("GET", f"{CHAT}/{self.reply.id}", headers=BOUNDED) as followed:
            assert await read_stream(followed) == self.reply
        await Load(http).turn(self.response_id)


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def keys_file(tmp_path: Path) -> Path:
    digests = [digest_of(key["authorization"].removeprefix("Bearer ")).hex() for key in (FREE, BOUNDED)]
    path = tmp_path / "keys"
    path.write_text(
        f"free:sha256:{digests[0]}\nbounded:sha256:{digests[1]} rpm=100000 tpm=100000000 streams=64\n"
    )
    return path


@pytest.mark.parametrize("kind", [StoppedRedis, SlowRedis])
async def test_nobody_but_the_operator_notices(kind: type[StoppedRedis], keys_file: Path) -> None:
    place, made = kind(), list[Made]()
    arguments = ["--redis-url", place.url, "--api-keys-file", str(keys_file), "--replica"]
    with place.running(), ForkedServer([*arguments, "first"]) as server:
        async with load_on(server) as load:
            operator = Operator(server, load.http)
            await operator.wait_metric("store_up", lambda up: up == 1)
            for begin, end in place.troubles():
                made += await go_through(begin, end, load, operator, place.redis)
        async with client(server) as http:
            operator = Operator(server, http)
            await operator.wait_metric("store_unwritten", lambda number: number == 0)
            for each in made:
                await until(partial(each.is_kept, place.redis))
            assert await operator.metric("store_corrupt_total") == 0
        # One line for each change: never the same one twice.
        assert operator.news[0] == "gone"
        assert all(earlier != later for earlier, later in itertools.pairwise(operator.news))
        server.kill()
        with ForkedServer([*arguments, "second"]) as second:
            async with client(second) as http:
                for each in made:
                    await each.check(http)


async def go_through(
    begin: Callable[[], None], end: Callable[[], None], load: Load, operator: Operator, redis: RedisServer
) -> list[Made]:
    """One trouble from before its beginning to after its end; what was made before and meanwhile."""
    before = await Made.on(load)
    await until(lambda: before.is_kept(redis))
    failures = await operator.metric("store_failures_total")
    rejected = await operator.metric("store_rejected_total")
    await asyncio.to_thread(begin)
    await operator.wait_news("gone")
    await before.check(load.http)
    meanwhile = await Made.on(load)
    await load.more(1)
    assert await operator.metric("store_failures_total") > failures
    assert await operator.metric("store_rejected_total") > rejected
    assert await operator.metric("store_unwritten") > 0
    await asyncio.to_thread(end)
    await operator.wait_news("back")
    await load.more(1)
    return [before, meanwhile]
