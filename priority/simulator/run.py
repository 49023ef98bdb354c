"""One simulated server: the real queue and scheduler, a virtual clock, and steps that only take time."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from math import inf, isfinite
from typing import Protocol

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.prefix_events import PrefixLog
from penstock.engine.planning.request import FinishReason, Output, Request, Sequence
from penstock.engine.planning.request_queue import RequestQueue, StepLoad
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits, TokenSink
from penstock.engine.planning.step import Chunk, Sampled, StepPlan, StepResult
from penstock.priority.baselines import FirstComeQueue
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from penstock.priority.queue import LaneQueue
from penstock.priority.simulator.result import BLOCK_SIZE, Result, Served, request_of
from penstock.priority.simulator.trace import Arrival
from penstock.priority.steptime import StepTimeModel
from penstock.priority.verdict import Refusal

POLICIES = ("fcfs", "strict", "fair", "penstock")
_PROGRESS_EVERY = 100
_LOOK_EVERY_S = 0.25
"""The interval of the search for requests that waited too long, as on the server."""
_PATIENCE = 0.5
"""The part of the shortest promise per token below which all streams may decode in a step."""
_TOKEN = [1]


@dataclass(frozen=True, slots=True, kw_only=True)
class Machine:
    """The simulated machine: its step times and its capacity."""

    coefficients: Mapping[str, float]
    num_kv_tokens: int = 400_000
    max_batch_tokens: int = 2_048
    max_num_seqs: int = 192
    max_model_len: int = 32_768


class SimulatedQueue(RequestQueue, Protocol):
    """The queue methods that the simulator needs in addition to the engine's."""

    def put(self, request: Request, now: float) -> object: ...

    def depths(self) -> dict[Lane, int]: ...


def make_queue(
    policy: str,
    machine: Machine,
    lanes: Mapping[Lane, LanePolicy],
    weights: Mapping[str, int],
    *,
    learns: bool = False,
) -> SimulatedQueue:
    """One of POLICIES; the first three let everybody in and fill every step."""
    if policy in ("fcfs", "strict"):
        return FirstComeQueue(by_lane=policy == "strict")
    coefficients = machine.coefficients if policy == "penstock" else None
    model = StepTimeModel(coefficients, learns=learns)
    return LaneQueue(nullcontext(), lanes, weights=weights, model=model)


