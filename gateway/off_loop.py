"""Work on large bodies runs in a thread, because on the event loop it would hold up every stream."""

from __future__ import annotations

import contextlib
from collections.abc import AsyncIterator, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

OFF_LOOP_BYTES = 32 * 1024
"""JSON or packing of this size takes about a millisecond."""

TOKEN_BYTES = 4
"""Hashing a token of a prompt takes about as long as other work on so many bytes."""

# Threads take turns with the event loop on one interpreter: the more of them, the less is left for it.
_SHORT = anyio.CapacityLimiter(2)

_Result = TypeVar("_Result")


async def off_loop(size: int, work: Callable[..., _Result], *args: object) -> _Result:
    """Returns the result of `work(*args)`, done in a thread if `size`, about the bytes it looks at, is large."""
    if size <= OFF_LOOP_BYTES:
        return work(*args)
    return await anyio.to_thread.run_sync(work, *args, limiter=_SHORT)


class FairSemaphore:
    """A fair semaphore: one tenant's next work waits for only a few pieces of each other tenant's work."""

    def __init__(self, num_places: int, num_each: int) -> None:
        """At most `num_each` pieces of one tenant's work hold a place or compete for one."""
        self._num_each = num_each
        self._places = anyio.Semaphore(num_places)
        self._turns: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()
        """The tenants' own semaphores, each as long as the tenant has work."""

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(tenant, anyio.Semaphore(self._num_each))
        async with turn, self._places:
            yield
