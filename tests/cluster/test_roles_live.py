"""A server for prompts and two for the tokens after them behind a switch: equal texts, and kill -9 of each in turn."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Iterator
from functools import partial
from itertools import islice
from typing import Any

import httpx
import pytest
from redis import Redis

from loadtests.forked import ForkedServer
from loadtests.survival import Follower, Interrupted, client, undisturbed
from penstock.app.settings import Settings
from penstock.app.switch import make_switch
from penstock.cluster.switch import Switch
from penstock.cluster.upstream import Address
from penstock.priority.routing import router
from penstock.priority.routing.router import Router
from tests.app.test_survival import are_written
from tests.cluster.scripted_replicas import serving
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio

SECRET = "a secret of the tests"
START_S = 60
ROLES = ("prefill", "decode", "decode")
WORDS = "The knight rode on past the mill and the river, and nobody knew where to. "
BLOCK_SIZE = 16
MANY_TOKENS = 400


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture(autouse=True)
def _long(monkeypatch: pytest.MonkeyPatch) -> None:
    """The demo model's context is short."""
    monkeypatch.setattr(router, "LONG_PROMPT", BLOCK_SIZE // 2)


@pytest.fixture
def redis_url() -> Iterator[str]:
    with RedisServer() as redis:
        yield redis.url


@contextlib.asynccontextmanager
async def cluster(
    redis_url: str, *options: str
) -> AsyncIterator[tuple[Switch, list[ForkedServer], httpx.AsyncClient]]:
    common = ["--redis-url", redis_url, "--warm-up-tokens", "0", "--threads", "1", "--cluster-secret", SECRET]
    common += options
    servers = [
        ForkedServer([*common, "--replica", f"r{number}", "--role", role])
        for number, role in enumerate(ROLES)
    ]
    # A busy machine is not to look like a frozen replica.
    switch = make_switch(
        Settings.load({"cluster_secret": SECRET}), None, is_open=False, router=Router(stale_s=START_S)
    )
    try:
        for server in servers:
            server.wait_ready()
        addresses = [Address(server.host, server.port) for server in servers]
        async with switch.running(addresses), serving(switch.app()) as address, client(str(address)) as http:
            async with asyncio.timeout(START_S):
                while len(switch.members.live) < len(servers):
                    await asyncio.sleep(0.01)
            yield switch, servers, http
    finally:
        for server in servers:
            server.stop()


def body_of(seed: int, num_sentences: int = 5) -> dict[str, Any]:
    return {
        "model": "penstock-demo",
        "prompt": f"Story {seed}. {num_sentences * WORDS}",
        "max_tokens": 24,
        "seed": seed,
        "temperature": 1.0,
        "ignore_eos": True,
    }


async def test_texts_are_those_of_a_single_server(redis_url: str) -> None:
    async with cluster(redis_url) as (switch, servers, http):
        apart = [await http.post("/v1/completions", json=body_of(seed)) for seed in range(6)]
        assert switch.metrics.computed_elsewhere.value == len(apart)
        async with client(f"http://{servers[0].host}:{servers[0].port}") as single:
            whole = [await single.post("/v1/completions", json=body_of(seed)) for seed in range(6)]
        num_taken = 0
        for one, other in zip(apart, whole, strict=True):
            assert one.status_code == 200, one.text
            assert one.headers["x-penstock-replica"] in ("r1", "r2")
            assert one.json()["choices"] == other.json()["choices"]
            usage = one.json()["usage"]
            num_whole = (usage["prompt_tokens"] - 1) // BLOCK_SIZE * BLOCK_SIZE
            num_cached = usage["prompt_tokens_details"]["cached_tokens"]
            # It has never seen the prompt: its whole blocks came from the other server, or were computed sooner here.
            assert num_cached <= num_whole
            num_taken += num_cached
        assert num_taken


async def test_kv_is_taken_while_prompts_are_computed(redis_url: str) -> None:
    """In steps of a block each, of which a prompt takes many."""
    bodies = [body_of(seed, 60) for seed in range(4)]
    async with cluster(redis_url, "--max-batch-tokens", str(BLOCK_SIZE)) as (switch, servers, http):
        apart = await asyncio.gather(*(http.post("/v1/completions", json=body) for body in bodies))
        assert switch.metrics.early_tokens.value > 0
        async with client(f"http://{servers[0].host}:{servers[0].port}") as single:
            for one, body in zip(apart, bodies, strict=True):
                assert one.status_code == 200, one.text
                whole = await single.post("/v1/completions", json=body)
                assert one.json()["choices"] == whole.json()["choices"]


@pytest.mark.parametrize(
    ("victim", "num_streams"),
    [
        (0, 8),
        (1, 8),
        *(
            pytest.param(victim, 50, marks=pytest.mark.long("fifty streams, each role killed"))
            for victim in range(3)
        ),
    ],
)
async def test_no_client_notices_that_one_was_killed(redis_url: str, victim: int, num_streams: int) -> None:
    """All prompts are computed at the first server; those that begin when it is gone, where they go on."""
    journals = Redis.from_url(redis_url)
    try:
        async with cluster(redis_url) as (switch, servers, http):
            expected = await undisturbed(str(http.base_url), followers_of(num_streams))
            assert switch.metrics.computed_elsewhere.value > 0
            followers = followers_of(num_streams)
            interrupted = Interrupted(
                lambda: servers[victim],
                followers,
                0,
                partial(are_written, journals),
                num_known=num_streams // 2,
            )
            await asyncio.gather(*(follower.ask(http, interrupted.count) for follower in followers))
            assert interrupted.is_over
            assert servers[victim].wait() != 0
            for follower, text in zip(followers, expected, strict=True):
                assert follower.is_whole(text)
            assert (await http.post("/v1/completions", json=body_of(99))).status_code == 200
    finally:
        journals.close()


def followers_of(number: int) -> list[Follower]:
    """The first one's reply has not ended when half of the others' have begun.

    None is a response in the background: one that had not begun is not sent again, so that it is not made twice.
    """
    others = (one for one in map(Follower, range(1, 2 * number)) if one.path != "/v1/responses")
    return [Follower(0, MANY_TOKENS), *islice(others, number - 1)]
