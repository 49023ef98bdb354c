"""The contract of all stores: in memory, in Redis, and in both together."""

from __future__ import annotations

import math
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from penstock.gateway.store.interface import LEASE_S, PIECE, Durable, JournalChange, Key, Quota, Store
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.shared import SharedStore
from tests.clock import Clock
from tests.gateway.store.stores import DURABLE_KINDS, KINDS, block, opened, record, redis_store
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("closing")]


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, server: RedisServer, clock: Clock) -> AsyncIterator[Store]:
    async with opened(request.param, server, clock) as store:
        yield store


@pytest.fixture(params=DURABLE_KINDS)
async def durable(
    request: pytest.FixtureRequest, server: RedisServer, clock: Clock
) -> AsyncIterator[Durable]:
    async with opened(request.param, server, clock) as store:
        assert store.durable is not None
        yield store.durable


# Records


async def test_a_record_is_what_was_put_last(store: Store) -> None:
    assert await store.get(record()) is None
    await store.put(record(), b"one", 60)
    await store.put(record(), b"two", 60)
    assert await store.get(record()) == b"two"
    assert await store.get(record(), 60) == b"two"


@pytest.mark.parametrize("value", [b"", b"\x00\xff", b"long " * 1000, bytes(range(256)) * 400])
async def test_a_value_comes_back_as_it_was(store: Store, value: bytes) -> None:
    await store.put(record(), value, 60)
    assert await store.get(record()) == value


async def test_add_puts_only_where_there_is_none(store: Store) -> None:
    assert await store.add(record(), b"one", 60) is None
    assert await store.add(record(), b"two", 60) == b"one"
    assert await store.get(record()) == b"one"


async def test_add_after_put_and_after_delete(store: Store) -> None:
    await store.put(record(), b"one", 60)
    assert await store.add(record(), b"two", 60) == b"one"
    await store.delete(record())
    assert await store.add(record(), b"three", 60) is None
    assert await store.get(record()) == b"three"


async def test_others_that_see_a_replaced_value_see_what_was_put_before(server: RedisServer) -> None:
    """A process may end right behind it: what is still to be written then is never written."""
    shared, other = SharedStore(MemoryStore(), redis_store(server)), redis_store(server, replica="b")
    await other.put(record("batch"), b"running", 60)
    assert await shared.get(record("batch")) == b"running"
    await shared.put(record("file"), b"results", 60)
    assert await shared.replace(record("batch"), b"running", b"completed", 60)
    assert await other.get(record("file")) == b"results"


async def test_replace_puts_only_where_the_old_value_still_is(store: Store) -> None:
    assert not await store.replace(record(), b"", b"one", 60)
    assert await store.get(record()) is None
    await store.put(record(), b"one", 60)
    await store.put(record("later"), b"x", 60)
    assert await store.replace(record(), b"one", b"two " * 1000, 60)
    assert await store.list("response", "t", 10) == ["r", "later"]
    assert not await store.replace(record(), b"one", b"three", 60)
    assert await store.get(record()) == b"two " * 1000
    assert await store.replace(record(), b"two " * 1000, b"three", 60)
    assert await store.get(record()) == b"three"


async def test_delete_says_whether_there_was_one(store: Store) -> None:
    assert not await store.delete(record())
    await store.put(record(), b"one", 60)
    assert await store.delete(record())
    assert not await store.delete(record())
    assert await store.get(record()) is None


async def test_a_record_without_time_to_live_is_none(store: Store) -> None:
    await store.put(record(), b"one", 0)
    assert await store.get(record()) is None


async def test_the_list_begins_with_what_was_put_last(store: Store) -> None:
    for id_ in ("a", "b", "c", "a"):
        await store.put(record(id_), b"x", 60)
    await store.put(record("other", kind="conversation"), b"x", 60)
    assert await store.list("response", "t", 10) == ["a", "c", "b"]
    assert await store.list("response", "t", 2) == ["a", "c"]
    await store.delete(record("c"))
    assert await store.list("response", "t", 10) == ["a", "b"]
    assert await store.list("response", "t", 0) == []


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (record("x", tenant="a"), record("x", tenant="b")),
        (record("b:x", tenant="a"), record("x", tenant="a:b")),
        (record("x", tenant=""), record("x", tenant=":")),
        (record("x", tenant="}{"), record("x", tenant="{}")),
        (record("x", tenant="\ud800"), record("x", tenant="?")),
        (record("x", kind="a:b", tenant="c"), record("x", kind="a", tenant="b:c")),
    ],
)
async def test_no_key_leads_to_the_record_of_another(store: Store, one: Key, other: Key) -> None:
    await store.put(one, b"one", 60)
    assert await store.get(other) is None
    assert await store.list(other.kind, other.tenant, 10) == []
    assert not await store.delete(other)
    assert await store.add(other, b"other", 60) is None
    assert await store.get(one) == b"one"
    assert await store.list(one.kind, one.tenant, 10) == [one.id]


