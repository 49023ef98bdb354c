"""The stores that the tests of this folder are about, with time in the test's hands where it can be."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

from penstock.gateway.store.interface import Key, PrefixChange, Store
from penstock.gateway.store.link import Link
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.redis import RedisStore
from penstock.gateway.store.shared import SharedStore
from tests.gateway.store.durable_store import DurableStore
from tests.redis_server import RedisServer

KINDS = ["memory", "redis", "shared"]
DURABLE_KINDS = ["durable", "redis"]


OPENED: list[Link] = []
"""Closed after each test that uses the fixture `closing`."""


def redis_store(
    server: RedisServer,
    *,
    replica: str = "a",
    namespace: str = "test",
    clock: Callable[[], float] | None = None,
    link_clock: Callable[[], float] = time.monotonic,
) -> RedisStore:
    """`link_clock` is the time by which the breaker waits."""
    link = Link(server.url, client_name="test", clock=link_clock)
    OPENED.append(link)
    return RedisStore(server.url, namespace=namespace, replica=replica, clock=clock, link=link)


@asynccontextmanager
async def opened(kind: str, server: RedisServer, clock: Callable[[], float]) -> AsyncIterator[Store]:
    local = MemoryStore(clock)
    store: Store
    if kind == "memory":
        store = local
    elif kind == "durable":
        store = DurableStore(clock, replica="a")
    elif kind == "redis":
        store = redis_store(server, clock=clock)
    else:
        store = SharedStore(local, redis_store(server, clock=clock))
    async with store.running():
        yield store


def record(id_: str = "r", *, kind: str = "response", tenant: str = "t") -> Key:
    return Key(kind, tenant, id_)


def block(
    name: str, parent: str | None = None, *, depth: int = 1, hits: int = 1, used_s: float = 1e9
) -> PrefixChange:
    return PrefixChange(
        hash=name.encode(),
        parent=None if parent is None else parent.encode(),
        depth=depth,
        token_ids=(depth, 2**32 - 1),
        salt=b"salt",
        hits=hits,
        last_used_s=used_s,
        resident=True,
    )
