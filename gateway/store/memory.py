"""A server without Redis has its store in this process: it is bounded, and gone with the process."""

from __future__ import annotations

import asyncio
import builtins
import time
from collections import OrderedDict, defaultdict
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from heapq import heapify, heappop, heappush
from itertools import islice

from penstock.gateway.store.gcra import LocalQuotas
from penstock.gateway.store.interface import Key, ShareStats, StoreStats

MAX_BYTES = 64 * 1024 * 1024
_OVERHEAD_BYTES = 256
"""An entry takes so much besides its content."""
_FEW = 100
_KEYS_A_TURN = 64
"""As many keys are looked up in one turn of the event loop."""


@dataclass(frozen=True, slots=True)
class Entry:
    """An Entry is a value, and when it is forgotten."""

    value: bytes
    expires_s: float

    @property
    def num_bytes(self) -> int:
        return len(self.value) + _OVERHEAD_BYTES


@dataclass(slots=True)
class _TenantRecords:
    """A _TenantRecords is what one tenant has."""

    num_bytes: int = 0
    used: OrderedDict[Key, None] = field(default_factory=OrderedDict)
    """The key that was used least recently first."""
    ids: dict[str, dict[str, None]] = field(default_factory=lambda: defaultdict(dict))
    """The ids by kind, the least recently put first."""


class LocalRecords:
    """LocalRecords expire. When there is no room, the tenant with the most loses its least recently used ones."""

    def __init__(self, clock: Callable[[], float], max_bytes: int) -> None:
        self.num_bytes = 0
        self.num_evicted = 0
        """The number of records that had to go before they expired."""
        self.max_bytes = max_bytes
        self._clock = clock
        self._entries: dict[Key, Entry] = {}
        self._shares: dict[str, _TenantRecords] = {}
        """The shares by tenant, none of which is empty."""
        self._expiries: builtins.list[tuple[float, Key]] = []
        """A heap of times at which something may expire: those that an entry was given since, too."""

    def __len__(self) -> int:
        return len(self._entries)

    @property
    def num_tenants(self) -> int:
        return len(self._shares)

    @property
    def largest_share(self) -> int:
        """The bytes of the tenant that has most."""
        return max((share.num_bytes for share in self._shares.values()), default=0)

    def get(self, key: Key) -> Entry | None:
        self._forget_expired()
        entry = self._entries.get(key)
        if entry is not None:
            self._shares[key.tenant].used.move_to_end(key)
        return entry

    def peek(self, key: Key) -> Entry | None:
        """The entry, which is not used by this; it may have expired."""
        return self._entries.get(key)

    def put(self, key: Key, value: bytes, ttl_s: float) -> None:
        self.pop(key)
        entry = Entry(value, self._clock() + ttl_s)
        if entry.num_bytes > self.max_bytes or ttl_s <= 0:
            return
        share = self._shares.setdefault(key.tenant, _TenantRecords())
        share.used[key] = share.ids[key.kind][key.id] = None
        share.num_bytes += entry.num_bytes
        self.num_bytes += entry.num_bytes
        self._enter(key, entry)
        self._make_room()

    def touch(self, key: Key, ttl_s: float) -> None:
        """The time to live of an entry begins again."""
        self._enter(key, Entry(self._entries[key].value, self._clock() + ttl_s))

    def refresh(self, key: Key, value: bytes) -> None:
        """Puts the value where there is one, to expire when that would have."""
        entry = self.get(key)
        if entry is not None:
            self.put(key, value, entry.expires_s - self._clock())

    def pop(self, key: Key) -> Entry | None:
        """Removes and returns an entry, which may have expired."""
        entry = self._entries.pop(key, None)
        if entry is not None:
            share = self._shares[key.tenant]
            del share.used[key], share.ids[key.kind][key.id]
            share.num_bytes -= entry.num_bytes
            self.num_bytes -= entry.num_bytes
            if not share.used:
                del self._shares[key.tenant]
        return entry

    def list(self, kind: str, tenant: str, limit: int) -> builtins.list[str]:
        """The ids of a tenant's records of one kind, the one that was put last first."""
        self._forget_expired()
        share = self._shares.get(tenant)
        return [] if share is None else builtins.list(islice(reversed(share.ids[kind]), max(0, limit)))

    def items(self) -> Iterator[tuple[Key, Entry]]:
        """All records, those of one tenant and kind in the order in which they were put."""
        self._forget_expired()
        for tenant, share in self._shares.items():
            for kind, ids in share.ids.items():
                for key in (Key(kind, tenant, id_) for id_ in ids):
                    yield key, self._entries[key]

    def _enter(self, key: Key, entry: Entry) -> None:
        self._entries[key] = entry
        heappush(self._expiries, (entry.expires_s, key))
        if len(self._expiries) > 2 * len(self._entries) + _FEW:
            self._expiries = [(entry.expires_s, key) for key, entry in self._entries.items()]
            heapify(self._expiries)

    def _forget_expired(self) -> None:
        now_s = self._clock()
        while self._expiries and self._expiries[0][0] <= now_s:
            _, key = heappop(self._expiries)
            entry = self._entries.get(key)
            if entry is not None and entry.expires_s <= now_s:
                self.pop(key)

    def _make_room(self) -> None:
        self._forget_expired()
        while self.num_bytes > self.max_bytes:
            largest = max(self._shares.values(), key=lambda share: share.num_bytes)
            self.pop(next(iter(largest.used)))
            self.num_evicted += 1


class MemoryStore(LocalQuotas):
    """A MemoryStore keeps all in this process. Past `max_bytes` the tenant that has most loses records."""

    durable = None

    def __init__(self, clock: Callable[[], float] = time.monotonic, *, max_bytes: int = MAX_BYTES) -> None:
        super().__init__(clock)
        self.records = LocalRecords(clock, max_bytes)

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Does nothing: there is nothing to start or to close."""
        yield

    def stats(self) -> StoreStats:
        records = self.records
        share = ShareStats(
            records.max_bytes // max(1, records.num_tenants), records.largest_share, records.num_evicted
        )
        return StoreStats(num_records=len(records), num_bytes=records.num_bytes, shares={"memory": share})

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
        entry = self.records.get(key)
        if entry is not None:
            return entry.value
        self.records.put(key, value, ttl_s)
        return None

    async def replace(self, key: Key, old: bytes, new: bytes, ttl_s: float) -> bool:
        entry = self.records.get(key)
        if entry is None or entry.value != old:
            return False
        self.records.put(key, new, ttl_s)
        return True

    async def delete(self, key: Key) -> bool:
        exists = self.records.get(key) is not None
        self.records.pop(key)
        return exists

    async def list(self, kind: str, tenant: str, limit: int) -> builtins.list[str]:
        return self.records.list(kind, tenant, limit)

    async def share(self, key: Key, value: bytes, ttl_s: float) -> None:
        if self.records.get(key) is None:
            self.records.put(key, value, ttl_s)
        else:
            self.records.touch(key, ttl_s)

    async def shared(self, keys: Sequence[Key], ttl_s: float) -> builtins.list[bytes | None]:
        values: builtins.list[bytes | None] = []
        for start in range(0, len(keys), _KEYS_A_TURN):
            values += [await self.get(key, ttl_s) for key in keys[start : start + _KEYS_A_TURN]]
            await asyncio.sleep(0)  # others have their turn
        return values
