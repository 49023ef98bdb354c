"""The waiting requests, their order and their sums: plain bookkeeping without any policy."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator, Mapping, Sequence
from enum import Enum
from heapq import heapify, heappop, heappush, heapreplace
from itertools import islice
from math import inf
from typing import NamedTuple

from penstock.engine.planning.keeping import Keeping, num_attended
from penstock.engine.planning.request import Request
from penstock.priority.coverage import Coverage, Margin
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.lengths import Lengths
from penstock.priority.rates import Rate
from penstock.priority.ratios import LATE, Ratios
from penstock.priority.recent import LastMinute
from penstock.priority.room import Need
from penstock.priority.routing.state import LaneWork, with_largest
from penstock.priority.shares import COST_PREFILL, Share, virtual

LEAD_TOKENS = 4_096
"""Prompt tokens that a lane may be ahead of the next less urgent one and still go first, at weight 1."""
_LIVELY_S = 300.0
_UNKNOWN_LENGTH = 256
"""The expected length of an answer while too little is known, if its limit allows it."""
_FORGET_AFTER_US = 600_000_000
_STALE, _MANY = 2, 64
"""A heap of clocks is made anew when it has more entries than this: so many for each account, and so many more."""
_BYTES_PER_TOKEN = 36
"""A slot of a tuple, and an integer object."""


class Stage(Enum):
    WAITING = 1
    PREFILLING = 2
    DECODING = 3


class Size(NamedTuple):
    """The machine's work for a request until its first token."""

    num_uncached: int
    """Prompt tokens to compute."""
    num_attended: int
    """Pairs of such a token and a token that it attends to."""
    num_kv: int
    """Tokens of KV that no running sequence holds yet."""
    num_seats: int = 1

    def work(self, attended_each: float) -> float:
        """Returns the prompt tokens to compute, with the cost of attending expressed in tokens."""
        return self.num_uncached + attended_each * self.num_attended

    @staticmethod
    def of(
        num_prompt: int,
        num_cached: int = 0,
        num_in_use: int = 0,
        num_seats: int = 1,
        keeping: Keeping | None = None,
    ) -> Size:
        """Returns the size of a prompt with so many cached tokens, some of them in use, of which so much is kept."""
        num_uncached = max(1, num_prompt - num_cached)
        num_held = num_prompt if keeping is None else min(num_prompt, keeping.most)
        return Size(
            num_uncached,
            _num_attended(num_prompt - num_uncached, num_prompt, keeping),
            max(1, num_held - num_in_use),
            num_seats,
        )


def _num_attended(start: int, end: int, keeping: Keeping | None) -> int:
    return num_attended(start, end) if keeping is None else keeping.num_attended(start, end)