async def test_any_text_may_be_an_id(store: Store) -> None:
    for id_ in ("", " ", "\ud800", "?", "\x00", "é" * 500, "a:b{c}"):
        await store.put(record(id_), id_.encode(errors="surrogatepass"), 60)
    assert await store.get(record("\ud800")) == b"\xed\xa0\x80"
    assert await store.get(record("?")) == b"?"
    assert len(await store.list("response", "t", 10)) == 7


# What is shared


def piece(id_: str, tenant: str = "t") -> Key:
    return Key(PIECE, tenant, id_)


async def test_what_is_shared_comes_back_as_it_was_put_first(store: Store) -> None:
    await store.share(piece("a"), b"one", 6000)
    await store.share(piece("a"), b"one", 6000)
    await store.share(piece("b"), b"two", 6000)
    assert await store.shared([piece("b"), piece("none"), piece("a")], 6000) == [b"two", None, b"one"]
    assert await store.shared([piece("a", tenant="other")], 6000) == [None]
    assert await store.shared([], 60) == []
    assert await store.list("response", "t", 10) == []


# Quotas


async def test_requests_come_back_evenly(store: Store, clock: Clock) -> None:
    quota = Quota(requests_per_minute=6)
    for i in range(6):
        grant = await store.reserve("t", quota, 100, f"l{i}")
        assert grant.refused is None
        assert grant.requests is not None
        assert grant.tokens is None
        assert grant.requests.remaining == 5 - i
        assert grant.requests.reset_s == pytest.approx(10 * (i + 1))
    refused = await store.reserve("t", quota, 100, "l6")
    assert refused.refused == "requests"
    assert refused.retry_after_s == pytest.approx(10)
    clock.now += 10
    assert (await store.reserve("t", quota, 100, "l7")).refused is None
    assert (await store.reserve("t", quota, 100, "l8")).refused == "requests"


async def test_nothing_is_reserved_if_one_bound_is_reached(store: Store) -> None:
    quota = Quota(requests_per_minute=10, tokens_per_minute=100, max_streams=2)
    assert (await store.reserve("t", quota, 90, "a")).refused is None
    refused = await store.reserve("t", quota, 20, "b")
    assert refused.refused == "tokens"
    assert refused.retry_after_s == pytest.approx(6)
    assert (await store.reserve("t", quota, 10, "b")).refused is None
    refused = await store.reserve("t", quota, 0, "c")
    assert refused.refused == "streams"
    assert refused.retry_after_s > 0
    assert refused.requests is not None
    assert refused.requests.remaining == 8


async def test_what_never_fits_is_told_so(store: Store) -> None:
    grant = await store.reserve("t", Quota(tokens_per_minute=100), 101, "a")
    assert (grant.refused, grant.retry_after_s) == ("tokens", math.inf)
    grant = await store.reserve("t", Quota(requests_per_minute=0), 1, "a")
    assert (grant.refused, grant.retry_after_s) == ("requests", math.inf)


async def test_settling_charges_and_gives_back(store: Store) -> None:
    quota = Quota(tokens_per_minute=100)
    await store.reserve("t", quota, 60, "a")
    await store.settle("t", quota, -50, "lease")
    grant = await store.reserve("t", quota, 90, "b")
    assert grant.refused is None
    await store.settle("t", quota, 100, "lease")
    grant = await store.reserve("t", quota, 1, "c")
    assert grant.refused == "tokens"
    assert grant.retry_after_s == pytest.approx(60.6)


async def test_giving_back_more_than_was_used_saves_nothing(store: Store) -> None:
    quota = Quota(tokens_per_minute=100)
    await store.settle("t", quota, -1000, "lease")
    assert (await store.reserve("t", quota, 100, "a")).refused is None
    assert (await store.reserve("t", quota, 1, "b")).refused == "tokens"


async def test_waiting_saves_nothing_up(store: Store, clock: Clock) -> None:
    quota = Quota(requests_per_minute=6)
    await store.reserve("t", quota, 0, "l")
    clock.now += 1000
    refused = [(await store.reserve("t", quota, 0, f"l{i}")).refused for i in range(7)]
    assert refused == [None] * 6 + ["requests"]


async def test_a_lease_ends_when_it_is_released_or_not_renewed(store: Store, clock: Clock) -> None:
    quota = Quota(max_streams=1)
    assert (await store.reserve("t", quota, 0, "a")).refused is None
    assert (await store.reserve("t", quota, 0, "b")).refused == "streams"
    assert (await store.reserve("t", quota, 0, "a")).refused is None
    assert (await store.reserve("other", quota, 0, "b")).refused is None
    await store.release("t", "a")
    assert (await store.reserve("t", quota, 0, "b")).refused is None
    clock.now += LEASE_S * 0.9
    await store.renew([("t", "b")])
    clock.now += LEASE_S * 0.9
    assert (await store.reserve("t", quota, 0, "c")).refused == "streams"
    clock.now += LEASE_S * 0.2
    assert (await store.reserve("t", quota, 0, "c")).refused is None


# Journals


def change(
    offset: int = 0, token_ids: tuple[int, ...] = (), *, header: bytes | None = None, end: bytes | None = None
) -> JournalChange:
    return JournalChange("s", header, offset, token_ids, 60, end)


