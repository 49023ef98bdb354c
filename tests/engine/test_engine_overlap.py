"""The step thread with a runner beside which the host goes on: order, faults, memory, and the end."""

from __future__ import annotations

import itertools
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import pairwise
from queue import SimpleQueue

import pytest

from penstock.engine import engine
from penstock.engine.engine import Engine, EngineState
from penstock.engine.planning.device import DeviceError, OutOfMemory, RunnerFacts
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason, Output, Sequence
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.engine.planning.step import StepPlan, StepResult
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeProposer, FakeSink, drafting_always, expected_output, make_request
from tests.engine.queued_runner import QueuedRunner, QueuedStep

PATIENCE_S = 20.0


class TroubledRunner(QueuedRunner):
    """Notes what is asked of it, and fails when the test says so. Steps are numbered from 1."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.asked: list[tuple[str, int]] = []
        self.launch_faults: dict[int, list[Exception]] = {}
        self.wait_faults: dict[int, Exception] = {}
        self.entered: SimpleQueue[int] = SimpleQueue()
        """Steps that are waited for."""
        self.gate = threading.Semaphore(1_000_000)
        self.plain_ahead_s: float | None = None
        self._number_of: dict[int, int] = {}

    def load(self) -> RunnerFacts:
        return replace(super().load(), plain_ahead_s=self.plain_ahead_s)

    def launch(self, plan: StepPlan) -> QueuedStep:
        self.asked.append(("launch", plan.number))
        if faults := self.launch_faults.get(plan.number):
            raise faults.pop(0)
        step = super().launch(plan)
        self._number_of[id(step)] = plan.number
        return step

    def land(self, step: QueuedStep) -> StepResult:
        number = self._number_of[id(step)]
        self.entered.put(number)
        assert self.gate.acquire(timeout=PATIENCE_S)
        self.asked.append(("wait", number))
        result = super().land(step)
        if (fault := self.wait_faults.pop(number, None)) is not None:
            raise fault
        return result


class EngineHarness:
    def __init__(self) -> None:
        self.runner = TroubledRunner()
        self.queue = LaneQueue(threading.Lock())
        self.reports: list[StepReport] = []
        self.news = threading.Condition()
        self.states: SimpleQueue[EngineState] = SimpleQueue()
        ticks = itertools.count(1)
        self.engine = Engine(
            lambda: self.runner,
            self.queue,
            FakeSink(),
            SchedulerLimits(max_batch_tokens=32, max_num_seqs=8, max_model_len=100),
            deliver=self.deliver,
            clock=lambda: float(next(ticks)),
            on_state=self.states.put,
        )

    def deliver(self, report: StepReport) -> None:
        with self.news:
            self.reports.append(report)
            self.news.notify_all()

    def start(self) -> None:
        """Starts the engine; all that was submitted before is in the queue when the first step is planned."""
        self.engine.start()
        assert self.states.get(timeout=PATIENCE_S) is EngineState.READY

    def submit(self, name: str, prompt: list[int], max_tokens: int = 3, n: int = 1) -> None:
        self.queue.put(make_request(name, prompt, max_tokens=max_tokens, n=n), 0.0)
        self.engine.wake()

    def outputs(self, name: str) -> list[Output]:
        return [o for report in self.reports for o in report.outputs if o.request_id == name]

    def tokens(self, name: str) -> list[int]:
        return [token for output in self.outputs(name) for token in output.token_ids]

    def wait_for(self, truth: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(truth, timeout=PATIENCE_S)

    def last(self, name: str) -> Output:
        self.wait_for(lambda: any(o.finish_reason for o in self.outputs(name)))
        return self.outputs(name)[-1]

    def assert_whole(self, name: str, prompt: list[int], max_tokens: int = 3) -> None:
        assert self.last(name).finish_reason is FinishReason.LENGTH
        assert self.tokens(name) == expected_output(make_request(name, prompt, max_tokens=max_tokens), 0, 100)

    def stop(self) -> None:
        self.runner.gate.release(1_000)
        assert self.engine.stop(PATIENCE_S)
        assert self.runner.closed


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    harness = EngineHarness()
    yield harness
    harness.stop()
    stats = harness.engine.stats()
    assert stats.num_pool_violations == 0
    for name in {o.request_id for report in harness.reports for o in report.outputs}:
        ends = [o.index for o in harness.outputs(name) if o.finish_reason is not None]
        assert len(ends) == len(set(ends)), "a choice ended twice"


def test_the_next_step_is_launched_before_one_is_waited_for(harness: EngineHarness) -> None:
    harness.submit("r", [1, 2, 3], max_tokens=4)
    harness.start()
    harness.assert_whole("r", [1, 2, 3], 4)
    harness.stop()
    launch, wait = "launch", "wait"
    assert harness.runner.asked == [
        (launch, 1), (launch, 2), (wait, 1), (launch, 3), (wait, 2), (launch, 4), (wait, 3), (wait, 4),
    ]  # fmt: skip
    assert harness.runner.num_unknown == 3


def test_a_model_in_stages_has_a_step_in_flight_for_each(harness: EngineHarness) -> None:
    """Three prompts in one step, then a sequence in each: a step is waited for when each stage has one."""
    harness.runner.num_stages, harness.runner.num_ahead = 3, 2
    for number in range(3):
        harness.submit(f"r{number}", [number, 2, 3], max_tokens=3)
    harness.start()
    for number in range(3):
        harness.assert_whole(f"r{number}", [number, 2, 3])
    harness.stop()
    launch, wait = "launch", "wait"
    assert harness.runner.asked == [
        (launch, 1), (wait, 1), (launch, 2), (launch, 3), (launch, 4), (wait, 2), (launch, 5), (wait, 3),
        (launch, 6), (wait, 4), (launch, 7), (wait, 5), (wait, 6), (wait, 7),
    ]  # fmt: skip
    assert harness.runner.num_unknown == 0


def test_while_drafts_may_be_had_a_step_is_waited_for_before_the_next_is_planned(
    harness: EngineHarness,
) -> None:
    harness.start()
    scheduler = harness.engine._scheduler
    assert scheduler is not None
    scheduler.drafting = drafting_always(FakeProposer(random.Random(0), 0.8), 3)
    harness.submit("r", [1, 2, 3], max_tokens=30)
    harness.assert_whole("r", [1, 2, 3], 30)
    harness.stop()
    launch, wait, asked = "launch", "wait", harness.runner.asked
    assert asked[:4] == [(launch, 1), (launch, 2), (wait, 1), (wait, 2)], "the first one has a prompt"
    numbers = range(3, len(asked) // 2 + 1)
    assert asked[4:] == [(what, number) for number in numbers for what in (launch, wait)]
    assert len(numbers) < 28
    assert harness.runner.num_unknown == 1


def test_while_drafts_rest_a_step_is_in_flight_as_ever(harness: EngineHarness) -> None:
    """Over turns of both kinds. Only the first step of a turn without drafts finds nothing before it in flight."""
    harness.start()
    scheduler = harness.engine._scheduler
    assert scheduler is not None
    proposed: list[int] = []

    class Wrong(FakeProposer):
        def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
            proposed.append(len(lengths))
            return [[0] for _ in sequences]

    scheduler.drafting = Drafting(Wrong(random.Random(0), 0.0), 3, num_ahead=1)
    harness.submit("r", [1, 2, 3], max_tokens=90)
    harness.assert_whole("r", [1, 2, 3], 90)
    harness.stop()
    asked = harness.runner.asked
    num_alone = sum(before == ("launch", number) for before, (_, number) in pairwise(asked))
    turns = scheduler.drafting._pace(1).turn
    assert turns >= 2
    assert proposed
    assert num_alone <= len(proposed) + turns + 2


def test_there_is_one_report_a_step_and_their_times_follow_one_another(harness: EngineHarness) -> None:
    prompts = {f"r{i}": [*range(8), 20 + i] for i in range(6)}
    for name, prompt in prompts.items():
        harness.submit(name, prompt, max_tokens=4)
    harness.start()
    for name, prompt in prompts.items():
        harness.assert_whole(name, prompt, 4)
    harness.stop()
    reports = harness.reports
    assert len(reports) == harness.engine.stats().num_steps
    for before, after in pairwise(reports):
        assert before.started_s + before.duration_s <= after.started_s
    prefill = sum(r.num_prefill_tokens for r in reports)
    hits = sum(r.num_prefix_hit_tokens for r in reports)
    assert prefill + hits == sum(r.num_prefix_query_tokens for r in reports) == 54
    assert sum(r.num_decode_tokens for r in reports) == 6 * 3


def test_blocks_are_free_when_the_step_that_uses_them_is_back(harness: EngineHarness) -> None:
    harness.runner.gate = threading.Semaphore(0)
    harness.submit("r", list(range(10)), max_tokens=50, n=2)
    harness.start()
    assert harness.runner.entered.get(timeout=PATIENCE_S) == 1
    harness.engine.cancel("r")
    harness.runner.gate.release()
    assert harness.runner.entered.get(timeout=PATIENCE_S) == 2
    assert harness.engine.stats().num_free_blocks < 63, "step 2 may still write them"
    harness.runner.gate.release()
    harness.last("r")
    harness.wait_for(lambda: harness.reports[-1].num_free_blocks == 63)
    assert [o.finish_reason for o in harness.outputs("r")].count(FinishReason.CANCELLED) == 2


# Faults


def test_a_launch_that_fails_lets_the_step_before_end_first(harness: EngineHarness) -> None:
    harness.runner.launch_faults[3] = [ValueError("odd shape")]
    harness.submit("r", [1, 2, 3], max_tokens=9)
    harness.start()
    last = harness.last("r")
    assert (last.finish_reason, last.error) == (FinishReason.FAILED, "the step failed")
    assert len(harness.tokens("r")) == 2, "what steps 1 and 2 brought"
    assert [report.error for report in harness.reports] == [None, None, "ValueError: odd shape"]
    harness.submit("next", [1, 2, 3])
    harness.assert_whole("next", [1, 2, 3])


def test_a_step_that_fails_in_flight_ends_its_sequences_and_no_others(harness: EngineHarness) -> None:
    harness.runner.gate = threading.Semaphore(0)
    harness.runner.wait_faults[1] = ValueError("late")
    harness.submit("old", [1, 2, 3], max_tokens=9)
    harness.start()
    assert harness.runner.entered.get(timeout=PATIENCE_S) == 1
    harness.submit("new", [4, 5, 6])
    harness.runner.gate.release(1_000)
    assert harness.last("old").error == "the step failed"
    assert harness.tokens("old") == []
    harness.assert_whole("new", [4, 5, 6])
    harness.submit("old again", [1, 2, 3])
    harness.assert_whole("old again", [1, 2, 3])


@pytest.mark.parametrize("where", ["launch", "wait"])
def test_a_lost_device_ends_everybody_once(where: str) -> None:
    harness = EngineHarness()
    lost = DeviceError("lost")
    if where == "launch":
        harness.runner.launch_faults[3] = [lost]
    else:
        harness.runner.wait_faults[2] = lost
    names = [f"r{i}" for i in range(3)]
    for i, name in enumerate(names):
        harness.submit(name, [i, 2, 3], max_tokens=9, n=2)
    harness.start()
    assert harness.states.get(timeout=PATIENCE_S) is EngineState.FAILED
    harness.stop()
    for name in names:
        ends = [(o.index, o.error) for o in harness.outputs(name) if o.finish_reason is not None]
        assert sorted(ends) == [(0, "the engine failed"), (1, "the engine failed")]
    assert harness.engine.failure is lost


# Memory


def test_a_step_too_large_for_the_device_is_halved_until_it_fits(harness: EngineHarness) -> None:
    harness.runner.room = 3
    for i in range(4):
        harness.submit(f"r{i}", [i, 2, 3, 4, 5])
    harness.start()
    for i in range(4):
        harness.assert_whole(f"r{i}", [i, 2, 3, 4, 5])
    harness.stop()
    launches = [number for what, number in harness.runner.asked if what == "launch"]
    assert launches[:5] == [1, 1, 1, 1, 2], "20 tokens, 10, 5 and 3; the steps to come are small at once"
    assert all(report.error is None and not report.num_preemptions for report in harness.reports)


def test_a_sequence_that_the_device_has_no_room_for_is_told_so(harness: EngineHarness) -> None:
    harness.runner.room = 0
    harness.submit("a", [1, 2, 3])
    harness.submit("b", [4, 5, 6])
    harness.start()
    for name in ("a", "b"):
        assert harness.last(name).error == "the device has not enough memory for this request"
    harness.runner.room = 1 << 30
    harness.submit("c", [1, 2, 3])
    harness.assert_whole("c", [1, 2, 3])
    assert harness.engine.state is EngineState.READY
    launches = [number for what, number in harness.runner.asked if what == "launch"]
    assert launches[:5] == [1, 1, 1, 1, 2], (
        "6 tokens, 3, 2, 1; then `b` alone, and nothing is tried again as it was"
    )


def test_memory_that_runs_out_in_decode_takes_no_token_twice(harness: EngineHarness) -> None:
    """The step before is in flight when the launch fails, and its tokens count."""
    harness.runner.launch_faults = {number: [OutOfMemory("full")] for number in (2, 3)}
    for i in range(4):
        harness.submit(f"r{i}", [i, 2, 3], max_tokens=6)
    harness.start()
    for i in range(4):
        harness.assert_whole(f"r{i}", [i, 2, 3], 6)
    assert not sum(report.num_preemptions for report in harness.reports)


@pytest.mark.parametrize("plain_ahead_s", [None, 1.0])
def test_a_step_that_finds_no_memory_while_it_runs_is_halved(
    harness: EngineHarness, plain_ahead_s: float | None
) -> None:
    """What was launched after it followed its tokens, and counts for nothing. The first one had 12 tokens."""
    harness.runner.plain_ahead_s = plain_ahead_s
    harness.runner.wait_faults = {number: OutOfMemory("full") for number in (1, 4, 9)}
    for i in range(4):
        harness.submit(f"r{i}", [i, 2, 3], max_tokens=6)
    harness.start()
    for i in range(4):
        harness.assert_whole(f"r{i}", [i, 2, 3], 6)
    assert all(report.error is None for report in harness.reports)
    assert max(report.num_prefill_tokens + report.num_decode_tokens for report in harness.reports) <= 6


def test_who_ended_before_the_choice_is_not_launched_again(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens in flight that a choice depends on end a sequence; then there is no memory for the choice."""
    runner, engine, launched = harness.runner, harness.engine, list[list[str]]()
    launch = runner.launch

    def refuse_the_second(plan: StepPlan) -> QueuedStep:
        launched.append([chunk.sequence.request.request_id for chunk in plan.chunks])
        return runner.refused_late(plan) if len(launched) == 2 else launch(plan)

    monkeypatch.setattr(runner, "launch", refuse_the_second)
    monkeypatch.setattr(
        engine, "_limit", lambda scheduler, _: engine._land_but(scheduler, 0, is_launching=True)
    )
    runner.bad.add(("a", 0))
    harness.submit("a", [1, 2, 3])
    harness.submit("b", [4, 5, 6])
    harness.start()
    assert harness.last("a").error == "logits were not finite"
    harness.assert_whole("b", [4, 5, 6])
    assert launched == [["a", "b"], ["a", "b"], ["b"], ["b"]]