class Ticket:
    """One request, from admission to the end of its last choice."""

    __slots__ = (
        "account",
        "allowed_s",
        "arrival_us",
        "choices_left",
        "deadline_us",
        "forecast_s",
        "is_near",
        "key",
        "num_bytes",
        "num_cached",
        "num_charged",
        "num_computed",
        "num_growth",
        "num_places",
        "num_prompt",
        "request",
        "size",
        "stage",
    )

    def __init__(
        self,
        request: Request,
        account: Account,
        num_cached: int,
        size: Size,
        deadline_us: int,
        order: int,
    ) -> None:
        self.request = request
        self.account = account
        self.arrival_us = microseconds(request.arrival_s)
        self.deadline_us = deadline_us
        self.num_cached = num_cached
        """Prompt tokens that were in the prefix cache when it was let in."""
        self.num_prompt = num_prompt = request.num_prompt_tokens
        self.size = size
        self.num_places = 1 if request.branches else request.n
        """The number of answers with streams of their own; branches have no output."""
        sampling = request.sampling
        self.num_growth = 0
        """Tokens of KV that its answers are expected to take."""
        if sampling.max_tokens and not request.branches:
            left = account.left(0, sampling.max_tokens, sampling.num_thinking)
            if request.keeping is not None:
                left = min(left, max(0, request.keeping.most - num_prompt))
            self.num_growth = int(self.num_places * left)
        self.num_bytes = _BYTES_PER_TOKEN * num_prompt
        self.key = (deadline_us, order)
        self.stage = Stage.WAITING
        self.num_charged = 0
        """Prompt tokens charged when it was dispatched."""
        self.num_computed = 0
        self.choices_left = request.n
        self.forecast_s: float | None = None
        """The forecast at admission, without learnt corrections."""
        self.allowed_s = inf
        """The time from its arrival that it was promised; infinite if it was promised none, or the promise is over."""
        self.is_near = False
        """Whether it was let in near the border; see `Coverage.border`."""

    def note_late(self, now: float) -> None:
        """Counts its promise as broken once its time has passed, whether the first token comes or not."""
        if now - self.request.arrival_s > self.allowed_s:
            self.allowed_s = inf
            self.account.lane.coverage.note(self.account.margin, is_kept=False)

    def need(self, attended_each: float, spare: float) -> Need:
        """Returns its need, with half of the KV of its answers, which grow."""
        size = self.size
        return Need(size.work(attended_each), size.num_kv + self.num_growth / 2, self.num_places, spare)

    @property
    def num_prefill_left(self) -> int:
        return max(0, self.size.num_uncached - self.num_computed) if self.stage is Stage.PREFILLING else 0

    def work_left(self, attended_each: float) -> float:
        """Returns the work that it still has with its prompt, in prompt tokens."""
        num_left = self.num_prefill_left
        return num_left + attended_each * self.num_attended_left

    @property
    def num_attended_left(self) -> int:
        start = self.num_prompt - self.num_prefill_left
        return _num_attended(start, self.num_prompt, self.request.keeping)


class Backlog:
    """The sums over the waiting requests of a tenant or a lane."""

    __slots__ = ("num_attended", "num_choices", "num_growth", "num_kv", "num_requests", "num_tokens")

    def __init__(self) -> None:
        self.num_requests = 0
        self.num_choices = 0
        self.num_tokens = 0
        """Uncached prompt tokens."""
        self.num_attended = 0
        self.num_kv = 0
        self.num_growth = 0

    def count(self, tickets: Sequence[Ticket], sign: int) -> None:
        """Adds requests to the sums, or takes them out."""
        self.num_requests += sign * len(tickets)
        for ticket in tickets:
            size = ticket.size
            self.num_choices += sign * ticket.num_places
            self.num_tokens += sign * size.num_uncached
            self.num_attended += sign * size.num_attended
            self.num_kv += sign * size.num_kv
            self.num_growth += sign * ticket.num_growth

    def work(self, attended_each: float) -> float:
        """Prompt tokens to compute, those included that attending to others takes as long as."""
        return self.num_tokens + attended_each * self.num_attended


