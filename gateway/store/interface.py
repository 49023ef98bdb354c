"""The store's interface, and the plain data that goes through it.

Nobody on the way of a request waits for a write: `put` and `delete` are remembered and carried out in batches. Reads
wait for at most `MAX_WAIT_S`. Times to live are in seconds; ids are text that the gateway made or checked.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Mapping, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field, replace
from typing import Literal, NamedTuple, Protocol

from pydantic import ConfigDict

HALF_LIFE_S = 3600.0
"""Twice as many hits of a prefix are worth as much as being used so much later."""
MAX_WAIT_S = 0.1
"""No call takes longer, whatever state Redis is in, where the request can go on without an answer."""


PIECE = "piece"
"""The kind of records that other records share."""


class StoreUnavailable(Exception):
    """The store did not answer in time, or is known to be gone."""


class Key(NamedTuple):
    """A Key is what a record is found by. One tenant's keys never lead to another's records."""

    kind: str
    """"response", "conversation", "file" and so on; docs/internals/store.md has all of them."""
    tenant: str
    id: str


@dataclass(frozen=True, slots=True)
class JournalChange:
    """A JournalChange is the part of a stream that is not written yet. Writing it twice changes nothing."""

    stream_id: str
    header: bytes | None
    """The header with the stream's request; None if it is written already."""
    offset: int
    """The number of tokens that were written before."""
    token_ids: tuple[int, ...]
    """Words of 32 bits: tokens, and what `gateway.sessions.recordings.journal` writes down with them."""
    ttl_s: float
    """The time to live, counted from now."""
    end: bytes | None = None
    """The way in which the stream ended, after which nothing follows."""
    tenant: str = ""
    """The tenant in whose share the journal counts."""


JournalOutcome = Literal["written", "ended", "missing", "gap", "foreign", "full"]
"""A change is left out if its stream has ended, has no header, lacks tokens before it, or is another process's now, and
if it is the first of a stream and its tenant's journals have no room for another one."""


@dataclass(frozen=True, slots=True)
class Journal:
    """A Journal is a stream as it was recorded."""

    stream_id: str
    header: bytes
    token_ids: tuple[int, ...]
    end: bytes | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Quota:
    """A Quota is what one tenant may use; None is without a bound."""

    requests_per_minute: int | None = None
    tokens_per_minute: int | None = None
    """The bound of prompt and output tokens together."""
    requests_per_day: int | None = None
    tokens_per_day: int | None = None
    requests_per_month: int | None = None
    tokens_per_month: int | None = None
    max_streams: int | None = None
    """The bound of requests that are at work at a time."""

    def of_requests(self) -> Quota:
        """Returns the quota without bounds of tokens."""
        return replace(self, tokens_per_minute=None, tokens_per_day=None, tokens_per_month=None)


@dataclass(frozen=True, slots=True)
class Window:
    """A Window is one day or month of the calendar, with a tenant's bounds in it. A store only counts in it."""

    name: str
    """"day" or "month"."""
    date: str
    """The window's date in UTC, which tells it from those before and after it: "2026-11-28", "2026-11"."""
    max_requests: int | None
    max_tokens: int | None
    left_s: float
    """The time until its end, from when the request came."""
    ends_s: float
    """Its end, in seconds since 1970."""

    @property
    def id(self) -> str:
        return f"{self.name}:{self.date}"


class Use(NamedTuple):
    """A Use is what a tenant used in a window."""

    requests: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Allotment:
    """An Allotment says where a tenant stands against one of its bounds in time."""

    limit: int
    remaining: int
    reset_s: float
    """The time until the bound is as if it had never been used."""


@dataclass(frozen=True, slots=True)
class Grant:
    """A Grant is the answer to a reservation within a quota."""

    refused: str | None
    """The bound that is reached: "requests", "tokens", "streams", or "requests-day" and its like; then nothing was
    reserved."""
    retry_after_s: float
    """The time after which it is worth asking again; 0 unless refused, infinite if it never fits."""
    requests: Allotment | None
    tokens: Allotment | None
    num_streams: int = 0
    """The tenant's other requests at work."""
    uses: tuple[Use, ...] = ()
    """What is used of the windows, in their order."""


@dataclass(frozen=True, slots=True)
class PrefixChange:
    """A PrefixChange is a block that came to be resident, was found again, or is gone."""

    __pydantic_config__ = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    hash: bytes
    parent: bytes | None
    """The hash of the block before; None for the first block of a chain."""
    depth: int
    """The number of blocks from the start of the chain up to here, this one included."""
    token_ids: tuple[int, ...]
    salt: bytes
    hits: int
    """The number of hits since the block was first known."""
    last_used_s: float
    """In seconds since 1970."""
    resident: bool

    @property
    def hotness(self) -> float:
        """A time in seconds since 1970 that grows with hits and the last use, and needs no recounting."""
        return self.last_used_s + HALF_LIFE_S * math.log2(1 + max(0, self.hits))


class ShareStats(NamedTuple):
    """A ShareStats is the room for one tenant's records, and its use."""

    max_bytes: int
    largest_bytes: int
    """The bytes of the tenant that has most."""
    num_evicted: int
    """Records that were given up before their time, for their tenant had too much."""