def simulate(
    arrivals: list[Arrival],
    machine: Machine,
    policy: str = "penstock",
    *,
    lanes: Mapping[Lane, LanePolicy] = DEFAULT_POLICIES,
    weights: Mapping[str, int] | None = None,
    num_machines: int = 1,
    insisting: Container[int] = (),
    slowness: Callable[[float], float] | None = None,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Runs a trace to the end of its last request. Deterministic.

    Args:
        insisting: places in the trace of requests that are let in even if they are expected too late.
        num_machines: so many equal machines; each request goes to the one with the least prompt tokens outstanding,
            sessions stay where they began.
        slowness: by how much a machine is slower than its coefficients at a time; queues then learn its step times.
        progress: told now and then how many requests have ended.
    """
    result = Result(policy, [Served(arrival) for arrival in arrivals], 0.0)
    tally = Tally(progress)
    has_prefixes = any(arrival.hash_ids for arrival in arrivals)
    servers = [
        SimulatedServer(
            machine, make_queue(policy, machine, lanes, weights or {}, learns=slowness is not None), lanes,
            result, tally.add, log=None, prefix_cache=has_prefixes, slowness=slowness,
        )
        for _ in range(num_machines)
    ]  # fmt: skip
    dealer = _Dealer(servers)
    for number, served in enumerate(result.served):
        arrival = served.arrival
        for server in servers:
            server.advance(arrival.at_s)
        with tally.refusing(served):
            dealer.server_for(arrival).offer(served, request_of(number, arrival), insists=number in insisting)
    for server in servers:
        server.advance(inf)
        server.note_charges()
    result.duration_s = max(server.now for server in servers)
    return result


def _limits(machine: Machine, lanes: Mapping[Lane, LanePolicy]) -> SchedulerLimits:
    """Returns the limits of the machine's steps; without `lanes` each lane may use all of the KV."""
    return SchedulerLimits(
        max_batch_tokens=machine.max_batch_tokens,
        max_num_seqs=machine.max_num_seqs,
        max_model_len=machine.max_model_len,
        kv_shares=tuple(policy.kv_share for _, policy in sorted(lanes.items())),
    )


class Tally:
    """Counts the requests that have ended."""

    def __init__(self, progress: Callable[[int], None]) -> None:
        self.num_ended = 0
        self._progress = progress

    def add(self, *_: object) -> None:
        self.num_ended += 1
        if self.num_ended % _PROGRESS_EVERY == 0:
            self._progress(self.num_ended)

    @contextmanager
    def refusing(self, served: Served) -> Iterator[None]:
        """Counts a request as ended that is refused within."""
        try:
            yield
        except Refusal as refusal:
            served.refuse(refusal)
            self.add()


class SimulatedServer(TokenSink):
    """One machine with its own scheduler, queue and clock."""

    def __init__(
        self,
        machine: Machine,
        queue: SimulatedQueue,
        lanes: Mapping[Lane, LanePolicy],
        result: Result,
        on_end: Callable[[str, Served], None],
        *,
        log: PrefixLog | None,
        prefix_cache: bool = True,
        slowness: Callable[[float], float] | None = None,
    ) -> None:
        """`on_end` is called for each admitted request that is over, with its id and outcome."""
        self.machine = machine
        self.queue = queue
        self.result = result
        self.on_end = on_end
        self.model = StepTimeModel(machine.coefficients, learns=False)
        self._slowness = slowness
        self.memory = SequenceMemory(
            machine.num_kv_tokens // BLOCK_SIZE + 1, BLOCK_SIZE, prefix_cache=prefix_cache, log=log
        )
        self.limits = _limits(machine, lanes if result.policy == "penstock" else {})
        self.scheduler = Scheduler(queue, self.memory, self, self.limits)
        self.patient = [lane for lane in Lane if not isfinite(lanes[lane].tpot_s)]
        self.patience_s = _PATIENCE * min(policy.tpot_s for policy in lanes.values())
        self.now = 0.0
        self.looked_s = 0.0
        """The time of the last search for requests that waited too long."""
        self.open: dict[str, Served] = {}
        """Let in and not ended."""
        self.num_prompt_open = 0
        """Prompt tokens let in whose request has no first token yet."""

    def offer(
        self, served: Served, request: Request, *, insists: bool = False, at_s: float | None = None
    ) -> None:
        """A request comes; the clock stands at the end of the step in which it came, or at its time.

        Args:
            at_s: the time at which it comes, if that is later than its arrival in the trace.

        Raises:
            Refusal: it is not let in.
        """
        arrival = served.arrival
        if arrival.num_prompt + arrival.num_output > min(self.machine.max_model_len, self.memory.max_tokens):
            raise Refusal("too_long", "more tokens than the machine holds", 0.0)
        # On the server the event loop decides when it comes, not when the step has ended.
        at_s = arrival.at_s if at_s is None else at_s
        forecast = None
        if not isinstance(self.queue, LaneQueue):
            self.queue.put(request, at_s)
        elif insists:
            self.queue.readmit(request, at_s)
        else:
            cached = self.memory.find_cached(request.block_hashes)
            [request], forecast = self.queue.put_all([request], at_s, [cached])
            served.lane = Lane(request.lane)
        served.predicted_s = at_s - arrival.at_s + forecast.seconds if forecast else None
        served.promised_s = forecast.allowed_s if forecast else inf
        self.open[request.request_id] = served
        self.num_prompt_open += arrival.num_prompt

    def advance(self, until_s: float) -> None:
        """Steps until the clock reaches that time; an infinite one means until all is done."""
        while self.now < until_s and self.open:
            self._expire()
            plan = self._plan()
            if plan.chunks:
                self._step(plan)
                self._repeat(until_s)
            elif until_s < inf:
                break
            elif self.open:
                raise RuntimeError(f"{len(self.open)} requests can never run")
        if until_s < inf:
            self.now = max(self.now, until_s)

    def _plan(self) -> StepPlan:
        num_before = self.scheduler.sequences.counters.num_preemptions
        self.scheduler.sequences.take_departed()
        plan = self.scheduler.plan(self.now)
        self.result.num_preemptions += self.scheduler.sequences.counters.num_preemptions - num_before
        return plan

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:  # noqa: ARG002
        """Ends a sequence that has all its tokens; there is no text."""
        ended = None if self._num_left(sequence) else FinishReason.STOP
        return "", FinishReason.LENGTH if is_last else ended

    def _num_left(self, sequence: Sequence) -> int:
        """Steps until its last token."""
        return self.open[sequence.request.request_id].arrival.num_output - sequence.num_output_tokens

    @property
    def is_calm(self) -> bool:
        """Nobody waits, and all streams decode."""
        return self._num_alike(list(self.scheduler.sequences.running)) > 0

    def note_charges(self) -> None:
        if isinstance(self.queue, LaneQueue):
            for tenant, cost in self.queue.tenants().items():
                self.result.charged[tenant] = self.result.charged.get(tenant, 0) + cost

    def _expire(self) -> None:
        if not isinstance(self.queue, LaneQueue) or self.now - self.looked_s < _LOOK_EVERY_S:
            return
        self.looked_s = self.now
        for request in self.queue.expire(self.now):
            served = self.open.pop(request.request_id)
            self.num_prompt_open -= served.arrival.num_prompt
            served.refused = "queue_timeout"
            self.on_end(request.request_id, served)

    def _step(self, plan: StepPlan) -> None:
        num_decode = num_context = num_sampled = 0
        for chunk in plan.chunks:
            num_decode += chunk.start >= chunk.sequence.num_prompt_tokens
            num_context += chunk.start + chunk.num_tokens
            num_sampled += chunk.samples
        shape = plan.num_tokens - num_decode, num_decode, num_context, plan.num_attended
        duration_s = self._spend(*shape)
        for output in self.scheduler.commit(plan, StepResult([Sampled(_TOKEN)] * num_sampled), self.now):
            self._note(output)
        self._observe(*shape, duration_s)

    def _repeat(self, until_s: float) -> None:
        """Takes the steps in which every stream only gets its next token, all at once.

        That is so while nobody comes or waits, all streams decode, and there is room for what they bring. Scheduler
        and queue are left as they would be after these steps one by one.
        """
        running = list(self.scheduler.sequences.running)
        most_steps = self._num_alike(running)
        if not most_steps:
            return
        running.sort(key=self._num_left, reverse=True)
        num_context = sum(len(sequence.token_ids) for sequence in running)
        run = _Run(self.now)
        while running and run.num_steps < most_steps and self.now < until_s:
            if self.model.seconds(0, len(running), num_context) > self._most_s(running):
                break
            shape = 0, len(running), num_context, 0
            self._spend(*shape)
            run.add(self.now)
            num_context += len(running)
            if ending := self._pop_ending(running, run.num_steps):
                num_context -= sum(len(sequence.token_ids) + run.num_steps for sequence in ending)
                self._end(ending, run)
        if run.num_steps:
            self._extend(running, run.num_steps, run)
            self._observe(*shape, run.last_s)

    def _num_alike(self, running: list[Sequence]) -> int:
        """Returns the number of steps that only decode one token per stream, ignoring arrivals."""
        if self.scheduler.sequences.waiting or not running or len(running) > self.limits.max_batch_tokens:
            return 0
        if any(s.num_remaining != 1 or s.num_computed < s.num_prompt_tokens for s in running) or any(
            self.queue.depths().values()
        ):
            return 0
        return max(0, self.memory.pool.num_free // len(running) - 1) * BLOCK_SIZE

    def _most_s(self, running: list[Sequence]) -> float:
        """In steps of up to this, the queue lets all streams decode."""
        return self.patience_s if any(s.request.lane in self.patient for s in running) else inf

    def _end(self, ending: list[Sequence], run: _Run) -> None:
        """The last token of these, by the scheduler itself."""
        self._extend(ending, run.num_steps - 1, run)
        plan = StepPlan()
        for sequence in ending:
            self.memory.grow(sequence, sequence.num_computed + 1)
            plan.chunks.append(Chunk(sequence, sequence.num_computed, 1, True, sequence.num_preemptions))
            sequence.num_computed += 1
            sequence.num_pending += 1
        sampled = [Sampled(_TOKEN)] * len(ending)
        for output in self.scheduler.commit(plan, StepResult(sampled), self.now):
            self._note(output)

    def _pop_ending(self, running: list[Sequence], num_steps: int) -> list[Sequence]:
        """Takes those from the end of `running` that get their last token in that step; in order of arrival."""
        ending = []
        while running and self._num_left(running[-1]) == num_steps:
            ending.append(running.pop())
        return sorted(ending, key=lambda sequence: sequence.order)

    def _extend(self, sequences: list[Sequence], num_tokens: int, run: _Run) -> None:
        """Adds tokens to sequences that took part in all steps of the run."""
        if not num_tokens:
            return
        for sequence in sequences:
            self.memory.grow(sequence, sequence.num_computed + num_tokens)
            sequence.num_computed += num_tokens
            sequence.token_ids += _TOKEN * num_tokens
            self.memory.commit(sequence, sequence.num_computed)
            served = self.open[sequence.request.request_id]
            first_gap_s = run.first_ended_s - served.last_token_s
            served.longest_gap_s = max(served.longest_gap_s, first_gap_s, run.longest_s)
            served.last_token_s = self.now
            served.num_tokens += num_tokens
        work = [(sequence.request, 0, num_tokens, len(sequence.token_ids)) for sequence in sequences]
        self.queue.charge(work, self.now)

    def _spend(self, num_prefill: int, num_decode: int, num_context: int, num_attended: int) -> float:
        """Lets the time of one step pass."""
        duration_s = self.model.seconds(num_prefill, num_decode, num_context, num_attended)
        if self._slowness is not None:
            duration_s *= self._slowness(self.now)
        self.now += duration_s
        self.result.busy_s += duration_s
        self.result.num_steps += 1
        return duration_s

    def _observe(
        self, num_prefill: int, num_decode: int, num_context: int, num_attended: int, duration_s: float
    ) -> None:
        self.queue.observe(
            StepLoad(
                num_prefill_tokens=num_prefill,
                num_decode_tokens=num_decode,
                num_context_tokens=num_context,
                num_attended=num_attended,
                duration_s=duration_s,
                num_running=len(self.scheduler.sequences.running),
                max_num_seqs=self.limits.max_num_seqs,
                max_batch_tokens=self.limits.max_batch_tokens,
                num_free_tokens=self.memory.num_free_tokens,
                num_kv_tokens=self.memory.num_kv_tokens,
                preempted=self.scheduler.sequences.preempted,
            )
        )

    def _note(self, output: Output) -> None:
        served = self.open[output.request_id]
        if served.first_token_s is None:
            served.first_token_s = self.now
            self.num_prompt_open -= served.arrival.num_prompt
        else:
            served.longest_gap_s = max(served.longest_gap_s, self.now - served.last_token_s)
        served.last_token_s = self.now
        served.num_tokens += len(output.token_ids)
        if output.finish_reason is not None:
            self._finish(served, output)

    def _finish(self, served: Served, output: Output) -> None:
        served.num_ended += 1
        if served.num_ended < served.arrival.n:
            return
        served.finished_s = self.now
        if output.timings is not None:
            served.num_preemptions = output.timings.num_preemptions
            served.num_cached = output.timings.num_cached_tokens
        del self.open[output.request_id]
        self.on_end(output.request_id, served)


class _Run:
    """Steps that are taken at once. Seconds."""

    def __init__(self, started_s: float) -> None:
        self.num_steps = 0
        self.ended_s = self.first_ended_s = started_s
        self.last_s = self.longest_s = 0.0

    def add(self, ended_s: float) -> None:
        if not self.num_steps:
            self.first_ended_s = ended_s
        self.num_steps += 1
        self.last_s = ended_s - self.ended_s
        self.longest_s = max(self.longest_s, self.last_s)
        self.ended_s = ended_s


class _Dealer:
    """Deals requests out to equal machines."""

    def __init__(self, servers: list[SimulatedServer]) -> None:
        self._servers = servers
        self._homes: dict[tuple[int, ...], SimulatedServer] = {}

    def server_for(self, arrival: Arrival) -> SimulatedServer:
        if len(self._servers) == 1:
            return self._servers[0]
        if not arrival.hash_ids:
            return self._least()
        # The first block alone is often a system prompt that everybody has.
        session = arrival.hash_ids[:2]
        if session not in self._homes:
            self._homes[session] = self._least()
        return self._homes[session]

    def _least(self) -> SimulatedServer:
        return min(self._servers, key=lambda server: (server.num_prompt_open, len(server.open)))
