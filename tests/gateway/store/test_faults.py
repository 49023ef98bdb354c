"""Redis that is paused, stopped, empty, or has something else in it: no call waits for it, and none fails by it."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress

import pytest

from penstock.gateway.store import link as link_module
from penstock.gateway.store import time_budget
from penstock.gateway.store.interface import PIECE, JournalChange, Key, Quota, StoreUnavailable
from penstock.gateway.store.link import MAX_FAILURES, Command
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.redis import RedisStore
from penstock.gateway.store.shared import SharedStore
from penstock.gateway.store.time_budget import TIME_BUDGET, TimeBudget, retry_budget
from tests.clock import Clock
from tests.gateway.store.stores import block, record, redis_store
from tests.redis_server import RedisServer

pytestmark = [pytest.mark.anyio, pytest.mark.usefixtures("closing")]

GENEROUS_S = 5.0
"""Far more than a call may take, and far less than it would take to wait for Redis: with `real_waits` a minute."""
NO_BOUNDS = Quota(requests_per_minute=1000, tokens_per_minute=1000, max_streams=10)
JOURNAL = JournalChange("s", b"header", 0, (1, 2, 3), 60)

CALLS: dict[str, Callable[[SharedStore], Awaitable[object]]] = {
    "get": lambda store: store.get(record()),
    "get and keep": lambda store: store.get(record(), 60),
    "put": lambda store: store.put(record(), b"x", 60),
    "add": lambda store: store.add(record(), b"x", 60),
    "replace": lambda store: store.replace(record("known"), b"x", b"y", 60),
    "delete": lambda store: store.delete(record("unknown")),
    "list": lambda store: store.list("response", "t", 10),
    "write_journals": lambda store: store.remote.write_journals([JOURNAL]),
    "read_journal": lambda store: store.remote.read_journal("s"),
    "delete_journals": lambda store: store.remote.delete_journals(["s"]),
    "claim": lambda store: store.remote.claim(),
    "reserve": lambda store: store.reserve("t", NO_BOUNDS, 1, "l"),
    "settle": lambda store: store.settle("t", NO_BOUNDS, 1, "lease"),
    "renew": lambda store: store.renew([("t", "l")]),
    "release": lambda store: store.release("t", "l"),
    "write_prefixes": lambda store: store.remote.write_prefixes([block("a")]),
    "locate": lambda store: store.remote.locate([b"a"]),
    "hottest": lambda store: store.remote.hottest(10),
    "beat": lambda store: store.beat(),
}
STANDING_IN = ("put", "add", "replace", "list", "reserve", "settle", "renew", "release")
"""The operations that memory does while Redis is gone; the others are refused."""


def shared_store(server: RedisServer, link_clock: Clock) -> SharedStore:
    return SharedStore(MemoryStore(), redis_store(server, link_clock=link_clock))


async def timed(call: Awaitable[object]) -> tuple[bool, float]:
    """Whether it was done, and how long it took."""
    start_s = time.monotonic()
    try:
        await call
    except StoreUnavailable:
        return False, time.monotonic() - start_s
    return True, time.monotonic() - start_s


@pytest.mark.usefixtures("real_waits")
@pytest.mark.parametrize("fault", ["paused", "stopped"])
@pytest.mark.parametrize("name", CALLS)
async def test_no_call_waits_for_redis(name: str, fault: str, server: RedisServer) -> None:
    store = shared_store(server, Clock())
    try:
        server.pause() if fault == "paused" else server.kill()
        results = [await timed(CALLS[name](store)) for _ in range(2)]
    finally:
        server.resume() if fault == "paused" else server.start()
    assert all(took_s < GENEROUS_S for _, took_s in results)
    assert results[0][0] == (name in STANDING_IN)


@pytest.mark.usefixtures("real_waits")
async def test_many_calls_at_a_time_wait_no_longer_than_one(server: RedisServer) -> None:
    store = redis_store(server, link_clock=Clock())
    server.pause()
    start_s = time.monotonic()
    try:
        results = await asyncio.gather(*(timed(store.get(record())) for _ in range(100)))
    finally:
        server.resume()
    assert time.monotonic() - start_s < GENEROUS_S
    assert not any(done for done, _ in results)
    assert store.stats().state == "gone"


async def test_the_calls_of_one_request_wait_no_longer_than_one_call(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = redis_store(server)
    await store.put(record(), b"x", 60)
    before = TIME_BUDGET.set(TimeBudget())
    server.pause()
    try:
        with monkeypatch.context() as hurried:
            hurried.setattr(link_module, "WORK_S", 0.08)
            results = [await timed(store.get(record())) for _ in range(4)]
    finally:
        server.resume()
        TIME_BUDGET.reset(before)
    assert not any(done for done, _ in results)
    assert store.stats().num_rejected == 3  # although the breaker is closed: one failure is none
    assert store.stats().state == "ok"
    assert await store.get(record()) == b"x"


async def test_who_can_go_on_with_nothing_else_waits_for_a_slow_redis_in_one_call(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(time_budget, "RETRY_S", 60.0)
    monkeypatch.setattr(link_module, "WORK_S", 0.08)
    store = redis_store(server)
    before = TIME_BUDGET.set(retry_budget())
    try:
        await store.put(record(), b"x", 60)
        server.call("CLIENT", "PAUSE", 500)
        assert await store.get(record()) == b"x"
    finally:
        TIME_BUDGET.reset(before)
    assert store.stats().failures == {}


@pytest.mark.usefixtures("real_waits")
async def test_failures_are_counted_by_kind(server: RedisServer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(link_module, "MAX_CONNECTIONS", 1)
    monkeypatch.setattr(link_module, "POOL_WAIT_S", 0.001)
    store = redis_store(server)
    server.pause()
    try:
        await asyncio.gather(*(timed(store.get(record())) for _ in range(3)))
    finally:
        server.resume()
    assert store.stats().failures == {"timeout": 1, "pool": 2}
    assert store.stats().num_calls == 3


class LateLoop(Clock):
    """Time of a process that is held up for a second whenever it waits."""

    def __call__(self) -> float:
        self.now += 1.0
        return self.now


@pytest.mark.parametrize(("clock", "state"), [(LateLoop(), "ok"), (Clock(), "gone")])
async def test_what_this_process_was_too_late_for_is_no_fault_of_redis(
    clock: Clock, state: str, server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = redis_store(server, link_clock=clock)
    await store.put(record(), b"x", 60)
    server.pause()
    try:
        with monkeypatch.context() as hurried:
            hurried.setattr(link_module, "WORK_S", 0.01)
            assert not any([(await timed(store.get(record())))[0] for _ in range(MAX_FAILURES)])
    finally:
        server.resume()
    assert store.stats().state == state


async def test_redis_gone_and_back_is_one_line_each(
    server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    clock = Clock()
    store = redis_store(server, link_clock=clock)
    await store.put(record(), b"x", 60)
    server.kill()
    for _ in range(20):
        with suppress(StoreUnavailable):
            await store.get(record())
    stats = store.stats()
    assert (stats.state, stats.breaker, stats.failures["refused"]) == ("gone", "open", 1)
    assert stats.num_rejected >= 18
    server.start()
    with pytest.raises(StoreUnavailable):
        await store.get(record())
    clock.now += 2
    assert await store.get(record()) is None
    assert store.stats().state == "ok"
    assert store.num_losses == 1
    messages = [record.message for record in caplog.records if record.name == "penstock.store"]
    assert messages == ["Redis is gone (refused): memory stands in for it", "Redis is back"]


async def test_too_much_at_a_time_is_no_reason_to_give_redis_up(server: RedisServer) -> None:
    store = redis_store(server)
    await store.get(record())
    await asyncio.gather(*(timed(store.get(record())) for _ in range(200)))
    assert store.stats().state == "ok"


async def test_one_that_no_longer_waits_does_no_harm(server: RedisServer) -> None:
    store = redis_store(server)
    await store.put(record(), b"x", 60)
    for _ in range(8):
        call = asyncio.create_task(store.get(record()))
        await asyncio.sleep(0)
        call.cancel()
    assert await store.get(record()) == b"x"
    assert store.stats().failures == {}


async def test_a_redis_that_forgets_its_scripts(server: RedisServer) -> None:
    store = redis_store(server)
    await store.put(record(), b"one", 60)
    server.call("SCRIPT", "FLUSH")
    await store.put(record(), b"two", 60)
    assert await store.get(record()) == b"two"
    assert store.stats().failures == {}


async def test_a_full_redis_is_one_that_is_gone(server: RedisServer) -> None:
    store = shared_store(server, Clock())
    await store.put(record(), b"x", 60)
    server.call("CONFIG", "SET", "maxmemory", "1")
    try:
        with pytest.raises(StoreUnavailable):
            await store.flush()
    finally:
        server.call("CONFIG", "SET", "maxmemory", "0")
    assert store.stats().failures == {"response": 1}
    await store.flush()
    assert await store.remote.get(record()) == b"x"


# Memory stands in, and catches up


async def test_records_live_on_while_redis_is_gone(server: RedisServer) -> None:
    clock = Clock()
    store = shared_store(server, clock)
    await store.put(record("before"), b"before", 60)
    await store.flush()
    server.kill()
    assert await store.get(record("before")) == b"before"
    await store.put(record("while"), b"while", 60)
    assert await store.get(record("while")) == b"while"
    assert await store.add(record("added"), b"added", 60) is None
    assert await store.add(record("added"), b"again", 60) == b"added"
    with pytest.raises(StoreUnavailable):
        await store.get(record("of another"))
    assert await store.delete(record("before"))
    assert await store.get(record("before")) is None
    assert await store.list("response", "t", 10) == ["added", "while"]
    server.start()
    clock.now += 2
    await store.flush()
    assert store.stats().num_dirty == 0
    assert await store.remote.list("response", "t", 10) == ["added", "while"]
    assert await store.remote.get(record("while")) == b"while"


async def test_an_empty_redis_gets_back_what_is_here(server: RedisServer) -> None:
    clock = Clock()
    store, other = shared_store(server, clock), redis_store(server, replica="b")
    for id_ in ("a", "b", "c"):
        await store.put(record(id_), id_.encode(), 60)
    await store.flush()
    server.restart()
    await other.put(record("b"), b"newer", 60)
    clock.now += 2
    assert await store.get(record("a")) == b"a"
    await store.flush()
    assert await other.get(record("a")) == b"a"
    assert await other.get(record("b")) == b"newer"
    assert await store.get(record("b")) == b"newer"
    assert sorted(await other.list("response", "t", 10)) == ["a", "b", "c"]


async def test_a_redis_that_was_emptied_is_found_out_by_the_heartbeat(server: RedisServer) -> None:
    store = shared_store(server, Clock())
    await store.beat()
    await store.put(record(), b"x", 60)
    await store.flush()
    server.call("FLUSHALL")
    await store.beat()
    assert store.remote.num_losses == 1
    await store.flush()
    assert await store.remote.get(record()) == b"x"
    await store.beat()
    assert store.remote.num_losses == 1


async def test_a_redis_that_is_emptied_soon_after_it_was_restarted_is_found_out(server: RedisServer) -> None:
    clock = Clock()
    store = shared_store(server, clock)
    await store.beat()
    await store.put(record(), b"x", 60)
    await store.flush()
    server.restart()
    clock.now += 2
    with suppress(StoreUnavailable):
        await store.get(record("unknown"))  # its connection is gone
    clock.now += 2
    await store.get(record("unknown"))
    await store.flush()
    server.call("FLUSHALL")
    assert await store.get(record()) == b"x"
    await store.flush()
    assert await store.remote.get(record()) == b"x"


async def test_it_is_found_out_although_the_answer_that_told_it_was_lost(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = await emptied_store(server)
    ask = store.remote.link.one

    async def lost(command: Command) -> None:
        await ask(command)
        raise StoreUnavailable("its answer is lost")

    with monkeypatch.context() as patch:
        patch.setattr(store.remote.link, "one", lost)
        with pytest.raises(StoreUnavailable):
            await store.beat()
    assert store.remote.num_losses == 0
    assert await store.get(record()) == b"value"
    assert store.remote.num_losses == 1


async def test_a_redis_that_was_emptied_is_found_out_by_whoever_asks_first(server: RedisServer) -> None:
    """The objects of this process are served, and an idempotency key that was used stays used."""
    store = SharedStore(MemoryStore(), redis_store(server))
    key, claim = record("kept"), record("claim", kind="idempotency")
    await store.beat()
    await store.put(key, b"value", 60)
    assert await store.add(claim, b"first", 60) is None
    await store.flush()
    server.call("FLUSHALL")
    assert await store.add(claim, b"second", 60) == b"first"
    assert await store.get(key) == b"value"
    await store.flush()
    other = redis_store(server, replica="b")
    assert (await other.get(claim), await other.get(key)) == (b"first", b"value")


async def emptied_store(server: RedisServer) -> SharedStore:
    """A store whose Redis had a record, and has lost it unnoticed."""
    store = SharedStore(MemoryStore(), redis_store(server))
    await store.beat()
    await store.put(record(), b"value", 60)
    await store.flush()
    server.call("FLUSHALL")
    return store


async def test_what_is_gone_here_by_now_is_not_given_back(server: RedisServer) -> None:
    store = await emptied_store(server)
    await store.put(record("deleted"), b"x", 60)
    await store.flush()
    server.call("FLUSHALL")
    await store.beat()
    assert await store.delete(record("deleted"))
    await store.flush()
    assert await store.remote.get(record("deleted")) is None
    assert await store.remote.get(record()) == b"value"


async def test_what_is_here_is_served_if_nobody_can_tell_whether_redis_was_emptied(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def too_late() -> None:
        raise StoreUnavailable

    store = await emptied_store(server)
    monkeypatch.setattr(store.remote, "beat", too_late)
    assert await store.get(record()) == b"value"


async def test_what_was_put_again_while_somebody_asked_for_it_is_found(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Redis says no, for it was emptied; before that is understood, another call has seen it and all is there again."""
    store = await emptied_store(server)
    ask = store.remote.get

    async def told_late(key: Key, ttl_s: float | None = None) -> bytes | None:
        found = await ask(key, ttl_s)
        await store.beat()
        await store.flush()
        return found

    monkeypatch.setattr(store.remote, "get", told_late)
    assert await store.get(record()) == b"value"


