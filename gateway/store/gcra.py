"""Quotas by GCRA: each bound is one number, the time at which it would be as if it had never been used.

All arithmetic is in whole microseconds, and the same as that of the script in Redis, so that the two agree exactly.
A minute's worth may be used at once; what is used comes back evenly over a minute.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from penstock.gateway.store.interface import LEASE_S, Allotment, Grant, Quota

MINUTE_US = 60_000_000
STREAMS_RETRY_S = 1.0
"""Nobody knows when a stream ends; it is worth asking again after this."""
SECOND_US = 1_000_000
MAX_AHEAD_US = 24 * 60 * MINUTE_US
"""No debt is longer than a day."""


def cost_us(amount: int, limit: int) -> int:
    """How far an amount moves a bound's time, rounded towards zero, so that `limit` single ones fit in a minute."""
    whole = abs(amount) * MINUTE_US // max(1, limit)
    return whole if amount >= 0 else -whole


def allotment(limit: int | None, ahead_us: int) -> Allotment | None:
    """The allotment of a bound whose time is so far ahead of now."""
    if limit is None:
        return None
    remaining = max(0, MINUTE_US - ahead_us) * limit // MINUTE_US
    return Allotment(limit, remaining, ahead_us / SECOND_US)


def judge(quota: Quota, num_tokens: int, num_streams: int, requests_us: int, tokens_us: int) -> Grant:
    """The answer, by how far ahead of now the two times are before anything is reserved.

    A request that never fits waits for infinity.
    """
    waits = {
        "tokens": _wait_s(quota.tokens_per_minute, num_tokens, tokens_us),
        "requests": _wait_s(quota.requests_per_minute, 1, requests_us),
        "streams": STREAMS_RETRY_S if _is_full(quota, num_streams) else 0.0,
    }
    reached = [bound for bound, wait_s in waits.items() if wait_s > 0]
    return Grant(
        max(reached, key=waits.__getitem__) if reached else None,
        max(waits.values()),
        allotment(quota.requests_per_minute, requests_us),
        allotment(quota.tokens_per_minute, tokens_us),
    )


def _wait_s(limit: int | None, amount: int, ahead_us: int) -> float:
    if limit is None:
        return 0.0
    if amount > limit:
        return math.inf
    return max(0, ahead_us + cost_us(amount, limit) - MINUTE_US) / SECOND_US


def _is_full(quota: Quota, num_streams: int) -> bool:
    return quota.max_streams is not None and num_streams >= quota.max_streams


def granted(quota: Quota, requests_us: int, tokens_us: int) -> Grant:
    """The answer to a request that was let in, by how far ahead the times are now that it is reserved."""
    return Grant(
        None,
        0.0,
        allotment(quota.requests_per_minute, requests_us),
        allotment(quota.tokens_per_minute, tokens_us),
    )


@dataclass(slots=True)
class _Account:
    requests_us: int = 0
    tokens_us: int = 0
    leases: OrderedDict[str, int] = field(default_factory=OrderedDict)
    """When each lease ends, the one that ends first in front."""

    def lend(self, lease_id: str, now_us: int) -> None:
        """The lease begins, or begins again."""
        self.leases[lease_id] = now_us + int(LEASE_S * SECOND_US)
        self.leases.move_to_end(lease_id)

    def forget_ended(self, now_us: int) -> None:
        while self.leases and next(iter(self.leases.values())) <= now_us:
            self.leases.popitem(last=False)


class LocalQuotas:
    """LocalQuotas count what tenants used, as far as this process knows."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._accounts: dict[str, _Account] = {}

    def __len__(self) -> int:
        return len(self._accounts)

    def reserve(self, tenant: str, quota: Quota, num_tokens: int, lease_id: str) -> Grant:
        account, now_us = self._account(tenant)
        grant = judge(
            quota,
            num_tokens,
            len(account.leases) - (lease_id in account.leases),
            account.requests_us - now_us,
            account.tokens_us - now_us,
        )
        if grant.refused:
            self._forget_idle(tenant, now_us)
            return grant
        self.charge(tenant, quota, num_tokens, lease_id)
        _, now_us = self._account(tenant)
        return granted(quota, account.requests_us - now_us, account.tokens_us - now_us)

    def charge(self, tenant: str, quota: Quota, num_tokens: int, lease_id: str) -> None:
        """Counts a request that was let in elsewhere."""
        account, now_us = self._account(tenant)
        if quota.requests_per_minute is not None:
            account.requests_us += cost_us(1, quota.requests_per_minute)
        if quota.tokens_per_minute is not None:
            account.tokens_us += cost_us(num_tokens, quota.tokens_per_minute)
        account.lend(lease_id, now_us)

    def settle(self, tenant: str, quota: Quota, num_tokens: int) -> None:
        if quota.tokens_per_minute is None:
            return
        account, now_us = self._account(tenant)
        ahead_us = account.tokens_us - now_us + cost_us(num_tokens, quota.tokens_per_minute)
        account.tokens_us = now_us + min(max(0, ahead_us), MAX_AHEAD_US)
        self._forget_idle(tenant, now_us)

    def renew(self, leases: Sequence[tuple[str, str]]) -> None:
        for tenant, lease_id in leases:
            account, now_us = self._account(tenant)
            account.lend(lease_id, now_us)
        for tenant in list(self._accounts):
            _, now_us = self._account(tenant)
            self._forget_idle(tenant, now_us)

    def release(self, tenant: str, lease_id: str) -> None:
        account, now_us = self._account(tenant)
        account.leases.pop(lease_id, None)
        self._forget_idle(tenant, now_us)

    def _account(self, tenant: str) -> tuple[_Account, int]:
        """The tenant's account, without what is over, and the time."""
        now_us = int(self._clock() * SECOND_US)
        account = self._accounts.setdefault(tenant, _Account())
        account.requests_us = max(account.requests_us, now_us)
        account.tokens_us = max(account.tokens_us, now_us)
        account.forget_ended(now_us)
        return account, now_us

    def _forget_idle(self, tenant: str, now_us: int) -> None:
        account = self._accounts[tenant]
        if not account.leases and account.requests_us <= now_us and account.tokens_us <= now_us:
            del self._accounts[tenant]
