"""One simulated server: the real queue and scheduler, a virtual clock, and steps that only take time."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Protocol

from engine.kv.tables import BlockTables
from engine.request import FinishReason, Output, Request, SamplingParams, Sequence
from engine.scheduler import Scheduler, SchedulerLimits
from engine.step import Plan, RequestQueue, Sampled, StepLoad, StepResult
from priority.admission import Forecast
from priority.baselines import FirstComeQueue
from priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from priority.queue import LaneQueue, Refusal
from priority.simulator.trace import BLOCK_TOKENS, Arrival
from priority.steptime import StepTimeModel

POLICIES = ("fcfs", "strict", "fair", "penstock")
_BLOCK_SIZE = 16
_PROGRESS_EVERY = 1_000
_TOKEN = [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """What is simulated: how long steps take, and how much it holds."""

    coefficients: Mapping[str, float]
    num_kv_tokens: int = 400_000
    max_batch_tokens: int = 2_048
    max_num_seqs: int = 192
    max_model_len: int = 32_768


@dataclass(slots=True)
class Served:
    """How one request of the trace went. Times in seconds on the virtual clock."""

    arrival: Arrival
    first_token_s: float | None = None
    finished_s: float | None = None
    num_tokens: int = 0
    longest_gap_s: float = 0.0
    last_token_s: float = 0.0
    predicted_s: float | None = None
    refused: str | None = None
    retry_after_s: float = 0.0
    num_preemptions: int = 0
    num_cached: int = 0

    @property
    def ttft_s(self) -> float | None:
        return None if self.first_token_s is None else self.first_token_s - self.arrival.at_s

    @property
    def tpot_s(self) -> float:
        """Mean time per token after the first; 0 for one token."""
        if self.num_tokens < 2 or self.first_token_s is None:
            return 0.0
        return (self.last_token_s - self.first_token_s) / (self.num_tokens - 1)


@dataclass(slots=True)
class Result:
    """One simulated run."""

    policy: str
    served: list[Served]
    duration_s: float
    num_steps: int = 0
    num_preemptions: int = 0
    busy_s: float = 0.0
    charged: dict[str, int] = field(default_factory=dict)


class SimulatedQueue(RequestQueue, Protocol):
    """What the simulator needs beyond the engine's side."""

    def put(self, request: Request, now: float, num_cached: int = 0) -> Forecast | None: ...

    def depths(self) -> dict[Lane, int]: ...


class NoText:
    """Sequences that end when they have all their tokens."""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:  # noqa: ARG002
        return "", FinishReason.LENGTH if is_last else None


def make_queue(
    policy: str, machine: Machine, lanes: Mapping[Lane, LanePolicy], weights: Mapping[str, int]
) -> SimulatedQueue:
    """One of POLICIES; the first three let everybody in and fill every step."""
    if policy in ("fcfs", "strict"):
        return FirstComeQueue(by_lane=policy == "strict")
    model = (
        StepTimeModel(machine.coefficients, learns=False)
        if policy == "penstock"
        else StepTimeModel(learns=False)
    )
    return LaneQueue(nullcontext(), lanes, weights=weights, model=model)


