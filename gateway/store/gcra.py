"""Quotas per minute by GCRA, and counters for days and months.

A bound per minute is one number, the time at which it would be as if it had never been used: a minute's worth may be
used at once, and what is used comes back evenly over a minute. What is used of a day or month comes back at its end.
All arithmetic is in whole numbers, and the same as that of the script in Redis, so that the two agree exactly.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

from penstock.gateway.store.interface import LEASE_S, Allotment, Grant, Quota, Use, Window

MINUTE_US = 60_000_000
STREAMS_RETRY_S = 1.0
"""Nobody knows when a stream ends; it is worth asking again after this."""
SECOND_US = 1_000_000
MAX_AHEAD_US = 24 * 60 * MINUTE_US
"""No debt is longer than a day."""


def cost_us(amount: int, limit: int) -> int:
    """Returns how far an amount moves a bound's time, rounded towards zero so that `limit` units fit in a minute."""
    whole = abs(amount) * MINUTE_US // max(1, limit)
    return whole if amount >= 0 else -whole


def allotment(limit: int | None, ahead_us: int) -> Allotment | None:
    """The allotment of a bound whose time is so far ahead of now."""
    if limit is None:
        return None
    remaining = max(0, MINUTE_US - ahead_us) * limit // MINUTE_US
    return Allotment(limit, remaining, ahead_us / SECOND_US)


@dataclass(frozen=True, slots=True)
class Standing:
    """A Standing is what a tenant has used: how far ahead of now its two times are, and its counts."""

    num_streams: int
    requests_us: int
    tokens_us: int
    uses: tuple[Use, ...] = ()

    def grant(self, quota: Quota, refused: str | None = None, retry_after_s: float = 0.0) -> Grant:
        return Grant(
            refused,
            retry_after_s,
            allotment(quota.requests_per_minute, self.requests_us),
            allotment(quota.tokens_per_minute, self.tokens_us),
            self.num_streams,
            self.uses,
        )


def judge(quota: Quota, num_tokens: int, before: Standing, windows: Sequence[Window] = ()) -> Grant:
    """Returns the answer to a request, by where the tenant stands before anything is reserved.

    A request that never fits waits for infinity.
    """
    is_full = quota.max_streams is not None and before.num_streams >= quota.max_streams
    waits = {
        "tokens": _wait_s(quota.tokens_per_minute, num_tokens, before.tokens_us),
        "requests": _wait_s(quota.requests_per_minute, 1, before.requests_us),
        "streams": STREAMS_RETRY_S if is_full else 0.0,
    }
    for window, use in zip(windows, before.uses, strict=True):
        waits[f"tokens-{window.name}"] = _window_wait_s(window.max_tokens, use.tokens, num_tokens, window)
        waits[f"requests-{window.name}"] = _window_wait_s(window.max_requests, use.requests, 1, window)
    reached = [bound for bound, wait_s in waits.items() if wait_s > 0]
    refused = max(reached, key=waits.__getitem__) if reached else None
    return before.grant(quota, refused, max(waits.values()))


def _wait_s(limit: int | None, amount: int, ahead_us: int) -> float:
    if limit is None:
        return 0.0
    if amount > limit:
        return math.inf
    return max(0, ahead_us + cost_us(amount, limit) - MINUTE_US) / SECOND_US


def _window_wait_s(limit: int | None, used: int, amount: int, window: Window) -> float:
    if limit is None or used + amount <= limit:
        return 0.0
    return math.inf if amount > limit else window.left_s


