"""A server with Redis has this process's memory in front of it, and in its place while it is gone."""

from __future__ import annotations

import asyncio
import builtins
from collections import OrderedDict
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, replace
from itertools import islice
from typing import TypeVar

from penstock.gateway.background import every, meanwhile
from penstock.gateway.store.interface import (
    HEARTBEAT_S,
    Grant,
    Key,
    Quota,
    StoreStats,
    StoreUnavailable,
    Use,
    Window,
)
from penstock.gateway.store.link import MAX_COMMANDS, batch_of, log
from penstock.gateway.store.memory import MAX_BYTES, MemoryStore
from penstock.gateway.store.redis import RedisStore

FLUSH_S = 0.03
"""The time for which a put waits for others to be sent with it."""
MAX_DIRTY = 100_000
CLOSE_S = 1.0
K = TypeVar("K")
V = TypeVar("V")


@dataclass(frozen=True, slots=True)
class Pending:
    """A Pending is what became of a record, for Redis to know."""

    value: bytes | None
    """The value that was put; None if the record was deleted."""
    expires_s: float
    only_new: bool = False
    """Redis may have it already: then it only lives longer."""

    @property
    def num_bytes(self) -> int:
        return len(self.value or b"")


class WriteBuffer:
    """A WriteBuffer holds what Redis does not know of yet, the newest of each key; if it is too much, the oldest go."""

    def __init__(self, max_entries: int, max_bytes: int) -> None:
        self._max_entries = max_entries
        self._max_bytes = max_bytes
        self._entries: OrderedDict[Key, Pending] = OrderedDict()
        self._num_bytes = 0
        self.num_dropped = 0

    def __len__(self) -> int:
        return len(self._entries)

    def __contains__(self, key: Key) -> bool:
        return key in self._entries

    def get(self, key: Key) -> Pending | None:
        return self._entries.get(key)

    def put(self, key: Key, pending: Pending) -> None:
        self._pop(key)
        self._entries[key] = pending
        self._num_bytes += pending.num_bytes
        while len(self._entries) > self._max_entries or self._num_bytes > self._max_bytes:
            self._pop(next(iter(self._entries)))
            self.num_dropped += 1

    def done(self, key: Key, pending: Pending) -> None:
        """Forgets what Redis knows; if something came after it, that is still to be done."""
        if self._entries.get(key) is pending:
            self._pop(key)

    def postpone(self, key: Key) -> None:
        """Puts a key behind all others: it may be this one that does not get through."""
        if key in self._entries:
            self._entries.move_to_end(key)

    def of(self, kind: str, tenant: str) -> dict[str, Pending]:
        """Returns the pending changes of one tenant and kind by id, oldest first."""
        return {
            key.id: pending
            for key, pending in self._entries.items()
            if key.kind == kind and key.tenant == tenant
        }

    def batch(self) -> dict[Key, Pending]:
        """The oldest that go in one call; they stay here until they are done."""
        number = batch_of((pending.num_bytes for pending in self._entries.values()), MAX_COMMANDS // 2)
        return dict(islice(self._entries.items(), number))

    def _pop(self, key: Key) -> None:
        pending = self._entries.pop(key, None)
        if pending is not None:
            self._num_bytes -= pending.num_bytes


class SharedStore:
    """A SharedStore is memory and Redis together.

    Records are in both, and Redis hears of them soon after; what was read from it is remembered, too. Quotas are
    counted in both, and Redis decides while it can. What is durable is in Redis alone.
    """

    def __init__(
        self,
        local: MemoryStore,
        remote: RedisStore,
        *,
        max_dirty: int = MAX_DIRTY,
        max_dirty_bytes: int = MAX_BYTES,
    ) -> None:
        self.local = local
        self.remote = remote
        self._clock = local.clock
        self._buffer = WriteBuffer(max_dirty, max_dirty_bytes)
        self._releases: dict[tuple[str, str], None] = {}
        self._unshared: dict[str, int] = {}
        """The tokens reserved by lease while Redis was gone, still to be written to it."""
        self._unsure: dict[tuple[str, str], None] = {}
        """The leases of those that Redis may have reserved all the same, and answered too late."""
        self._owed: dict[tuple[str, str], tuple[Window, Use]] = {}
        """What tenants used of windows while Redis was gone, by tenant and window, still to be written to it."""
        self._num_losses_seen = remote.num_losses
        self._work = asyncio.Event()

    @property
    def durable(self) -> RedisStore:
        return self.remote

    def stats(self) -> StoreStats:
        local, remote = self.local.stats(), self.remote.stats()
        return replace(
            remote,
            num_dirty=len(self._buffer) + len(self._releases) + len(self._owed),
            num_dropped=self._buffer.num_dropped,
            num_records=local.num_records,
            num_bytes=local.num_bytes,
            shares={**local.shares, **remote.shares},
        )

    # Records

    async def get(self, key: Key, ttl_s: float | None = None) -> bytes | None:
        if key in self._buffer:
            return await self._get_local(key, ttl_s)
        num_losses = self.remote.num_losses
        try:
            value = await self.remote.get(key, ttl_s)
            await self._look_for_losses(key, value)
        except StoreUnavailable:
            value = await self.local.get(key, ttl_s)
            if value is None and key not in self._buffer:
                raise
            return value
        if key in self._buffer or self._was_lost(value, num_losses):
            return await self._get_local(key, ttl_s)
        await self._remember(key, value, ttl_s)
        return value

    async def _look_for_losses(self, key: Key, value: bytes | None) -> None:
        """Finds out whether Redis was emptied since the last beat: what it lacks and this process has gives that away.

        Raises StoreUnavailable if it cannot be asked.
        """
        if value is None and self.local.records.peek(key) is not None:
            await self.remote.beat()
        self._notice_losses()

    def _was_lost(self, value: bytes | None, num_losses: int) -> bool:
        """Whether Redis may have lost what was not found, since it had so many losses; by now it may have it again."""
        return value is None and self.remote.num_losses != num_losses

    async def _get_local(self, key: Key, ttl_s: float | None) -> bytes | None:
        value = await self.local.get(key, ttl_s)
        pending = self._buffer.get(key)
        if pending is None:
            return value
        if ttl_s is not None:
            self._buffer.put(key, pending := replace(pending, expires_s=self._clock() + ttl_s))
        return pending.value if pending.expires_s > self._clock() else None

    async def _remember(self, key: Key, value: bytes | None, ttl_s: float | None) -> None:
        """Remembers what Redis has, for when it is gone."""
        if value is None:
            await self.local.delete(key)
        elif ttl_s is not None:
            await self.local.put(key, value, ttl_s)
        else:
            self.local.records.refresh(key, value)

    async def put(self, key: Key, value: bytes, ttl_s: float) -> None:
        await self.local.put(key, value, ttl_s)
        self._later(key, Pending(value, self._clock() + ttl_s))

    async def add(self, key: Key, value: bytes, ttl_s: float) -> bytes | None:
        if key not in self._buffer:
            num_losses = self.remote.num_losses
            with suppress(StoreUnavailable):
                there = await self.remote.add(key, value, ttl_s)
                with suppress(StoreUnavailable):
                    await self._look_for_losses(key, there)
                if key not in self._buffer and not self._was_lost(there, num_losses):
                    await self._remember(key, value if there is None else there, ttl_s)
                    return there
                if (ours := await self._get_local(key, None)) is not None:
                    self._later(key, Pending(ours, self._clock() + ttl_s))
                    return ours
        there = await self._get_local(key, None)
        if there is None:
            await self.put(key, value, ttl_s)
        return there

    async def replace(self, key: Key, old: bytes, new: bytes, ttl_s: float) -> bool:
        """Replaces a value; while Redis does not answer the last one to write wins, for others cannot be seen.

        Redis hears before of all that was put before: the new value may speak of it, and outlive this process.
        """
        if key not in self._buffer:
            with suppress(StoreUnavailable):
                await self.flush()
                is_done = await self.remote.replace(key, old, new, ttl_s)
                if is_done and key not in self._buffer:
                    await self.local.put(key, new, ttl_s)
                return is_done
        if await self._get_local(key, None) != old:
            return False
        await self.put(key, new, ttl_s)
        return True

    async def delete(self, key: Key) -> bool:
        """Deletes a record, as soon as can be; raises StoreUnavailable if nobody knows whether there was one."""
        pending = self._buffer.get(key)
        there = await self.local.delete(key) or (pending is not None and pending.value is not None)
        is_known = there or pending is not None
        deleted = Pending(None, float("inf"))
        self._later(key, deleted)
        if is_known:
            return there
        there = await self.remote.delete(key)
        self._buffer.done(key, deleted)
        return there

    async def list(self, kind: str, tenant: str, limit: int) -> list[str]:
        pending = self._buffer.of(kind, tenant)
        try:
            ids = await self.remote.list(kind, tenant, limit + len(pending))
        except StoreUnavailable:
            return await self.local.list(kind, tenant, limit)
        self._notice_losses()
        pending = self._buffer.of(kind, tenant)
        newest = [id_ for id_ in reversed(pending) if pending[id_].value is not None]
        return list(dict.fromkeys(newest + [id_ for id_ in ids if id_ not in pending]))[:limit]

    async def share(self, key: Key, value: bytes, ttl_s: float) -> None:
        await self.local.share(key, value, ttl_s)
        self._later(key, Pending(value, self._clock() + ttl_s, only_new=True))

    async def shared(self, keys: Sequence[Key], ttl_s: float) -> builtins.list[bytes | None]:
        """Reads pieces; one that is here is right, for nobody changes it, and Redis is told that it is still wanted."""
        values = dict(zip(keys, await self.local.shared(keys, ttl_s), strict=True))
        elsewhere = [key for key, value in values.items() if value is None]
        for key, value in values.items():
            if value is not None:
                self._later(key, Pending(value, self._clock() + ttl_s, only_new=True))
        for key, value in zip(elsewhere, await self.remote.shared(elsewhere, ttl_s), strict=True):
            values[key] = value
            if value is not None:
                await self.local.share(key, value, ttl_s)
        return [values[key] for key in keys]

    def _later(self, key: Key, pending: Pending) -> None:
        self._buffer.put(key, pending)
        self._work.set()

    # Quotas

    async def reserve(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> Grant:
        try:
            grant = await self.remote.reserve(tenant, quota, num_tokens, lease_id, windows)
        except StoreUnavailable:
            grant = await self.local.reserve(tenant, quota, num_tokens, lease_id, windows)
            if grant.refused is None and not lease_id:
                self._owe(tenant, windows, Use(1, num_tokens))
            elif grant.refused is None:
                _note(self._unshared, lease_id, num_tokens)
                _note(self._unsure, (tenant, lease_id), None)
                self._work.set()
            return grant
        if grant.refused is None:
            self.local.charge(tenant, quota, num_tokens, lease_id, windows)
        return grant

    async def settle(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> None:
        # Before anything is waited for: the lease's release may be under way as well.
        is_unsure = self._unsure.pop((tenant, lease_id), self) is None
        num_requests = int(lease_id in self._unshared)
        num_unshared = self._unshared.pop(lease_id, 0)
        await self.local.settle(tenant, quota, num_tokens, lease_id, windows)
        with suppress(StoreUnavailable):
            if is_unsure and (await self.remote.holds([(tenant, lease_id)]))[0]:
                num_requests = num_unshared = 0
        num_tokens += num_unshared
        try:
            await self.remote.settle(tenant, quota, num_tokens, lease_id, windows, num_requests=num_requests)
        except StoreUnavailable:
            self._owe(tenant, windows, Use(num_requests, num_tokens))

    def _owe(self, tenant: str, windows: Sequence[Window], use: Use) -> None:
        """Remembers what is to be charged to windows once Redis is back; by then a minute is over."""
        for window in windows:
            _, owed = self._owed.get((tenant, window.id), (window, Use(0, 0)))
            total = Use(owed.requests + use.requests, owed.tokens + use.tokens)
            self._owed[tenant, window.id] = window, total
            self._work.set()

    async def standings(self, tenants: Sequence[tuple[str, Quota, Sequence[Window]]]) -> builtins.list[Grant]:
        try:
            return await self.remote.standings(tenants)
        except StoreUnavailable:
            return await self.local.standings(tenants)

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        await self.local.renew(leases)
        with suppress(StoreUnavailable):
            await self.remote.renew([lease for lease in leases if lease not in self._unsure])

    async def release(self, tenant: str, lease_id: str) -> None:
        self._unshared.pop(lease_id, None)
        self._unsure.pop((tenant, lease_id), None)
        await self.local.release(tenant, lease_id)
        try:
            await self.remote.release(tenant, lease_id)
        except StoreUnavailable:
            _note(self._releases, (tenant, lease_id), None)
            self._work.set()

    # What it does by itself

    async def beat(self) -> None:
        await self.remote.beat()
        self._notice_losses()

    async def _beat_if_possible(self) -> None:
        with suppress(StoreUnavailable):
            await self.beat()

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Writes behind and beats; at the end what is left is written, if that can be done within `CLOSE_S`."""
        async with self.remote.running():
            await self._beat_if_possible()
            beating = every(HEARTBEAT_S, self._beat_if_possible, "the heartbeat")
            try:
                async with meanwhile(beating), meanwhile(self._flush_always()):
                    yield
            finally:
                with suppress(StoreUnavailable, TimeoutError):
                    async with asyncio.timeout(CLOSE_S):
                        await self.flush()

    async def _flush_always(self) -> None:
        while True:
            await self._work.wait()
            await asyncio.sleep(FLUSH_S)
            self._work.clear()
            try:
                await self.flush()
            except StoreUnavailable:
                self._work.set()
            except Exception:
                log.exception("writing to Redis failed")
                self._work.set()

    async def flush(self) -> None:
        """Tells Redis all that it does not know. Raises StoreUnavailable; what is left then stays to be told."""
        await self._make_sure()
        while batch := self._buffer.batch():
            await self._write(batch)
            self._notice_losses()
        while leases := list(self._releases)[:MAX_COMMANDS]:
            await self.remote.release_all(leases)
            for lease in leases:
                self._releases.pop(lease, None)
        while self._owed:
            (tenant, _), (window, use) = self._owed.popitem()
            try:
                await self.remote.settle(tenant, Quota(), use.tokens, "", [window], num_requests=use.requests)
            except BaseException:  # also if this is cancelled
                self._owe(tenant, [window], use)
                raise

    async def _make_sure(self) -> None:
        """Finds out which reservations Redis made although it answered too late: those are charged there already."""
        while leases := list(self._unsure)[:MAX_COMMANDS]:
            for lease, is_there in zip(leases, await self.remote.holds(leases), strict=True):
                self._unsure.pop(lease, None)
                if is_there:
                    self._unshared.pop(lease[1], None)

    async def _write(self, batch: dict[Key, Pending]) -> None:
        now_s = self._clock()
        written: dict[bool, list[tuple[Key, bytes, float]]] = {True: [], False: []}
        for key, pending in batch.items():
            if pending.value is not None and pending.expires_s > now_s:
                written[pending.only_new].append((key, pending.value, pending.expires_s - now_s))
        try:
            await self.remote.put_all(written[False])
            await self.remote.share_all(written[True])
            await self.remote.delete_all([key for key, pending in batch.items() if pending.value is None])
        except StoreUnavailable:
            for key in batch:
                self._buffer.postpone(key)
            raise
        for key, pending in batch.items():
            self._buffer.done(key, pending)

    def _notice_losses(self) -> None:
        """Gives a Redis that lost what it had what is here, unless another replica put it meanwhile."""
        if self._num_losses_seen == self.remote.num_losses:
            return
        self._num_losses_seen = self.remote.num_losses
        for key, entry in self.local.records.items():
            if key not in self._buffer:
                self._buffer.put(key, Pending(entry.value, entry.expires_s, only_new=True))
        self._work.set()


def _note(entries: dict[K, V], key: K, value: V) -> None:
    """Enters a value among at most MAX_DIRTY: the oldest goes."""
    entries[key] = value
    if len(entries) > MAX_DIRTY:
        del entries[next(iter(entries))]
