"""Threads for work on texts, which tenants share fairly."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable
from typing import TypeVar

import anyio
import anyio.to_thread

from penstock.gateway.errors import refused
from penstock.gateway.off_loop import FairSemaphore

TOKENIZED_ON_LOOP_BYTES = 1024
"""Tokenizing a text of this size takes a quarter of a millisecond, twice what handing it to a thread does."""

_FIRST_GUESS_S_PER_BYTE = 3e-7
_NEWEST_SHARE = 0.2

_Result = TypeVar("_Result")


class FairThreads:
    """Threads for work on texts that tenants share fairly, with a bound on each tenant's waiting work."""

    def __init__(self, num_threads: int, max_bytes: int, clock: Callable[[], float] = time.monotonic) -> None:
        """`max_bytes` bounds one tenant's texts, including those being processed."""
        self._clock = clock
        self._num_threads = num_threads
        self._max_bytes = max_bytes
        self._turns = FairSemaphore(num_threads, num_threads)
        self._threads = anyio.CapacityLimiter(num_threads)
        self._bytes: Counter[str] = Counter()
        """The bytes that wait or are being processed, by tenant."""
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