@dataclass(slots=True)
class _QuotaAccount:
    """A _QuotaAccount is what one tenant used, as of `now_us`."""

    now_us: int = 0
    requests_us: int = 0
    tokens_us: int = 0
    leases: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """The leases by their end, the earliest first."""
    counts: dict[str, tuple[Use, int]] = field(default_factory=dict)
    """What is used of a window, by the window's id, and the window's end."""

    def advance(self, now_us: int) -> None:
        """Forgets what is over by now."""
        self.now_us = now_us
        self.requests_us = max(self.requests_us, now_us)
        self.tokens_us = max(self.tokens_us, now_us)
        while self.leases and next(iter(self.leases.values())) <= now_us:
            self.leases.popitem(last=False)
        for window_id in [id_ for id_, (_, end_us) in self.counts.items() if end_us <= now_us]:
            del self.counts[window_id]

    @property
    def is_idle(self) -> bool:
        return not (self.leases or self.counts) and max(self.requests_us, self.tokens_us) <= self.now_us

    def standing(self, windows: Sequence[Window], lease_id: str = "") -> Standing:
        """Returns where the tenant stands, without the lease of that id."""
        uses = tuple(self.counts.get(window.id, (Use(0, 0), 0))[0] for window in windows)
        num_streams = len(self.leases) - (lease_id in self.leases)
        return Standing(num_streams, self.requests_us - self.now_us, self.tokens_us - self.now_us, uses)

    def charge(self, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window]) -> None:
        if quota.requests_per_minute is not None:
            self.requests_us += cost_us(1, quota.requests_per_minute)
        if quota.tokens_per_minute is not None:
            self.tokens_us += cost_us(num_tokens, quota.tokens_per_minute)
        self.count(windows, 1, num_tokens)
        if lease_id:
            self.lend(lease_id)

    def count(self, windows: Iterable[Window], num_requests: int, num_tokens: int) -> None:
        for window in windows:
            end_us = self.now_us + int(window.left_s * SECOND_US)
            used, end_us = self.counts.get(window.id, (Use(0, 0), end_us))
            use = Use(used.requests + num_requests, max(0, used.tokens + num_tokens))
            self.counts[window.id] = use, end_us

    def lend(self, lease_id: str) -> None:
        """The lease begins, or begins again."""
        self.leases[lease_id] = self.now_us + int(LEASE_S * SECOND_US)
        self.leases.move_to_end(lease_id)


class LocalQuotas:
    """LocalQuotas count what tenants used, as far as this process knows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self.clock = clock
        self._accounts: dict[str, _QuotaAccount] = {}

    @property
    def num_accounts(self) -> int:
        return len(self._accounts)

    @contextmanager
    def _account(self, tenant: str) -> Iterator[_QuotaAccount]:
        """Yields a tenant's account, which is forgotten if it is idle afterwards."""
        account = self._accounts.setdefault(tenant, _QuotaAccount())
        account.advance(int(self.clock() * SECOND_US))
        yield account
        if account.is_idle:
            del self._accounts[tenant]

    async def reserve(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> Grant:
        with self._account(tenant) as account:
            grant = judge(quota, num_tokens, account.standing(windows, lease_id), windows)
            if grant.refused:
                return grant
            account.charge(quota, num_tokens, lease_id, windows)
            return account.standing(windows, lease_id).grant(quota)

    async def standings(self, tenants: Sequence[tuple[str, Quota, Sequence[Window]]]) -> list[Grant]:
        return [self._standing(*tenant) for tenant in tenants]

    def _standing(self, tenant: str, quota: Quota, windows: Sequence[Window]) -> Grant:
        with self._account(tenant) as account:
            return account.standing(windows).grant(quota)

    def charge(
        self, tenant: str, quota: Quota, num_tokens: int, lease_id: str, windows: Sequence[Window] = ()
    ) -> None:
        """Counts a request that was let in elsewhere."""
        with self._account(tenant) as account:
            account.charge(quota, num_tokens, lease_id, windows)

    async def settle(
        self,
        tenant: str,
        quota: Quota,
        num_tokens: int,
        lease_id: str,  # noqa: ARG002
        windows: Sequence[Window] = (),
    ) -> None:
        with self._account(tenant) as account:
            if quota.tokens_per_minute is not None:
                ahead_us = account.tokens_us - account.now_us + cost_us(num_tokens, quota.tokens_per_minute)
                account.tokens_us = account.now_us + min(max(0, ahead_us), MAX_AHEAD_US)
            account.count((window for window in windows if window.id in account.counts), 0, num_tokens)

    async def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        for tenant, lease_id in leases:
            with self._account(tenant) as account:
                account.lend(lease_id)
        for tenant in list(self._accounts):
            with self._account(tenant):
                pass  # so that what is idle by now is forgotten

    async def release(self, tenant: str, lease_id: str) -> None:
        with self._account(tenant) as account:
            account.leases.pop(lease_id, None)
