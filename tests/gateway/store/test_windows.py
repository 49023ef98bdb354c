"""Days and months in memory and in Redis, against a model that is as simple as can be."""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from datetime import UTC, datetime

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.access.quotas import windows_of
from penstock.gateway.store.interface import Quota, Store, Use, Window
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.shared import SharedStore
from tests.clock import Clock
from tests.few import examples
from tests.gateway.store.stores import KINDS, opened, redis_store
from tests.redis_server import RedisServer

HOUR_S = 3600.0
LAST_DAY = datetime(2026, 11, 30, 22, tzinfo=UTC).timestamp()
LIMITS = st.none() | st.integers(1, 30)
STEPS = st.lists(
    st.tuples(st.just("reserve"), st.integers(0, 25))
    | st.tuples(st.just("settle"), st.integers(-30, 30))
    | st.tuples(st.just("wait"), st.sampled_from([1, 5, 30, 300])),
    max_size=25,
)


class Ledger:
    """What is used of every window."""

    def __init__(self) -> None:
        self.requests, self.tokens = Counter[str](), Counter[str]()

    def fits(self, window: Window, amount: int) -> bool:
        requests = window.max_requests is None or self.requests[window.id] < window.max_requests
        tokens = window.max_tokens is None or self.tokens[window.id] + amount <= window.max_tokens
        return requests and tokens

    def use(self, windows: Sequence[Window], num_requests: int, num_tokens: int) -> None:
        for window in windows:
            self.requests[window.id] += num_requests
            self.tokens[window.id] = max(0, self.tokens[window.id] + num_tokens)

    def uses(self, windows: Sequence[Window]) -> tuple[Use, ...]:
        return tuple(Use(self.requests[window.id], self.tokens[window.id]) for window in windows)


async def follow(server: RedisServer, quota: Quota, steps: list[tuple[str, int]]) -> None:
    server.call("FLUSHALL")
    clock, ledger = Clock(LAST_DAY), Ledger()
    local, remote = MemoryStore(clock), redis_store(server, clock=clock)
    reserved: list[tuple[Window, ...]] = []
    async with remote.running():
        for i, (step, amount) in enumerate(steps):
            windows = windows_of(quota, clock.now)
            if step == "reserve":
                grant = await local.reserve("t", quota, amount, f"{i}", windows)
                assert await remote.reserve("t", quota, amount, f"{i}", windows) == grant
                assert (grant.refused is None) == all(ledger.fits(window, amount) for window in windows)
                if grant.refused is None:
                    ledger.use(windows, 1, amount)
                    reserved.append(windows)
                assert grant.uses == ledger.uses(windows)
            elif step == "settle" and reserved:
                began_in = reserved.pop(0)
                await local.settle("t", quota, amount, "lease", began_in)
                await remote.settle("t", quota, amount, "lease", began_in)
                ledger.use(began_in, 0, amount)
            elif step == "wait":
                clock.now += amount * HOUR_S
            windows = windows_of(quota, clock.now)
            for store in (local, remote):
                [standing] = await store.standings([("t", quota, windows)])
                assert standing.uses == ledger.uses(windows)


@settings(max_examples=examples(40))
@given(st.tuples(LIMITS, LIMITS, LIMITS, LIMITS), STEPS)
def test_memory_and_redis_count_as_the_model_does(
    redis_process: RedisServer, limits: tuple[int | None, ...], steps: list[tuple[str, int]]
) -> None:
    names = ("requests_per_day", "tokens_per_day", "requests_per_month", "tokens_per_month")
    asyncio.run(follow(redis_process, Quota(**dict(zip(names, limits, strict=True))), steps))


@pytest.fixture
def clock() -> Clock:
    return Clock(LAST_DAY)


@pytest.fixture(params=KINDS)
async def store(request: pytest.FixtureRequest, server: RedisServer, clock: Clock) -> AsyncIterator[Store]:
    async with opened(request.param, server, clock) as store:
        yield store


