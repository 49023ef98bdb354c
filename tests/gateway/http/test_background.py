"""Work in the background ends with whom it is done for."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.background import every, meanwhile


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
            raise RuntimeError("no paper")
        done.set()

    async with meanwhile(every(0.0, work, "printing")):
        await done.wait()
    assert [record.getMessage() for record in caplog.records] == ["printing failed; going on"]
    assert "no paper" in caplog.text