async def test_a_journal_grows_and_ends(durable: Durable) -> None:
    assert await durable.read_journal("s") is None
    await durable.write_journals([change(header=b"made from this")])
    await durable.write_journals([change(0, (1, 2)), change(2, (3,))])
    journal = await durable.read_journal("s")
    assert journal is not None
    assert (journal.header, journal.token_ids, journal.end) == (b"made from this", (1, 2, 3), None)
    await durable.write_journals([change(3, (2**32 - 1,), end=b"stop")])
    journal = await durable.read_journal("s")
    assert journal is not None
    assert (journal.token_ids, journal.end) == ((1, 2, 3, 2**32 - 1), b"stop")


async def test_writing_twice_changes_nothing(durable: Durable) -> None:
    changes = [change(0, (1, 2), header=b"h"), change(2, (3, 4)), change(4, (5,), end=b"stop")]
    for written in (changes[:1], changes[:2], changes[1:2], changes[:1], changes, changes):
        await durable.write_journals(written)
    journal = await durable.read_journal("s")
    assert journal is not None
    assert (journal.header, journal.token_ids, journal.end) == (b"h", (1, 2, 3, 4, 5), b"stop")


async def test_nothing_follows_the_end(durable: Durable) -> None:
    await durable.write_journals([change(0, (1,), header=b"h", end=b"stop")])
    assert await durable.write_journals([change(1, (2,))]) == ["ended"]
    journal = await durable.read_journal("s")
    assert journal is not None
    assert (journal.token_ids, journal.end) == ((1,), b"stop")


async def test_a_journal_has_no_gaps(durable: Durable) -> None:
    assert await durable.write_journals([change(0, (1,))]) == ["missing"]
    assert await durable.read_journal("s") is None
    outcomes = await durable.write_journals([change(0, (1,), header=b"h"), change(2, (3,))])
    assert outcomes == ["written", "gap"]
    journal = await durable.read_journal("s")
    assert journal is not None
    assert journal.token_ids == (1,)


async def test_a_deleted_journal_is_gone(durable: Durable) -> None:
    await durable.write_journals([change(0, (1,), header=b"h")])
    await durable.delete_journals(["s", "unknown"])
    assert await durable.read_journal("s") is None
    assert list(await durable.claim()) == []


async def test_streams_of_this_process_are_its_own_until_they_end(durable: Durable) -> None:
    await durable.write_journals([change(0, (1,), header=b"h")])
    assert list(await durable.claim()) == ["s"]
    await durable.write_journals([change(1, (), end=b"stop")])
    assert list(await durable.claim()) == []


async def test_a_new_header_takes_the_place_of_the_old_one(durable: Durable) -> None:
    await durable.write_journals([change(0, (1, 2), header=b"h")])
    await durable.write_journals([change(0, (1, 2), header=b"tried again")])
    journal = await durable.read_journal("s")
    assert journal is not None
    assert (journal.header, journal.token_ids) == (b"tried again", (1, 2))


# Prefixes


async def test_a_chain_is_held_up_to_its_first_gap(durable: Durable) -> None:
    chain = [block("a"), block("b", "a", depth=2), block("c", "b", depth=3), block("d", "c", depth=4)]
    await durable.write_prefixes(chain)
    hashes = [block.hash for block in chain]
    assert await durable.locate(hashes) == {"a": 4}
    await durable.write_prefixes([replace(chain[2], resident=False)])
    assert await durable.locate(hashes) == {"a": 2}
    assert await durable.locate(hashes[2:]) == {}
    assert await durable.locate([]) == {}


async def test_a_long_chain_is_held_as_a_whole(durable: Durable) -> None:
    chain = [block(f"{i}", f"{i - 1}" if i else None, depth=i + 1) for i in range(250)]
    await durable.write_prefixes(chain)
    assert await durable.locate([block.hash for block in chain] + [b"unknown"]) == {"a": 250}
    await durable.write_prefixes([replace(chain[50], resident=False)])
    assert await durable.locate([block.hash for block in chain]) == {"a": 50}


async def test_the_hottest_come_first(durable: Durable) -> None:
    blocks = [block("a", hits=9), block("b", "a", depth=2, hits=8), block("y", "x", depth=2, hits=100)]
    await durable.write_prefixes(blocks)
    found = list(await durable.hottest(10))
    assert found == [blocks[2], blocks[0], blocks[1]]
    assert list(await durable.hottest(2)) == found[:2]
    assert list(await durable.hottest(0)) == []


async def test_what_is_no_longer_held_is_still_hot(durable: Durable) -> None:
    await durable.write_prefixes([block("a")])
    await durable.write_prefixes([replace(block("a"), token_ids=(), resident=False)])
    (found,) = await durable.hottest(10)
    assert found.token_ids == block("a").token_ids


async def test_used_later_is_hotter(durable: Durable) -> None:
    await durable.write_prefixes([block("old", used_s=1e9), block("new", used_s=1e9 + 1)])
    assert [block.hash for block in await durable.hottest(10)] == [b"new", b"old"]
