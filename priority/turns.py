"""Whose turn it is: which lane goes next, which of its tenants, and who goes before a prompt that is under way."""

from __future__ import annotations

from collections.abc import Iterable

from penstock.priority.shares import COST_PREFILL, virtual
from penstock.priority.waiting import LaneLine, Ticket

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


def choose(line: LaneLine) -> Ticket:
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
