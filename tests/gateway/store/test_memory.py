"""The memory store is bounded, and its entries expire."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.store.memory import Entry, LocalRecords, MemoryStore
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


async def test_a_tenant_that_has_too_much_loses_its_own() -> None:
    store = MemoryStore(Clock(), max_bytes=12_600)
    for id_ in "ab":
        await store.put(record(id_, tenant="small"), VALUE, 60)
    for i in range(20):
        await store.put(record(f"{i}", tenant="large"), VALUE, 60)
    assert await store.list("response", "small", 10) == ["b", "a"]
    assert await store.list("response", "large", 10) == [f"{i}" for i in range(19, 11, -1)]
    share = store.stats().shares["memory"]
    assert share == (6_300, 8 * 1256, 12)


async def test_a_tenant_may_have_everything_while_nobody_else_needs_it() -> None:
    store = MemoryStore(Clock(), max_bytes=12_600)
    for i in range(10):
        await store.put(record(f"{i}", tenant="large"), VALUE, 60)
    assert store.stats().num_records == 10
    for i in range(10):
        await store.put(record(f"{i}", tenant="late"), VALUE, 60)
    for tenant in ("large", "late"):
        assert len(await store.list("response", tenant, 10)) == 5


def test_a_full_store_takes_a_record_without_looking_at_all_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Clock()
    records = LocalRecords(clock, 1256 * 2_000)
    for i in range(2_000):
        records.put(record(f"{i}"), VALUE, 60 + i)
    looked_at = 0

    def num_bytes(entry: Entry) -> int:
        nonlocal looked_at
        looked_at += 1
        return len(entry.value) + 256

    monkeypatch.setattr(Entry, "num_bytes", property(num_bytes))
    for i in range(100):
        records.put(record(f"new {i}"), VALUE, 60)
    assert looked_at < 100 * 10
    assert (len(records), records.num_evicted) == (2_000, 100)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["put", "get", "keep", "pop", "wait"]),
            st.sampled_from("ab"),
            st.integers(0, 5),
            st.integers(1, 30),
        ),
        max_size=60,
    )
)
def test_bytes_shares_and_lists_are_those_of_what_is_there(steps: list[tuple[str, str, int, int]]) -> None:
    clock = Clock()
    records = LocalRecords(clock, 1_600)
    for step, tenant, number, amount in steps:
        key = record(f"{number}", tenant=tenant)
        if step == "put":
            records.put(key, b"x" * 10 * amount, amount)
        elif step == "get":
            records.get(key)
        elif step == "keep" and records.get(key) is not None:
            records.touch(key, amount)
        elif step == "pop":
            records.pop(key)
        else:
            clock.now += amount / 4
        there = dict(records.items())
        assert all(entry.expires_s > clock.now for entry in there.values())
        shares = [sum(e.num_bytes for k, e in there.items() if k.tenant == name) for name in "ab"]
        assert (records.num_bytes, records.largest_share) == (sum(shares), max(shares))
        assert records.num_bytes <= 1_600
        for name in "ab":
            assert set(records.list("response", name, 10)) == {k.id for k in there if k.tenant == name}
        assert len(records._expiries) <= 2 * len(records) + 100


def test_what_is_put_and_used_again_and_again_leaves_nothing_behind() -> None:
    records = LocalRecords(Clock(), 10_000)
    for i in range(1_000):
        records.put(record(f"{i % 3}"), b"x", 60 + i)
        records.touch(record(f"{i % 3}"), 60 + i)
        assert len(records._expiries) <= 2 * 3 + 100
        records.pop(record(f"{i % 7}"))


def test_a_refreshed_value_expires_when_the_one_before_would_have() -> None:
    clock = Clock()
    clock.now = 100.0
    records, key = LocalRecords(clock, 10_000), record("a")
    records.put(key, b"one", 60)
    clock.now += 40
    records.refresh(key, b"two")
    clock.now += 19
    entry = records.get(key)
    assert entry is not None
    assert entry.value == b"two"
    clock.now += 2
    assert records.get(key) is None
    records.refresh(key, b"three")
    assert records.get(key) is None
