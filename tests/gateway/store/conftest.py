"""One Redis for all tests of this folder, empty at the start of each."""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator

import pytest

from tests.gateway.store.stores import OPENED
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
async def closing(server: RedisServer) -> AsyncIterator[None]:  # noqa: ARG001
    """Closes the connections of a test, whatever became of it."""
    yield
    while OPENED:
        await OPENED.pop().aclose()