async def test_what_another_replica_deleted_is_not_brought_back(server: RedisServer) -> None:
    store, other = SharedStore(MemoryStore(), redis_store(server)), redis_store(server, replica="b")
    claim = record("claim", kind="idempotency")
    await store.beat()
    await other.beat()
    assert await store.add(claim, b"first", 60) is None
    await other.delete(claim)
    assert await store.get(claim) is None
    assert await store.add(claim, b"second", 60) is None


async def test_a_deletion_that_redis_did_not_hear_of_holds(server: RedisServer) -> None:
    clock = Clock()
    store, other = shared_store(server, clock), redis_store(server, replica="b")
    await other.put(record(), b"x", 60)
    server.pause()
    with pytest.raises(StoreUnavailable):
        await store.delete(record())
    assert await store.get(record()) is None
    server.resume()
    clock.now += 100
    await store.flush()
    assert await other.get(record()) is None


async def test_what_was_reserved_while_redis_was_gone_is_charged_whole_and_not_given_back(
    server: RedisServer,
) -> None:
    clock, quota = Clock(), Quota(tokens_per_minute=1000)
    store = shared_store(server, clock)
    await store.reserve("t", quota, 300, "before")
    server.kill()
    assert (await store.reserve("t", quota, 400, "while")).refused is None
    server.start()
    clock.now += 2
    await store.reserve("t", quota, 500, "after")
    await store.settle("t", quota, -150, "while")
    await store.settle("t", quota, -100, "after")
    grant = await store.remote.reserve("t", quota, 1, "probe")
    assert grant.tokens is not None
    assert grant.tokens.remaining == pytest.approx(1000 - 250 - 400 - 1, abs=20)