class Account(Backlog):
    """A tenant in a lane: its waiting requests, earliest deadline first, and its share."""

    __slots__ = (
        "arrivals",
        "lane",
        "lengths",
        "margin",
        "num_open",
        "ratios",
        "served_us",
        "share",
        "tenant",
        "tickets",
    )

    def __init__(self, tenant: str, weight: int, lane: LaneLine) -> None:
        super().__init__()
        self.tenant = tenant
        self.lane = lane
        self.share = Share(weight)
        self.tickets: list[tuple[tuple[int, int], Ticket]] = []
        self.num_open = 0
        """Requests that wait or run."""
        self.ratios = Ratios()
        self.margin = Margin()
        self.lengths = Lengths()
        self.served_us = 0
        """The time at which its last request was dispatched."""
        self.arrivals = Rate()
        """Work that was let in per second, in prompt tokens."""

    @property
    def head(self) -> Ticket:
        return self.tickets[0][1]

    @property
    def turn(self) -> tuple[float, int, tuple[int, int]]:
        """The larger part of its prompt is cached, the sooner; then by what the tenant has had, then by deadline."""
        head = self.head
        return -head.num_cached / head.num_prompt, self.share.clock, head.key

    def charge(self, cost: int, now_us: int) -> None:
        self.share.charge(cost)
        self.lane.share.charge(cost)
        self.lane.worked.add(self.tenant, cost, now_us / 1e6)
        if cost < 0:
            self.lane.note_clock(self)

    def clock_at(self, floor: int) -> int:
        """Returns the clock of its next request: with nothing waiting, it starts again at the floor of its lane."""
        return self.share.clock if self.tickets else max(self.share.clock, floor)

    def work_by(self, deadline_us: int, attended_each: float) -> float:
        """Returns the work of its waiting requests that are due no later."""
        work = self.work(attended_each)
        for (due_us, _), ticket in reversed(self.tickets):
            if due_us <= deadline_us:
                break
            work -= ticket.size.work(attended_each)
        return work

    def first(self, due: float, attended_each: float) -> Iterator[Ticket]:
        """The waiting requests that are no more work than is due, in order."""
        for _, ticket in self.tickets:
            due -= ticket.size.work(attended_each)
            if due < 0:
                return
            yield ticket

    def left(self, num_output: int, limit: int, num_thinking: int | None = None) -> float:
        """Returns how many tokens more are expected of an answer that has so many.

        Args:
            num_thinking: the bound on its reasoning, if there is one.
        """
        for lengths in (self.lengths, self.lane.lengths):
            if (left := lengths.left(num_output, limit, num_thinking)) is not None:
                return left
        return min(limit - num_output, max(_UNKNOWN_LENGTH - num_output, num_output / 2))