def simulate(
    arrivals: list[Arrival],
    machine: Machine,
    policy: str = "penstock",
    *,
    lanes: Mapping[Lane, LanePolicy] = DEFAULT_POLICIES,
    weights: Mapping[str, int] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Runs a trace to the end of its last request. Deterministic.

    Args:
        progress: told now and then how many requests have ended.
    """
    return _Simulation(arrivals, machine, policy, lanes, weights or {}, progress).run()


class _Simulation:
    def __init__(
        self,
        arrivals: list[Arrival],
        machine: Machine,
        policy: str,
        lanes: Mapping[Lane, LanePolicy],
        weights: Mapping[str, int],
        progress: Callable[[int], None],
    ) -> None:
        self.arrivals = arrivals
        self.machine = machine
        self.progress = progress
        self.model = StepTimeModel(machine.coefficients, learns=False)
        self.queue = make_queue(policy, machine, lanes, weights)
        has_prefixes = any(arrival.hash_ids for arrival in arrivals)
        self.tables = BlockTables(
            machine.num_kv_tokens // _BLOCK_SIZE + 1, _BLOCK_SIZE, prefix_cache=has_prefixes
        )
        shares = tuple(lanes[lane].kv_share for lane in Lane) if policy == "penstock" else ()
        self.limits = SchedulerLimits(
            max_batch_tokens=machine.max_batch_tokens,
            max_num_seqs=machine.max_num_seqs,
            max_model_len=machine.max_model_len,
            kv_shares=shares,
        )
        self.scheduler = Scheduler(self.queue, self.tables, NoText(), self.limits)
        self.result = Result(policy, [Served(arrival) for arrival in arrivals], 0.0)
        self.now = 0.0
        self.num_arrived = 0
        self.num_ended = 0

    def run(self) -> Result:
        while self.num_ended < len(self.arrivals):
            self._let_in()
            self._expire()
            plan = self.scheduler.plan(self.now)
            if plan.chunks:
                self._step(plan)
            elif self.num_arrived < len(self.arrivals):
                self.now = max(self.now, self.arrivals[self.num_arrived].at_s)
            elif self.num_ended < len(self.arrivals):
                raise RuntimeError(f"{len(self.arrivals) - self.num_ended} requests can never run")
        self.result.duration_s = self.now
        self.result.num_preemptions = self.scheduler.counters.num_preemptions
        if isinstance(self.queue, LaneQueue):
            self.result.charged = self.queue.tenants()
        return self.result

    def _let_in(self) -> None:
        while self.num_arrived < len(self.arrivals) and self.arrivals[self.num_arrived].at_s <= self.now:
            number, self.num_arrived = self.num_arrived, self.num_arrived + 1
            served = self.result.served[number]
            request = self._request(number, served.arrival)
            if request is None:
                self._end(served, "too_long")
                continue
            cached = (
                self.tables.num_cached_tokens(request.prompt_token_ids, b"") if served.arrival.hash_ids else 0
            )
            try:
                # On the server the event loop decides when it comes, not when the step has ended.
                forecast = self.queue.put(request, served.arrival.at_s, cached)
            except Refusal as refusal:
                served.retry_after_s = refusal.retry_after_s
                self._end(served, refusal.reason)
            else:
                served.predicted_s = forecast.seconds if forecast else None

    def _request(self, number: int, arrival: Arrival) -> Request | None:
        num_prompt, num_output = arrival.num_prompt, arrival.num_output
        if num_prompt + num_output > min(self.machine.max_model_len, self.tables.max_tokens):
            return None
        return Request(
            request_id=str(number),
            prompt_token_ids=_prompt(number, arrival),
            sampling=SamplingParams(max_tokens=num_output),
            arrival_s=arrival.at_s,
            lane=arrival.lane,
            tenant=arrival.tenant,
        )

    def _expire(self) -> None:
        if isinstance(self.queue, LaneQueue):
            for request in self.queue.expire(self.now):
                self._end(self.result.served[int(request.request_id)], "queue_timeout")

    def _end(self, served: Served, refused: str | None) -> None:
        served.refused = refused
        self.num_ended += 1
        if self.num_ended % _PROGRESS_EVERY == 0:
            self.progress(self.num_ended)

    def _step(self, plan: Plan) -> None:
        num_decode = sum(1 for c in plan.chunks if c.start >= c.sequence.num_prompt_tokens)
        num_context = sum(c.start + c.num_tokens for c in plan.chunks)
        duration_s = self.model.seconds(plan.num_tokens - num_decode, num_decode, num_context)
        self.now += duration_s
        self.result.busy_s += duration_s
        self.result.num_steps += 1
        num_sampled = sum(1 for chunk in plan.chunks if chunk.samples)
        for output in self.scheduler.commit(plan, StepResult([Sampled(_TOKEN)] * num_sampled), self.now):
            self._note(output)
        pool = self.tables.pool
        self.queue.observe(
            StepLoad(
                num_prefill_tokens=plan.num_tokens - num_decode,
                num_decode_tokens=num_decode,
                num_context_tokens=num_context,
                duration_s=duration_s,
                num_running=len(self.scheduler.running),
                max_num_seqs=self.limits.max_num_seqs,
                max_batch_tokens=self.limits.max_batch_tokens,
                num_free_tokens=pool.num_free * _BLOCK_SIZE,
                num_kv_tokens=self.tables.max_tokens,
            )
        )

    def _note(self, output: Output) -> None:
        served = self.result.served[int(output.request_id)]
        if served.first_token_s is None:
            served.first_token_s = self.now
        else:
            served.longest_gap_s = max(served.longest_gap_s, self.now - served.last_token_s)
        served.last_token_s = self.now
        served.num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            served.finished_s = self.now
            if output.timings is not None:
                served.num_preemptions = output.timings.num_preemptions
                served.num_cached = output.timings.num_cached_tokens
            self._end(served, None)


def _prompt(number: int, arrival: Arrival) -> tuple[int, ...]:
    """Token ids that are equal exactly where the trace says that prompts are."""
    if not arrival.hash_ids:
        return (number,) * arrival.num_prompt
    tokens: list[int] = []
    for i in range(-(-arrival.num_prompt // BLOCK_TOKENS)):
        # Past the ids that the trace gives, a prompt is its own.
        block = arrival.hash_ids[i] if i < len(arrival.hash_ids) else -number - 1
        tokens += [block] * BLOCK_TOKENS
    return tuple(tokens[: arrival.num_prompt])
