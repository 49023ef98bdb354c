"""Whose turn it is among the requests that wait; see `queue`."""

from __future__ import annotations

from collections.abc import Iterable
from math import inf

from penstock.priority.shares import COST_PREFILL, virtual
from penstock.priority.waiting import LaneLine, Ticket, microseconds

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
