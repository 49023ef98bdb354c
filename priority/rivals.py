"""The other tenants of a lane, as a forecast sees them: those that sent last one by one, the rest as one.

A forecast thus looks at the same number of tenants however many there are. What the rest have waiting, and what is due
to them, is summed before the lesser of the two is taken, as if each had the least clock; likewise what they send and
what is due to them. The lesser of two sums is never less than the sum over the lesser of each, so a forecast is never
sooner for it than one by one, but for some tokens that clocks round away, and later by no more than the work that the
rest have, or send.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from penstock.priority.shares import COST_PREFILL, virtual
from penstock.priority.waiting import Account

MOST_NAMED = 32
"""The tenants that are looked at one by one."""


class Rival(NamedTuple):
    """Another tenant, or the rest as one. Work is in prompt tokens."""

    account: Account | None
    waiting: float
    due: float
    """The work whose turn comes before the request's first token."""
    weight: int
    num_requests: int

    @property
    def before(self) -> float:
        """The waiting work whose turn comes before the request's first token."""
        return min(self.waiting, self.due)


def rivals_of(account: Account, work: float, attended_each: float) -> list[Rival]:
    """Returns the other tenants of the lane, for a request after which its tenant will have had so much work."""
    lane, floor = account.lane, account.lane.floor
    named = lane.recent(account, MOST_NAMED)
    rivals = [
        Rival(
            other,
            other.work(attended_each),
            _due_before(account, other.share.weight, other.clock_at(floor), work, floor),
            other.share.weight,
            other.num_requests,
        )
        for other in named
    ]
    seen = [*named, account] if lane.accounts.get(account.tenant) is account else named
    if len(lane.accounts) > len(seen):
        weight = lane.weight - sum(a.share.weight for a in seen)
        waiting = lane.work(attended_each) - sum(a.work(attended_each) for a in seen)
        due = _due_before(account, weight, floor, work, floor)
        num_requests = lane.num_requests - sum(a.num_requests for a in seen)
        rivals.append(Rival(None, max(0.0, waiting), due, weight, num_requests))
    return rivals


def arrivals_of(account: Account, rivals: Sequence[Rival], now: float, ahead_s: float) -> list[float]:
    """Returns the work that each rival sends per second, over as long a past as is looked ahead."""
    named = [r.account.arrivals.per_second(now, ahead_s) for r in rivals if r.account is not None]
    if len(named) == len(rivals):
        return named
    rest = account.lane.arrivals.per_second(now, ahead_s) - account.arrivals.per_second(now, ahead_s)
    return [*named, max(0.0, rest - sum(named))]


def level(own: float, rivals: Iterable[Rival]) -> float:
    """Returns the work of a lane until its tenant has had `own`."""
    return own + sum([rival.before for rival in rivals])


def _due_before(account: Account, weight: int, clock: int, work: float, floor: int) -> float:
    """Returns the work of others whose turn comes before this tenant has had so much, in prompt tokens.

    Args:
        weight: of the others together.
        clock: of the others, the least that they can have.
        floor: of the lane.
    """
    lead = max(0, account.clock_at(floor) - clock) / virtual(COST_PREFILL)
    return weight * (work / account.share.weight + lead)
