"""Work that goes on beside other work, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Coroutine
from typing import Any


@contextlib.asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While this is entered `work` is done in a task of its own, which is cancelled then."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await end(task)


async def end(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits until it is over; raises what it failed with."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
