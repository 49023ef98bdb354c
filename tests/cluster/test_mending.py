"""Two servers and a Redis behind a switch, and kill -9: nobody who reads a resumable stream notices."""

from __future__ import annotations

import asyncio
from collections import Counter
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
            expected = await undisturbed(str(address))
            followers = [Follower(seed) for seed in range(NUM_STREAMS)]
            busiest = partial(_busiest, replicas, followers)
            interrupted = Interrupted(busiest, followers, 0, partial(are_written, journals))
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


def _busiest(replicas: Sequence[ServerProcess], followers: list[Follower]) -> ServerProcess:
    """The one that has the most replies to end."""
    left = Counter(tag_in(follower.id) for follower in followers if not follower.done)
    return max(enumerate(replicas), key=lambda numbered: left[tag_of(f"r{numbered[0]}")])[1]