async def test_a_release_that_redis_did_not_hear_of_is_told_later(server: RedisServer) -> None:
    clock = Clock()
    store = shared_store(server, clock)
    one = Quota(max_streams=1)
    assert (await store.reserve("t", one, 0, "a")).refused is None
    server.pause()
    await store.release("t", "a")
    assert store.stats().num_dirty == 1
    server.resume()
    clock.now += 100
    await store.flush()
    assert (await store.remote.reserve("t", one, 0, "b")).refused is None


async def test_quotas_hold_while_redis_is_gone(server: RedisServer) -> None:
    store = shared_store(server, Clock())
    quota = Quota(requests_per_minute=3)
    assert (await store.reserve("t", quota, 0, "a")).refused is None
    server.kill()
    assert (await store.reserve("t", quota, 0, "b")).refused is None
    assert (await store.reserve("t", quota, 0, "c")).refused is None
    assert (await store.reserve("t", quota, 0, "d")).refused == "requests"


async def test_a_put_finds_an_empty_redis_out(server: RedisServer) -> None:
    clock = Clock()
    store = shared_store(server, clock)
    await store.put(record("a"), b"x", 60)
    await store.flush()
    server.restart()
    clock.now += 2
    await store.put(record("b"), b"x", 60)
    with suppress(StoreUnavailable):
        await store.flush()
    clock.now += 2
    await store.flush()
    assert await store.remote.list("response", "t", 10) == ["a", "b"]


