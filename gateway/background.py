"""Background work that runs alongside other work and ends with it."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextvars import Context
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
    """Cancels a task and waits until it is over; raises its exception if it failed."""
    task.cancel()
    with contextlib.suppress(asyncio.CancelledError):
        await task


class Rounds:
    """Coalesced work: requests that arrive during one round are all served by the next."""

    def __init__(self, work: Callable[[], Awaitable[None]]) -> None:
        self._work = work
        self._current: asyncio.Task[None] | None = None
        """The round that is under way, or over."""
        self._next: asyncio.Task[None] | None = None
        """The round that waits for the end of the current one."""

    async def next(self) -> None:
        """Returns when a round that began after this call has ended, even if other callers stop waiting."""
        if self._next is None:
            # Of nobody's own context: what one request may wait for is not what all of them may.
            self._next = asyncio.create_task(self._run(), context=Context())
        await asyncio.shield(self._next)

    async def _run(self) -> None:
        if self._current is not None:
            await asyncio.wait([self._current])
        self._current, self._next = self._next, None
        await self._work()
