"""Who takes the machine: each tenant's part of the last minute's work, and what it has open or was refused.

There is no metric of it, for a metric of each tenant would grow without bound.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass
from heapq import nlargest
from typing import NamedTuple

from penstock.gateway.access.keys import Client
from penstock.priority.queue import LaneQueue
from penstock.priority.recent import LastMinute

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
        self._counts = _Counts({}, {}, {}, {})
        self._total = _Load(0, 0, 0, 0)
        self._counted_s = float("-inf")

    def note_refused(self, tenant: str) -> None:
        self._refused.add(tenant, 1, self._clock())

    def load(self, tenant: str) -> TenantLoad:
        self._count()
        return self._shown(self._counts.load(tenant))

    def event_data(self, client: Client) -> dict[str, object]:
        """Returns the event `tenants`: for an operator those who take most, for anybody else the client alone."""
        self._count()
        names, total = self._counts.names(), self._total
        if client.is_operator:
            named = nlargest(MOST_NAMED, names, key=lambda name: (self._counts.load(name), name))
        else:
            named = [client.tenant.name]
            names, total = {*named}, self._counts.load(client.tenant.name)
        loads = [self._counts.load(tenant) for tenant in named]
        others = _Load(*(total - sum(some) for total, *some in zip(total, *loads, strict=True)))
        return {
            "tenants": [
                {"tenant": tenant, **asdict(self._shown(load))}
                for tenant, load in zip(named, loads, strict=True)
            ],
            "others": {"tenants": len(names.difference(named)), **asdict(self._shown(others))},
        }

    def _count(self) -> None:
        """Counts all tenants, once for all who ask."""
        now = self._clock()
        if now - self._counted_s < _FRESH_S:
            return
        self._counted_s = now
        work, waiting, running = self._queue.demands(now)
        # What was charged before the minute may have been given back in it.
        work = {tenant: cost for tenant, cost in work.items() if cost > 0}
        self._counts = _Counts(work, waiting, running, self._refused.sums(now))
        self._total = _Load(*(sum(amounts.values()) for amounts in self._counts))

    def _shown(self, load: _Load) -> TenantLoad:
        work, *others = load
        return TenantLoad(round(work / max(1, self._total.work), 4), *others)


class _Load(NamedTuple):
    work: int
    waiting: int
    running: int
    refused: int


class _Counts(NamedTuple):
    """The amounts by tenant."""

    work: dict[str, int]
    waiting: dict[str, int]
    running: dict[str, int]
    refused: dict[str, int]

    def load(self, tenant: str) -> _Load:
        return _Load(*(amounts.get(tenant, 0) for amounts in self))

    def names(self) -> set[str]:
        return set().union(*self)