@pytest.mark.anyio
@pytest.mark.usefixtures("closing")
async def test_a_day_is_used_up_until_its_end(store: Store, clock: Clock) -> None:
    quota = Quota(requests_per_day=2, tokens_per_month=100)
    for i in range(2):
        windows = windows_of(quota, clock.now)
        grant = await store.reserve("t", quota, 10, f"l{i}", windows)
        assert (grant.refused, grant.uses) == (None, (Use(i + 1, 10 * i + 10), Use(i + 1, 10 * i + 10)))
    refused = await store.reserve("t", quota, 10, "l2", windows)
    assert (refused.refused, refused.retry_after_s) == ("requests-day", 2 * HOUR_S)
    assert refused.uses == (Use(2, 20), Use(2, 20)), "what is refused is not counted"
    assert (await store.reserve("other", quota, 10, "l2", windows)).refused is None
    clock.now += 2 * HOUR_S
    await store.settle("t", quota, 50, "l1", windows)
    windows = windows_of(quota, clock.now)
    grant = await store.reserve("t", quota, 10, "l3", windows)
    assert grant.uses == (Use(1, 10), Use(1, 10)), (
        "the month ended with its last day, and what was settled is its own"
    )


@pytest.mark.anyio
@pytest.mark.usefixtures("closing")
async def test_of_several_bounds_the_one_that_renews_last_is_named(store: Store, clock: Clock) -> None:
    quota = Quota(requests_per_minute=1, tokens_per_day=10, tokens_per_month=10)
    clock.now -= 24 * HOUR_S
    windows = windows_of(quota, clock.now)
    await store.reserve("t", quota, 10, "a", windows)
    refused = await store.reserve("t", quota, 1, "b", windows)
    assert (refused.refused, refused.retry_after_s) == ("tokens-month", 26 * HOUR_S)
    assert (await store.reserve("t", quota, 11, "b", windows)).retry_after_s == float("inf")


@pytest.mark.anyio
@pytest.mark.usefixtures("closing")
async def test_what_was_used_while_redis_was_gone_is_charged_to_the_day(server: RedisServer) -> None:
    link_clock, quota = Clock(), Quota(requests_per_day=9, tokens_per_day=1000)
    store = SharedStore(MemoryStore(), redis_store(server, link_clock=link_clock))
    windows = windows_of(quota, LAST_DAY)
    await store.reserve("t", quota, 100, "before", windows)
    server.kill()
    for lease in ("ended", "running"):
        assert (await store.reserve("t", quota, 100, lease, windows)).refused is None
    await store.settle("t", quota, -30, "ended", windows)
    [standing] = await store.standings([("t", quota, windows)])
    assert standing.uses == (Use(3, 270),), "memory stands in"
    server.start()
    link_clock.now += 100
    await store.flush()
    await store.settle("t", quota, -20, "running", windows)
    [standing] = await store.remote.standings([("t", quota, windows)])
    assert standing.uses == (Use(2, 150),), "all but what the killed Redis had lost itself"
    assert store.stats().num_dirty == 0


@pytest.mark.anyio
@pytest.mark.usefixtures("closing")
async def test_counts_of_a_window_go_with_it(server: RedisServer) -> None:
    store, quota = redis_store(server), Quota(tokens_per_day=10)
    windows = windows_of(quota, LAST_DAY)
    await store.reserve("t", quota, 1, "l", windows)
    [key] = [key for key in server.all_keys() if ":day:" in key]
    assert 2 * HOUR_S * 1000 < server.call("PTTL", key) < 4 * HOUR_S * 1000
    clock = Clock(LAST_DAY)
    local = MemoryStore(clock)
    await local.reserve("t", quota, 1, "l", windows)
    await local.release("t", "l")
    assert local.num_accounts == 1
    clock.now += 2 * HOUR_S
    await local.renew([])
    assert local.num_accounts == 0


@pytest.mark.parametrize(
    ("at", "ends"),
    [
        ("2026-11-28T19:05:02", ("2026-11-28", "2026-11-29", "2026-11", "2026-12-01")),
        ("2026-12-31T23:59:59", ("2026-12-31", "2027-01-01", "2026-12", "2027-01-01")),
        ("2028-02-29T00:00:00", ("2028-02-29", "2028-03-01", "2028-02", "2028-03-01")),
    ],
)
def test_windows_are_the_days_and_months_of_utc(at: str, ends: tuple[str, ...]) -> None:
    now_s = datetime.fromisoformat(at).replace(tzinfo=UTC).timestamp()
    told: list[str] = []
    for window in windows_of(Quota(requests_per_day=1, tokens_per_month=1), now_s):
        assert window.ends_s - now_s == window.left_s
        told += [window.date, datetime.fromtimestamp(window.ends_s, UTC).date().isoformat()]
    assert tuple(told) == ends


def test_only_windows_with_a_bound_are_counted() -> None:
    assert windows_of(Quota(requests_per_minute=1, max_streams=1), LAST_DAY) == ()
    assert [window.name for window in windows_of(Quota(tokens_per_month=1), LAST_DAY)] == ["month"]
