"""The step thread among components that raise, stop and ask at the wrong moment."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from penstock.engine.engine import Engine, EngineState, EngineStats
from penstock.engine.planning.device import DeviceError, RunnerFacts
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason, Output, Sequence
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.engine.planning.step import StepPlan, StepResult
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink, expected_output, make_request

PATIENCE_S = 20.0


class StepRunner(FakeRunner):
    """Loads and steps when the test lets it, and fails as the test says."""

    def __init__(self) -> None:
        super().__init__(64, 4)
        self.may_load = threading.Event()
        self.load_fault: BaseException | None = None
        self.always: Exception | None = None
        """Raised by every step."""
        self.entered: SimpleQueue[int] = SimpleQueue()
        self.gate = threading.Semaphore(1_000_000)
        self.num_closed = 0

    def load(self) -> RunnerFacts:
        assert self.may_load.wait(PATIENCE_S)
        if self.load_fault is not None:
            raise self.load_fault
        return super().load()

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.put(len(plan.chunks))
        assert self.gate.acquire(timeout=PATIENCE_S)
        if self.always is not None:
            raise self.always
        return super().execute(plan)

    def close(self) -> None:
        super().close()
        self.num_closed += 1


class TouchySink(FakeSink):
    """Fails on one request."""

    def __init__(self) -> None:
        self.hated = ""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:
        if sequence.request.request_id == self.hated:
            raise LookupError("no text for it")
        return super().accept(sequence, token_id, is_last)


class EngineHarness:
    """An engine on a clock that counts its readings, and all that left it."""

    def __init__(self) -> None:
        self.runner = StepRunner()
        self.sink = TouchySink()
        self.queue = LaneQueue(threading.Lock())
        self.reports: list[StepReport] = []
        self.faults: list[Exception] = []
        """Raised by `deliver`, one a call, before the report is taken."""
        self.news = threading.Condition()
        self.states: SimpleQueue[EngineState] = SimpleQueue()
        ticks = itertools.count(1)
        self.engine = Engine(
            lambda: self.runner,
            self.queue,
            self.sink,
            SchedulerLimits(max_batch_tokens=32, max_num_seqs=4, max_model_len=100),
            deliver=self.deliver,
            clock=lambda: float(next(ticks)),
            on_state=self.states.put,
        )

    def deliver(self, report: StepReport) -> None:
        if self.faults:
            raise self.faults.pop()
        with self.news:
            self.reports.append(report)
            self.news.notify_all()

    def start(self) -> None:
        self.runner.may_load.set()
        self.engine.start()
        self.expect(EngineState.READY)

    def expect(self, state: EngineState) -> None:
        assert self.states.get(timeout=PATIENCE_S) is state

    def submit(self, name: str, prompt: list[int], max_tokens: int = 3, n: int = 1) -> None:
        self.queue.put(make_request(name, prompt, max_tokens=max_tokens, n=n), 0.0)
        self.engine.wake()

    def outputs(self, name: str) -> list[Output]:
        return [o for report in self.reports for o in report.outputs if o.request_id == name]

    def wait_for(self, truth: Callable[[], bool]) -> None:
        with self.news:
            assert self.news.wait_for(truth, timeout=PATIENCE_S)

    def last(self, name: str) -> Output:
        self.wait_for(lambda: any(o.finish_reason for o in self.outputs(name)))
        return self.outputs(name)[-1]


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    harness = EngineHarness()
    yield harness
    harness.runner.may_load.set()
    harness.runner.gate.release(1_000)
    assert harness.engine.stop(PATIENCE_S)


# The runner


@pytest.mark.parametrize("fault", [OSError("disk"), MemoryError(), SystemExit(3)])
def test_whatever_load_raises_is_kept_and_the_runner_closed(
    harness: EngineHarness, fault: BaseException
) -> None:
    harness.runner.load_fault = fault
    harness.runner.may_load.set()
    harness.engine.start()
    harness.expect(EngineState.FAILED)
    assert harness.engine.stop(PATIENCE_S)
    assert harness.engine.failure is fault
    assert harness.engine.error == (str(fault) or type(fault).__name__)
    assert harness.engine.stats() == EngineStats()
    assert harness.runner.num_closed == 1
    assert harness.reports == []


def test_a_step_that_fails_once_leaves_those_who_came_later_alone(harness: EngineHarness) -> None:
    harness.start()
    harness.runner.fault = ValueError("once")
    harness.submit("a", [1], n=3)
    harness.last("a")
    assert sorted(o.index for o in harness.outputs("a")) == [0, 1, 2]
    assert {o.finish_reason for o in harness.outputs("a")} == {FinishReason.FAILED}
    harness.submit("b", [1, 2])
    harness.last("b")
    request = make_request("b", [1, 2], max_tokens=3)
    assert [t for o in harness.outputs("b") for t in o.token_ids] == expected_output(request, 0, 100)


def test_a_step_that_fails_forgets_what_it_never_computed(harness: EngineHarness) -> None:
    """Blocks of a step that broke must not be found by the same prompt that comes again."""
    harness.start()
    prompt = list(range(12))
    harness.runner.fault = ValueError("once")
    harness.submit("a", prompt)
    harness.last("a")
    assert harness.engine.stats().num_cached_blocks == 0
    harness.submit("b", prompt)
    timings = harness.last("b").timings
    assert timings is not None
    assert timings.num_cached_tokens == 0


@pytest.mark.parametrize(
    "fault", [ValueError("shape"), MemoryError("no room"), KeyError(3), AssertionError()]
)
def test_steps_that_always_fail_end_everybody_and_the_engine_stays_ready(
    harness: EngineHarness, fault: Exception
) -> None:
    harness.start()
    harness.runner.always = fault
    names = [f"r{i}" for i in range(9)]
    for name in names:
        harness.submit(name, [1, 2])
    assert {harness.last(name).error for name in names} == {"the step failed"}
    assert {report.error for report in harness.reports} == {f"{type(fault).__name__}: {fault}"}
    assert harness.engine.state is EngineState.READY
    stats = harness.engine.stats()
    assert (stats.num_free_blocks, stats.num_pool_violations) == (63, 0)


def test_a_lost_device_ends_those_who_wait_in_the_engine_and_not_those_in_the_queue(
    harness: EngineHarness,
) -> None:
    """One computes a prefix, as many as there are seats wait for it, and two more have not been looked at."""
    harness.runner.fault = DeviceError("lost")
    names = [f"r{i}" for i in range(7)]
    for i, name in enumerate(names):
        harness.submit(name, [*range(9), i])
    harness.start()
    harness.expect(EngineState.FAILED)
    (report,) = harness.reports
    assert [o.request_id for o in report.outputs] == names[:5]
    assert {o.error for o in report.outputs} == {"the engine failed"}
    assert [name for name in names if harness.queue.cancel(name)] == names[5:]
    assert isinstance(harness.engine.failure, DeviceError)
    assert harness.runner.num_closed == 1


# The sink and the receiver


def test_a_receiver_that_raises_once_gets_the_last_report(harness: EngineHarness) -> None:
    harness.faults.append(ConnectionError("nobody listens"))
    harness.start()
    harness.submit("r", [1])
    harness.expect(EngineState.FAILED)
    assert harness.engine.error == "nobody listens"
    assert [report.error for report in harness.reports] == ["nobody listens"]
    assert harness.outputs("r")[0].token_ids
    assert harness.last("r").finish_reason is FinishReason.FAILED


# Stopping


def test_stop_during_load_ends_after_it(harness: EngineHarness) -> None:
    harness.engine.start()
    assert not harness.engine.stop(timeout_s=0.0)
    assert harness.engine.state is EngineState.STARTING
    harness.runner.may_load.set()
    assert harness.engine.stop(PATIENCE_S)
    harness.expect(EngineState.READY)
    harness.expect(EngineState.STOPPED)
    assert harness.runner.num_closed == 1


def test_stop_during_a_step_lets_it_end_and_delivers_what_it_brought(harness: EngineHarness) -> None:
    harness.runner.gate = threading.Semaphore(0)
    harness.start()
    harness.submit("r", [1, 2], max_tokens=50)
    harness.runner.entered.get(timeout=PATIENCE_S)
    assert not harness.engine.stop(timeout_s=0.0)
    harness.runner.gate.release(50)
    assert harness.engine.stop(PATIENCE_S)
    assert [len(o.token_ids) for o in harness.outputs("r")] == [1]
    assert harness.outputs("r")[-1].finish_reason is None, "what is unfinished stays so"
    assert harness.runner.num_closed == 1


def test_stop_twice_and_before_the_start_is_nothing_special(harness: EngineHarness) -> None:
    other = EngineHarness()
    assert other.engine.stop(0.0)
    harness.start()
    assert harness.engine.stop(PATIENCE_S)
    assert harness.engine.stop(0.0)
    assert harness.engine.state is EngineState.STOPPED
    assert harness.runner.num_closed == 1


def test_stop_from_several_threads_at_once(harness: EngineHarness) -> None:
    harness.start()
    harness.submit("r", [1], max_tokens=90)
    answers: SimpleQueue[bool] = SimpleQueue()
    threads = [
        threading.Thread(target=lambda: answers.put(harness.engine.stop(PATIENCE_S))) for _ in range(4)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers.get(timeout=PATIENCE_S) for _ in range(4)] == [True] * 4
    harness.expect(EngineState.STOPPED)


def test_what_is_submitted_while_it_stops_is_left_in_the_queue(harness: EngineHarness) -> None:
    harness.runner.gate = threading.Semaphore(0)
    harness.start()
    harness.submit("r", [1], max_tokens=50)
    harness.runner.entered.get(timeout=PATIENCE_S)
    harness.engine.stop(timeout_s=0.0)
    harness.submit("late", [2])
    harness.engine.cancel("late")
    harness.runner.gate.release(50)
    assert harness.engine.stop(PATIENCE_S)
    assert harness.outputs("late") == []
    assert harness.queue.cancel("late")


# Cancelling


def test_unknown_and_ended_ids_bring_no_output_and_no_report(harness: EngineHarness) -> None:
    harness.start()
    for name in ("never", "", "r"):
        harness.engine.cancel(name)
    harness.submit("r", [1], max_tokens=2)
    harness.last("r")
    for _ in range(3):
        harness.engine.cancel("r")
    harness.submit("after", [2], max_tokens=1)
    harness.last("after")
    assert [o.finish_reason for o in harness.outputs("r")] == [None, FinishReason.LENGTH]
    assert len(harness.reports) == 3


def test_a_cancel_during_a_step_comes_with_the_next_and_frees_the_blocks(harness: EngineHarness) -> None:
    harness.runner.gate = threading.Semaphore(0)
    harness.start()
    harness.submit("r", list(range(10)), max_tokens=50, n=2)
    harness.runner.entered.get(timeout=PATIENCE_S)
    harness.engine.cancel("r")
    harness.engine.cancel("r")
    harness.runner.gate.release()
    harness.wait_for(lambda: sum(o.finish_reason is not None for o in harness.outputs("r")) == 2)
    assert [r.num_decode_tokens + r.num_prefill_tokens for r in harness.reports] == [10, 0]
    assert harness.reports[-1].num_free_blocks == 63
    assert {o.finish_reason for o in harness.reports[-1].outputs} == {FinishReason.CANCELLED}


# What is seen from outside


def test_progress_moves_with_every_step_and_with_every_turn_without_work(harness: EngineHarness) -> None:
    harness.start()
    seen = [harness.engine.last_progress_s]
    for name in ("a", "b"):
        harness.submit(name, [1], max_tokens=2)
        harness.last(name)
        seen.append(harness.engine.last_progress_s)
    assert seen == sorted(set(seen))
    asked = 0
    while harness.engine.last_progress_s == seen[-1] and asked < 10_000_000:
        harness.engine.wake()
        asked += 1
    assert harness.engine.last_progress_s > seen[-1]


def test_progress_stands_still_while_a_step_hangs(harness: EngineHarness) -> None:
    harness.runner.gate = threading.Semaphore(0)
    harness.start()
    harness.submit("r", [1], max_tokens=1)
    harness.runner.entered.get(timeout=PATIENCE_S)
    stuck = harness.engine.last_progress_s
    for _ in range(100):
        harness.engine.wake()
        harness.engine.cancel("r")
    assert harness.engine.last_progress_s == stuck
    harness.runner.gate.release()
    harness.last("r")
    assert harness.engine.last_progress_s > stuck


def test_reports_follow_one_another_in_time_and_add_up(harness: EngineHarness) -> None:
    harness.start()
    for i in range(6):
        harness.submit(f"r{i}", [*range(8), 20 + i], max_tokens=4)
    for i in range(6):
        harness.last(f"r{i}")
    for before, after in itertools.pairwise(harness.reports):
        assert before.started_s + before.duration_s < after.started_s
    assert sum(len(o.token_ids) for r in harness.reports for o in r.outputs) == 24
    prefill = sum(r.num_prefill_tokens for r in harness.reports)
    hits = sum(r.num_prefix_hit_tokens for r in harness.reports)
    assert prefill + hits == sum(r.num_prefix_query_tokens for r in harness.reports) == 54
    assert sum(r.num_decode_tokens for r in harness.reports) == 6 * 3
    assert {r.num_blocks for r in harness.reports} == {63}
    assert harness.engine.stats().num_steps == len(harness.reports)


def test_the_longest_sequence_is_known_once_ready(harness: EngineHarness) -> None:
    assert harness.engine.max_sequence_tokens == 100
    harness.runner.num_blocks = 6
    harness.start()
    assert harness.engine.max_sequence_tokens == 5 * 4
