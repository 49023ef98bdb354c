"""The queue: admitted requests that wait until the engine has room; the engine's RequestQueue.

Three questions, answered one after the other. Which lane: the one that has had least for its weight, where a more
urgent lane may run ahead by a bounded lead. Which tenant: the one that has had least for its weight, where those who
are nearly equal go by what the prefix cache holds of them. Which request: the earliest deadline. A tenant that was not
served for too long may jump the first two, within a quarter of the work.

Two threads meet here, the event loop (put, cancel, expire) and the engine's step thread (the rest). One lock, handed in
by the caller so that this module stays free of threads, is held for plain arithmetic only. Times come in as arguments,
so the same calls give the same schedule.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from contextlib import AbstractContextManager, suppress
from dataclasses import replace
from math import isfinite

from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.request_queue import Allowance, StepLoad
from penstock.priority.admission import Admission
from penstock.priority.bounds import Bounds
from penstock.priority.coverage import NEAR, Coverage
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy, Urgency
from penstock.priority.routing.state import Load
from penstock.priority.shares import COST_HIT, output_cost, prompt_cost
from penstock.priority.steptime import StepTimeModel
from penstock.priority.tenants import Demands, charges, demands
from penstock.priority.turns import aged, due_before, lines_in_turn, next_of
from penstock.priority.verdict import Forecast, Refusal
from penstock.priority.waiting import Account, LaneLine, Size, Stage, Ticket, microseconds
from penstock.priority.yielding import MAX_VICTIMS, yielding

AGED_PART = 4
"""One token in this many may go to requests that were passed over for too long."""
_AGED_MOST_TOKENS = 2_048


class LaneQueue:
    """Lanes, tenants and deadlines. With admission, only requests whose promise can be kept are let in."""

    def __init__(
        self,
        lock: AbstractContextManager[object],
        policies: Mapping[Lane, LanePolicy] = DEFAULT_POLICIES,
        *,
        weights: Mapping[str, int] | None = None,
        model: StepTimeModel | None = None,
        promises: bool = True,
    ) -> None:
        """`weights` of tenants, 1 where missing. Without `promises` nobody is refused for being late."""
        self._lock = lock
        self._weights = dict(weights or {})
        self._promises = promises
        self._lanes = {lane: LaneLine(lane, policies[lane]) for lane in Lane}
        self._tickets: dict[str, Ticket] = {}
        self._num_let_in = 0
        self._aged_tokens = _AGED_MOST_TOKENS
        """The tokens that may still be spent on requests that were passed over for too long."""
        self._now_us = 0
        self.admission = Admission(policies, model or StepTimeModel(), self._lanes, self._tickets)
        self._bounds = Bounds(self.admission, self._lanes, self._tickets)

    # The event loop's side

    def put(self, request: Request, now: float, num_cached: int = 0, num_in_use: int = 0) -> Forecast | None:
        """Admits a request and reserves its place, in one operation.

        Args:
            num_cached: prompt tokens that are likely to be found in the prefix cache.
            num_in_use: prompt tokens of these whose KV running sequences hold.

        Returns:
            When its first token is expected; None if too little was measured to say.

        Raises:
            Refusal: a bound is reached, or the lane's promise cannot be kept.
        """
        with self._lock:
            return self._put([request], now, [(num_cached, num_in_use)])

    def put_all(
        self, requests: ListLike[Request], now: float, cached: ListLike[tuple[int, int]]
    ) -> tuple[ListLike[Request], Forecast | None]:
        """Admits the requests of one reply to one lane, or none of them; errors are those of `put`.

        Args:
            cached: for each, `num_cached` and `num_in_use` of `put`.

        Returns:
            The requests as they were let in, which is in the lane that they try first or in their own; and the forecast
            of the last one's first token.
        """
        first = [replace(one, lane=one.tried_lane) for one in requests if one.tried_lane is not None]
        with self._lock:
            if first and self.admission.can_forecast:
                with suppress(Refusal):
                    return first, self._put(first, now, cached)
            return requests, self._put(requests, now, cached)

    def readmit(self, request: Request, now: float) -> None:
        """Admits a request that an earlier process had admitted, without checking bounds and promises again."""
        with self._lock:
            line, account = self._account(request, now)
            self._enter(line, account, [self._ticket(line, account, request)], now)

    def check_open(
        self, urgency: Urgency, tenant: str, arrival_s: float, now: float, most_tokens: int
    ) -> None:
        """Refuses a request that `put` would refuse whatever its prompt, before any work is spent on it.

        Args:
            most_tokens: the prompt has no more of them.

        Raises:
            Refusal: the lane, or the tenant's part of it, is full, or even a prompt of one token would come too late.
        """
        with self._lock:
            line = self._lanes[urgency.lane]
            account = line.accounts.get(tenant)
            self._bounds.check_places(line, account, 1, now)
            if account is not None and line.is_late:
                forecast = self.admission.forecast(
                    account, Size.of(1), now, num_promised=most_tokens, ttft_s=urgency.ttft_s
                )
                if forecast is not None:
                    self._check_promise(line, forecast, max(0.0, now - arrival_s))

    def cancel(self, request_id: str) -> bool:
        """True if the request was still waiting here; then it is gone and the engine never sees it."""
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is None or ticket.stage is not Stage.WAITING:
                return False
            self._leave(ticket)
            return True

    def expire(self, now: float) -> list[Request]:
        """Removes and returns the requests that have waited longer than their lane allows."""
        with self._lock:
            self._now_us = max(self._now_us, microseconds(now))
            self.admission.note_late_ones(now)
            overdue = [
                ticket
                for line in self._lanes.values()
                for ticket in line.waiting()
                if now - ticket.request.arrival_s > max(line.policy.ttl_s, ticket.request.ttft_s or 0.0)
            ]
            for ticket in overdue:
                self._leave(ticket)
            for line in self._lanes.values():
                line.forget_idle(self._now_us)
            return [ticket.request for ticket in overdue]

    def depths(self) -> dict[Lane, int]:
        """Requests that wait, by lane."""
        with self._lock:
            return {lane: line.num_requests for lane, line in self._lanes.items()}

    def predict(self, lane: Lane, num_tokens: int, now: float) -> Forecast | None:
        """Returns the forecast for a new tenant's prompt of so many tokens; None while too little was measured."""
        with self._lock:
            return self.admission.newcomer(self._lanes[lane], num_tokens, now)

    def coverage(self) -> dict[Lane, Coverage]:
        """Returns how many promises were kept in the lanes that promise something."""
        with self._lock:
            promising = (line for line in self._lanes.values() if isfinite(line.policy.ttft_s))
            return {line.lane: replace(line.coverage) for line in promising}

    def position(self, request_id: str) -> int | None:
        """Returns the number of requests of its lane with an earlier deadline; None if it does not wait here."""
        with self._lock:
            ticket = self._tickets.get(request_id)
            if ticket is None or ticket.stage is not Stage.WAITING:
                return None
            return bisect_left(ticket.account.lane.tickets, (ticket.key,))

    def tenants(self) -> dict[str, int]:
        """Returns each tenant's charges over all lanes, in 2048ths of a prompt token."""
        with self._lock:
            return charges(self._lanes.values())

    def demands(self, now: float) -> Demands:
        """Returns what each tenant has of the machine, or wants of it."""
        with self._lock:
            return demands(self._lanes.values(), now)

    def set_weights(self, weights: Mapping[str, int]) -> None:
        """Sets the weights of tenants, 1 where missing; earlier charges stay."""
        with self._lock:
            self._weights = dict(weights)
            for line in self._lanes.values():
                line.set_weights(weights)

    def load(self, now: float, *, num_free_kv: int, is_draining: bool = False) -> Load:
        """Returns the load of this queue and its engine, for routers, given the free tokens of the KV pool."""
        with self._lock:
            return self.admission.load(now, num_free_kv, is_draining=is_draining)

    def step_model(self) -> dict[str, float]:
        """The fitted coefficients of the step time."""
        with self._lock:
            return self.admission.model.as_dict()

    # The engine's side

    def allowance(
        self, running: list[Sequence], decodes: list[Sequence], chunked: list[Sequence]
    ) -> Allowance:
        with self._lock:
            return self.admission.allowance(running, decodes, chunked, self._now_us / 1e6)

    def take(
        self, fits: Callable[[Request], bool], above: int | None = None, before: Request | None = None
    ) -> Request | None:
        """Checks whether a request fits without the lock, because that can take milliseconds."""
        while True:
            with self._lock:
                aged = self._aged() if above is None else None
                candidates = [next_of(line) for line in lines_in_turn(self._lanes.values(), above)]
                if before is not None and before.lane == above:
                    candidates += due_before(self._tickets.get(before.request_id))
            if aged is not None:
                candidates.insert(0, aged)
            chosen = next((ticket for ticket in candidates if fits(ticket.request)), None)
            if chosen is None:
                return None
            with self._lock:
                if self._tickets.get(chosen.request.request_id) is chosen:  # else it was cancelled meanwhile
                    self._aged_tokens -= chosen.size.num_uncached if chosen is aged else 0
                    return self._dispatch(chosen)

    def passed_over(self) -> Request | None:
        with self._lock:
            aged = self.admission.passed_over = self._aged()
            return None if aged is None else aged.request

    def charge(self, work: list[tuple[Request, int, int, int]], now: float) -> None:
        with self._lock:
            self._now_us = max(self._now_us, microseconds(now))
            self.admission.step_began_s = now
            outputs: dict[Account, int] = {}
            tickets, prefilling = self._tickets, Stage.PREFILLING
            for request, num_prompt, num_output, num_known in work:
                ticket = tickets.get(request.request_id)
                if ticket is None:
                    continue
                if ticket.stage is prefilling:
                    self._note_prefill(ticket, num_prompt, num_output, now)
                if num_output:
                    cost = output_cost(num_known - num_output, num_known)
                    outputs[ticket.account] = outputs.get(ticket.account, 0) + cost
            for account, cost in outputs.items():
                account.charge(cost, self._now_us)

    def observe(self, load: StepLoad) -> None:
        with self._lock:
            self.admission.observe(load)

    def step_seconds(self, num_prefill: int, num_decode: int, num_context: int, num_attended: int) -> float:
        model = self.admission.model
        return model.seconds(num_prefill, num_decode, num_context, num_attended) if model.is_known else 0.0

    def settle(self, request: Request, now: float, sequence: Sequence | None = None) -> None:
        with self._lock:
            ticket = self._tickets.get(request.request_id)
            if ticket is None:
                return
            ticket.choices_left -= 1
            if sequence is not None and not request.branches:
                self.admission.note_ended(ticket, sequence)
            if not ticket.choices_left:
                self._end(ticket, now)

    def victim(self, running: list[Sequence], beneficiary: Sequence) -> Sequence | None:
        """Chooses from strictly lower lanes, cheapest recompute first; else the newest of the lowest lane."""
        if lower := yielding(running, beneficiary.request.lane):
            return lower[0]
        return max(running, key=lambda s: (s.request.lane, s.order, -s.num_computed, s.index), default=None)

    def giving_way(self, request: Request, running: list[Sequence]) -> list[Sequence]:
        return yielding(running, request.lane)[:MAX_VICTIMS]

    # Letting in

    def _put(
        self, requests: ListLike[Request], now: float, cached: ListLike[tuple[int, int]]
    ) -> Forecast | None:
        """Admits requests that one reply needs, or none, by one forecast: that of the last one's first token."""
        line, account = self._account(requests[0], now)
        tickets = [
            self._ticket(line, account, request, *found)
            for request, found in zip(requests, cached, strict=True)
        ]
        self._bounds.check(line, account, tickets, now)
        *others, last = tickets
        if others:
            self._enter(line, account, others, now)
        num_tokens = sum(ticket.size.num_uncached for ticket in tickets) if others else None
        try:
            forecast = self._promise(line, last, now, num_tokens)
        except Refusal:
            for ticket in others:
                self._leave(ticket)
            raise
        self._enter(line, account, [last], now)
        return forecast

    def _account(self, request: Request, now: float) -> tuple[LaneLine, Account]:
        """Returns the lane of a request that comes now, and its tenant's account there."""
        line = self._lanes[Lane(request.lane)]
        self._now_us = max(self._now_us, microseconds(now))
        return line, line.account(request.tenant, self._weights.get(request.tenant, 1))

    def _ticket(
        self, line: LaneLine, account: Account, request: Request, num_cached: int = 0, num_in_use: int = 0
    ) -> Ticket:
        self._num_let_in += 1
        num_seats = 1 if request.beams is None else request.n
        size = Size.of(request.num_prompt_tokens, num_cached, num_in_use, num_seats, request.keeping)
        work = size.work(self.admission.model.attended_each)
        due_s = request.ttft_s or self.admission.planner.due_s(line.lane, work)
        deadline_us = microseconds(request.arrival_s + due_s)
        return Ticket(request, account, num_cached, size, deadline_us, self._num_let_in)

    def _promise(
        self, line: LaneLine, ticket: Ticket, now: float, num_promised: int | None
    ) -> Forecast | None:
        """Promises a request its first token, if the forecast allows it.

        Raises:
            Refusal: it does not.
        """
        ttft_s = ticket.request.ttft_s
        forecast = self.admission.forecast(
            ticket.account, ticket.size, now, num_promised=num_promised, ttft_s=ttft_s
        )
        ticket.allowed_s = ttft_s or line.policy.ttft_s
        if forecast is not None:
            waited_s = max(0.0, now - ticket.request.arrival_s)
            self._check_promise(line, forecast, waited_s)
            ticket.forecast_s, ticket.allowed_s = waited_s + forecast.raw_s, forecast.allowed_s
            ticket.is_near = waited_s + forecast.late_s >= NEAR * forecast.allowed_s
        return forecast

    def _check_promise(self, line: LaneLine, forecast: Forecast, waited_s: float) -> None:
        """Refuses a request that would come too late: one in a hundred that are let in may."""
        seconds = waited_s + forecast.late_s
        line.is_late = self._promises and seconds > forecast.allowed_s
        if line.is_late:
            coverage, left_s = line.coverage, forecast.allowed_s - waited_s
            coverage.num_needless += coverage.border.share_within(left_s / forecast.raw_s, line.ratios)
            raise Refusal(
                "promise_out_of_reach",
                f"the first token could take {seconds:.2f} s; "
                f"the {line.lane.label} lane promises {forecast.allowed_s:.2f} s",
                seconds - forecast.allowed_s,
            )

    def _enter(self, line: LaneLine, account: Account, tickets: list[Ticket], now: float) -> None:
        if not account.num_open:
            account.share.join(line.floor, self._now_us)
        elif not account.tickets:
            account.share.clock = max(account.share.clock, line.floor)
        if not line.num_requests and not line.num_running:
            line.share.join(self._lane_floor(line), self._now_us)
        elif not line.num_requests:
            line.share.clock = max(line.share.clock, self._lane_floor(line))
        line.entered_s = now
        account.num_open += len(tickets)
        attended_each = self.admission.model.attended_each
        work = sum(ticket.size.work(attended_each) for ticket in tickets)
        account.arrivals.add(work, now)
        line.arrivals.add(work, now)
        line.add(account, tickets)
        for ticket in tickets:
            self._tickets[ticket.request.request_id] = ticket

    def _lane_floor(self, line: LaneLine) -> int:
        others = (other for other in self._lanes.values() if other is not line)
        busy = [other.share.clock for other in others if other.num_requests or other.num_running]
        return min(busy, default=line.share.clock)

    def _leave(self, ticket: Ticket) -> None:
        ticket.account.lane.remove(ticket)
        del self._tickets[ticket.request.request_id]
        self._close(ticket.account)

    def _end(self, ticket: Ticket, now: float) -> None:
        request, account, line = ticket.request, ticket.account, ticket.account.lane
        del self._tickets[request.request_id]
        if request.branches and not ticket.num_prefill_left:  # it is answered with its last branch
            self._note_prefill(ticket, 0, 1, now)
        line.note_left(ticket, -1)
        if ticket.stage is Stage.PREFILLING:  # what was not computed is given back
            rest = prompt_cost(min(ticket.num_computed, ticket.num_charged), ticket.num_charged)
            account.charge(-rest, self._now_us)
        line.num_running -= 1
        self._close(account)
        self.admission.note_finished(now)

    def _close(self, account: Account) -> None:
        account.num_open -= 1
        if not account.num_open:
            account.share.idle_since_us = self._now_us
        line = account.lane
        if not line.num_requests and not line.num_running:
            line.share.idle_since_us = self._now_us

    # Taken and served

    def _aged(self) -> Ticket | None:
        return aged(self._lanes.values(), self._now_us) if self._aged_tokens > 0 else None

    def _dispatch(self, ticket: Ticket) -> Request:
        line = ticket.account.lane
        line.remove(ticket)
        line.num_running += 1
        line.last_clock = ticket.account.share.clock
        ticket.account.served_us = self._now_us
        ticket.stage = Stage.PREFILLING
        ticket.num_charged = ticket.num_prompt
        line.note_left(ticket, 1)
        self._aged_tokens = min(_AGED_MOST_TOKENS, self._aged_tokens + ticket.size.num_uncached // AGED_PART)
        ticket.account.charge(prompt_cost(0, ticket.num_charged), self._now_us)
        return ticket.request

    def _note_prefill(self, ticket: Ticket, num_prompt: int, num_output: int, now: float) -> None:
        line = ticket.account.lane
        line.note_left(ticket, -1)
        ticket.num_computed += num_prompt
        if num_output:
            ticket.stage = Stage.DECODING
            num_hits = max(0, ticket.num_charged - ticket.num_computed)
            ticket.account.charge(COST_HIT * num_hits - prompt_cost(0, num_hits), self._now_us)
            self.admission.note_first_token(ticket, now)
        line.note_left(ticket, 1)
