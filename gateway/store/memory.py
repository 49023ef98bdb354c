"""The store of a server without Redis: everything in this process, bounded, and gone with it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace

from gateway.store.gcra import LocalQuotas
from gateway.store.interface import Grant, Key, Quota, StoreStats

MAX_BYTES = 64 * 1024 * 1024
_OVERHEAD_BYTES = 256
"""What an entry takes besides its content."""


@dataclass(frozen=True, slots=True)
class Entry:
    value: bytes
    expires_s: float
    put_number: int
    """Grows with every put."""

    @property
    def num_bytes(self) -> int:
        return len(self.value) + _OVERHEAD_BYTES


class Shelf:
    """Values that expire, the one used least recently first to go when there is no more room."""

    def __init__(self, clock: Callable[[], float], max_bytes: int) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Entry] = OrderedDict()
        self._num_puts = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: Key) -> Entry | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_s <= self._clock():
            self.pop(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def peek(self, key: Key) -> Entry | None:
        """Without using it; it may have expired."""
        return self._entries.get(key)

    def put(self, key: Key, value: bytes, ttl_s: float) -> None:
        self.pop(key)
        self._num_puts += 1
        entry = Entry(value, self._clock() + ttl_s, self._num_puts)
        if entry.num_bytes > self._max_bytes or ttl_s <= 0:
            return
        self._entries[key] = entry
        self.num_bytes += entry.num_bytes
        if self.num_bytes > self._max_bytes:
            self._make_room()

    def touch(self, key: Key, ttl_s: float) -> None:
        """Its time to live begins again."""
        entry = self._entries[key]
        self._entries[key] = replace(entry, expires_s=self._clock() + ttl_s)

    def refresh(self, key: Key, value: bytes) -> None:
        """If there is one, it is this from now on, and expires when it would have."""
        entry = self.get(key)
        if entry is not None:
            self.put(key, value, entry.expires_s - self._clock())

    def pop(self, key: Key) -> Entry | None:
        """Also returns what has expired."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
        return entry

    def items(self) -> Iterator[tuple[Key, Entry]]:
        now_s = self._clock()
        return ((key, entry) for key, entry in self._entries.items() if entry.expires_s > now_s)

    def _make_room(self) -> None:
        now_s = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.expires_s <= now_s]:
            self.pop(key)
        while self.num_bytes > self._max_bytes:
            self.pop(next(iter(self._entries)))


class MemoryStore:
    """The interface in this process. Records are dropped past `max_bytes`, those used least recently first."""

    durable = None

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_bytes: int = MAX_BYTES) -> None:
        self.clock = clock
        self.quotas = LocalQuotas(clock)
        self.records = Shelf(clock, max_bytes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """There is nothing to start or to close; for what all stores have in common."""
        yield

    def stats(self) -> StoreStats:
        return StoreStats(num_records=len(self.records), num_bytes=self.records.num_bytes)

    async def get(self, key: Key, ttl_s: float | None = None) -> bytes | None:
        entry = self.records.get(key)
        if entry is None:
            return None
        if ttl_s is not None:
            self.records.touch(key, ttl_s)
        return entry.value

    async def put(self, key: Key, value: bytes, ttl_s: float) -> None:
        self.records.put(key, value, ttl_s)

    async def add(self, key: Key, value: bytes, ttl_s: float) -> bytes | None:
        there = self.records.get(key)
        if there is not None:
            return there.value
        self.records.put(key, value, ttl_s)
        return None

    async def replace(self, key: Key, old: bytes, new: bytes, ttl_s: float) -> bool:
        there = self.records.get(key)
        if there is None or there.value != old:
            return False
        self.records.put(key, new, ttl_s)
        return True

    async def delete(self, key: Key) -> bool:
        there = self.records.get(key) is not None
        self.records.pop(key)
        return there

    async def list(self, kind: str, tenant: str, limit: int) -> list[str]:
        found = [
            (entry.put_number, key.id)
            for key, entry in self.records.items()
            if key.kind == kind and key.tenant == tenant
        ]
        return [id_ for _, id_ in sorted(found, reverse=True)[: max(0, limit)]]

    async def reserve(self, tenant: str, quota: Quota, num_tokens: int, lease_id: str) -> Grant:
        return self.quotas.reserve(tenant, quota, num_tokens, lease_id)

    async def settle(self, tenant: str, quota: Quota, num_tokens: int, lease_id: str) -> None:  # noqa: ARG002
        self.quotas.settle(tenant, quota, num_tokens)

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        self.quotas.renew(leases)

    async def release(self, tenant: str, lease_id: str) -> None:
        self.quotas.release(tenant, lease_id)
