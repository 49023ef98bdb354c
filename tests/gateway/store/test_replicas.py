"""Several processes on one Redis: who lives, whose a stream is, and what is left when all is over."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace

import pytest

from penstock.gateway.store import redis as redis_module
from penstock.gateway.store import redis_records
from penstock.gateway.store.interface import ALIVE_S, HEARTBEAT_S, JournalChange, Key, Quota, ShareStats
from penstock.gateway.store.link import Command
from penstock.gateway.store.redis import RedisStore
from tests.clock import Clock
from tests.gateway.store.stores import block, record, redis_store
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("closing")]

SECTIONS = {"record", "records", "journal", "tokens", "unfinished", "used", "leases"} | {
    *("prefix", "hot", "resident", "replicas", "since", "sizes", "expiries"),
    *("journal_sizes", "journal_expiries"),
}
"""The kinds of keys, as the README names them."""
BEGUN = JournalChange("s", b"header", 0, (1,), 600)


@pytest.fixture
def clock() -> Clock:
    return Clock()


async def beat_for(seconds: float, clock: Clock, *stores: RedisStore) -> None:
    for _ in range(round(seconds / HEARTBEAT_S)):
        clock.now += HEARTBEAT_S
        for store in stores:
            await store.beat()


async def test_a_restarted_server_claims_its_own_streams_at_once(server: RedisServer, clock: Clock) -> None:
    old = redis_store(server, replica="h:8000", clock=clock)
    await old.write_journals([BEGUN, replace(BEGUN, stream_id="ended", end=b"stop")])
    new = redis_store(server, replica="h:8000", clock=clock)
    assert list(await new.claim()) == ["s"]
    assert list(await new.claim()) == ["s"]
    assert list(await old.claim()) == []


async def test_a_restarted_server_claims_its_own_streams_after_a_long_time_too(
    server: RedisServer, clock: Clock
) -> None:
    await redis_store(server, clock=clock).write_journals([BEGUN])
    clock.now += 500
    server.call("DEL", "penstock:{test}:replicas", "penstock:{test}:since")
    assert list(await redis_store(server, clock=clock).claim()) == ["s"]


async def test_a_server_that_was_not_heard_of_for_long_still_has_its_streams(
    server: RedisServer, clock: Clock
) -> None:
    store = redis_store(server, clock=clock)
    await store.write_journals([BEGUN])
    clock.now += ALIVE_S * 2
    assert list(await store.claim()) == ["s"]


async def test_only_a_dead_server_loses_its_streams_and_to_one_other(
    server: RedisServer, clock: Clock
) -> None:
    a, b, c = (redis_store(server, replica=name, clock=clock) for name in "abc")
    await a.write_journals([BEGUN])
    await beat_for(ALIVE_S * 2, clock, a, b, c)
    assert list(await b.claim()) == []
    await beat_for(ALIVE_S, clock, b, c)
    assert list(await b.claim()) == ["s"]
    assert list(await c.claim()) == []


async def test_nobody_is_dead_soon_after_redis_forgot_who_lives(server: RedisServer, clock: Clock) -> None:
    a, b = (redis_store(server, replica=name, clock=clock) for name in "ab")
    await a.write_journals([BEGUN])
    await beat_for(ALIVE_S * 2, clock, a, b)
    server.call("DEL", "penstock:{test}:replicas", "penstock:{test}:since")
    await b.beat()
    assert list(await b.claim()) == []
    await beat_for(ALIVE_S, clock, b)
    assert list(await b.claim()) == ["s"]


async def test_who_lost_a_stream_no_longer_writes_to_it(server: RedisServer, clock: Clock) -> None:
    old, new = redis_store(server, clock=clock), redis_store(server, clock=clock)
    await old.write_journals([BEGUN])
    await new.claim()
    assert await old.write_journals([JournalChange("s", None, 1, (7, 8), 60, b"late")]) == ["foreign"]
    await new.write_journals([JournalChange("s", None, 1, (2,), 60)])
    journal = await new.read_journal("s")
    assert journal is not None
    assert (journal.token_ids, journal.end) == ((1, 2), None)


async def test_who_was_replaced_does_not_come_back(
    server: RedisServer, clock: Clock, caplog: pytest.LogCaptureFixture
) -> None:
    old = redis_store(server, clock=clock)
    await old.beat()
    new = redis_store(server, clock=clock)
    await new.write_journals([BEGUN])
    await old.beat()
    assert list(await old.claim()) == []
    await beat_for(ALIVE_S * 3, clock, new, old)
    assert list(await old.claim()) == []
    said = "another server calls itself a: each needs a name of its own, by --replica"
    assert [line.getMessage() for line in caplog.records] == [said]


async def test_a_server_that_ends_well_is_gone_at_once(server: RedisServer, clock: Clock) -> None:
    a, b = (redis_store(server, replica=name, clock=clock) for name in "ab")
    await beat_for(ALIVE_S * 2, clock, a, b)
    async with a.running():
        await a.write_journals([BEGUN])
        await a.write_prefixes([block("x")])
        assert await b.locate([b"x"]) == {"a": 1}
    assert await b.locate([b"x"]) == {}
    assert list(await b.claim()) == ["s"]


async def test_what_another_replica_put_in_between_is_not_replaced(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    ours, theirs = (redis_store(server, replica=name) for name in "ab")
    await ours.put(record(), b"old", 60)
    ask = ours.link.one

    async def overtaken(command: Command) -> object:
        answer = await ask(command)
        if command[0] == "GET":
            await theirs.put(record(), b"theirs", 60)
        return answer

    monkeypatch.setattr(ours.link, "one", overtaken)
    assert not await ours.replace(record(), b"old", b"ours", 60)
    assert await theirs.get(record()) == b"theirs"


async def test_only_living_replicas_hold_blocks(server: RedisServer, clock: Clock) -> None:
    a, b = (redis_store(server, replica=name, clock=clock) for name in ("a:1", "b:%"))
    await a.write_prefixes([block("x"), block("y", "x", depth=2)])
    await b.write_prefixes([block("x")])
    assert await a.locate([b"x", b"y"]) == {"a:1": 2, "b:%": 1}
    await beat_for(ALIVE_S, clock, b)
    assert await a.locate([b"x", b"y"]) == {"b:%": 1}
    restarted = redis_store(server, replica="b:%", clock=clock)
    await restarted.beat()
    assert await a.locate([b"x", b"y"]) == {}


async def test_the_coldest_prefixes_are_forgotten(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_module, "MAX_PREFIXES", 3)
    store = redis_store(server)
    await store.write_prefixes([block(name, used_s=1e9 + i) for i, name in enumerate("abcde")])
    assert [block.hash for block in await store.hottest(10)] == [b"e", b"d", b"c"]
    prefixes = {key for key in server.all_keys() if ":prefix:" in key}
    assert len(prefixes) == 3
    assert await store.locate([b"a"]) == {}


async def test_a_block_that_expired_is_no_longer_hot(server: RedisServer) -> None:
    store = redis_store(server)
    await store.write_prefixes([block("a"), block("b", "a", depth=2), block("c")])
    server.call("DEL", f"penstock:{{test}}:prefix:{b'a'.hex()}")
    assert {block.hash for block in await store.hottest(10)} == {b"b", b"c"}
    assert server.call("ZCARD", "penstock:{test}:hot") == 2


async def test_the_list_forgets_what_expired(server: RedisServer) -> None:
    store = redis_store(server)
    for i in range(250):
        await store.put(record(f"{i}"), b"x", 600)
    index = next(key for key in server.all_keys() if ":records:" in key)
    for key in server.all_keys() - {index}:
        if ":record:" in key and not key.endswith((":7", ":8")):
            server.call("DEL", key)
    assert await store.list("response", "t", 10) == ["8", "7"]
    assert server.call("ZCARD", index) == 2


async def test_every_key_expires(server: RedisServer) -> None:
    store = redis_store(server)
    await store.put(record(), b"x", 60)
    await store.put(record("long"), b"x", 6000)
    await store.share(Key("piece", "t", "p"), b"x", 6000)
    await store.write_journals([BEGUN])
    await store.reserve("t", Quota(requests_per_minute=5, tokens_per_minute=5), 1, "l")
    await store.renew([("u", "l")])
    await store.write_prefixes([block("a")])
    await store.beat()
    sections = {key.removeprefix("penstock:{test}:").partition(":")[0] for key in server.all_keys()}
    assert sections == SECTIONS
    assert {key for key in server.all_keys() if server.call("PTTL", key) <= 0} == set()


async def test_namespaces_know_nothing_of_each_other(server: RedisServer) -> None:
    one, other = (redis_store(server, namespace=name) for name in ("a", "a}:{b"))
    await one.put(record(), b"x", 60)
    await one.write_journals([BEGUN])
    assert await other.get(record()) is None
    assert await other.read_journal("s") is None
    assert list(await other.claim()) == []


async def test_a_url_that_is_none_is_refused() -> None:
    with pytest.raises(ValueError, match="scheme"):
        RedisStore("http://127.0.0.1", namespace="n", replica="r")


async def test_records_outlive_a_model_and_streams_do_not(server: RedisServer) -> None:
    """A server of another model goes on with the conversations; what was generated by the one before it cannot."""
    stores = [
        RedisStore(server.url, namespace=f"model-{n}", replica=f"h:{n}", records_namespace="records")
        for n in (1, 2)
    ]
    async with stores[0].running(), stores[1].running():
        await stores[0].put(record("conv", kind="conversation"), b"said", 600)
        await stores[0].write_journals([BEGUN])
        assert await stores[1].get(record("conv", kind="conversation")) == b"said"
        assert await stores[1].list("conversation", "t", 9) == ["conv"]
        assert await stores[1].read_journal("s") is None
        assert await stores[1].delete(record("conv", kind="conversation"))
        assert await stores[0].list("conversation", "t", 9) == []


# Shares


async def test_a_tenant_that_has_too_much_in_redis_loses_what_would_expire_first(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(redis_records, "MAX_TENANT_BYTES", 5_000)
    store, value = redis_store(server), random.Random(1).randbytes(600)
    for i in range(7):
        await store.put(record(f"{i}"), value, 86_400)
        await store.put(record("of another", tenant="u"), value, 86_400)
        assert await store.get(record("0"), 86_400) == value
    assert [await store.get(record(f"{i}")) is not None for i in range(7)] == [
        True,
        *[False] * 3,
        *[True] * 3,
    ]
    assert await store.list("response", "t", 10) == ["6", "5", "4", "0"]
    assert await store.get(record("of another", tenant="u")) == value
    share = store.stats().shares["redis"]
    assert share == (5_000, 4 * (601 + 400), 3)


async def test_what_expired_and_what_was_deleted_counts_no_longer(server: RedisServer, clock: Clock) -> None:
    store, share = redis_store(server, clock=clock), ShareStats(redis_records.MAX_TENANT_BYTES, 402, 0)
    await store.put(record("soon"), b"x", 3600)
    await store.put(record("deleted"), b"x", 86_400)
    await store.put(record("again"), b"x" * 100, 86_400)
    assert await store.delete(record("deleted"))
    clock.now += 3601
    await store.put(record("again"), b"x", 86_400)
    assert store.stats().shares["redis"] == share


async def test_records_that_live_shortly_and_files_do_not_count(server: RedisServer) -> None:
    store = redis_store(server)
    await store.put(record(), b"x" * 1000, 600)
    await store.put(record(kind="file_part"), b"x" * 1000, 86_400)
    assert store.stats().shares["redis"].largest_bytes == 0


async def test_a_share_that_redis_lost_the_sizes_of_begins_anew(server: RedisServer) -> None:
    store = redis_store(server)
    await store.put(record("a"), b"x", 86_400)
    server.call("DEL", *(key for key in server.all_keys() if ":sizes:" in key))
    assert await store.delete(record("a"))
    await store.put(record("b"), b"x", 86_400)
    assert store.stats().shares["redis"].largest_bytes == 402
    assert {key for key in server.all_keys() if server.call("PTTL", key) <= 0} == set()


async def test_what_is_there_is_not_sent_again(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    store, sent = redis_store(server), []
    put_all = store.put_all

    async def noted(records: Sequence[tuple[Key, bytes, float]], *, only_new: bool = False) -> None:
        sent.append([key.id for key, _, _ in records])
        await put_all(records, only_new=only_new)

    monkeypatch.setattr(store, "put_all", noted)
    pieces = [(Key("piece", "t", id_), b"x", 86_400.0) for id_ in "ab"]
    await store.share_all(pieces[:1])
    await store.share_all(pieces)
    assert sent == [["a"], ["b"]]
