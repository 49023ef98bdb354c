"""The bounds of lanes: how much may wait in each, and how much of that may be one tenant's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.priority.admission import Admission
from penstock.priority.lanes import Lane
from penstock.priority.shares import ATTENDED_EACH
from penstock.priority.verdict import RETRY_S, Refusal
from penstock.priority.waiting import Account, LaneLine, Ticket


class Bounds:
    """Refuses what would be more than may wait."""

    def __init__(
        self, admission: Admission, lanes: Mapping[Lane, LaneLine], tickets: Mapping[str, Ticket]
    ) -> None:
        """`lanes` and `tickets` are those of the queue."""
        self._admission = admission
        self._lanes = lanes
        self._tickets = tickets

    def check(self, line: LaneLine, account: Account, tickets: Sequence[Ticket], now: float) -> None:
        """Refuses all requests of a reply if they are too many together; one that is too large may wait alone."""
        policy, is_one = line.policy, len(tickets) == 1
        self.check_places(
            line, account, sum(ticket.num_places for ticket in tickets), now, may_be_alone=is_one
        )
        if is_one and not line.num_requests:
            return
        own = sum(int(ticket.size.work(ATTENDED_EACH)) for ticket in tickets)
        num_own = int(account.work(ATTENDED_EACH)) + own
        # Most are within the least part that a tenant may fill.
        if (
            not (is_one and not account.tickets)
            and num_own > policy.tenant_share * policy.max_tokens
            and num_own > self._part(account) * policy.max_tokens
        ):
            raise self._tenant_full(line, f"{account.num_tokens} prompt tokens", len(account.tickets), now)
        is_long = int(line.work(ATTENDED_EACH)) + own > policy.max_tokens
        if is_long or line.num_bytes + sum(ticket.num_bytes for ticket in tickets) > policy.max_bytes:
            raise self._full(line, f"{line.num_tokens} prompt tokens", now)

    def check_places(
        self, line: LaneLine, account: Account | None, n: int, now: float, *, may_be_alone: bool = True
    ) -> None:
        """Refuses `n` choices, each of which is a place; where they `may_be_alone`, larger ones may wait alone."""
        most = line.policy.max_requests
        least = line.policy.tenant_share * most
        is_alone = may_be_alone and not (account is not None and account.tickets)
        if account is not None and not is_alone and account.num_choices + n > least:
            most_own = max(1, int(self._part(account) * most))
            if account.num_choices + n > most_own < most:
                what = _places(account.num_choices, n)
                raise self._tenant_full(line, what, account.num_requests, now)
        if (line.num_requests or not may_be_alone) and line.num_choices + n > most:
            raise self._full(line, _places(line.num_choices, n), now)

    def _tenant_full(self, line: LaneLine, what: str, num_own: int, now: float) -> Refusal:
        message = f"the {line.lane.label} lane has no more room for you ({what} of yours wait)"
        retry_after_s = self._seconds_for(max(1, num_own // 4), now)
        return Refusal("tenant_queue_full", message, retry_after_s, tenant_limit=True)

    def _full(self, line: LaneLine, what: str, now: float) -> Refusal:
        message = f"the {line.lane.label} lane is full ({what} wait)"
        return Refusal("queue_full", message, self._seconds_for(max(1, line.num_requests // 4), now))

    def _seconds_for(self, num_requests: int, now: float) -> float:
        if rate := self._admission.finish_rate(now):
            return num_requests / rate
        return RETRY_S[1] if self._tickets else RETRY_S[0]

    def _part(self, account: Account) -> float:
        """Returns the part of its lane that a tenant may fill: all of it while no other tenant is seen in any lane."""
        for line in self._lanes.values():
            if len(line.accounts) > (account.tenant in line.accounts):
                return account.lane.policy.tenant_share
        return 1.0


def _places(num_waiting: int, n: int) -> str:
    return f"{num_waiting} answers" if n == 1 else f"{n} more are asked for; {num_waiting} answers"
