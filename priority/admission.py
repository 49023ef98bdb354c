"""Admission: when would a request's first token come, and is that soon enough?

Two estimates, and the later one counts. The snapshot adds up the prefill work that goes before the request by the rules
of `queue`, and what other tenants, by the rates at which they send, will have brought before it meanwhile. The share
looks further ahead: it divides the machine among all tenants by those rates, max-min fair, because those who keep
sending will also be served while this request waits. To this come the time until KV and a seat are free, and the step
that runs. What is left of error is learnt: a factor per tenant and lane that makes 19 forecasts in twenty come true.
Predicting before admitting follows Mooncake (Qin et al., FAST 2025).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from math import inf, isfinite

from engine.planning.request import Sequence
from engine.planning.step import UNLIMITED, Allowance, StepLoad
from priority.lanes import Lane, LanePolicy
from priority.rates import Rate
from priority.room import Held
from priority.shares import COST_PREFILL, virtual
from priority.steptime import StepTimeModel
from priority.waiting import Account, LaneLine, Ticket
from priority.yielding import MAX_VICTIMS, yielding

ALONE_SLACK = 1.5
"""A prompt so long that even alone it takes longer than the promise is let in if this times that can be kept."""
_QUANTILE = 0.95
_LEARNING = 0.04
_FACTORS = (0.5, 3.0)
_LANE_COUNTS_AS = 10
"""So many forecasts of a tenant's own weigh as much as what was learnt of its whole lane."""
_MARGIN = 0.9
"""Of a promise on the time per token, what a step is planned to take: the rest is for what lies between steps."""
_STEPS_PER_TTFT = 8
"""No step takes longer than this part of the promise on the first token, so that nobody who comes waits longer."""
_LEAST_PREFILL = 16
_GRAIN = 8
_CATCH_UP = 8
"""A stream without a promise decodes at least once in so many steps."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """When the first token is expected, in seconds from now."""

    seconds: float
    """With the learnt factor: 19 in 20 come sooner."""
    raw_s: float
    """Without it."""
    allowed_s: float
    """What the lane promises; infinite, if nothing."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps that have so many prompt tokens at most, beside decodes that take the fixed part of their time."""

    num_prefill: int
    fixed_s: float
    each_s: float
    """Of a prompt token."""

    @property
    def tokens_per_second(self) -> float:
        """Prompt tokens, in full steps."""
        return self.num_prefill / (self.fixed_s + self.each_s * self.num_prefill)

    def seconds_for(self, num_tokens: float, *, is_filled: bool) -> float:
        """To the end of the step that has the last of these prompt tokens; others' may fill it."""
        num_full, rest = divmod(num_tokens, self.num_prefill)
        if rest and is_filled:
            num_full, rest = num_full + 1, 0.0
        last_s = self.fixed_s + self.each_s * rest if rest else 0.0
        return num_full * (self.fixed_s + self.each_s * self.num_prefill) + last_s


