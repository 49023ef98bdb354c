"""Work in the background ends with whom it is done for."""

from __future__ import annotations

import asyncio

import pytest

from penstock.gateway.background import Rounds, every, meanwhile
from tests.gateway.harness import settled


@pytest.mark.anyio
async def test_it_is_over_when_its_owner_goes_on() -> None:
    begun, over = asyncio.Event(), asyncio.Event()

    async def work() -> None:
        begun.set()
        try:
            await asyncio.Event().wait()
        finally:
            over.set()

    async with meanwhile(work()):
        await begun.wait()
        assert not over.is_set()
    assert over.is_set()


@pytest.mark.anyio
async def test_a_fault_is_a_line_and_not_the_end(caplog: pytest.LogCaptureFixture) -> None:
    done, num_calls = asyncio.Event(), 0

    async def work() -> None:
        nonlocal num_calls
        num_calls += 1
        if num_calls == 1:
            raise RuntimeError("out of order")
        done.set()

    async with meanwhile(every(0.0, work, "printing")):
        await done.wait()
    assert [record.getMessage() for record in caplog.records] == ["printing failed; going on"]
    assert "out of order" in caplog.text


class Gated:
    """Work of which each round waits until the test lets it go on."""

    def __init__(self) -> None:
        self.begun: list[asyncio.Event] = []
        self.num_ended = 0

    async def work(self) -> None:
        gate = asyncio.Event()
        self.begun.append(gate)
        await gate.wait()
        self.num_ended += 1


@pytest.mark.anyio
async def test_who_asks_during_a_round_shares_the_next_with_all_who_do() -> None:
    gated = Gated()
    rounds = Rounds(gated.work)
    first = asyncio.create_task(rounds.next())
    await settled()
    others = [asyncio.create_task(rounds.next()) for _ in range(5)]
    await settled()
    assert len(gated.begun) == 1
    gated.begun[0].set()
    await settled()
    assert first.done()
    assert len(gated.begun) == 2
    assert not any(other.done() for other in others)
    gated.begun[1].set()
    await asyncio.gather(*others)
    assert gated.num_ended == 2


@pytest.mark.anyio
async def test_a_round_goes_on_when_one_of_those_who_wait_for_it_leaves() -> None:
    gated = Gated()
    rounds = Rounds(gated.work)
    leaving, staying = (asyncio.create_task(rounds.next()) for _ in range(2))
    await settled()
    leaving.cancel()
    await settled()
    assert leaving.cancelled()
    gated.begun[0].set()
    await staying
    assert gated.num_ended == 1


@pytest.mark.anyio
async def test_a_round_that_fails_is_told_to_all_who_wait_for_it_and_the_next_one_begins() -> None:
    num_rounds = 0

    async def work() -> None:
        nonlocal num_rounds
        num_rounds += 1
        if num_rounds == 1:
            raise RuntimeError("out of order")

    rounds = Rounds(work)
    told = await asyncio.gather(rounds.next(), rounds.next(), return_exceptions=True)
    assert [str(error) for error in told] == ["out of order"] * 2
    await rounds.next()
    assert num_rounds == 2
