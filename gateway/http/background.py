"""Work that goes on beside other work, and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from typing import Any

log = logging.getLogger("penstock.gateway")


@contextlib.asynccontextmanager
async def meanwhile(work: Coroutine[Any, Any, None]) -> AsyncIterator[None]:
    """While this is entered `work` is done in a task of its own, which is cancelled then."""
    task = asyncio.create_task(work)
    try:
        yield
    finally:
        await end(task)


async def every(seconds: float, work: Callable[[], Awaitable[None]], name: str) -> None:
    """Does `work` again and again, until cancelled; a fault is a line in the log, by its name, and not the end."""
    while True:
        await asyncio.sleep(seconds)
        try:
            await work()
        except Exception:
            log.exception("%s failed; going on", name)


async def end(task: asyncio.Task[None]) -> None:
    """Cancels a task and waits until it is over; raises what it failed with."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task
