"""Whose turn it is: which lane goes next, which of its tenants, and who goes before a prompt that is under way."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from penstock.priority.shares import COST_PREFILL, virtual
from penstock.priority.waiting import Account, LaneLine, Ticket, microseconds

LOCALITY_TOKENS = 2_048
"""Tenants within so many prompt tokens of each other count as equal; 0 is the pure counter."""


def lines_in_turn(lines: Iterable[LaneLine], above: int | None) -> list[LaneLine]:
    """Returns the lane whose turn it is, then the more urgent ones, which may try if its head does not fit."""
    contenders = [line for line in lines if line.num_requests or line.lane == above]
    if not contenders:
        return []
    first = min(contenders, key=lambda line: (line.turn, line.lane))
    if above is not None and first.lane >= above:
        return []
    return [first, *(line for line in contenders if line.lane < first.lane)]


def next_of(line: LaneLine) -> Ticket:
    """Returns the waiting request of a lane whose turn it is."""
    if len(line.active) == 1:
        return next(iter(line.active.values())).head
    near = line.floor + virtual(COST_PREFILL * LOCALITY_TOKENS)
    candidates = [a for a in line.active.values() if a.share.clock <= near]
    return min(candidates, key=lambda account: account.turn).head


def due_before(running: Ticket | None) -> list[Ticket]:
    """Returns the earliest due of the requests that may go before the rest of a prompt of their lane.

    Their tenants have had no more than the prompt's, which was charged for all of it.
    """
    if running is None:
        return []
    account = running.account
    heads = (a.head for a in account.lane.active.values() if a.share.clock <= account.share.clock)
    first = min(heads, key=lambda ticket: ticket.key, default=running)
    return [first] if first.deadline_us < running.deadline_us else []


def overtaken(account: Account, deadline_us: int, running: Iterable[Ticket], attended_each: float) -> float:
    """Returns the work left with prompts of the lane that a request due then goes before: see `due_before`."""
    lane = account.lane
    if not lane.num_prefill_left:
        return 0.0
    clock = account.clock_at(lane.floor)
    return sum(
        ticket.work_left(attended_each)
        for ticket in running
        if ticket.account.lane is lane
        and ticket.deadline_us > deadline_us
        and clock <= ticket.account.share.clock
    )


def lead(line: LaneLine, lane: LaneLine) -> float:
    """Returns the work of a less urgent lane that goes before any of the other; below 0 if that has a lead."""
    return line.share.weight * (lane.turn - line.turn) / virtual(COST_PREFILL)


def aged(lines: Iterable[LaneLine], now_us: int) -> Ticket | None:
    """Returns the longest waiting of the tenants that were not served for too long."""
    heads = [
        account.head
        for line in lines
        if line.num_requests and line.policy.ageing_s < inf
        for account in line.active.values()
        if now_us - max(account.head.arrival_us, account.served_us) > microseconds(line.policy.ageing_s)
    ]
    return min(heads, key=lambda ticket: (ticket.arrival_us, ticket.key), default=None)
