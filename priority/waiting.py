"""Who waits, in which order, and how much there is of it: plain bookkeeping without any policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from enum import Enum
from math import inf

from engine.planning.request import Request
from priority.lanes import Lane, LanePolicy
from priority.rates import Rate
from priority.routing.state import LaneWork, with_largest
from priority.shares import Share

_LIVELY_S = 300.0
_BYTES_PER_TOKEN = 36
"""A slot of a tuple, and an integer object."""


class Stage(Enum):
    WAITING = 1
    PREFILLING = 2
    DECODING = 3


class Ticket:
    """One request, from being let in to the end of its last choice."""

    __slots__ = (
        "account",
        "arrival_us",
        "choices_left",
        "deadline_us",
        "forecast_s",
        "key",
        "num_bytes",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_uncached",
        "request",
        "stage",
    )

    def __init__(
        self, request: Request, account: Account, num_cached: int, deadline_us: int, order: int
    ) -> None:
        self.request = request
        self.account = account
        self.arrival_us = microseconds(request.arrival_s)
        self.deadline_us = deadline_us
        self.num_cached = num_cached
        """Prompt tokens that were in the prefix cache when it was let in."""
        num_prompt = request.num_prompt_tokens
        self.num_uncached = max(1, num_prompt - num_cached)
        """What it counts as, in prompt tokens."""
        self.num_bytes = _BYTES_PER_TOKEN * num_prompt
        self.key = (deadline_us, order)
        self.stage = Stage.WAITING
        self.num_charged = 0
        """Prompt tokens charged when it was dispatched."""
        self.num_computed = 0
        self.choices_left = request.n
        self.forecast_s: float | None = None

    @property
    def num_prompt(self) -> int:
        return self.num_uncached + self.num_cached

    @property
    def num_prefill_left(self) -> int:
        return max(0, self.num_uncached - self.num_computed) if self.stage is Stage.PREFILLING else 0


class Account:
    """A tenant in a lane: its waiting requests, earliest deadline first, and its share."""

    __slots__ = (
        "arrivals",
        "factor",
        "lane",
        "num_learnt",
        "num_open",
        "num_tokens",
        "served_us",
        "share",
        "tenant",
        "tickets",
    )

    def __init__(self, tenant: str, weight: int, lane: LaneLine) -> None:
        self.tenant = tenant
        self.lane = lane
        self.share = Share(weight)
        self.tickets: list[tuple[tuple[int, int], Ticket]] = []
        self.num_tokens = 0
        """Uncached prompt tokens that wait."""
        self.num_open = 0
        """Requests that wait or run."""
        self.factor = lane.factor
        """What its forecasts should be multiplied by; `Admission` learns it."""
        self.num_learnt = 0
        """Forecasts that it was learnt from."""
        self.served_us = 0
        """When a request of it was last dispatched."""
        self.arrivals = Rate()
        """Uncached prompt tokens let in per second."""

    @property
    def head(self) -> Ticket:
        return self.tickets[0][1]


class LaneLine:
    """A lane: the accounts that have something waiting, and what it adds up to."""

    def __init__(self, lane: Lane, policy: LanePolicy) -> None:
        self.lane = lane
        self.policy = policy
        self.share = Share(policy.weight)
        self.accounts: dict[str, Account] = {}
        self.active: dict[str, Account] = {}
        """Those of the accounts that have something waiting."""
        self.num_requests = 0
        self.num_tokens = 0
        self.num_bytes = 0
        self.num_prefill_left = 0
        """Prompt tokens that running requests of the lane still have to compute."""
        self.num_running = 0
        self.entered_s = -inf
        """When a request last came."""
        self.is_late = False
        """The one that was looked at last was refused, for its first token would have come too late."""
        self.factor = 1.0
        """Where the factors of new tenants start."""
        self.last_clock = 0
        """The clock of the tenant that was served last: where others start if nobody waits."""

    @property
    def floor(self) -> int:
        """The least clock of those who wait."""
        return min((a.share.clock for a in self.active.values()), default=self.last_clock)

    def is_lively(self, now: float) -> bool:
        """Requests came lately, and more are to be expected."""
        return now - self.entered_s < _LIVELY_S

    def work(self, now: float) -> LaneWork:
        """What a router has to know of it."""
        return LaneWork(
            queued=with_largest({tenant: account.num_tokens for tenant, account in self.active.items()}),
            num_waiting=self.num_requests,
            num_running=self.num_running,
            num_prefill_left=self.num_prefill_left,
            is_lively=self.is_lively(now),
            factor=self.factor,
        )

    def account(self, tenant: str, weight: int) -> Account:
        found = self.accounts.get(tenant)
        if found is None:
            found = self.accounts[tenant] = Account(tenant, weight, self)
        return found

    def add(self, ticket: Ticket) -> None:
        account = ticket.account
        insort(account.tickets, (ticket.key, ticket))
        self.active[account.tenant] = account
        self._count(ticket, 1)

    def remove(self, ticket: Ticket) -> None:
        account = ticket.account
        del account.tickets[bisect_left(account.tickets, (ticket.key,))]
        if not account.tickets:
            del self.active[account.tenant]
        self._count(ticket, -1)

    def waiting(self) -> Iterator[Ticket]:
        for account in self.active.values():
            for _, ticket in account.tickets:
                yield ticket

    def _count(self, ticket: Ticket, sign: int) -> None:
        self.num_requests += sign
        self.num_tokens += sign * ticket.num_uncached
        self.num_bytes += sign * ticket.num_bytes
        ticket.account.num_tokens += sign * ticket.num_uncached


def microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)
