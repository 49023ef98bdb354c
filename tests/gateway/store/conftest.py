"""One Redis for all tests of this folder, empty at the start of each."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from penstock.gateway.store import link, redis
from tests.redis_server import RedisServer


@pytest.fixture(scope="session")
def redis_process() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.fixture
def server(redis_process: RedisServer) -> RedisServer:
    if not redis_process.running:
        redis_process.start()
    redis_process.resume()
    redis_process.call("FLUSHALL")
    return redis_process


@pytest.fixture
def real_waits(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests that are about how long a call takes: one that waited for Redis would take a minute."""
    monkeypatch.setattr(link, "_BACKSTOP_S", 60.0)


@pytest.fixture(autouse=True)
def _patience(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """A busy machine is not to look like a Redis that is gone."""
    if "real_waits" not in request.fixturenames:
        monkeypatch.setattr(link, "WORK_S", 2.0)
        monkeypatch.setattr(link, "POOL_WAIT_S", 2.0)
        monkeypatch.setattr(redis, "MAX_WAIT_S", 3.0)