@dataclass(frozen=True, slots=True, kw_only=True)
class StoreStats:
    """StoreStats are a store's figures for the operator. All counts begin at 0 with the process."""

    state: Literal["ok", "gone"] = "ok"
    """The state is "gone" while Redis does not answer, and memory stands in for it."""
    breaker: Literal["closed", "open", "half_open"] = "closed"
    num_calls: int = 0
    """The number of calls to Redis, those that failed included."""
    failures: Mapping[str, int] = field(default_factory=dict)
    """The number of calls that failed, by kind: "timeout", "pool", "refused", "connection", "response"."""
    num_rejected: int = 0
    """The number of calls that were not tried, because Redis was known to be gone."""
    num_dirty: int = 0
    """The number of records, deletions and releases that Redis does not know of yet."""
    num_dropped: int = 0
    """The number of those that it will never know of, because there were too many."""
    num_corrupt: int = 0
    """The number of values in Redis that could not be read."""
    num_records: int = 0
    num_bytes: int = 0
    """The bytes of records in this process's memory."""
    shares: Mapping[str, ShareStats] = field(default_factory=dict)
    """The shares of tenants by place: "memory" or "redis"."""


class Durable(Protocol):
    """A Durable store also keeps streams and the replicas' prefixes, which outlive this process.

    Every method raises StoreUnavailable while the store does not answer.
    """

    @property
    def num_losses(self) -> int:
        """A number that grows when written data may be lost and has to be written again."""

    async def put(self, key: Key, value: bytes, ttl_s: float) -> None:
        """Puts a record that is too large for this process's memory; `Store.get` finds it."""

    # Journals of streams

    async def write_journals(self, changes: Sequence[JournalChange]) -> Sequence[JournalOutcome]:
        """Returns the outcome of each change, in order.

        Raises:
            StoreUnavailable: some may not be written; the caller writes them again.
        """

    async def read_journal(self, stream_id: str) -> Journal | None: ...

    async def read_journals(self, stream_ids: Sequence[str]) -> Sequence[Journal]:
        """The journals that there are, read in one go."""

    async def delete_journals(self, stream_ids: Sequence[str]) -> None: ...

    async def claim(self) -> Sequence[str]:
        """Makes streams whose process is gone this one's, and returns the ids of all of its own that have no end.

        Those that it had before are told again: the answer that named them first may have been lost.
        """

    # Prefixes

    async def write_prefixes(self, changes: Sequence[PrefixChange]) -> None:
        """Writes changes of this process's blocks; raises StoreUnavailable like `write_journals`."""

    async def locate(self, hashes: Sequence[bytes]) -> dict[str, int]:
        """The number of the chain's first blocks that each living replica holds, where it holds any."""

    async def hottest(self, limit: int) -> Sequence[PrefixChange]:
        """The blocks of the prefixes that were used most and last, the hottest first, whoever held them."""


class Store(Protocol):
    """A Store has what the gateway keeps. Methods may be called at any time; reading may raise StoreUnavailable."""

    @property
    def durable(self) -> Durable | None:
        """The durable part; None if nothing that is written here is still there after a restart."""

    def running(self) -> AbstractAsyncContextManager[None]:
        """Writes pending puts while it is entered; all are done when it is left."""

    # Records: whatever was put last, forgotten `ttl_s` after it was put or read

    async def get(self, key: Key, ttl_s: float | None = None) -> bytes | None:
        """The value, or None. With `ttl_s` the record's time to live begins again."""

    async def put(self, key: Key, value: bytes, ttl_s: float) -> None: ...

    async def add(self, key: Key, value: bytes, ttl_s: float) -> bytes | None:
        """Puts the value if there is none, in one go; returns the one that was there."""

    async def replace(self, key: Key, old: bytes, new: bytes, ttl_s: float) -> bool:
        """Puts a new value if the old one is still there, in one go; False if it is not, and nothing was put.

        Where it outlives this process, all does that was put before.
        """

    async def delete(self, key: Key) -> bool:
        """Deletes a record; True if there was one."""

    async def list(self, kind: str, tenant: str, limit: int) -> builtins.list[str]:
        """The ids of a tenant's records of one kind, the one that was put last first."""

    async def share(self, key: Key, value: bytes, ttl_s: float) -> None:
        """Puts a value that is the same whoever puts it: where it is already, it only lives longer. It has no list."""

    async def shared(self, keys: Sequence[Key], ttl_s: float) -> builtins.list[bytes | None]:
        """The values that were shared under these keys, whose time to live begins again."""

    # Quotas

    async def reserve(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> Grant:
        """Asks for one request of so many tokens, and a lease for as long as it is at work; for none without its id.

        Of the quota only the bounds per minute and of streams count here: `windows` have the others.
        """

    async def settle(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> None:
        """Charges so many tokens more than were reserved for this lease; fewer, if it is negative.

        The windows are those of the reservation, for what began in one is charged to it even after its end.
        """

    async def standings(self, tenants: Sequence[tuple[str, Quota, Sequence[Window]]]) -> builtins.list[Grant]:
        """Returns where tenants stand, without asking for anything."""

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        """Renews leases, as (tenant, lease id); to be called for all requests at work at least every `LEASE_S / 3`."""

    async def release(self, tenant: str, lease_id: str) -> None: ...

    def stats(self) -> StoreStats: ...


HEARTBEAT_S = 2.0
"""A process tells the others so often that it lives."""
ALIVE_S = 3 * HEARTBEAT_S
"""A process that was not heard of for so long is gone."""
LEASE_S = 30.0
