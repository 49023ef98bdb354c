"""What is in this process is bounded, and expires."""

from __future__ import annotations

import pytest

from gateway.store.interface import JournalChange
from gateway.store.memory import MemoryStore
from tests.gateway.store.stores import Clock, block, record

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


async def test_journals_are_bounded_and_expire() -> None:
    clock = Clock()
    store = MemoryStore(clock, max_bytes=4000)
    for i in range(10):
        await store.write_journals([JournalChange(f"{i}", VALUE, 0, (1,), 60)])
    found = [await store.read_journal(f"{i}") is not None for i in range(10)]
    assert found == [False] * 7 + [True] * 3
    clock.now += 60
    assert await store.read_journal("9") is None


async def test_prefixes_are_bounded() -> None:
    store = MemoryStore(Clock(), max_prefixes=2)
    await store.write_prefixes([block(name) for name in "abc"])
    assert {found.hash for found in await store.hottest(10)} == {b"b", b"c"}