class LaneLine(Backlog):
    """A lane: the accounts with waiting requests, and their sums."""

    def __init__(self, lane: Lane, policy: LanePolicy) -> None:
        super().__init__()
        self.lane = lane
        self.policy = policy
        self.share = Share(policy.weight)
        self.accounts: dict[str, Account] = {}
        """The tenants that were here lately; who sent last stands last."""
        self.active: dict[str, Account] = {}
        """The accounts that have something waiting."""
        self.tickets: list[tuple[tuple[int, int], Ticket]] = []
        """The waiting requests, the earliest deadline first."""
        self.arrivals = Rate()
        """The sum of its accounts' arrivals."""
        self.weight = 0
        """The sum of its accounts' weights."""
        self._clocks: list[tuple[int, int, Account]] = []
        """A heap of clocks that active accounts had, each no later than the clock now."""
        self._num_clocks = 0
        self.num_bytes = 0
        self.num_changes = 0
        """How often a request came to wait, or no longer waits."""
        self.num_prefill_left = 0
        """Prompt tokens that running requests of the lane still have to compute."""
        self.num_attended_left = 0
        self.num_running = 0
        self.entered_s = -inf
        """The time at which a request last arrived."""
        self.is_late = False
        """Whether the request that was looked at last was refused because it would have come too late."""
        self.worked = LastMinute()
        """The costs of its tenants."""
        self.ratios = Ratios()
        self.coverage = Coverage()
        self.lengths = Lengths()
        self.last_clock = 0
        """The clock of the tenant that was served last: where others start if nobody waits."""

    @property
    def turn(self) -> int:
        """The lane of which this is least goes next: the clock, less the lead that an urgent lane may have."""
        return self.share.clock - (len(Lane) - 1 - self.lane) * virtual(COST_PREFILL * LEAD_TOKENS)

    @property
    def floor(self) -> int:
        """The least clock of the tenants that have something waiting."""
        clocks = self._clocks
        while clocks:
            clock, number, account = clocks[0]
            if not account.tickets:
                heappop(clocks)
            elif account.share.clock > clock:
                heapreplace(clocks, (account.share.clock, number, account))
            else:
                return clock
        return self.last_clock

    def note_clock(self, account: Account) -> None:
        """Takes the clock of an account that became active, or that was set back."""
        if account.tickets:
            self._num_clocks += 1
            if len(self._clocks) > _STALE * len(self.active) + _MANY:
                self._clocks = [(a.share.clock, i, a) for i, a in enumerate(self.active.values())]
                heapify(self._clocks)
                self._num_clocks = len(self._clocks)
            heappush(self._clocks, (account.share.clock, self._num_clocks, account))

    def is_lively(self, now: float) -> bool:
        """Whether requests came lately, so that more are to be expected."""
        return now - self.entered_s < _LIVELY_S

    def work_left(self, attended_each: float) -> float:
        """Returns the work that running requests still have with their prompts, in prompt tokens."""
        return self.num_prefill_left + attended_each * self.num_attended_left

    def note_left(self, ticket: Ticket, sign: int) -> None:
        """Adds what a running request still has to compute of its prompt to the sums, or takes it out."""
        if ticket.stage is Stage.PREFILLING:
            self.num_prefill_left += sign * ticket.num_prefill_left
            self.num_attended_left += sign * ticket.num_attended_left

    def lane_work(self, now: float, attended_each: float) -> LaneWork:
        """Returns its load, for routers."""
        queued = {tenant: int(account.work(attended_each)) for tenant, account in self.active.items()}
        return LaneWork(
            queued=with_largest(queued),
            num_waiting=self.num_requests,
            num_running=self.num_running,
            num_prefill_left=int(self.work_left(attended_each)),
            is_lively=self.is_lively(now),
            factor=self.ratios.quantile(LATE) * self.coverage.margin.value,
        )

    def account(self, tenant: str, weight: int) -> Account:
        found = self.accounts.get(tenant)
        if found is None:
            found = self.accounts[tenant] = Account(tenant, weight, self)
            self.weight += weight
        return found

    def forget_idle(self, now_us: int) -> None:
        """Forgets tenants that have not been here for long: they have no debt left to remember."""
        horizon = now_us - _FORGET_AFTER_US
        idle = [t for t, a in self.accounts.items() if not a.num_open and a.share.idle_since_us < horizon]
        for tenant in idle:
            self.weight -= self.accounts.pop(tenant).share.weight

    def set_weights(self, weights: Mapping[str, int]) -> None:
        for tenant, account in self.accounts.items():
            account.share.weight = weights.get(tenant, 1)
        self.weight = sum(account.share.weight for account in self.accounts.values())

    def recent(self, account: Account, most: int) -> list[Account]:
        """Returns the other accounts that sent last, at most so many."""
        last = islice(reversed(self.accounts.values()), most + 1)
        return [other for other in last if other is not account][:most]

    def add(self, account: Account, tickets: Sequence[Ticket]) -> None:
        """Takes requests of a tenant that come to wait."""
        self.accounts[account.tenant] = self.accounts.pop(account.tenant)
        is_first = not account.tickets
        for ticket in tickets:
            entry = ticket.key, ticket
            insort(account.tickets, entry)
            insort(self.tickets, entry)
        self.active[account.tenant] = account
        if is_first:
            self.note_clock(account)
        account.count(tickets, 1)
        self.count(tickets, 1)

    def remove(self, ticket: Ticket) -> None:
        account = ticket.account
        for tickets in (account.tickets, self.tickets):
            del tickets[bisect_left(tickets, (ticket.key,))]
        if not account.tickets:
            del self.active[account.tenant]
        account.count((ticket,), -1)
        self.count((ticket,), -1)

    def first(self, due: float, attended_each: float) -> Iterator[Ticket]:
        """The waiting requests, the earliest deadline first, until they are more work than is due."""
        for _, ticket in self.tickets:
            if due <= 0:
                return
            yield ticket
            due -= ticket.size.work(attended_each)

    def waiting(self) -> Iterator[Ticket]:
        return (ticket for _, ticket in self.tickets)

    def count(self, tickets: Sequence[Ticket], sign: int) -> None:
        super().count(tickets, sign)
        self.num_bytes += sign * sum(ticket.num_bytes for ticket in tickets)
        self.num_changes += 1


def microseconds(seconds: float) -> int:
    return round(seconds * 1_000_000)
