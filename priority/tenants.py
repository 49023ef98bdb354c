"""What tenants have of the machine and want of it, over all lanes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.priority.waiting import LaneLine


class Demand(NamedTuple):
    """A Demand is what a tenant has of the machine, or wants of it."""

    work: int
    """Its cost over the last minute, as fairness counts it; see `shares`."""
    num_waiting: int
    num_running: int


def charges(lines: Iterable[LaneLine]) -> dict[str, int]:
    """Returns all that each tenant was charged."""
    charged: dict[str, int] = {}
    for line in lines:
        for tenant, account in line.accounts.items():
            charged[tenant] = charged.get(tenant, 0) + account.share.charged
    return charged


def demands(lines: Iterable[LaneLine], now: float) -> dict[str, Demand]:
    """Returns the demand of each tenant that has something open, or had work done in the last minute."""
    found: dict[str, Demand] = {}

    def add(tenant: str, *more: int) -> None:
        found[tenant] = Demand(*map(sum, zip(found.get(tenant, (0, 0, 0)), more, strict=True)))

    for line in lines:
        for tenant, work in line.worked.sums(now).items():
            add(tenant, work, 0, 0)
        for tenant, account in line.accounts.items():
            if account.num_open:
                add(tenant, 0, account.num_requests, account.num_open - account.num_requests)
    return found
