"""GCRA in memory and in Redis, against a model that is as simple as can be."""

from __future__ import annotations

import asyncio
import time
from fractions import Fraction

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.gateway.store.gcra import LocalQuotas, cost_us
from penstock.gateway.store.interface import LEASE_S, Quota
from penstock.gateway.store.memory import MemoryStore
from tests.clock import Clock
from tests.few import examples
from tests.gateway.store.stores import redis_store
from tests.redis_server import RedisServer

# Limits that divide a minute: then all three are exact to the microsecond.
LIMITS = st.none() | st.sampled_from([1, 2, 3, 4, 5, 6, 8, 10, 12, 15, 16, 20])
STEPS = st.lists(
    st.tuples(st.just("reserve"), st.integers(0, 25))
    | st.tuples(st.just("settle"), st.integers(-30, 30))
    | st.tuples(st.just("wait"), st.sampled_from([1, 3, 10, 20, 29]))
    | st.tuples(st.just("release"), st.just(0)),
    max_size=25,
)


class Bucket:
    """So much is used; it comes back evenly, a limit's worth a minute, and never below nothing."""

    def __init__(self, limit: int | None) -> None:
        self.limit = limit
        self.used = Fraction(0)

    def fits(self, amount: int) -> bool:
        return self.limit is None or self.used + amount <= self.limit

    def use(self, amount: int) -> None:
        self.used = max(Fraction(0), self.used + amount)

    def wait(self, seconds: int) -> None:
        self.use(0)
        self.used = max(Fraction(0), self.used - Fraction(seconds * (self.limit or 0), 60))


async def follow(server: RedisServer, quota: Quota, steps: list[tuple[str, int]]) -> None:
    server.call("FLUSHALL")
    clock = Clock()
    local, remote = MemoryStore(clock), redis_store(server, clock=clock)
    requests, tokens = Bucket(quota.requests_per_minute), Bucket(quota.tokens_per_minute)
    leases: list[str] = []
    async with remote.running():
        for i, (step, amount) in enumerate(steps):
            if step == "reserve":
                grant = await local.reserve("t", quota, amount, f"{i}")
                assert await remote.reserve("t", quota, amount, f"{i}") == grant
                full = quota.max_streams is not None and len(leases) >= quota.max_streams
                assert (grant.refused is None) == (requests.fits(1) and tokens.fits(amount) and not full)
                if grant.refused is None:
                    requests.use(1)
                    tokens.use(amount)
                    leases.append(f"{i}")
            elif step == "settle":
                await local.settle("t", quota, amount, "lease")
                await remote.settle("t", quota, amount, "lease")
                tokens.use(amount)
            elif step == "release" and leases:
                lease = leases.pop(0)
                await local.release("t", lease)
                await remote.release("t", lease)
            elif step == "wait":
                clock.now += amount
                await local.renew([("t", lease) for lease in leases])
                await remote.renew([("t", lease) for lease in leases])
                requests.wait(amount)
                tokens.wait(amount)


@settings(max_examples=examples(40))
@given(requests=LIMITS, tokens=LIMITS, streams=st.none() | st.integers(1, 3), steps=STEPS)
def test_memory_and_redis_do_as_the_model_does(
    redis_process: RedisServer,
    requests: int | None,
    tokens: int | None,
    streams: int | None,
    steps: list[tuple[str, int]],
) -> None:
    quota = Quota(requests_per_minute=requests, tokens_per_minute=tokens, max_streams=streams)
    asyncio.run(follow(redis_process, quota, steps))


@given(limit=st.integers(1, 10**9), amount=st.integers(0, 10**6))
def test_a_minutes_worth_fits_in_a_minute(limit: int, amount: int) -> None:
    assert limit * cost_us(1, limit) <= 60_000_000
    assert cost_us(amount, limit) + cost_us(-amount, limit) == 0
    assert cost_us(amount, limit) <= 60_000_000 or amount > limit


@pytest.mark.parametrize("limit", [1, 7, 13, 999])
@pytest.mark.anyio
async def test_any_limit_lets_exactly_so_many_in_at_once(limit: int) -> None:
    quotas = LocalQuotas(Clock())
    quota = Quota(requests_per_minute=limit)
    grants = [await quotas.reserve("t", quota, 0, f"{i}") for i in range(limit + 1)]
    assert [grant.refused for grant in grants] == [None] * limit + ["requests"]


@pytest.mark.anyio
async def test_who_used_nothing_lately_is_forgotten() -> None:
    clock = Clock()
    quotas = LocalQuotas(clock)
    await quotas.reserve("t", Quota(requests_per_minute=1), 0, "l")
    await quotas.release("t", "l")
    assert quotas.num_accounts == 1
    clock.now += 60
    await quotas.renew([])
    assert quotas.num_accounts == 0


@pytest.mark.anyio
async def test_many_streams_of_a_tenant_are_renewed_in_time_that_grows_with_their_number() -> None:
    async def renewed_s(number: int) -> float:
        quotas, leases = LocalQuotas(Clock()), [("t", f"{i}") for i in range(number)]
        await quotas.renew(leases)
        start_s = time.thread_time()
        await quotas.renew(leases)
        return time.thread_time() - start_s

    few_s, many_s = [min([await renewed_s(number) for _ in range(3)]) for number in (500, 4_000)]
    assert many_s < 24 * few_s


@pytest.mark.anyio
async def test_leases_end_in_the_order_of_their_renewal() -> None:
    clock, quota = Clock(), Quota(max_streams=2)
    quotas = LocalQuotas(clock)
    for lease_id in "ab":
        assert (await quotas.reserve("t", quota, 0, lease_id)).refused is None
        clock.now += 10
    await quotas.renew([("t", "a")])
    assert (await quotas.reserve("t", quota, 0, "c")).refused == "streams"
    clock.now += LEASE_S - 9
    assert (await quotas.reserve("t", quota, 0, "c")).refused is None  # b's has ended, and a's has not
    assert (await quotas.reserve("t", quota, 0, "d")).refused == "streams"
