"""The step loop under random troubles, turn by turn: requests, cancels, ends, faults and short memory, in any order.

Which steps the host goes on beside differs from step to step. Whatever happens, every choice ends once, with the tokens
of an undisturbed run as far as it came; the engine never rests while there is work; and when it rests, everything is
free again, and its last report says so.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from itertools import count
from threading import Lock

import pytest

from penstock.engine.engine import Engine
from penstock.engine.planning.device import DeviceError, OutOfMemory, RunnerFacts
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason, Output, Request, Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits, TokenSink
from penstock.engine.planning.step import Chunk, StepPlan, StepResult
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeProposer, UnpricedDrafting, expected_output
from tests.engine.fake_states import FakeStates
from tests.engine.queued_runner import QueuedChunk, QueuedRunner, QueuedStep
from tests.few import examples

MAX_LEN, NUM_SEATS = 28, 4


class TroubledRunner(QueuedRunner):
    """Needs the host for some plain steps, has no memory for some, and loses some at their launch or later."""

    def __init__(self, num_blocks: int, pace: random.Random, trouble: float) -> None:
        super().__init__(num_blocks, 4, lambda: pace.random() < 0.5)
        self.seats: set[Sequence] = set()
        self.lost: set[tuple[str, int]] = set()
        """Choices of steps that failed."""
        self.is_launching = False
        """Whether a step is waited for while another is launched: then it is not computed again."""
        self._random, self._trouble = pace, trouble
        self.plain_ahead_s = pace.choice([1.0, 1.0, None])
        if self.plain_ahead_s is None and pace.random() < 0.5:
            self.states = FakeStates(pace.choice([6, 12, 24]), 4)

    def load(self) -> RunnerFacts:
        return replace(super().load(), plain_ahead_s=self.plain_ahead_s)

    def launch(self, plan: StepPlan) -> QueuedStep:
        with self._mistakes_told():
            return self._launched(plan)

    def land(self, step: QueuedStep) -> StepResult:
        with self._mistakes_told():
            result = super().land(step)
        if self._happens():
            self._lose(step.chunks)
            raise ValueError("late")
        if self._happens():
            if self.is_launching or sum(chunk.end - chunk.start for chunk in step.chunks) == 1:
                self._lose(step.chunks)
            raise OutOfMemory("full, late")
        return result

    @contextmanager
    def _mistakes_told(self) -> Iterator[None]:
        """Planning's mistakes end the test: the engine would take them for a step that failed."""
        try:
            yield
        except AssertionError as mistake:
            raise DeviceError(str(mistake)) from mistake

    def _launched(self, plan: StepPlan) -> QueuedStep:
        assert all(chunk.sequence.finish_reason is None for chunk in plan.chunks), "nobody waits for it"
        if self._random.random() < 0.1:
            plan.is_beside = False
        self.seats.update(chunk.sequence for chunk in plan.chunks)
        assert len(self.seats) <= NUM_SEATS
        if self._happens():
            self.fault = OutOfMemory("full")
        elif self._happens():
            self.fault = ValueError("odd shape")
        if self.fault is not None and (plan.num_tokens == 1 or isinstance(self.fault, ValueError)):
            self._lose(plan.chunks)
        if self.fault is None and plan.num_tokens > 1 and self._happens():
            return self.refused_late(plan)
        return super().launch(plan)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        self.seats.difference_update(sequences)

    def _happens(self) -> bool:
        return self._random.random() < self._trouble

    def _lose(self, chunks: Iterable[Chunk | QueuedChunk]) -> None:
        self.lost.update(chunk.sequence.key for chunk in chunks)


class StoppingSink(TokenSink):
    """A sequence ends with its stop token, or by its length."""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:
        if token_id in sequence.request.sampling.stop_token_ids:
            return "", FinishReason.STOP
        return f"{token_id} ", FinishReason.LENGTH if is_last else None


