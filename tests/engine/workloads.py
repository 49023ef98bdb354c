"""Random work for a scheduler, and a run of it on a fake runner that is recorded step by step."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from threading import Lock

from hypothesis import strategies as st

from penstock.engine.launching import launch_fitting
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import Output, Request, Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits, TokenSink
from penstock.engine.planning.step import StepPlan
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink, make_request

BLOCK_SIZE = 4
Key = tuple[str, int]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """Requests, the step before which each arrives, and the engine they come to."""

    requests: tuple[Request, ...]
    arrivals: tuple[int, ...]
    num_blocks: int
    budget: int
    max_num_seqs: int
    max_model_len: int
    prefix_cache: bool

    @property
    def max_len(self) -> int:
        """The longest sequence that limits and pool allow."""
        return min(self.max_model_len, (self.num_blocks - 1) * BLOCK_SIZE)


@dataclass(frozen=True, kw_only=True)
class Piece:
    """A chunk as it was planned."""

    key: Key
    start: int
    end: int
    samples: bool
    num_known: int
    num_preemptions: int


@dataclass(frozen=True, kw_only=True)
class Step:
    pieces: tuple[Piece, ...]
    decoding: frozenset[Key]
    """Sequences that ran before the step was planned and had one token to compute."""
    running: frozenset[Key]
    """After it was planned."""
    num_preempted: int
    outputs: tuple[Output, ...]

    @property
    def num_tokens(self) -> int:
        return sum(piece.end - piece.start for piece in self.pieces)


class Run:
    """A workload at work.

    `watch` sees every plan between its launch and its commit, when the step is in flight. A runner with `num_ahead`
    has the next one launched before.
    """

    def __init__(
        self,
        workload: Workload,
        watch: Callable[[Run, StepPlan], None] = lambda *_: None,
        *,
        runner: FakeRunner | None = None,
        sink: TokenSink | None = None,
    ) -> None:
        self.workload = workload
        self.runner = runner or FakeRunner(workload.num_blocks, BLOCK_SIZE)
        self.queue = LaneQueue(Lock())
        self.tables = SequenceMemory(
            workload.num_blocks,
            BLOCK_SIZE,
            prefix_cache=workload.prefix_cache,
            windows=self.runner.windows,
        )
        limits = SchedulerLimits(
            max_batch_tokens=workload.budget,
            max_num_seqs=workload.max_num_seqs,
            max_model_len=workload.max_model_len,
            num_stages=self.runner.num_stages,
        )
        self.scheduler = Scheduler(self.queue, self.tables, sink or FakeSink(), limits)
        self.steps: list[Step] = []
        self.tokens: dict[Key, list[int]] = {}
        self.texts: dict[Key, str] = {}
        self.ended: dict[Key, Output] = {}
        self.flights: deque[tuple[StepPlan, StepInFlight]] = deque()
        self._watch = watch
        self._to_come = sorted(
            zip(workload.arrivals, workload.requests, strict=True), key=lambda pair: pair[0]
        )

    @property
    def is_over(self) -> bool:
        return (
            not self._to_come and self.scheduler.sequences.is_idle and not any(self.queue.depths().values())
        )

    @property
    def now(self) -> float:
        return float(len(self.steps))

    def arrive(self) -> None:
        while self._to_come and self._to_come[0][0] <= len(self.steps):
            self.queue.put(self._to_come.pop(0)[1], self.now)

    def step(self) -> Step:
        self.arrive()
        before = self.scheduler.sequences.counters.num_preemptions
        decoding = frozenset(s.key for s in self.scheduler.sequences.running if s.num_remaining == 1)
        plan = self.scheduler.plan(self.now)
        self.runner.forget(self.scheduler.sequences.take_departed())
        pieces = tuple(
            Piece(
                key=c.sequence.key,
                start=c.start,
                end=c.start + c.num_tokens,
                samples=c.samples,
                num_known=len(c.sequence.token_ids),
                num_preemptions=c.sequence.num_preemptions,
            )
            for c in plan.chunks
        )
        running = frozenset(s.key for s in self.scheduler.sequences.running)
        outputs = self._execute(plan)
        self.steps.append(
            Step(
                pieces=pieces,
                decoding=decoding,
                running=running,
                num_preempted=self.scheduler.sequences.counters.num_preemptions - before,
                outputs=tuple(outputs),
            )
        )
        return self.steps[-1]

    def finish(self, before_step: Callable[[Run], None] = lambda _: None) -> Run:
        """To the end of all work; a step that brings nothing while somebody waits is a deadlock."""
        for _ in range(4_000):
            if self.is_over:
                return self
            before_step(self)
            num_in_flight = len(self.flights)
            step = self.step()
            waiting = self.scheduler.sequences.waiting or any(self.queue.depths().values())
            assert step.pieces or num_in_flight or not waiting, "there is work, and the step is empty"
        raise AssertionError("the work does not end")

    def receive(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = output.request_id, output.index
            assert key not in self.ended, f"{key} went on after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            self.texts[key] = self.texts.get(key, "") + output.text
            if output.finish_reason is not None:
                self.ended[key] = output

    def cancel(self, request: Request) -> None:
        """Wherever it is: still to come, in the queue, or in the engine."""
        self._to_come = [pair for pair in self._to_come if pair[1] is not request]
        if not self.queue.cancel(request.request_id):
            self.receive(self.scheduler.sequences.cancel(request.request_id, self.now))

    def preempt(self, pick: int) -> None:
        sequences = self.scheduler.sequences
        if sequences.running:
            sequences.preempt(sequences.running[pick % len(sequences.running)])

    def sequences(self) -> list[Sequence]:
        return [*self.scheduler.sequences.running, *self.scheduler.sequences.waiting]

    def _execute(self, plan: StepPlan) -> list[Output]:
        if plan.chunks:
            self.flights.append((plan, launch_fitting(self.runner, self.scheduler, plan)))
        self._watch(self, plan)
        outputs: list[Output] = []
        num_left = self.runner.num_ahead if plan.chunks else len(self.flights) - 1
        while len(self.flights) > max(0, num_left):
            outputs += self.land()
        return outputs

    def land(self) -> list[Output]:
        """The oldest step in flight comes back."""
        plan, step = self.flights.popleft()
        outputs = self.scheduler.commit(plan, step.wait(), self.now)
        self.receive(outputs)
        self.runner.forget(self.scheduler.sequences.take_departed())
        return outputs


@st.composite
def workloads(
    draw: st.DrawFn,
    *,
    max_requests: int = 6,
    num_choices: tuple[int, ...] = (1, 1, 1, 2, 3),
    num_blocks: tuple[int, int] = (8, 24),
    prefix_cache: bool | None = None,
) -> Workload:
    """Prompts have common beginnings, two salts and three lanes; blocks and seats are short."""
    blocks = draw(st.integers(*num_blocks))
    max_model_len = draw(st.integers(10, 40))
    longest = min(max_model_len, (blocks - 1) * BLOCK_SIZE) - 1
    requests, arrivals = [], []
    for i in range(draw(st.integers(1, max_requests))):
        shared, own = draw(st.integers(0, longest - 1)), draw(st.integers(1, 9))
        stem = draw(st.integers(0, 1))
        prompt = [(stem + 3 * k) % 11 for k in range(shared)] + [20 + i] * own
        requests.append(
            make_request(
                f"r{i}",
                prompt[:longest],
                max_tokens=draw(st.integers(1, 14)),
                n=draw(st.sampled_from(num_choices)),
                lane=draw(st.integers(0, 2)),
                salt=draw(st.sampled_from([b"", b"", b"other"])),
                seed=draw(st.integers(0, 5)),
            )
        )
        arrivals.append(draw(st.integers(0, 12)))
    return Workload(
        requests=tuple(requests),
        arrivals=tuple(arrivals),
        num_blocks=blocks,
        budget=draw(st.integers(1, 20)),
        max_num_seqs=draw(st.integers(1, 6)),
        max_model_len=max_model_len,
        prefix_cache=draw(st.booleans()) if prefix_cache is None else prefix_cache,
    )