# The end


def test_stop_waits_for_what_is_in_flight_and_delivers_it(harness: EngineHarness) -> None:
    harness.runner.gate = threading.Semaphore(0)
    harness.submit("r", [1, 2], max_tokens=50)
    harness.start()
    assert harness.runner.entered.get(timeout=PATIENCE_S) == 1
    assert not harness.engine.stop(timeout_s=0.0)
    harness.runner.gate.release(50)
    assert harness.engine.stop(PATIENCE_S)
    assert [len(o.token_ids) for o in harness.outputs("r")] == [1, 1]
    assert harness.outputs("r")[-1].finish_reason is None, "what is unfinished stays so"


def test_a_device_lost_while_stopping_is_told() -> None:
    harness = EngineHarness()
    harness.runner.gate = threading.Semaphore(0)
    harness.runner.wait_faults[2] = DeviceError("lost")
    harness.submit("r", [1, 2], max_tokens=50)
    harness.start()
    assert harness.runner.entered.get(timeout=PATIENCE_S) == 1
    assert not harness.engine.stop(timeout_s=0.0)
    harness.stop()
    assert harness.states.get(timeout=PATIENCE_S) is EngineState.FAILED
    assert harness.last("r").error == "the engine failed"


# A host beside which plain steps alone run


def test_none_but_plain_steps_are_ahead_and_a_newcomer_holds_back_no_token(harness: EngineHarness) -> None:
    """What is in flight is waited for before a step with a prompt is launched, which has ended then."""
    harness.runner.plain_ahead_s = 1e9
    harness.runner.gate = threading.Semaphore(0)
    harness.submit("r", [1, 2, 3], max_tokens=6)
    harness.start()
    for number in (1, 2):
        assert harness.runner.entered.get(timeout=PATIENCE_S) == number
        if number == 2:
            harness.submit("new", [4, 5, 6], max_tokens=2)
        harness.runner.gate.release()
    harness.runner.gate.release(1_000)
    harness.assert_whole("r", [1, 2, 3], 6)
    harness.assert_whole("new", [4, 5, 6], 2)
    harness.stop()
    launch, wait = "launch", "wait"
    assert harness.runner.asked[:8] == [
        (launch, 1), (wait, 1), (launch, 2), (launch, 3), (wait, 2), (wait, 3), (launch, 4), (wait, 4),
    ]  # fmt: skip