class EngineByTurns:
    """An engine whose turns the test takes."""

    def __init__(self, pace: random.Random) -> None:
        self.pace = pace
        self.runner = TroubledRunner(pace.choice([9, 12, 16, 40]), pace, pace.choice([0.0, 0.05, 0.15]))
        self.queue = LaneQueue(Lock())
        self.queue.step_seconds = lambda *_: pace.choice([0.0, 0.0, 2.0])  # type: ignore[method-assign]
        self.reports: list[StepReport] = []
        self.requests: dict[str, Request] = {}
        self.num_submitted = self.num_rests = 0
        ticks = count(1)
        limits = SchedulerLimits(max_batch_tokens=16, max_num_seqs=NUM_SEATS, max_model_len=MAX_LEN)
        self.engine = Engine(
            lambda: self.runner,
            self.queue,
            StoppingSink(),
            limits,
            deliver=self.reports.append,
            clock=lambda: float(next(ticks)),
        )
        self.engine._runner, self.engine._facts = self.runner, self.runner.load()
        self.scheduler = self.engine._scheduler = self.engine._new_scheduler()
        if pace.random() < 0.4:
            self.scheduler.drafting = UnpricedDrafting(FakeProposer(pace, 0.7), 3, pace)
        self.runner.watch(self.scheduler.memory)
        self.engine._rest = self.rest  # type: ignore[method-assign]
        if self.runner.plain_ahead_s is None:
            self.engine._limit = self.limit  # type: ignore[method-assign]

    def submit(self) -> None:
        pace, name = self.pace, f"r{self.num_submitted}"
        self.num_submitted += 1
        stem, length = pace.randrange(3), pace.randint(1, 16)
        sampling = SamplingParams(
            max_tokens=pace.randint(1, 14),
            seed=length,
            stop_token_ids=frozenset(pace.sample(range(50), pace.choice([0, 0, 4]))),
            num_logprobs=pace.choice([None, None, None, 0]),
        )
        self.requests[name] = request = Request(
            request_id=name,
            prompt_token_ids=tuple((stem * 7 + i) % 11 for i in range(length)),
            sampling=sampling,
            n=pace.choice([1, 1, 1, 2, 3]),
            lane=pace.randrange(3),
        )
        self.queue.readmit(request, 0.0)  # nothing is refused

    def cancel(self) -> None:
        if self.requests:
            name = self.pace.choice(list(self.requests))
            if self.queue.cancel(name):
                del self.requests[name]
            else:
                self.engine.cancel(name)

    def turn(self) -> None:
        self.engine._turn(self.scheduler)
        self.scheduler.sequences.check()

    def limit(self, scheduler: Scheduler, plan: StepPlan) -> None:  # noqa: ARG002
        """What a step may choose depends on tokens in flight, perhaps."""
        if self.pace.random() < 0.2:
            self.runner.is_launching = True
            self.engine._land_but(scheduler, 0, is_launching=True)
            self.runner.is_launching = False

    def rest(self, scheduler: Scheduler) -> None:
        self.num_rests += 1
        assert scheduler.sequences.is_idle, "it rests while there is work"
        assert not any(self.queue.depths().values()), "it rests while somebody waits"
        assert not self.engine._flights
        assert scheduler.memory.num_free_blocks == scheduler.memory.num_blocks
        assert scheduler.memory.state_use.num_held == 0
        assert not self.runner.seats
        if self.reports:
            last = self.reports[-1]
            assert last.num_free_blocks == last.num_blocks, "what is shown stays wrong until the next step"
            assert last.num_running == last.num_waiting == 0

    def finish(self) -> None:
        before = self.num_rests
        for _ in range(2_000):
            if self.num_rests > before:
                break
            self.turn()
        assert self.num_rests > before, "the work does not end"
        for name, request in self.requests.items():
            for index in range(request.n):
                self.check(request, index, [o for o in self.outputs(name) if o.index == index])

    def outputs(self, name: str) -> list[Output]:
        return [o for report in self.reports for o in report.outputs if o.request_id == name]

    def check(self, request: Request, index: int, outputs: list[Output]) -> None:
        assert [o.finish_reason for o in outputs].count(None) == len(outputs) - 1, "it ends once"
        reason, tokens = outputs[-1].finish_reason, [token for o in outputs for token in o.token_ids]
        expected, stop = expected_output(request, index, MAX_LEN), request.sampling.stop_token_ids
        end = next((i + 1 for i, token in enumerate(expected) if token in stop), len(expected))
        if reason in (FinishReason.LENGTH, FinishReason.STOP):
            assert tokens == expected[:end]
        else:
            assert tokens == expected[: len(tokens)]
            assert len(tokens) <= end
        if reason is FinishReason.FAILED:
            first = request.request_id, 0
            assert {(request.request_id, index), first} & self.runner.lost, "no step of it failed"


@pytest.mark.parametrize("seed", range(examples(800)))
def test_whatever_happens_between_plan_launch_and_landing(seed: int) -> None:
    pace = random.Random(seed)
    engine = EngineByTurns(pace)
    for _ in range(pace.randint(1, 60)):
        if pace.random() < 0.25:
            engine.submit()
        if pace.random() < 0.08:
            engine.cancel()
        engine.turn()
    engine.finish()
