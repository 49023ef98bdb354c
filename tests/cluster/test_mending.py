"""Two servers and a Redis behind a switch, and kill -9: nobody who reads a resumable stream notices."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from functools import partial

import pytest
from redis import Redis

from loadtests.forked import ForkedServer
from loadtests.survival import NUM_STREAMS, Follower, Interrupted, client, undisturbed
from penstock.app.bench.server_process import ServerProcess
from penstock.app.settings import Settings
from penstock.app.switch import make_switch
from penstock.cluster.upstream import Address
from penstock.gateway.sessions.owners import tag_in, tag_of
from penstock.priority.routing.router import Router
from tests.app.test_survival import are_written
from tests.cluster.scripted_replicas import serving
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio

SECRET = "a secret of the tests"
START_S = 60
MANY_TOKENS = 1000
"""So many that the first client's reply has not ended when half of the clients' have begun, on a busy machine too."""


@pytest.fixture
def anyio_backend() -> str:
    return "asyncio"


@pytest.fixture
def redis_url() -> Iterator[str]:
    with RedisServer() as redis:
        yield redis.url


async def test_no_client_notices_that_a_replica_was_killed(redis_url: str) -> None:
    common = ["--redis-url", redis_url, "--warm-up-tokens", "0", "--threads", "1", "--cluster-secret", SECRET]
    replicas = [ForkedServer([*common, "--replica", f"r{number}"]) for number in range(2)]
    journals = Redis.from_url(redis_url)
    # A busy machine is not to look like a frozen replica.
    patient = Router(stale_s=START_S)
    switch = make_switch(Settings.load({"cluster_secret": SECRET}), None, is_open=False, router=patient)
    try:
        for server in replicas:
            server.wait_ready()
        addresses = [Address(server.host, server.port) for server in replicas]
        async with switch.running(addresses), serving(switch.app()) as address, client(str(address)) as http:
            async with asyncio.timeout(START_S):
                while len(switch.members.live) < len(replicas):
                    await asyncio.sleep(0.01)
            expected = await undisturbed(str(address), _followers())
            followers = _followers()
            victim = partial(_owner, replicas, followers[0])

            def may_kill(known: list[Follower]) -> bool:
                return followers[0] in known and are_written(journals, known)

            interrupted = Interrupted(victim, followers, 0, may_kill, num_known=NUM_STREAMS // 2)
            await asyncio.gather(*(follower.ask(http, interrupted.count) for follower in followers))
        assert interrupted.is_over
        assert switch.metrics.mended.value > 0
        for follower in followers:
            assert follower.done
            assert follower.numbers == list(range(len(follower.numbers)))
            assert follower.text == expected[follower.seed]
    finally:
        for server in replicas:
            server.stop()
        journals.close()


def _followers() -> list[Follower]:
    return [Follower(0, MANY_TOKENS), *map(Follower, range(1, NUM_STREAMS))]


def _owner(replicas: Sequence[ServerProcess], follower: Follower) -> ServerProcess:
    """The one that generates this client's reply."""
    owners = {tag_of(f"r{number}"): server for number, server in enumerate(replicas)}
    return owners[tag_in(follower.id) or ""]
