"""The store in Redis. The keys are listed in docs/internals/store.md."""

from __future__ import annotations

import builtins
import os
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from itertools import chain
from urllib.parse import quote, unquote

from penstock.gateway.off_loop import off_loop
from penstock.gateway.store import scripts
from penstock.gateway.store.gcra import SECOND_US, Standing, cost_us, judge
from penstock.gateway.store.interface import (
    ALIVE_S,
    LEASE_S,
    MAX_WAIT_S,
    Grant,
    Journal,
    JournalChange,
    JournalOutcome,
    PrefixChange,
    Quota,
    StoreStats,
    StoreUnavailable,
    Use,
    Window,
)
from penstock.gateway.store.link import MAX_COMMANDS, Argument, Command, Link, batched, log
from penstock.gateway.store.packing import (
    TOKEN_BYTES,
    pack,
    pack_prefix,
    pack_tokens,
    unpack,
    unpack_prefix,
    unpack_tokens,
)
from penstock.gateway.store.redis_records import (
    MAX_TENANT_BYTES,
    RECORD_BYTES,
    RedisRecords,
    hashed,
    ms,
    prefix_of,
)

MAX_CLAIMED = 1000
_JOURNAL_SHARES = ("journal_sizes", "journal_expiries")
"""The sections of what a tenant's journals take: they may lie in another namespace, and slot, than its records."""
MAX_PREFIXES = 100_000
PREFIX_TTL_S = 24 * 3600.0
RESIDENT_TTL_S = 60.0
"""The blocks of a replica are remembered for so long after it was heard of last."""
_SETTLED_LATE_S = 3600.0
"""What began in a window may be charged to it so long after its end."""


