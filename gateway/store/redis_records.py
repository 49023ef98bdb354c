"""Records in Redis, and the share that each tenant has there. The keys are listed in docs/internals/store.md."""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable, Sequence
from hashlib import blake2b, sha1
from typing import Any
from urllib.parse import quote

from penstock.gateway.off_loop import off_loop
from penstock.gateway.store import scripts
from penstock.gateway.store.gcra import SECOND_US
from penstock.gateway.store.interface import PIECE, Key, ShareStats
from penstock.gateway.store.link import Argument, Command, Link, log
from penstock.gateway.store.packing import pack, unpack

MAX_LISTED = 10_000
"""`list` knows so many ids of one tenant and kind."""
MAX_TENANT_BYTES = 256 * 1024 * 1024
"""The records of one tenant that live for long may have so many bytes."""
COUNTED_S = 3600.0
"""Records with a shorter time to live do not count."""
BOUNDED_ELSEWHERE = frozenset({"file_part"})
"""Records of these kinds do not count, because uploads have a bound of their own."""
RECORD_BYTES = 400
"""A record takes so much in Redis besides its value."""


class RedisRecords:
    """RedisRecords are in Redis alone: every method raises StoreUnavailable while it does not answer."""

    def __init__(self, link: Link, namespace: str, clock: Callable[[], float] | None) -> None:
        """`clock` stands in for Redis's own time in tests."""
        self.link = link
        self.num_corrupt = 0
        self._clock = clock
        self._records_prefix = prefix_of(namespace)
        self._num_evicted = 0
        self._shares: dict[str, int] = {}
        """The bytes of each tenant at this process's last write for it."""

    @property
    def share_of_tenants(self) -> ShareStats:
        return ShareStats(MAX_TENANT_BYTES, max(self._shares.values(), default=0), self._num_evicted)

    async def get(self, key: Key, ttl_s: float | None = None) -> bytes | None:
        kept = None if ttl_s is None else self._keep("GET", key, ttl_s)
        return await self._value(key, await self.link.one(kept or ("GET", self._record(key))))

    async def put(self, key: Key, value: bytes, ttl_s: float) -> None:
        await self.put_all([(key, value, ttl_s)])

    async def put_all(self, records: Sequence[tuple[Key, bytes, float]], *, only_new: bool = False) -> None:
        """Puts records with their times to live; with `only_new`, one that is there already stays as it is."""
        records = [record for record in records if record[2] > 0]
        values = [value for _, value, _ in records]
        packed = await off_loop(sum(map(len, values)), lambda: list(map(pack, values)))
        puts = [
            self._put(key, value, ttl_s, "none" if only_new else None)
            for (key, _, ttl_s), value in zip(records, packed, strict=True)
        ]
        for (key, _, _), answer in zip(records, await self.link.all(puts), strict=True):
            self._is_put(key, answer)

    async def add(self, key: Key, value: bytes, ttl_s: float) -> bytes | None:
        packed = await off_loop(len(value), pack, value)
        there = await self.link.one(self._put(key, packed, ttl_s, "none"))
        return None if self._is_put(key, there) else await self._value(key, there)

    async def replace(self, key: Key, old: bytes, new: bytes, ttl_s: float) -> bool:
        there = await self.link.one(("GET", self._record(key)))
        if await self._value(key, there) != old:
            return False
        packed, digest = await off_loop(len(new), lambda: (pack(new), sha1(there).hexdigest()))
        return self._is_put(key, await self.link.one(self._put(key, packed, ttl_s, digest)))

    async def delete(self, key: Key) -> bool:
        return await self.delete_all([key]) > 0

    async def delete_all(self, keys: Sequence[Key]) -> int:
        """Deletes records, and returns how many there were."""
        calls = [self._call(scripts.DELETE, self._keys_of(key), key.id, _name_in_share(key)) for key in keys]
        return sum(await self.link.all(calls))

    async def share(self, key: Key, value: bytes, ttl_s: float) -> None:
        await self.share_all([(key, value, ttl_s)])

    async def share_all(self, records: Sequence[tuple[Key, bytes, float]]) -> None:
        """Shares records: only those that are not there are sent."""
        there = await self.link.all([self._keep("EXISTS", key, ttl_s) for key, _, ttl_s in records])
        await self.put_all([record for record, is_there in zip(records, there, strict=True) if not is_there])

    async def shared(self, keys: Sequence[Key], ttl_s: float) -> builtins.list[bytes | None]:
        values = await self.link.all([self._keep("GET", key, ttl_s) for key in keys])
        return [await self._value(key, packed) for key, packed in zip(keys, values, strict=True)]

    async def list(self, kind: str, tenant: str, limit: int) -> builtins.list[str]:
        bounds = (min(limit, MAX_LISTED), self._record(Key(kind, tenant, "")))
        ids = await self.link.one(self._call(scripts.LIST, [self._index(kind, tenant)], *bounds))
        return [id_.decode(errors="replace") for id_ in ids]

    def _put(self, key: Key, packed: bytes, ttl_s: float, expected: str | None) -> Command:
        kind, counts = quote(key.kind, safe=""), ttl_s >= COUNTED_S and key.kind not in BOUNDED_ELSEWHERE
        beginnings = (self._records_prefix + "record:", self._record(key._replace(id="")))
        bounds = (MAX_LISTED, MAX_TENANT_BYTES if counts else None, RECORD_BYTES)
        arguments = (packed, ms(ttl_s), kind, key.id, expected, *beginnings, *bounds)
        return self._call(scripts.PUT, self._keys_of(key), *arguments)

    def _is_put(self, key: Key, answer: Any) -> bool:
        """Returns whether a record was put, from the answer to `_put`."""
        if not isinstance(answer, list):
            return False
        num_bytes, num_evicted = answer
        self._num_evicted += num_evicted
        if num_bytes:
            self._shares[key.tenant] = num_bytes
        return True

    def _keep(self, question: str, key: Key, ttl_s: float) -> Command:
        return self._call(scripts.KEEP, self._keys_of(key), ms(ttl_s), _name_in_share(key), question)

    async def _value(self, key: Key, packed: bytes | None) -> bytes | None:
        if packed is None:
            return None
        try:
            return await off_loop(len(packed), unpack, packed)
        except ValueError as error:
            self._note_unreadable(f"the {key.kind} {key.id!r}", error)
            return None

    def _record(self, key: Key) -> str:
        return f"{self._records_prefix}record:{quote(key.kind, safe='')}:{hashed(key.tenant)}:{key.id}"

    def _index(self, kind: str, tenant: str) -> str:
        return f"{self._records_prefix}records:{quote(kind, safe='')}:{hashed(tenant)}"

    def _keys_of(self, key: Key) -> tuple[str, ...]:
        """The keys of the record, of the index of its kind, and of its tenant's sizes and expiries."""
        record, tenant = self._record(key), hashed(key.tenant)
        index = record if key.kind == PIECE else self._index(key.kind, key.tenant)
        shares = (f"{self._records_prefix}{section}:{tenant}" for section in ("sizes", "expiries"))
        return record, index, *shares

    def _call(self, script: str, keys: Sequence[str], *arguments: Argument | None) -> Command:
        """Returns the command that calls a script; None is an empty argument."""
        now = None if self._clock is None else int(self._clock() * SECOND_US)
        given = ("" if argument is None else argument for argument in (now, *arguments))
        return ("EVALSHA", script, len(keys), *keys, *given)

    def _note_unreadable(self, what: str, error: ValueError) -> None:
        self.num_corrupt += 1
        log.warning("%s is passed over, for it cannot be read: %s", what, " ".join(str(error).split()))


def prefix_of(namespace: str) -> str:
    return f"penstock:{{{quote(namespace, safe='')}}}:"


def _name_in_share(key: Key) -> str:
    return f"{quote(key.kind, safe='')}:{key.id}"


def hashed(tenant: str) -> str:
    """A hash of a tenant's name: no two tenants have the same, and nobody reads a name out of it."""
    return blake2b(tenant.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


def ms(seconds: float) -> int:
    return max(1, math.ceil(seconds * 1000))