async def test_what_is_put_while_it_is_written_is_written_too(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store = shared_store(server, Clock())
    put_all, newer = store.remote.put_all, [b"two"]

    async def put_meanwhile(records: Sequence[tuple[Key, bytes, float]], *, only_new: bool = False) -> None:
        if newer:
            await store.put(record(), newer.pop(), 60)
        await put_all(records, only_new=only_new)

    monkeypatch.setattr(store.remote, "put_all", put_meanwhile)
    await store.put(record(), b"one", 60)
    await store.flush()
    assert await store.remote.get(record()) == b"two"


async def test_what_is_to_be_written_is_bounded(server: RedisServer) -> None:
    store = SharedStore(MemoryStore(), redis_store(server), max_dirty=3)
    for i in range(5):
        await store.put(record(f"{i}"), b"x", 60)
    await store.put(record("4"), b"newest", 60)
    assert (store.stats().num_dirty, store.stats().num_dropped) == (3, 2)
    await store.flush()
    assert await store.remote.list("response", "t", 10) == ["4", "3", "2"]
    assert await store.remote.get(record("4")) == b"newest"


async def test_running_writes_behind_and_at_its_end(server: RedisServer) -> None:
    store, other = shared_store(server, Clock()), redis_store(server, replica="b")
    async with store.running():
        await store.put(record("a"), b"x", 60)
        while await other.get(record("a")) is None:
            await asyncio.sleep(0.01)
        await store.put(record("b"), b"x", 60)
        assert await store.list("response", "t", 10) == ["b", "a"]
    assert await other.get(record("b")) == b"x"


@pytest.mark.usefixtures("real_waits")
@pytest.mark.parametrize("fault", ["paused", "stopped"])
async def test_running_ends_soon_without_redis(fault: str, server: RedisServer) -> None:
    store = shared_store(server, Clock())
    async with store.running():
        server.pause() if fault == "paused" else server.kill()
        await store.put(record("a"), b"x", 60)
        start_s = time.monotonic()
    assert time.monotonic() - start_s < GENEROUS_S


# Values that are not what was written


def redis_key(rest: str) -> str:
    return "penstock:{test}:" + rest


def key_of(server: RedisServer, section: str) -> str:
    prefix = redis_key(section)
    (key,) = (
        key
        for key in server.all_keys()
        if key == prefix or (key.startswith(prefix + ":") and not key.endswith(":requests"))
    )
    return key


async def fill(store: RedisStore) -> None:
    await store.put(record(), b"x" * 5000, 60)
    await store.write_journals([JOURNAL])
    await store.write_prefixes([block("a")])


READS: dict[str, tuple[Callable[[RedisStore], Awaitable[object]], object]] = {
    "record": (lambda store: store.get(record()), None),
    "journal": (lambda store: store.read_journal("s"), None),
    "tokens": (lambda store: store.read_journal("s"), None),
    "prefix": (lambda store: store.hottest(10), []),
}
GARBAGE: dict[str, list[tuple[str | bytes, ...]]] = {
    "record": [("SET", b""), ("SET", b"garbage"), ("SET", b"z"), ("SETRANGE", b"20", b"xx")],
    "journal": [("HSET", "header", b"garbage"), ("HSET", "end", b"garbage"), ("HSET", "count", b"4")],
    "tokens": [("APPEND", b"xxx"), ("APPEND", b"xxxx"), ("DEL",)],
    "prefix": [("SET", b""), ("SET", b"garbage"), ("APPEND", b"x")],
}
WRONG = [(section, command) for section, commands in GARBAGE.items() for command in commands]


@pytest.mark.parametrize(("section", "command"), WRONG)
async def test_a_value_that_cannot_be_read_is_one_line_and_a_miss(
    section: str, command: tuple[str | bytes, ...], server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    store = redis_store(server)
    await fill(store)
    server.call(command[0], key_of(server, section), *command[1:])
    read, miss = READS[section]
    assert await read(store) == miss
    assert [(record.name, record.levelno) for record in caplog.records] == [
        ("penstock.store", logging.WARNING)
    ]
    assert "\n" not in caplog.text.strip()
    assert store.stats().num_corrupt == 1
    assert store.stats().failures == {}


async def test_a_quota_that_is_nonsense_is_as_good_as_unused(server: RedisServer) -> None:
    store = redis_store(server)
    await store.reserve("t", NO_BOUNDS, 1, "l")
    for garbage in (b"", b"garbage"):
        server.call("SET", key_of(server, "used"), garbage)
        assert (await store.reserve("t", NO_BOUNDS, 1, "l")).refused is None


async def test_a_key_of_another_type_is_a_store_that_does_not_answer(server: RedisServer) -> None:
    store = redis_store(server)
    await fill(store)
    key = key_of(server, "record")
    server.call("DEL", key)
    server.call("RPUSH", key, "garbage")
    with pytest.raises(StoreUnavailable):
        await store.get(record())
    await store.put(record(), b"x", 60)
    assert await store.get(record()) == b"x"


async def test_a_stream_begins_anew_where_half_of_one_was_left(server: RedisServer) -> None:
    store = redis_store(server)
    await store.write_journals([JOURNAL])
    server.call("DEL", key_of(server, "journal"))
    await store.write_journals([JournalChange("s", b"header", 0, (9,), 60)])
    journal = await store.read_journal("s")
    assert journal is not None
    assert journal.token_ids == (9,)


async def test_pieces_that_are_read_here_live_longer_in_redis_too(server: RedisServer) -> None:
    store, key = shared_store(server, Clock()), Key(PIECE, "t", "p")
    await store.share(key, b"x", 6000)
    await store.flush()
    server.call("PEXPIRE", key_of(server, "record"), 1000)
    assert await store.shared([key], 6000) == [b"x"]
    await store.flush()
    assert server.call("PTTL", key_of(server, "record")) > 5_000_000


async def test_a_piece_that_redis_gave_up_is_there_again_once_it_is_asked_for(server: RedisServer) -> None:
    store, key = shared_store(server, Clock()), Key(PIECE, "t", "p")
    await store.share(key, b"x", 6000)
    await store.flush()
    server.call("DEL", key_of(server, "record"))
    assert await store.shared([key], 6000) == [b"x"]
    await store.flush()
    assert await redis_store(server, replica="b").shared([key], 6000) == [b"x"]


async def test_a_reservation_that_redis_made_and_answered_too_late_is_charged_once(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    store, quota = shared_store(server, Clock()), Quota(requests_per_minute=60, tokens_per_minute=1000)
    ask = store.remote.link.one

    async def lost(command: Command) -> None:
        await ask(command)
        raise StoreUnavailable("its answer is lost")

    for lease, is_settled_before in (("long", False), ("short", True)):
        with monkeypatch.context() as patch:
            patch.setattr(store.remote.link, "one", lost)
            assert (await store.reserve("t", quota, 300, lease)).refused is None
        if not is_settled_before:
            await store.renew([("t", lease)])
            await store.flush()
            await store.renew([("t", lease)])
        await store.settle("t", quota, -200, lease)
        await store.release("t", lease)
    grant = await store.remote.reserve("t", quota, 1, "probe")
    assert grant.tokens is not None
    assert grant.tokens.remaining == pytest.approx(1000 - 2 * 100 - 1, abs=20)


async def test_a_lease_that_redis_does_not_know_is_no_proof_of_a_charge(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As a renewal alone would make one."""
    store, quota = shared_store(server, Clock()), Quota(tokens_per_minute=1000)

    async def away(command: Command) -> None:  # noqa: ARG001
        raise StoreUnavailable("it is away")

    with monkeypatch.context() as patch:
        patch.setattr(store.remote.link, "one", away)
        assert (await store.reserve("t", quota, 300, "lease")).refused is None
    await store.renew([("t", "lease")])
    await store.settle("t", quota, -100, "lease")
    grant = await store.remote.reserve("t", quota, 1, "probe")
    assert grant.tokens is not None
    assert grant.tokens.remaining == pytest.approx(1000 - 200 - 1, abs=20)