class RedisStore(RedisRecords):
    """A RedisStore keeps all in Redis alone: every method raises StoreUnavailable while it does not answer."""

    def __init__(
        self,
        url: str,
        *,
        namespace: str,
        replica: str,
        records_namespace: str | None = None,
        clock: Callable[[], float] | None = None,
        link: Link | None = None,
    ) -> None:
        """
        Args:
            replica: this server's name, the same after a restart; two that run at a time have two names.
            records_namespace: of records, if they are shared with servers of other namespaces.
            clock: stands in for Redis's own time in tests.

        Raises:
            ValueError: the URL is none.
        """
        link = link or Link(url, client_name=f"penstock-{quote(replica, safe='.:')}")
        super().__init__(link, records_namespace or namespace, clock)
        self._prefix = prefix_of(namespace)
        self._name = quote(replica, safe="") + ":"
        self._owner = self._name + os.urandom(8).hex()
        self._has_beaten = False
        self._is_replaced = False
        self._since = b""
        """The time at which Redis first heard of any replica, which is another one if it was emptied."""
        self._num_forgotten = 0

    @property
    def durable(self) -> RedisStore:
        return self

    @property
    def num_losses(self) -> int:
        return self.link.num_losses + self._num_forgotten

    @asynccontextmanager
    async def running(self) -> AsyncIterator[None]:
        """Takes leave and closes the connections at its end; who uses this store alone calls `beat`."""
        try:
            yield
        finally:
            with suppress(StoreUnavailable):
                await self._leave()
            await self.link.aclose()

    def stats(self) -> StoreStats:
        return StoreStats(
            state="ok" if self.link.breaker.state == "closed" else "gone",
            breaker=self.link.breaker.state,
            num_calls=self.link.num_calls,
            failures=dict(self.link.failures),
            num_rejected=self.link.num_rejected,
            num_corrupt=self.num_corrupt,
            shares={"redis": self.share_of_tenants},
        )

    # Journals of streams

    async def write_journals(self, changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
        await self._ensure_beat()
        size = sum(len(change.header or b"") + TOKEN_BYTES * len(change.token_ids) for change in changes)
        commands = await off_loop(size, lambda: [self._write_journal(change) for change in changes])
        return [answer.decode() for answer in await self.link.all(commands)]

    def _write_journal(self, change: JournalChange) -> Command:
        tenant = hashed(change.tenant)
        shares = (self._key(section, tenant) for section in _JOURNAL_SHARES)
        keys = [*self._journal_keys(change.stream_id), self._key("unfinished"), *shares]
        header, end = (None if part is None else pack(part) for part in (change.header, change.end))
        written = (header, change.offset, pack_tokens(change.token_ids), ms(change.ttl_s), end)
        names = (change.stream_id, tenant, *self._journal_keys(""))
        bounds = (MAX_TENANT_BYTES, RECORD_BYTES)
        return self._call(scripts.WRITE_JOURNAL, keys, self._owner, *written, *names, *bounds)

    async def read_journal(self, stream_id: str) -> Journal | None:
        return next(iter(await self.read_journals([stream_id])), None)

    async def read_journals(self, stream_ids: Sequence[str]) -> Sequence[Journal]:
        commands = [self._call(scripts.READ_JOURNAL, self._journal_keys(id_)) for id_ in stream_ids]
        answers = zip(stream_ids, await self.link.all(commands), strict=True)
        journals = [await self._journal(stream_id, *answer) for stream_id, answer in answers]
        return [journal for journal in journals if journal is not None]

    async def _journal(
        self, stream_id: str, header: bytes | None, end: bytes | None, count: bytes, tokens: bytes | None
    ) -> Journal | None:
        if header is None:
            return None
        size = len(header) + len(tokens or b"")
        try:
            return await off_loop(size, _journal, stream_id, header, end, count, tokens or b"")
        except ValueError as error:
            self._note_unreadable(f"the journal of {stream_id}", error)
            return None

    async def delete_journals(self, stream_ids: Sequence[str]) -> None:
        shares = [self._key(section, "") for section in _JOURNAL_SHARES]
        keys = {id_: [*self._journal_keys(id_), self._key("unfinished")] for id_ in stream_ids}
        await self.link.all([self._call(scripts.DELETE_JOURNAL, keys[id_], id_, *shares) for id_ in keys])

    async def claim(self) -> Sequence[str]:
        await self.beat()  # an event loop that was held up for long let this process seem dead
        keys = [self._key("unfinished"), self._key("replicas"), self._key("since")]
        alive_us = int(ALIVE_S * SECOND_US)
        arguments = (self._owner, self._name, alive_us, self._key("journal", ""), MAX_CLAIMED)
        stream_ids = await self.link.one(self._call(scripts.CLAIM, keys, *arguments))
        return [stream_id.decode(errors="replace") for stream_id in stream_ids]

    def _journal_keys(self, stream_id: str) -> tuple[str, str]:
        return self._key("journal", stream_id), self._key("tokens", stream_id)

    # Quotas

    async def reserve(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> Grant:
        costs = (_cost(1, quota.requests_per_minute), _cost(num_tokens, quota.tokens_per_minute))
        lease = (quota.max_streams, lease_id, int(LEASE_S * SECOND_US))
        bounds = chain.from_iterable((one.max_requests, one.max_tokens, _life_ms(one)) for one in windows)
        keys = self._quota_keys(tenant, windows)
        command = self._call(scripts.RESERVE, keys, *costs, *lease, num_tokens, *bounds)
        fits, *counts = await self.link.one(command)
        standing = _standing(counts)
        return standing.grant(quota) if fits else judge(quota, num_tokens, standing, windows)

    async def settle(
        self,
        tenant: str,
        quota: Quota,
        num_tokens: int,
        lease_id: str,  # noqa: ARG002
        windows: Sequence[Window] = (),
        *,
        num_requests: int = 0,
    ) -> None:
        """Charges also requests that were let in while Redis was gone."""
        limit = quota.tokens_per_minute
        if (limit is None and not windows) or num_tokens == num_requests == 0:
            return
        _, tokens, _, *counts = self._quota_keys(tenant, windows)
        cost = None if limit is None else cost_us(num_tokens, limit)
        settling = (cost, num_requests, num_tokens, *map(_life_ms, windows))
        await self.link.one(self._call(scripts.SETTLE, [tokens, *counts], *settling))

    async def standings(self, tenants: Sequence[tuple[str, Quota, Sequence[Window]]]) -> builtins.list[Grant]:
        calls = [
            self._call(scripts.RESERVE, self._quota_keys(tenant, windows)) for tenant, _, windows in tenants
        ]
        answers = await self.link.all(calls)
        return [
            _standing(counts).grant(quota)
            for (_, quota, _), (_, *counts) in zip(tenants, answers, strict=True)
        ]

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        ids: dict[str, list[str]] = {}
        for tenant, lease_id in leases:
            ids.setdefault(self._quota_keys(tenant)[2], []).append(lease_id)
        lease_us = int(LEASE_S * SECOND_US)
        await self.link.all([self._call(scripts.RENEW, [key], lease_us, *held) for key, held in ids.items()])

    async def release(self, tenant: str, lease_id: str) -> None:
        await self.release_all([(tenant, lease_id)])

    async def release_all(self, leases: Sequence[tuple[str, str]]) -> None:
        await self.link.all([("ZREM", self._quota_keys(tenant)[2], lease_id) for tenant, lease_id in leases])

    async def holds(self, leases: Sequence[tuple[str, str]]) -> builtins.list[bool]:
        """Returns which of these leases, as (tenant, lease id), there are."""
        scores = [("ZSCORE", self._quota_keys(tenant)[2], lease_id) for tenant, lease_id in leases]
        return [score is not None for score in await self.link.all(scores)]

    def _quota_keys(self, tenant: str, windows: Sequence[Window] = ()) -> builtins.list[str]:
        used = self._key("used", hashed(tenant))
        counts = (f"{used}:{window.id}" for window in windows)
        return [f"{used}:requests", f"{used}:tokens", self._key("leases", hashed(tenant)), *counts]

    # Prefixes

    async def write_prefixes(self, changes: Sequence[PrefixChange]) -> None:
        await self._ensure_beat()
        keys = [self._key("hot"), self._key("resident", self._owner)]
        bounds = (self._key("prefix", ""), MAX_PREFIXES, ms(PREFIX_TTL_S), ms(RESIDENT_TTL_S))
        written = [
            (one.hash.hex(), one.last_used_s, one.hotness, pack_prefix(one) if one.resident else None)
            for one in changes
        ]
        await self.link.all(
            [
                self._call(scripts.WRITE_PREFIXES, keys, *bounds, *chain.from_iterable(some))
                for some in batched(written)
            ]
        )

    async def locate(self, hashes: Sequence[bytes]) -> dict[str, int]:
        keys, bounds = [self._key("replicas")], (int(ALIVE_S * SECOND_US), self._key("resident", ""))
        commands = [
            self._call(scripts.LOCATE, keys, *bounds, *map(bytes.hex, some)) for some in batched(hashes)
        ]
        held: dict[bytes, int] = {}
        for i, answer in enumerate(await self.link.all(commands)):
            for owner, count in zip(answer[::2], answer[1::2], strict=True):
                if held.get(owner, 0) == i * MAX_COMMANDS:
                    held[owner] = held.get(owner, 0) + count
        return {_name_of(owner): count for owner, count in held.items() if count}

    async def hottest(self, limit: int) -> Sequence[PrefixChange]:
        """The blocks that were used most and last; fewer than there are, if there is no time for more."""
        deadline_s = time.monotonic() + MAX_WAIT_S / 2
        hot = self._key("hot")
        names = await self.link.one(("ZREVRANGE", hot, 0, limit - 1)) if limit > 0 else []
        hottest: builtins.list[PrefixChange] = []
        for some in batched(names):
            if time.monotonic() > deadline_s:
                break
            hottest += await self._prefixes(some)
        return hottest

    async def _prefixes(self, names: Sequence[bytes]) -> builtins.list[PrefixChange]:
        """Reads blocks; those of which nothing is written, or nothing right, are no longer hot."""
        keys = [self._key("prefix", name.decode(errors="replace")) for name in names]
        blocks, gone = [], []
        for name, packed in zip(names, await self.link.one(("MGET", *keys)), strict=True):
            try:
                blocks.append(unpack_prefix(packed or b""))
            except ValueError as error:
                gone.append(name)
                if packed is not None:
                    self._note_unreadable(f"the prefix {name!r}", error)
        if gone:
            await self.link.one(("ZREM", self._key("hot"), *gone))
        return blocks

    # This process among others

    async def beat(self) -> None:
        keys = [self._key("replicas"), self._key("since"), self._key("resident", self._owner)]
        first = not self._has_beaten
        arguments = (self._owner, self._name, int(ALIVE_S * SECOND_US), int(first), ms(RESIDENT_TTL_S))
        standing, since = await self.link.one(self._call(scripts.BEAT, keys, *arguments))
        self._has_beaten = True
        if standing == b"replaced":
            self._warn_of_its_namesake()
            return
        # Who was heard of again may have been so by a beat whose answer was lost: then `since` gives it away.
        is_forgotten = standing == b"new" or since != self._since
        # A restart may be counted twice, by the connection and here: Redis may have been emptied since.
        if is_forgotten and not first:
            self._num_forgotten += 1
        self._since = since

    def _warn_of_its_namesake(self) -> None:
        if not self._is_replaced:
            name = unquote(self._name.removesuffix(":"))
            log.warning("another server calls itself %s: each needs a name of its own, by --replica", name)
        self._is_replaced = True

    async def _leave(self) -> None:
        """Tells the others that this process is gone, so that nobody needs to wait to find out."""
        beat, resident = self._key("replicas"), self._key("resident", self._owner)
        await self.link.all([("ZREM", beat, self._owner), ("UNLINK", resident)])

    async def _ensure_beat(self) -> None:
        """Beats before the first write: what a process writes that nobody heard of is an orphan at once."""
        if not self._has_beaten:
            await self.beat()

    # Keys and calls

    def _key(self, section: str, *rest: str) -> str:
        return self._prefix + ":".join((section, *rest))


def _journal(stream_id: str, header: bytes, end: bytes | None, count: bytes, tokens: bytes) -> Journal:
    """Reads a journal; raises ValueError if it is not whole."""
    token_ids = unpack_tokens(tokens)
    if count != b"%d" % len(token_ids):
        raise ValueError("some of its tokens are missing")
    return Journal(stream_id, unpack(header), token_ids, None if end is None else unpack(end))


def _name_of(owner: bytes) -> str:
    return unquote(owner.decode().rpartition(":")[0])


def _cost(amount: int, limit: int | None) -> Argument | None:
    if limit is None:
        return None
    return "never" if amount > limit else cost_us(amount, limit)


def _life_ms(window: Window) -> int:
    return ms(window.left_s + _SETTLED_LATE_S)


def _standing(counts: Sequence[int]) -> Standing:
    num_streams, requests_us, tokens_us, *used = counts
    return Standing(num_streams, requests_us, tokens_us, tuple(map(Use, used[::2], used[1::2])))
