"""The time budget: what only the store can answer is asked again, for some seconds."""

from __future__ import annotations

import pytest

from penstock.gateway.store import time_budget
from penstock.gateway.store.interface import StoreUnavailable
from penstock.gateway.store.time_budget import NUM_CHECKS, TIME_BUDGET, TimeBudget, retry_budget, retrying
from tests.clock import Clock

pytestmark = pytest.mark.anyio


async def test_who_needs_the_store_asks_until_it_answers() -> None:
    asked = list[TimeBudget | None]()

    async def ask() -> str:
        asked.append(TIME_BUDGET.get())
        if len(asked) < 3:
            raise StoreUnavailable
        return "it"

    before = TIME_BUDGET.set(spent := TimeBudget(num_checks=0))
    try:
        assert await retrying(ask, Clock()) == "it"
        assert TIME_BUDGET.get() is spent
    finally:
        TIME_BUDGET.reset(before)
    assert asked == [retry_budget()] * 3
    assert retry_budget().num_checks > NUM_CHECKS


async def test_who_needs_the_store_gives_up_after_some_seconds() -> None:
    clock = Clock()

    async def ask() -> None:
        clock.now += time_budget.RETRY_S / 2
        raise StoreUnavailable

    with pytest.raises(StoreUnavailable):
        await retrying(ask, clock)
    assert clock.now == Clock().now + time_budget.RETRY_S
