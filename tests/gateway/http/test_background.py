"""Work in the background ends with whom it is done for."""

from __future__ import annotations

import asyncio

import pytest

from gateway.http.background import meanwhile


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