class Admission:
    """What the engine was seen to do, and what follows from it."""

    def __init__(self, policies: Mapping[Lane, LanePolicy], model: StepTimeModel) -> None:
        self.model = model
        self.policies = policies
        self.running: list[Sequence] = []
        """Those of the scheduler, which changes them in its own thread."""
        self._load: StepLoad | None = None
        self.last_step_s = 0.0
        self.step_began_s = -inf
        """When the last step came back, which is when the one that runs began. On the simulator it may be to come."""
        self.context_each = 0.0
        """KV tokens of a running stream, as it was seen last."""
        self._rows_each, self._tokens_each = 1.0, 1.0
        """What a step computes for a running stream, drafts included, and the tokens that this brings: of late."""
        self._finished = Rate()
        self._freed = Rate()
        """KV tokens given back."""

    # What is seen

    def observe(self, load: StepLoad) -> None:
        self._load = load
        shape = load.num_prefill_tokens, load.num_decode_tokens, load.num_context_tokens
        self.model.observe(*shape, load.duration_s)
        self.last_step_s = self.model.seconds(*shape)
        num_streams = load.num_decode_tokens - load.num_drafts
        if num_streams and not load.num_prefill_tokens:
            self.context_each = load.num_context_tokens / num_streams
            self._rows_each += _LEARNING * (1 + load.num_drafts / num_streams - self._rows_each)
            self._tokens_each += _LEARNING * (1 + load.num_accepted / num_streams - self._tokens_each)

    def note_finished(self, num_tokens: int, now: float) -> None:
        """A request ended and gave back the KV of so many tokens."""
        self._finished.add(1, now)
        self._freed.add(num_tokens, now)

    def note_first_token(self, ticket: Ticket, now: float) -> None:
        """Learns from how a forecast came out: the tenant's factor, and the lane's."""
        if ticket.forecast_s:
            ratio = (now - ticket.request.arrival_s) / ticket.forecast_s
            account = ticket.account
            account.factor = _closer(account.factor, ratio)
            account.num_learnt += 1
            account.lane.factor = _closer(account.lane.factor, ratio)

    def finish_rate(self, now: float) -> float:
        """Requests that end per second."""
        return self._finished.per_second(now)

    # The step

    def allowance(self, decodes: Mapping[Lane, int], num_context: int, lively: Iterable[Lane]) -> Allowance:
        """What a step may do.

        Args:
            decodes: running streams by lane.
            num_context: tokens of their KV.
            lively: lanes in which requests are to be expected.
        """
        if not self.model.is_known:
            return UNLIMITED
        num_decode = sum(decodes.values())
        alone_s = self.model.seconds(0, 1, num_context / max(1, num_decode))
        promised = (self.policies[lane].tpot_s for lane in decodes)
        # A promise that not even a single stream could be kept does not bind.
        tpot_s = min((s * _MARGIN for s in promised if s >= alone_s), default=inf)
        num_decode = self._num_decodes(decodes, num_decode, num_context, tpot_s)
        ttft_s = min((self.policies[lane].ttft_s for lane in lively), default=inf)
        alpha_s, beta_s = self.model.coefficients[:2]
        half_efficient = int(alpha_s / beta_s) if beta_s > 0 else 0
        num_prefill = min(
            self._num_prefill(tpot_s, num_decode, num_context, _LEAST_PREFILL),
            self._num_prefill(ttft_s / _STEPS_PER_TTFT, num_decode, num_context, half_efficient),
        )
        return Allowance(max(1, num_decode), max(num_prefill, _LEAST_PREFILL))

    def _num_decodes(
        self, decodes: Mapping[Lane, int], num_decode: int, num_context: int, tpot_s: float
    ) -> int:
        """All, unless the streams without a promise make the others miss theirs."""
        excess_s = self.model.seconds(0, num_decode, num_context) - tpot_s
        patient = sum(n for lane, n in decodes.items() if not isfinite(self.policies[lane].tpot_s))
        if excess_s <= 0 or not patient:
            return num_decode
        each_s = self.model.seconds(0, 1, num_context / num_decode) - self.model.seconds(0, 0, 0)
        too_many = int(excess_s / each_s) + 1 if each_s > 0 else patient
        return num_decode - min(too_many, patient - -(-patient // _CATCH_UP))

    def _num_prefill(self, cap_s: float, num_decode: int, num_context: int, least: int) -> int:
        """Prompt tokens that a step of `cap_s` has room for beside the decodes, and at least some."""
        fitting = self.model.prefill_within(cap_s, num_decode, num_context)
        return max(least, int(min(fitting, UNLIMITED.num_prefill)) // _GRAIN * _GRAIN)

    # The forecast

    def forecast(
        self,
        lanes: Mapping[Lane, LaneLine],
        account: Account,
        num_uncached: int,
        num_prompt: int,
        now: float,
        *,
        num_promised: int | None = None,
    ) -> Forecast | None:
        """For a request that would be let in now; None while too little was measured.

        Args:
            num_promised: prompt tokens for which it is allowed its time, if not those to compute.
        """
        load = self._load
        if not self.model.is_known or load is None:
            return None
        lane = account.lane
        num_decode = sum(line.num_running for line in lanes.values())
        num_context = int(self.context_each * num_decode)
        decodes = {line.lane: line.num_running for line in lanes.values() if line.num_running}
        lively = {line.lane for line in lanes.values() if line.is_lively(now)} | {lane.lane}
        pace = self.pace(decodes, num_context, lively, load.max_batch_tokens)
        ahead = self._ahead(lanes, account, num_uncached)
        share = self._share(lanes, account, pace.tokens_per_second, now)
        mine = account.num_tokens + num_uncached
        running = sum(line.num_prefill_left for line in lanes.values() if line.lane <= lane.lane)
        is_filled = any(
            line.num_tokens or line.num_prefill_left for line in lanes.values() if line.lane > lane.lane
        )
        known_s = pace.seconds_for(running + ahead, is_filled=is_filled)
        wait_s = max(
            self._with_overtakers(known_s, account, mine, pace.tokens_per_second, now),
            (running + mine) / share + pace.fixed_s,
        )
        # The step that runs has to end first.
        left_s = self._left_s(now) if num_decode else 0.0
        raw_s = left_s + wait_s + self._wait_for_room(lanes, account, load, ahead + num_prompt, now)
        seconds = raw_s * _factor(account)
        num_promised = num_uncached if num_promised is None else num_promised
        return Forecast(seconds, raw_s, self.allowed_s(lane.lane, num_promised, load.max_batch_tokens))

    def _left_s(self, now: float) -> float:
        """Seconds to the end of the step that runs, if it takes as long as the last one."""
        if now < self.step_began_s:
            return self.step_began_s - now
        return max(0.0, self.last_step_s - (now - self.step_began_s))

    def pace(
        self, decodes: Mapping[Lane, int], num_context: int, lively: Iterable[Lane], max_batch_tokens: int
    ) -> Pace:
        """How prompts are computed beside these decodes."""
        running, allowance = sum(decodes.values()), self.allowance(decodes, num_context, lively)
        num_decode = min(running, allowance.num_decodes)
        num_prefill = min(allowance.num_prefill, max(1, max_batch_tokens - num_decode))
        fixed_s = self.model.seconds(0, num_decode, num_context * num_decode / max(1, running))
        return Pace(num_prefill, max(1e-6, fixed_s), self.model.coefficients[1])

    def _ahead(self, lanes: Mapping[Lane, LaneLine], account: Account, num_uncached: int) -> float:
        """Prompt tokens computed before the request's last: its own, its tenant's, and what others may put before."""
        lane, mine = account.lane, account.num_tokens + num_uncached
        ahead = float(mine)
        floor = lane.floor
        for other in lane.active.values():
            if other is not account:
                ahead += min(other.num_tokens, _due_before(account, other, mine, floor))
        for line in lanes.values():
            if line.lane < lane.lane:
                ahead += line.num_tokens
            elif line.lane > lane.lane:
                ratio = line.share.weight / lane.share.weight
                ahead += min(line.num_tokens + line.num_prefill_left, ratio * mine)
        return ahead

    def _with_overtakers(
        self, wait_s: float, account: Account, mine: float, rate: float, now: float
    ) -> float:
        """The wait, and what it grows by as other tenants send on, each up to what is its due before this request.

        Solves w = wait_s + sum of min(due, arrivals * w) / rate: whoever has sent its due by then sends no more.
        """
        floor = account.lane.floor
        overtakers = []
        for other in account.lane.accounts.values():
            arrivals = other.arrivals.per_second(now)
            if other is not account and arrivals:
                due = _due_before(account, other, mine, floor) - other.num_tokens
                if due > 0:
                    overtakers.append((due / arrivals, due, arrivals))
        overtakers.sort()
        left = rate - sum(arrivals for _, _, arrivals in overtakers)
        tokens = wait_s * rate
        for until_s, due, arrivals in overtakers:
            if left > 0 and tokens <= until_s * left:
                break
            tokens += due
            left += arrivals
        return tokens / left

    def _share(self, lanes: Mapping[Lane, LaneLine], account: Account, rate: float, now: float) -> float:
        """Of the prefill rate, what is left for this tenant when all others go on as they do."""
        lane = account.lane
        urgent = sum(
            a.arrivals.per_second(now)
            for line in lanes.values()
            if line.lane < lane.lane
            for a in line.accounts.values()
        )
        weights = sum(line.share.weight for line in lanes.values())
        left = max(rate - urgent, rate * lane.share.weight / weights)
        others = [
            (a.arrivals.per_second(now), a.share.weight) for a in lane.accounts.values() if a is not account
        ]
        others.sort(key=lambda other: other[0] / other[1])
        total = account.share.weight + sum(weight for _, weight in others)
        for demand, weight in others:
            if demand > left * weight / total:
                break
            left -= demand
            total -= weight
        return max(left * account.share.weight / total, 1e-9)

    def _seats_before(self, lanes: Mapping[Lane, LaneLine], account: Account) -> float:
        """Waiting requests that go before: urgent lanes', the tenant's own, and of others as many as are their due."""
        own = len(account.tickets)
        before = own + sum(line.num_requests for line in lanes.values() if line.lane < account.lane.lane)
        for other in account.lane.active.values():
            if other is not account:
                before += min(len(other.tickets), -(-other.share.weight * (own + 1) // account.share.weight))
        return before

    def _wait_for_room(
        self,
        lanes: Mapping[Lane, LaneLine],
        account: Account,
        load: StepLoad,
        num_tokens: float,
        now: float,
    ) -> float:
        """Seconds until there is KV and a seat, which lower lanes give way for as far as they do."""
        num_seats = self._seats_before(lanes, account) + 1
        missing_seats = num_seats - (load.max_num_seqs - load.num_running)
        missing_kv = num_tokens - load.num_free_tokens
        if missing_seats <= 0 and missing_kv <= 0:
            return 0.0
        num_yielding = len(yielding(list(self.running), account.lane.lane))
        return self.held(now).wait_s(
            missing_kv, missing_seats, int(min(MAX_VICTIMS * num_seats, num_yielding))
        )

    def held(self, now: float) -> Held:
        """By the running requests."""
        running = list(self.running)
        num_held = sum(len(sequence.token_ids) for sequence in running)
        num_left = sum(sequence.max_len for sequence in running) - num_held
        step_s = self.model.seconds(0, len(running) * self._rows_each, num_held)
        return Held(
            num_running=len(running),
            num_tokens=num_held,
            ends_s=step_s * num_left / max(1, len(running)) / self._tokens_each,
            finished_per_s=self.finish_rate(now),
            freed_per_s=self._freed.per_second(now),
        )

    def allowed_s(self, lane: Lane, num_uncached: int, max_batch_tokens: int) -> float:
        """What the lane promises to a prompt of which so much is to be computed."""
        ttft_s = self.policies[lane].ttft_s
        if not isfinite(ttft_s):
            return inf
        alone_s = self.pace({}, 0, [lane], max_batch_tokens).seconds_for(num_uncached, is_filled=False)
        return max(ttft_s, ALONE_SLACK * alone_s)


def _due_before(account: Account, other: Account, num_tokens: float, floor: int) -> float:
    """Prompt tokens of another tenant whose turn comes before this tenant has had so many.

    Args:
        floor: of the lane: where the clock of a tenant starts again that has nothing waiting.
    """
    clock, theirs = (a.share.clock if a.tickets else max(a.share.clock, floor) for a in (account, other))
    lead = max(0, clock - theirs) / virtual(COST_PREFILL)
    return other.share.weight * (num_tokens / account.share.weight + lead)


def _factor(account: Account) -> float:
    """Mostly the lane's for a tenant of whom little was learnt, mostly its own later."""
    own = account.num_learnt / (account.num_learnt + _LANE_COUNTS_AS)
    return own * account.factor + (1 - own) * account.lane.factor


def _closer(factor: float, ratio: float) -> float:
    """A stochastic estimate of the quantile: 19 steps down weigh as much as one up."""
    step = _LEARNING * (_QUANTILE if ratio > factor else _QUANTILE - 1.0)
    return min(max(factor + step, _FACTORS[0]), _FACTORS[1])
