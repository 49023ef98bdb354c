"""What tenants have of the machine and want of it, over all lanes."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple

from penstock.priority.waiting import LaneLine


class Demands(NamedTuple):
    """What tenants have of the machine, and want of it, by name; those that have nothing are not named."""

    work: dict[str, int]
    """The costs of the last minute, as fairness counts them; see `shares`."""
    waiting: dict[str, int]
    """The requests that wait."""
    running: dict[str, int]


def charges(lines: Iterable[LaneLine]) -> dict[str, int]:
    """Returns all that each tenant was charged."""
    charged: dict[str, int] = {}
    for line in lines:
        for tenant, account in line.accounts.items():
            charged[tenant] = charged.get(tenant, 0) + account.share.charged
    return charged


def demands(lines: Iterable[LaneLine], now: float) -> Demands:
    """Returns the sums over all lanes."""
    found = Demands({}, {}, {})
    for line in lines:
        running = {
            tenant: account.num_open - account.num_requests
            for tenant, account in line.accounts.items()
            if account.num_open > account.num_requests
        }
        waiting = {tenant: account.num_requests for tenant, account in line.active.items()}
        for total, part in zip(found, (line.worked.sums(now), waiting, running), strict=True):
            for tenant, amount in part.items():
                total[tenant] = total.get(tenant, 0) + amount
    return found
