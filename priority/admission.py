"""Admission: when would a request's first token come, and is that soon enough?

Two estimates, and the later one counts. The snapshot adds up the prefill work that goes before the request by the rules
of `queue`, and what other tenants, by the rates at which they send, will have brought before it meanwhile. The share
looks further ahead: it divides the machine among all tenants by those rates, max-min fair, because those who keep
sending will also be served while this request waits. To this come the steps that can compute no prompt until KV and a
seat are free, and the rest of the step that runs. What is left of error is learnt: how late the first tokens of the
tenant, and of its lane, came by their forecasts. Predicting before admitting follows Mooncake (Qin et al., FAST 2025).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from collections.abc import Sequence as ListLike
from heapq import merge
from itertools import islice
from math import inf

from penstock.engine.planning.request import FinishReason, Sequence
from penstock.engine.planning.request_queue import Allowance, StepLoad
from penstock.priority.flows import fair_part, seconds_to_catch_up
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.outlook import Outlook
from penstock.priority.pacing import StepPlanner, Streams
from penstock.priority.rates import Rate
from penstock.priority.ratios import LATE, TOLD
from penstock.priority.rivals import Rival, arrivals_of, level, rivals_of
from penstock.priority.room import MOST_AHEAD, Ending, Held, Need, grouped
from penstock.priority.routing.state import Load
from penstock.priority.steptime import NAMES, StepTimeModel
from penstock.priority.turns import lead, overtaken
from penstock.priority.verdict import Forecast
from penstock.priority.waiting import Account, LaneLine, Size, Ticket, microseconds
from penstock.priority.yielding import yielding

_LEARNING = 0.04
REMEMBERED_S = 0.125
"""A forecast is computed anew when nothing has changed for so long, as the rates at which tenants send fade."""
_BLOCK_TOKENS = 16
"""About the KV that is left free for each fourth of the running sequences, any of which may need a block."""


class Admission:
    """The observed behaviour of the engine, and the forecasts that follow from it."""

    def __init__(
        self,
        policies: Mapping[Lane, LanePolicy],
        model: StepTimeModel,
        lanes: Mapping[Lane, LaneLine],
        tickets: Mapping[str, Ticket],
    ) -> None:
        """`lanes` and `tickets`, by request id, are those of the queue."""
        self.model = model
        self.planner = StepPlanner(policies, model)
        self.running: list[Sequence] = []
        """The running sequences of the scheduler, which changes the list in its own thread."""
        self._lanes = lanes
        self._tickets = tickets
        self._load: StepLoad | None = None
        self.last_step_s = 0.0
        self.step_began_s = -inf
        """The time at which the last step ended and the running one began; the simulator may set one in the future."""
        self.context_each = 0.0
        """KV tokens of a running stream, as it was seen last."""
        self._length = 128.0
        """Tokens of an answer, of late."""
        self._tokens_each = 1.0
        """Tokens that a step brings for one, of late."""
        self._num_prefill = 1
        """Prompt tokens that the last step was allowed."""
        self._held: Held | None = None
        """The cached result of `held` since the last step."""
        self._yielding: dict[Lane, int] = {}
        """The number of running sequences that may give way to each lane, since the last step."""
        self._waits: dict[tuple[Lane, str, Need, float, int], float] = {}
        """What `_wait_s` returned since anything changed."""
        self._num_changes = 0
        """Of the lanes, when these were computed."""
        self.passed_over: Ticket | None = None
        """The request that waits for too long and that others leave room for."""
        self._finished = Rate()

    # What is seen

    def observe(self, load: StepLoad) -> None:
        """Takes the measured load of a step."""
        self._load, self._held = load, None
        self._yielding.clear()
        self._waits.clear()
        shape = load.num_prefill_tokens, load.num_decode_tokens, load.num_context_tokens
        self.model.observe(*shape, load.duration_s, load.num_attended)
        self.last_step_s = self.model.seconds(*shape, load.num_attended)
        num_streams = load.num_decode_tokens - load.num_drafts
        if num_streams > 0 and not load.num_prefill_tokens:
            self.context_each = load.num_context_tokens / num_streams
        if num_streams > 0:
            self._tokens_each += _LEARNING * (1 + load.num_accepted / num_streams - self._tokens_each)

    def note_ended(self, ticket: Ticket, sequence: Sequence) -> None:
        """Learns from how long an answer has become."""
        is_whole, sampling = sequence.finish_reason is FinishReason.STOP, sequence.request.sampling
        bounds = max(1, sampling.max_tokens), sampling.num_thinking
        for lengths in (ticket.account.lengths, ticket.account.lane.lengths):
            lengths.add(sequence.num_output_tokens, *bounds, is_whole=is_whole)
        self._length += _LEARNING * (sequence.num_output_tokens - self._length)

    def note_finished(self, now: float) -> None:
        """Counts a request of which all choices ended."""
        self._finished.add(1, now)

    def note_first_token(self, ticket: Ticket, now: float) -> None:
        """Learns from how a forecast came out."""
        taken_s = now - ticket.request.arrival_s
        if ticket.forecast_s:
            ratio = taken_s / ticket.forecast_s
            ticket.account.ratios.add(ratio)
            ticket.account.lane.ratios.add(ratio)
            if ticket.is_near:
                ticket.account.lane.coverage.border.add(ratio)
        ticket.note_late(now)
        if ticket.allowed_s < inf:
            ticket.account.lane.coverage.note(ticket.account.margin, is_kept=True)

    def note_late_ones(self, now: float) -> None:
        """Counts the broken promises of requests that still wait."""
        for line in self._lanes.values():
            for ticket in line.waiting():
                ticket.note_late(now)

    @property
    def can_forecast(self) -> bool:
        """Whether enough was measured for forecasts."""
        return self.model.is_known and self._load is not None

    def finish_rate(self, now: float) -> float:
        """Returns how many requests end per second."""
        return self._finished.per_second(now)

    def load(self, now: float, num_free_kv: int, *, is_draining: bool) -> Load:
        """Returns the load of the queue and its engine, for routers."""
        model, held = self.model, self.held()
        return Load(
            lanes={lane: line.lane_work(now, model.attended_each) for lane, line in self._lanes.items()},
            coefficients=tuple(model.coefficients[: len(NAMES)] if model.is_known else (0.0,) * len(NAMES)),
            num_free_kv=num_free_kv,
            held=held,
            context_each=self.context_each,
            step_s=self.last_step_s if held.num_running else 0.0,
            is_draining=is_draining,
            experts_s=model.experts_s,
            chosen_share=model.chosen_share,
        )

    # The step

    def allowance(
        self, running: list[Sequence], decodes: list[Sequence], chunked: list[Sequence], now: float
    ) -> Allowance:
        """Returns the allowance of a step with these sequences, some decoding and some with longer chunks."""
        self.running = running
        self._waits.clear()
        lanes = [sequence.request.lane for sequence in decodes]
        num_context = sum([len(sequence.token_ids) - sequence.num_dropped for sequence in decodes])
        by_lane = {lane: num for lane in Lane if (num := lanes.count(lane))}
        if decodes and chunked:  # what the step reads is not that of streams alone
            self.context_each = num_context / len(decodes)
        allowance = self.planner.allowance(Streams(by_lane, num_context), self._lively(now))
        self._num_prefill = allowance.num_prefill
        return allowance

    def _lively(self, now: float, *more: Lane) -> set[Lane]:
        """Returns the lanes in which requests are to be expected."""
        return {line.lane for line in self._lanes.values() if line.is_lively(now)}.union(more)

    # The forecast

    def promised_s(self, lane: Lane, num_tokens: int) -> float | None:
        """Returns the seconds to the first token that a lane promises to a prompt of so many tokens.

        None if it promises none, or while too little was measured.
        """
        if not self.model.is_known or self._load is None:
            return None
        work = Size.of(num_tokens).work(self.model.attended_each)
        promised_s = self.planner.allowed_s(lane, work, self._load.max_batch_tokens)
        return promised_s if promised_s < inf else None

    def forecast(
        self,
        account: Account,
        size: Size,
        now: float,
        *,
        num_promised: int | None = None,
        ttft_s: float | None = None,
    ) -> Forecast | None:
        """Returns the forecast for a request that would be let in now; None while too little was measured.

        Args:
            num_promised: prompt tokens for which it is allowed its time, if not those to compute.
            ttft_s: the seconds that are promised to it, if not those of its lane.
        """
        load = self._load
        if not self.model.is_known or load is None:
            return None
        lane, each = account.lane, self.model.attended_each
        own = Need(size.work(each), size.num_kv, size.num_seats, self._spare(lane, load))
        raw_s = self._raw_s(account, own, load, now, ttft_s)
        told, late = (account.ratios.quantile(part, lane.ratios) for part in (TOLD, LATE))
        late *= lane.coverage.margin_of(account.margin)
        promised = own.work if num_promised is None else Size.of(num_promised).work(each)
        allowed_s = ttft_s or self.planner.allowed_s(lane.lane, promised, load.max_batch_tokens, late)
        return Forecast(raw_s * told, raw_s * late, raw_s, allowed_s)

    def newcomer(self, line: LaneLine, num_prompt: int, now: float) -> Forecast | None:
        """Returns the forecast for a new tenant's request with so many uncached tokens."""
        return self.forecast(Account("", 1, line), Size.of(num_prompt), now)

    def _raw_s(self, account: Account, own: Need, load: StepLoad, now: float, ttft_s: float | None) -> float:
        """Returns the time to the first token, without corrections learnt from earlier forecasts."""
        num_changes = sum([line.num_changes for line in self._lanes.values()])
        if num_changes != self._num_changes:
            self._waits.clear()
            self._num_changes = num_changes
        due_s = ttft_s or self.planner.due_s(account.lane.lane, own.work)
        key = account.lane.lane, account.tenant, own, due_s, int(now / REMEMBERED_S)
        if key not in self._waits:
            self._waits[key] = self._wait_s(account, own, due_s, load, now)
        # The step that runs has to end first.
        return self._waits[key] + (self._left_s(now) if self.running else 0.0)

    def _wait_s(self, account: Account, own: Need, due_s: float, load: StepLoad, now: float) -> float:
        """Returns the time from the end of the step that runs to the first token."""
        deadline_us, each = microseconds(now + due_s), self.model.attended_each
        running = filter(None, [self._tickets.get(one.request.request_id) for one in self.running])
        outlook = self._outlook(account.lane, load, now, overtaken(account, deadline_us, running, each))
        rate, mine = outlook.pace.tokens_per_second, account.work_by(deadline_us, each) + own.work
        rivals = rivals_of(account, mine, each)
        work = outlook.work(mine, ((rival.waiting, rival.due) for rival in rivals))
        known_s = outlook.seconds_for(work) + self._idle_s(outlook, account, load, rivals, own)
        arrivals = arrivals_of(account, rivals, now, known_s)
        overtakers = [
            (rival.due - rival.waiting, sent) for rival, sent in zip(rivals, arrivals, strict=True)
        ] + self._urgent(account.lane, level(mine, rivals), now, known_s)
        contenders = [(sent, rival.weight) for rival, sent in zip(rivals, arrivals, strict=True)]
        left = self._left_for(account.lane, rate, now, known_s)
        share = max(fair_part(left, account.share.weight, contenders), 1e-9)
        return max(
            seconds_to_catch_up(known_s * rate, rate, overtakers),
            (outlook.running + mine) / share + outlook.pace.fixed_s,
        )

    def _urgent(
        self, lane: LaneLine, lane_work: float, now: float, ahead_s: float
    ) -> list[tuple[float, float]]:
        """Returns, for each more urgent lane, what is due to it beyond what waits there, and what it sends per second.

        Args:
            lane_work: the lane's own work before the request's first token.
        """
        return [
            (
                line.share.weight / lane.share.weight * lane_work
                + lead(line, lane)
                - line.work(self.model.attended_each),
                line.arrivals.per_second(now, ahead_s),
            )
            for line in self._lanes.values()
            if line.lane < lane.lane
        ]

    def _outlook(self, lane: LaneLine, load: StepLoad, now: float, overtaken: float) -> Outlook:
        lanes, each = self._lanes.values(), self.model.attended_each
        pace = self.planner.pace(self._streams(), self._lively(now, lane.lane), load.max_batch_tokens)
        last = self._last_before(lane)
        preempted = sum(num for other, num in load.preempted if other <= last)
        return Outlook(
            pace=pace,
            running=preempted + sum(line.work_left(each) for line in lanes if line.lane <= last) - overtaken,
            urgent=sum(line.work(each) for line in lanes if line.lane < lane.lane),
            lower=[
                self._lower(line, lane, load, is_before=line.lane <= last)
                for line in lanes
                if line.lane > lane.lane and (line.num_tokens or line.num_prefill_left)
            ],
            held=self.held(),
            num_yielding=self._num_yielding(lane.lane) if last is lane.lane else 0,
        )

    def _num_yielding(self, lane: Lane) -> int:
        if lane not in self._yielding:
            self._yielding[lane] = len(yielding(list(self.running), lane))
        return self._yielding[lane]

    def _streams(self) -> Streams:
        decodes = {line.lane: line.num_running for line in self._lanes.values() if line.num_running}
        return Streams(decodes, int(self.context_each * sum(decodes.values())))

    def _lower(
        self, line: LaneLine, lane: LaneLine, load: StepLoad, *, is_before: bool
    ) -> tuple[float, float, float]:
        """Returns the entry of `Outlook.lower` for a less urgent lane, whose running prompts may be counted already."""
        each = self.model.attended_each
        waiting = line.work(each) * self._starts(line, load) + line.work_left(each) * (not is_before)
        return waiting, line.share.weight / lane.share.weight, lead(line, lane)

    def _last_before(self, lane: LaneLine) -> Lane:
        """Returns the least urgent lane whose running prompts go before a request of this lane.

        While it is the turn of a less urgent lane, that are also the prompts of this one.
        """
        return max(line.lane for line in self._lanes.values() if line is lane or lead(line, lane) > 0)

    def _left_s(self, now: float) -> float:
        """Returns the time to the end of the step that runs, if it takes as long as the last one."""
        if now < self.step_began_s:
            return self.step_began_s - now
        return max(0.0, self.last_step_s - (now - self.step_began_s))

    def _left_for(self, lane: LaneLine, rate: float, now: float, ahead_s: float) -> float:
        """Returns the part of the prefill rate that more urgent lanes leave to a lane, at least its own share."""
        lanes = self._lanes.values()
        urgent = [line.arrivals.per_second(now, ahead_s) for line in lanes if line.lane < lane.lane]
        busy = [line for line in lanes if line is lane or line.num_requests or line.num_running]
        own = rate * lane.share.weight / sum(line.share.weight for line in busy)
        return max(rate - sum(urgent), own)

    # The wait for room

    def _idle_s(
        self, outlook: Outlook, account: Account, load: StepLoad, rivals: ListLike[Rival], own: Need
    ) -> float:
        """Returns the time for which there is no KV or no seat."""
        preempted = self._preempted(load, self._last_before(account.lane))
        free_seats = load.max_num_seqs - load.num_running
        if self._has_room(preempted, own, load.num_free_tokens, free_seats):
            return 0.0
        first = merge(*self._before(account, load, rivals), key=lambda ticket: ticket.key)
        each = self.model.attended_each
        ahead = [
            ticket.need(each, self._spare(ticket.account.lane, load)) for ticket in islice(first, MOST_AHEAD)
        ]
        num_ahead = len(preempted) + self._num_before(account, rivals)
        return outlook.idle_s(load.num_free_tokens, free_seats, [*preempted, *ahead], own, num_ahead)

    def _has_room(self, preempted: ListLike[Need], own: Need, free_kv: float, free_seats: float) -> bool:
        """Returns whether there is room for all that wait in any lane, and for the request."""
        lines = self._lanes.values()
        num_kv = sum([line.num_kv + line.num_growth / 2 for line in lines]) + own.num_kv + own.spare
        num_seats = sum([line.num_choices for line in lines]) + own.num_seats
        return (
            num_kv + sum([need.num_kv for need in preempted]) <= free_kv
            and num_seats + len(preempted) <= free_seats
        )

    def _preempted(self, load: StepLoad, last: Lane) -> list[Need]:
        """Returns the needs of these lanes' preempted sequences."""
        return [
            Need(num, num, 1, self._spare(self._lanes[Lane(other)], load))
            for other, num in load.preempted
            if other <= last
        ]

    def _num_before(self, account: Account, rivals: ListLike[Rival]) -> float:
        """Returns how many waiting requests of the lane and of more urgent ones go before the request."""
        lane = account.lane
        urgent = [line for line in self._lanes.values() if line.lane < lane.lane]
        return sum(line.num_requests for line in (*urgent, account)) + sum(
            rival.num_requests * min(1.0, rival.due / rival.waiting) for rival in rivals if rival.waiting
        )

    def _before(
        self, account: Account, load: StepLoad, rivals: ListLike[Rival]
    ) -> Iterator[Iterator[Ticket]]:
        """Yields, each in order, the waiting requests that go before a request of this tenant."""
        lane, each, lines = account.lane, self.model.attended_each, self._lanes.values()
        for line in lines:
            if line.lane < lane.lane:
                yield line.waiting()
        yield (ticket for _, ticket in account.tickets)
        for rival in rivals:
            if rival.account is not None:
                yield rival.account.first(rival.due, each)
        so_far = level(account.work(each), rivals)
        for line in lines:
            if line.lane > lane.lane and self._starts(line, load):
                due = line.share.weight / lane.share.weight * so_far + lead(line, lane)
                yield line.first(due, each)

    def _starts(self, line: LaneLine, load: StepLoad) -> bool:
        """Returns whether there is room for the lane's next request; if not, more urgent ones go before it."""
        if not line.tickets:
            return False
        return line.tickets[0][1].size.num_kv + self._spare(line, load) <= load.num_free_tokens

    def _spare(self, lane: LaneLine, load: StepLoad) -> float:
        """Returns the tokens of KV that a request of the lane leaves free when it starts."""
        if not load.num_running:
            return 0.0
        kept, passed_over = 0.0, self.passed_over
        if passed_over is not None:
            kept = passed_over.size.num_kv
            if lane.lane < passed_over.account.lane.lane:
                kept = min(kept, load.num_kv_tokens // 2)
        kept += _BLOCK_TOKENS * (1 + load.num_running // 4)
        return max(kept, (1.0 - lane.policy.kv_share) * load.num_kv_tokens)

    def held(self) -> Held:
        """Returns the KV and seats that running sequences hold."""
        if self._held is None:
            self._held = self._count_held(list(self.running))
        return self._held

    def _count_held(self, running: list[Sequence]) -> Held:
        endings, prompts = list[Ending](), set[str]()
        for sequence in running:
            # What another choice has counted is the prompt that they share.
            is_counted = sequence.request.request_id in prompts
            prompts.add(sequence.request.request_id)
            num_kept = min(len(sequence.token_ids), sequence.num_findable)
            num_kv = min(num_kept, sequence.num_output_tokens) if is_counted else num_kept
            endings.append((self._steps_left(sequence), float(num_kv), 1.0))
        load, num_kv = self._load, int(sum(ending[1] for ending in endings))
        num_held = num_kv
        if load is not None and load.num_kv_tokens:
            num_held = min(num_kv, load.num_kv_tokens - load.num_free_tokens)
        scale = num_held / max(1, num_kv)  # prefixes that several requests share are held once
        return Held(
            num_running=len(running),
            num_kv=num_held,
            endings=grouped([(at, scale * kv, seats) for at, kv, seats in endings]),
            growth=self._tokens_each,
            life_steps=self._length / self._tokens_each,
        )

    def _steps_left(self, sequence: Sequence) -> float:
        """Returns the number of steps after which a running sequence is expected to have ended."""
        num_output, request = sequence.num_output_tokens, sequence.request
        limit = sequence.max_len - sequence.num_prompt_tokens
        num_left: float = limit - num_output
        if (ticket := self._tickets.get(request.request_id)) is not None:
            num_left = ticket.account.left(num_output, limit, request.sampling.num_thinking)
        return num_left / self._tokens_each + max(0, sequence.num_remaining - 1) / self._num_prefill