def test_who_ended_while_the_next_step_was_planned_is_not_in_it(harness: EngineHarness) -> None:
    harness.runner.plain_ahead_s = 1e9
    harness.runner.gate = threading.Semaphore(0)
    harness.submit("r", [1, 2, 3], max_tokens=90)
    harness.start()
    assert harness.runner.entered.get(timeout=PATIENCE_S) == 1
    harness.runner.gate.release()
    assert harness.runner.entered.get(timeout=PATIENCE_S) == 2
    harness.runner.wait_faults[3] = ValueError("late")
    harness.submit("new", [4, 5, 6], max_tokens=2)
    harness.runner.gate.release(1_000)
    assert harness.last("r").error == "the step failed"
    harness.assert_whole("new", [4, 5, 6], 2)
    harness.submit("r again", [1, 2, 3])
    harness.assert_whole("r again", [1, 2, 3])


def test_a_step_that_nobody_is_left_in_holds_no_block_back(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its only sequence ends with the step before, which is waited for because this one would take long."""
    monkeypatch.setattr(harness.queue, "step_seconds", lambda *load: 0.0 if load[2] < 8 else 2.0)
    harness.runner.plain_ahead_s = 1.0
    harness.runner.wait_faults[5] = ValueError("late")
    harness.submit("r", [1, 2, 3], max_tokens=90)
    harness.start()
    assert harness.last("r").error == "the step failed"
    harness.wait_for(lambda: harness.reports[-1].num_free_blocks == 63)
    harness.submit("new", [4, 5, 6])
    harness.assert_whole("new", [4, 5, 6])
    harness.stop()
    launched = [number for what, number in harness.runner.asked if what == "launch"]
    assert launched == [1, 2, 3, 4, 5, 7, 8, 9]
    stats = harness.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks


def test_who_waits_for_a_seat_starts_as_soon_as_one_is_free(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    """All others end with the step in flight, so that nothing is planned beside it."""
    monkeypatch.setattr(engine, "_IDLE_WAIT_S", 10 * PATIENCE_S)
    harness.runner.plain_ahead_s = 1e9
    for i in range(8):
        harness.submit(f"r{i}", [i, 2, 3], max_tokens=6)
    harness.submit("next", [4, 5, 6])
    harness.start()
    harness.assert_whole("next", [4, 5, 6])


def test_a_step_that_takes_long_is_waited_for_before_the_next_is_planned(harness: EngineHarness) -> None:
    """Its clock counts its readings, so that every step is said to take seconds."""
    harness.runner.plain_ahead_s = 0.05
    harness.submit("r", [1, 2, 3], max_tokens=60)
    harness.start()
    harness.assert_whole("r", [1, 2, 3], 60)
    harness.stop()
    asked = harness.runner.asked[-20:]
    assert asked == [(what, number) for number in range(51, 61) for what in ("launch", "wait")]
