"""Patience: who can only be answered by the store asks it again, for some seconds."""

from __future__ import annotations

import pytest

from penstock.gateway.store import patience
from penstock.gateway.store.interface import StoreUnavailable
from penstock.gateway.store.patience import NUM_GLANCES, PATIENCE, Patience, insist, insistent
from tests.clock import Clock

pytestmark = pytest.mark.anyio


async def test_who_needs_the_store_asks_until_it_answers() -> None:
    asked = list[Patience | None]()

    async def ask() -> str:
        asked.append(PATIENCE.get())
        if len(asked) < 3:
            raise StoreUnavailable
        return "it"

    before = PATIENCE.set(spent := Patience(num_glances=0))
    try:
        assert await insist(ask, Clock()) == "it"
        assert PATIENCE.get() is spent
    finally:
        PATIENCE.reset(before)
    assert asked == [insistent()] * 3
    assert insistent().num_glances > NUM_GLANCES


async def test_who_needs_the_store_gives_up_after_some_seconds() -> None:
    clock = Clock()

    async def ask() -> None:
        clock.now += patience.INSIST_S / 2
        raise StoreUnavailable

    with pytest.raises(StoreUnavailable):
        await insist(ask, clock)
    assert clock.now == Clock().now + patience.INSIST_S
