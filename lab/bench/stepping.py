"""A model step by step on this thread, as the engine goes, with no server and no thread of its own."""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import inf

from lab.bench.planning import NoText
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.launching import launch_fitting
from penstock.engine.planning.chunks import set_drafts
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.drafting import DRAFT_MODEL, Drafting, Proposer
from penstock.engine.planning.ranked_memory import Memory
from penstock.engine.planning.request import Request
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.setup import make_memory
from penstock.engine.planning.step import OPEN, StepPlan
from penstock.priority.queue import LaneQueue


@dataclass(frozen=True, slots=True)
class Step:
    plan: StepPlan
    num_tokens: int
    """Tokens that it brought to all sequences together."""
    seconds: float
    """Since the end of the step before."""


class Stepper:
    """A loaded model, and runs of it."""

    def __init__(self, load: Callable[[], LoadedModel], num_ahead: int = 0) -> None:
        """`num_ahead`: the steps that are launched before the tokens of the one before are known."""
        self._num_ahead = num_ahead
        self._runner = ModelRunner(load, num_ahead=num_ahead)
        self.facts = self._runner.load()

    def run(self, requests: Sequence[Request], drafting: Drafting | None = None) -> list[Step]:
        """The steps until all requests, which run at the same time, are done."""
        scheduler, flights = self._scheduler(requests, drafting), deque[tuple[StepPlan, StepInFlight]]()
        found, ended_s = list[Step](), time.perf_counter()

        def land(num_left: int) -> None:
            nonlocal ended_s
            while len(flights) > num_left:
                plan, step = flights.popleft()
                outputs = scheduler.commit(plan, step.wait(), time.perf_counter())
                self._runner.forget(scheduler.sequences.take_departed())
                began_s, ended_s = ended_s, time.perf_counter()
                found.append(Step(plan, len(outputs), ended_s - began_s))

        is_over = False
        while not is_over:
            if scheduler.awaits_tokens:
                land(0)
            plan = scheduler.plan(time.perf_counter())
            if plan.chunks:
                step = launch_fitting(self._runner, scheduler, plan, land=lambda: land(0))
                flights.append((plan, step))
            land(self._num_ahead if plan.chunks and scheduler.may_be_followed(plan) else 0)
            is_over = scheduler.sequences.is_idle
        return found

    def _scheduler(self, requests: Sequence[Request], drafting: Drafting | None) -> Scheduler:
        """A scheduler that has all requests in its queue."""
        facts, queue = self.facts, LaneQueue(threading.Lock())
        for request in requests:
            queue.put(request, 0.0)
        limits = SchedulerLimits(
            max_batch_tokens=facts.max_batch_tokens,
            max_num_seqs=len(requests),
            max_model_len=facts.max_model_len,
        )
        memory = make_memory(facts, prefix_cache=True, log=None)
        return Scheduler(queue, memory, NoText(), limits, drafting)


class Always(Drafting):
    """Has a proposer, or else the draft model, draft as many tokens in every step, whatever comes of it."""

    def __init__(self, proposer: Proposer | None, length: int, *, may_follow: bool = False) -> None:
        super().__init__(proposer, length, has_model=proposer is None, may_follow=may_follow)
        self.proposer = proposer

    @property
    def is_due(self) -> bool:
        return not self.is_followed

    def extend(self, plan: StepPlan, memory: Memory, num_tokens: int, most_s: float = inf) -> None:  # noqa: ARG002
        self.is_followed = False
        chunks = [chunk for chunk in plan.chunks if chunk.samples and chunk.num_tokens == 1]
        left = [(c.sequence.max_len, len(c.sequence.token_ids) + c.sequence.num_pending) for c in chunks]
        lengths = [min(self.most, max_len - num_tokens) for max_len, num_tokens in left]
        if max(lengths, default=0) <= 0:
            return
        for chunk, length in zip(chunks, lengths, strict=True):
            plan.copies += memory.grow(chunk.sequence, chunk.sequence.num_computed + length) or []
        name, found = DRAFT_MODEL, [[OPEN] * max(0, length) for length in lengths]
        if self.proposer is not None:
            name, found = self.proposer.name, self.proposer.propose([c.sequence for c in chunks], lengths)
        for chunk, drafts in zip(chunks, found, strict=True):
            set_drafts(plan, chunk, drafts, name)
        self.is_followed = self._may_follow

    def note_made(self, plan: StepPlan, made: Sequence[list[int]], seconds: float) -> None:  # noqa: ARG002
        for chunk, drafts in zip([chunk for chunk in plan.chunks if chunk.is_open], made, strict=True):
            chunk.drafts = drafts

    def fill(self, plan: StepPlan, made: list[list[int]], seconds: float) -> None:  # noqa: ARG002
        for chunk, drafts in zip([chunk for chunk in plan.chunks if chunk.is_open], made, strict=True):
            set_drafts(plan, chunk, drafts, DRAFT_MODEL)
