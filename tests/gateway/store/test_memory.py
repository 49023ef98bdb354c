"""The memory store is bounded, and its entries expire."""

from __future__ import annotations

import pytest

from gateway.store.memory import MemoryStore
from tests.clock import Clock
from tests.gateway.store.stores import record

pytestmark = pytest.mark.anyio

VALUE = b"x" * 1000


async def test_the_record_used_least_recently_goes_first() -> None:
    store = MemoryStore(Clock(), max_bytes=4000)
    for id_ in "abc":
        await store.put(record(id_), VALUE, 60)
    assert await store.get(record("a")) == VALUE
    await store.put(record("d"), VALUE, 60)
    assert await store.get(record("b")) is None
    assert await store.list("response", "t", 10) == ["d", "c", "a"]
    assert store.stats().num_records == 3
    assert store.stats().num_bytes <= 4000


async def test_what_expired_goes_before_what_did_not() -> None:
    clock = Clock()
    store = MemoryStore(clock, max_bytes=4000)
    await store.put(record("a"), VALUE, 60)
    await store.put(record("b"), VALUE, 5)
    await store.put(record("c"), VALUE, 60)
    clock.now += 10
    await store.put(record("d"), VALUE, 60)
    assert await store.list("response", "t", 10) == ["d", "c", "a"]


async def test_a_record_that_is_too_large_takes_nobodys_place() -> None:
    store = MemoryStore(Clock(), max_bytes=4000)
    await store.put(record("a"), VALUE, 60)
    await store.put(record("b"), VALUE * 5, 60)
    assert await store.get(record("b")) is None
    assert await store.get(record("a")) == VALUE


async def test_a_record_expires_unless_it_is_kept() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    await store.put(record(), VALUE, 60)
    clock.now += 59
    assert await store.get(record(), 60) == VALUE
    clock.now += 59
    assert await store.get(record()) == VALUE
    clock.now += 1
    assert await store.get(record()) is None
    assert await store.list("response", "t", 10) == []
    assert store.stats().num_bytes == 0
