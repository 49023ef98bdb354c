"""Who takes the machine: each tenant's part of the last minute's work, and what it has open or was refused.

There is no metric of it, for a metric of each tenant would grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass

from penstock.gateway.access.keys import Client
from penstock.priority.queue import LaneQueue
from penstock.priority.recent import LastMinute
from penstock.priority.tenants import Demand

MOST_NAMED = 10
"""The tenants that are named; the others are one sum."""
_FRESH_S = 0.25


@dataclass(frozen=True, slots=True)
class TenantLoad:
    """One tenant's, or several tenants', part of the load."""

    share: float
    """The part of the machine's work of the last minute, 0 to 1, by the costs with which the queue is fair."""
    waiting: int
    running: int
    refused: int
    """The requests that were answered with 429 or 503 in the last minute."""


class Tenants:
    """The tenants of one service, for the event loop's thread."""

    def __init__(self, queue: LaneQueue, clock: Callable[[], float]) -> None:
        self._queue = queue
        self._clock = clock
        self._refused = LastMinute()
        self._loads: dict[str, TenantLoad] = {}
        self._loads_s = float("-inf")

    def note_refused(self, tenant: str) -> None:
        self._refused.add(tenant, 1, self._clock())

    def load(self, tenant: str) -> TenantLoad:
        return self._all().get(tenant, TenantLoad(0.0, 0, 0, 0))

    def told(self, client: Client) -> dict[str, object]:
        """Returns the event `tenants`: an operator's names those who take most, anybody else's the client alone."""
        loads = self._all()
        own = client.tenant.name
        named = list(loads)[:MOST_NAMED] if client.is_operator else [own]
        others = [load for tenant, load in loads.items() if tenant not in named]
        return {
            "tenants": [{"tenant": tenant, **asdict(self.load(tenant))} for tenant in named],
            "others": {"tenants": len(others), **asdict(_sum(others))},
        }

    def _all(self) -> dict[str, TenantLoad]:
        """Returns the loads of all tenants, who takes most first; they are counted once for all who ask."""
        now = self._clock()
        if now - self._loads_s >= _FRESH_S:
            self._loads_s = now
            self._loads = _loads(self._queue.demands(now), self._refused.sums(now))
        return self._loads


def _loads(demands: dict[str, Demand], refused: dict[str, int]) -> dict[str, TenantLoad]:
    # What was charged before the minute may have been given back in it.
    total = sum(max(0, demand.work) for demand in demands.values()) or 1
    loads = {
        tenant: TenantLoad(
            round(max(0, demand.work) / total, 4),
            demand.num_waiting,
            demand.num_running,
            refused.get(tenant, 0),
        )
        for tenant in demands.keys() | refused.keys()
        for demand in [demands.get(tenant, Demand(0, 0, 0))]
    }
    return dict(sorted(loads.items(), key=lambda item: (*_rank(item[1]), item[0])))


def _rank(load: TenantLoad) -> tuple[float, ...]:
    return -load.share, -load.waiting - load.running, -load.refused


def _sum(loads: Iterable[TenantLoad]) -> TenantLoad:
    total = TenantLoad(0.0, 0, 0, 0)
    for load in loads:
        total = TenantLoad(
            round(total.share + load.share, 4),
            total.waiting + load.waiting,
            total.running + load.running,
            total.refused + load.refused,
        )
    return total
