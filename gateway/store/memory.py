"""The store of a server without Redis: everything in this process, bounded, and gone with it."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from typing import Generic, TypeVar

from gateway.store.interface import (
    Grant,
    Journal,
    JournalChange,
    Key,
    PrefixChange,
    Quota,
    StoreStats,
)
from gateway.store.prefixes import complete_chains, hotness
from gateway.store.quotas import LocalQuotas

MAX_BYTES = 64 * 1024 * 1024
MAX_PREFIXES = 10_000
_OVERHEAD_BYTES = 256
"""What an entry takes besides its content."""

K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Entry(Generic[V]):
    value: V
    num_bytes: int
    expires_s: float
    put_number: int
    """Grows with every put."""


class Shelf(Generic[K, V]):
    """Values that expire, the one used least recently first to go when there is no more room."""

    def __init__(self, clock: Callable[[], float], max_bytes: int) -> None:
        self._clock = clock
        self._max_bytes = max_bytes
        self._entries: OrderedDict[K, Entry[V]] = OrderedDict()
        self._num_puts = 0
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._entries)

    def get(self, key: K) -> Entry[V] | None:
        entry = self._entries.get(key)
        if entry is None:
            return None
        if entry.expires_s <= self._clock():
            self.pop(key)
            return None
        self._entries.move_to_end(key)
        return entry

    def peek(self, key: K) -> Entry[V] | None:
        """Without using it; it may have expired."""
        return self._entries.get(key)

    def put(self, key: K, value: V, num_bytes: int, ttl_s: float) -> None:
        self.pop(key)
        self._num_puts += 1
        num_bytes += _OVERHEAD_BYTES
        if num_bytes > self._max_bytes or ttl_s <= 0:
            return
        self._entries[key] = Entry(value, num_bytes, self._clock() + ttl_s, self._num_puts)
        self.num_bytes += num_bytes
        if self.num_bytes > self._max_bytes:
            self._make_room()

    def touch(self, key: K, ttl_s: float) -> None:
        """Its time to live begins again."""
        entry = self._entries[key]
        self._entries[key] = replace(entry, expires_s=self._clock() + ttl_s)

    def replace(self, key: K, value: V, num_bytes: int) -> None:
        """If there is one, it is this from now on, and expires when it would have."""
        entry = self.get(key)
        if entry is not None:
            self.put(key, value, num_bytes, entry.expires_s - self._clock())

    def pop(self, key: K) -> Entry[V] | None:
        """Also returns what has expired."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            self.num_bytes -= entry.num_bytes
        return entry

    def items(self) -> Iterator[tuple[K, Entry[V]]]:
        now_s = self._clock()
        return ((key, entry) for key, entry in self._entries.items() if entry.expires_s > now_s)

    def _make_room(self) -> None:
        now_s = self._clock()
        for key in [key for key, entry in self._entries.items() if entry.expires_s <= now_s]:
            self.pop(key)
        while self.num_bytes > self._max_bytes:
            self.pop(next(iter(self._entries)))


class MemoryStore:
    """The interface in this process.

    Records and, apart from them, journals are dropped past `max_bytes`, those used least recently first.
    """

    durable = False

    def __init__(
        self,
        clock: Callable[[], float] = time.monotonic,
        *,
        max_bytes: int = MAX_BYTES,
        max_prefixes: int = MAX_PREFIXES,
        replica: str = "local",
    ) -> None:
        self.num_losses = 0
        self.clock = clock
        self.quotas = LocalQuotas(clock)
        self.records: Shelf[Key, bytes] = Shelf(clock, max_bytes)
        self._journals: Shelf[str, Journal] = Shelf(clock, max_bytes)
        self._prefixes: OrderedDict[bytes, PrefixChange] = OrderedDict()
        self._max_prefixes = max_prefixes
        self._replica = replica

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
        self.records.put(key, value, len(value), ttl_s)

    async def add(self, key: Key, value: bytes, ttl_s: float) -> bytes | None:
        there = self.records.get(key)
        if there is not None:
            return there.value
        await self.put(key, value, ttl_s)
        return None

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

    async def write_journals(self, changes: Sequence[JournalChange]) -> None:
        for change in changes:
            self._write_journal(change)

    def _write_journal(self, change: JournalChange) -> None:
        entry = self._journals.get(change.stream_id)
        if entry is not None:
            journal = entry.value
        elif change.header is not None:
            journal = Journal(change.stream_id, change.header, (), None)
        else:
            return
        if journal.end is not None or change.offset > len(journal.token_ids):
            return
        end_of_change = change.offset + len(change.token_ids)
        token_ids = journal.token_ids[: change.offset] + change.token_ids + journal.token_ids[end_of_change:]
        header = journal.header if change.header is None else change.header
        journal = replace(journal, header=header, token_ids=token_ids, end=change.end)
        num_bytes = len(journal.header) + 8 * len(token_ids) + len(journal.end or b"")
        self._journals.put(change.stream_id, journal, num_bytes, change.ttl_s)

    async def read_journal(self, stream_id: str) -> Journal | None:
        entry = self._journals.get(stream_id)
        return None if entry is None else entry.value

    async def delete_journals(self, stream_ids: Sequence[str]) -> None:
        for stream_id in stream_ids:
            self._journals.pop(stream_id)

    async def claim(self) -> Sequence[str]:
        """Its own: streams of another process were never here."""
        return [stream_id for stream_id, entry in self._journals.items() if entry.value.end is None]

    async def reserve(self, tenant: str, quota: Quota, num_tokens: int, lease_id: str) -> Grant:
        return self.quotas.reserve(tenant, quota, num_tokens, lease_id)

    async def settle(self, tenant: str, quota: Quota, num_tokens: int, lease_id: str) -> None:  # noqa: ARG002
        self.quotas.settle(tenant, quota, num_tokens)

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        self.quotas.renew(leases)

    async def release(self, tenant: str, lease_id: str) -> None:
        self.quotas.release(tenant, lease_id)

    async def write_prefixes(self, changes: Sequence[PrefixChange]) -> None:
        for change in changes:
            if change.resident:
                self._prefixes[change.hash] = change
                self._prefixes.move_to_end(change.hash)
            elif change.hash in self._prefixes:
                self._prefixes[change.hash] = replace(self._prefixes[change.hash], resident=False)
        while len(self._prefixes) > self._max_prefixes:
            self._prefixes.popitem(last=False)

    async def locate(self, hashes: Sequence[bytes]) -> dict[str, int]:
        num_held = 0
        for block_hash in hashes:
            change = self._prefixes.get(block_hash)
            if change is None or not change.resident:
                break
            num_held += 1
        return {self._replica: num_held} if num_held else {}

    async def hottest(self, limit: int) -> Sequence[PrefixChange]:
        hottest_first = sorted(self._prefixes.values(), key=lambda change: (-hotness(change), change.depth))
        return [replace(change, resident=False) for change in complete_chains(hottest_first, limit)]

    async def beat(self) -> None: ...
