"""Work on what is large is done in a thread: it would hold every stream up."""

from __future__ import annotations

import contextlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable
from typing import TypeVar
from weakref import WeakValueDictionary

import anyio
import anyio.to_thread

from penstock.gateway.http.errors import refused

OFF_LOOP_BYTES = 32 * 1024
"""JSON or packing of this size takes about a millisecond."""
TOKENIZED_ON_LOOP_BYTES = 1024
"""Tokenizing a text of this size takes a quarter of a millisecond, twice what handing it to a thread does."""

TOKEN_BYTES = 4
"""Hashing a token of a prompt takes about as long as other work on so many bytes."""

# Threads take turns with the event loop on one interpreter: the more of them, the less is left for it.
_SHORT = anyio.CapacityLimiter(2)
_FIRST_GUESS_S_PER_BYTE = 3e-7
_NEWEST_SHARE = 0.2

_Result = TypeVar("_Result")


async def off_loop(size: int, work: Callable[..., _Result], *args: object) -> _Result:
    """Returns the result of `work(*args)`, done in a thread if `size`, about the bytes it looks at, is large."""
    if size <= OFF_LOOP_BYTES:
        return work(*args)
    return await anyio.to_thread.run_sync(work, *args, limiter=_SHORT)


class Turns:
    """Places that tenants have in turns: one tenant's next work waits for a few pieces of each other tenant's only."""

    def __init__(self, num_places: int, num_each: int) -> None:
        """At most `num_each` pieces of one tenant's work have a place, or wait for one, beside others'."""
        self._num_each = num_each
        self._places = anyio.Semaphore(num_places)
        self._turns: WeakValueDictionary[str, anyio.Semaphore] = WeakValueDictionary()
        """By tenant, as long as any of its work is there."""

    @contextlib.asynccontextmanager
    async def of(self, tenant: str) -> AsyncIterator[None]:
        turn = self._turns.setdefault(tenant, anyio.Semaphore(self._num_each))
        async with turn, self._places:
            yield


class FairThreads:
    """Threads for work on texts, which tenants have in turns; each tenant may have so much of it waiting."""

    def __init__(self, num_threads: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes` is what one tenant's texts may come to, those that are worked on included."""
        self._clock = clock
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._turns = Turns(num_threads, num_threads)
        self._threads = anyio.CapacityLimiter(num_threads)
        self._bytes: Counter[str] = Counter()
        """Bytes that wait or are worked on, by tenant."""
        self._s_per_byte = _FIRST_GUESS_S_PER_BYTE

    async def run(self, tenant: str, size: int, work: Callable[[], _Result]) -> _Result:
        """Returns the result of `work`, done in a thread if `size`, about the bytes of its texts, is large.

        Raises:
            ApiError: 429, if too much of the tenant's work waits already.
        """
        if size <= TOKENIZED_ON_LOOP_BYTES:
            return work()
        self._check_room(tenant, size)
        self._bytes[tenant] += size
        try:
            async with self._turns.of(tenant):
                return await self._timed(size, work)
        finally:
            self._bytes[tenant] -= size
            if not self._bytes[tenant]:
                del self._bytes[tenant]

    async def _timed(self, size: int, work: Callable[[], _Result]) -> _Result:
        began_s = self._clock()
        result = await anyio.to_thread.run_sync(work, limiter=self._threads)
        newest = (self._clock() - began_s) / size
        self._s_per_byte += _NEWEST_SHARE * (newest - self._s_per_byte)
        return result

    def _check_room(self, tenant: str, size: int) -> None:
        held = self._bytes.get(tenant, 0)
        if not held or held + size <= self._max_bytes:
            return
        message = (
            f"{held} bytes of your texts wait to be tokenized. With this request they would be more than the "
            f"{self._max_bytes} that may wait."
        )
        wait_s = self._seconds_until(held + size - self._max_bytes)
        raise refused(message, "too_much_to_tokenize", wait_s, tenant_limit=True)

    def _seconds_until(self, num_bytes: int) -> float:
        """Forecasts when so much of one tenant's work is done, if all tenants have the same share."""
        ahead = sum(min(waiting, num_bytes) for waiting in self._bytes.values())
        return ahead * self._s_per_byte / self._num_threads
