"""The step thread among components that raise, stop and ask at the wrong moment."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Callable, Iterator
from queue import SimpleQueue

import pytest

from engine.engine import Engine, EngineState, EngineStats
from engine.planning.request import FinishReason, Output, Sequence
from engine.planning.scheduler import SchedulerLimits
from engine.planning.step import DeviceError, Plan, RunnerFacts, StepReport, StepResult
from priority.queue import LaneQueue
from tests.engine.paper import PaperRunner, PaperSink, expected_output, make_request

PATIENCE_S = 20.0


class StepRunner(PaperRunner):
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

    def execute(self, plan: Plan) -> StepResult:
        self.entered.put(len(plan.chunks))
        assert self.gate.acquire(timeout=PATIENCE_S)
        if self.always is not None:
            raise self.always
        return super().execute(plan)

    def close(self) -> None:
        super().close()
        self.num_closed += 1


class TouchySink(PaperSink):
    """Fails on one request."""

    def __init__(self) -> None:
        self.hated = ""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:
        if sequence.request.request_id == self.hated:
            raise LookupError("no text for it")
        return super().accept(sequence, token_id, is_last)


class Workshop:
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
def shop() -> Iterator[Workshop]:
    shop = Workshop()
    yield shop
    shop.runner.may_load.set()
    shop.runner.gate.release(1_000)
    assert shop.engine.stop(PATIENCE_S)


# The runner


@pytest.mark.parametrize("fault", [OSError("disk"), MemoryError(), SystemExit(3)])
def test_whatever_load_raises_is_kept_and_the_runner_closed(shop: Workshop, fault: BaseException) -> None:
    shop.runner.load_fault = fault
    shop.runner.may_load.set()
    shop.engine.start()
    shop.expect(EngineState.FAILED)
    assert shop.engine.stop(PATIENCE_S)
    assert shop.engine.failure is fault
    assert shop.engine.error == (str(fault) or type(fault).__name__)
    assert shop.engine.stats() == EngineStats()
    assert shop.runner.num_closed == 1
    assert shop.reports == []


def test_a_step_that_fails_once_leaves_those_who_came_later_alone(shop: Workshop) -> None:
    shop.start()
    shop.runner.fault = ValueError("once")
    shop.submit("a", [1], n=3)
    shop.last("a")
    assert sorted(o.index for o in shop.outputs("a")) == [0, 1, 2]
    assert {o.finish_reason for o in shop.outputs("a")} == {FinishReason.FAILED}
    shop.submit("b", [1, 2])
    shop.last("b")
    request = make_request("b", [1, 2], max_tokens=3)
    assert [t for o in shop.outputs("b") for t in o.token_ids] == expected_output(request, 0, 100)


def test_a_step_that_fails_forgets_what_it_never_computed(shop: Workshop) -> None:
    """Blocks of a step that broke must not be found by the same prompt that comes again."""
    shop.start()
    prompt = list(range(12))
    shop.runner.fault = ValueError("once")
    shop.submit("a", prompt)
    shop.last("a")
    assert shop.engine.stats().num_cached_blocks == 0
    shop.submit("b", prompt)
    timings = shop.last("b").timings
    assert timings is not None
    assert timings.num_cached_tokens == 0


@pytest.mark.parametrize(
    "fault", [ValueError("shape"), MemoryError("no room"), KeyError(3), AssertionError()]
)
def test_steps_that_always_fail_end_everybody_and_the_engine_stays_ready(
    shop: Workshop, fault: Exception
) -> None:
    shop.start()
    shop.runner.always = fault
    names = [f"r{i}" for i in range(9)]
    for name in names:
        shop.submit(name, [1, 2])
    assert {shop.last(name).error for name in names} == {"the step failed"}
    assert {report.error for report in shop.reports} == {f"{type(fault).__name__}: {fault}"}
    assert shop.engine.state is EngineState.READY
    stats = shop.engine.stats()
    assert (stats.num_free_blocks, stats.num_pool_violations) == (63, 0)


def test_a_lost_device_ends_those_who_wait_in_the_engine_and_not_those_in_the_queue(shop: Workshop) -> None:
    """One computes a prefix, as many as there are seats wait for it, and two more have not been looked at."""
    shop.runner.fault = DeviceError("lost")
    names = [f"r{i}" for i in range(7)]
    for i, name in enumerate(names):
        shop.submit(name, [*range(9), i])
    shop.start()
    shop.expect(EngineState.FAILED)
    (report,) = shop.reports
    assert [o.request_id for o in report.outputs] == names[:5]
    assert {o.error for o in report.outputs} == {"the engine failed"}
    assert [name for name in names if shop.queue.cancel(name)] == names[5:]
    assert isinstance(shop.engine.failure, DeviceError)
    assert shop.runner.num_closed == 1


# The sink and the receiver


def test_a_receiver_that_raises_once_gets_the_last_report(shop: Workshop) -> None:
    shop.faults.append(ConnectionError("nobody listens"))
    shop.start()
    shop.submit("r", [1])
    shop.expect(EngineState.FAILED)
    assert shop.engine.error == "nobody listens"
    assert [report.error for report in shop.reports] == ["nobody listens"]
    assert shop.outputs("r")[0].token_ids
    assert shop.last("r").finish_reason is FinishReason.FAILED


# Stopping


def test_stop_during_load_ends_after_it(shop: Workshop) -> None:
    shop.engine.start()
    assert not shop.engine.stop(timeout_s=0.0)
    assert shop.engine.state is EngineState.STARTING
    shop.runner.may_load.set()
    assert shop.engine.stop(PATIENCE_S)
    shop.expect(EngineState.READY)
    shop.expect(EngineState.STOPPED)
    assert shop.runner.num_closed == 1


def test_stop_during_a_step_lets_it_end_and_delivers_what_it_brought(shop: Workshop) -> None:
    shop.runner.gate = threading.Semaphore(0)
    shop.start()
    shop.submit("r", [1, 2], max_tokens=50)
    shop.runner.entered.get(timeout=PATIENCE_S)
    assert not shop.engine.stop(timeout_s=0.0)
    shop.runner.gate.release(50)
    assert shop.engine.stop(PATIENCE_S)
    assert [len(o.token_ids) for o in shop.outputs("r")] == [1]
    assert shop.outputs("r")[-1].finish_reason is None, "what is unfinished stays so"
    assert shop.runner.num_closed == 1


def test_stop_twice_and_before_the_start_is_nothing_special(shop: Workshop) -> None:
    other = Workshop()
    assert other.engine.stop(0.0)
    shop.start()
    assert shop.engine.stop(PATIENCE_S)
    assert shop.engine.stop(0.0)
    assert shop.engine.state is EngineState.STOPPED
    assert shop.runner.num_closed == 1


def test_stop_from_several_threads_at_once(shop: Workshop) -> None:
    shop.start()
    shop.submit("r", [1], max_tokens=90)
    answers: SimpleQueue[bool] = SimpleQueue()
    threads = [threading.Thread(target=lambda: answers.put(shop.engine.stop(PATIENCE_S))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert [answers.get(timeout=PATIENCE_S) for _ in range(4)] == [True] * 4
    shop.expect(EngineState.STOPPED)


def test_what_is_submitted_while_it_stops_is_left_in_the_queue(shop: Workshop) -> None:
    shop.runner.gate = threading.Semaphore(0)
    shop.start()
    shop.submit("r", [1], max_tokens=50)
    shop.runner.entered.get(timeout=PATIENCE_S)
    shop.engine.stop(timeout_s=0.0)
    shop.submit("late", [2])
    shop.engine.cancel("late")
    shop.runner.gate.release(50)
    assert shop.engine.stop(PATIENCE_S)
    assert shop.outputs("late") == []
    assert shop.queue.cancel("late")


# Cancelling


def test_unknown_and_ended_ids_bring_no_output_and_no_report(shop: Workshop) -> None:
    shop.start()
    for name in ("never", "", "r"):
        shop.engine.cancel(name)
    shop.submit("r", [1], max_tokens=2)
    shop.last("r")
    for _ in range(3):
        shop.engine.cancel("r")
    shop.submit("after", [2], max_tokens=1)
    shop.last("after")
    assert [o.finish_reason for o in shop.outputs("r")] == [None, FinishReason.LENGTH]
    assert len(shop.reports) == 3


def test_a_cancel_during_a_step_comes_with_the_next_and_frees_the_blocks(shop: Workshop) -> None:
    shop.runner.gate = threading.Semaphore(0)
    shop.start()
    shop.submit("r", list(range(10)), max_tokens=50, n=2)
    shop.runner.entered.get(timeout=PATIENCE_S)
    shop.engine.cancel("r")
    shop.engine.cancel("r")
    shop.runner.gate.release()
    shop.wait_for(lambda: sum(o.finish_reason is not None for o in shop.outputs("r")) == 2)
    assert [r.num_decode_tokens + r.num_prefill_tokens for r in shop.reports] == [10, 0]
    assert shop.reports[-1].num_free_blocks == 63
    assert {o.finish_reason for o in shop.reports[-1].outputs} == {FinishReason.CANCELLED}


# What is seen from outside


def test_progress_moves_with_every_step_and_with_every_turn_without_work(shop: Workshop) -> None:
    shop.start()
    seen = [shop.engine.last_progress_s]
    for name in ("a", "b"):
        shop.submit(name, [1], max_tokens=2)
        shop.last(name)
        seen.append(shop.engine.last_progress_s)
    assert seen == sorted(set(seen))
    asked = 0
    while shop.engine.last_progress_s == seen[-1] and asked < 10_000_000:
        shop.engine.wake()
        asked += 1
    assert shop.engine.last_progress_s > seen[-1]


def test_progress_stands_still_while_a_step_hangs(shop: Workshop) -> None:
    shop.runner.gate = threading.Semaphore(0)
    shop.start()
    shop.submit("r", [1], max_tokens=1)
    shop.runner.entered.get(timeout=PATIENCE_S)
    stuck = shop.engine.last_progress_s
    for _ in range(100):
        shop.engine.wake()
        shop.engine.cancel("r")
    assert shop.engine.last_progress_s == stuck
    shop.runner.gate.release()
    shop.last("r")
    assert shop.engine.last_progress_s > stuck


def test_reports_follow_one_another_in_time_and_add_up(shop: Workshop) -> None:
    shop.start()
    for i in range(6):
        shop.submit(f"r{i}", [*range(8), 20 + i], max_tokens=4)
    for i in range(6):
        shop.last(f"r{i}")
    for before, after in itertools.pairwise(shop.reports):
        assert before.started_s + before.duration_s < after.started_s
    assert sum(len(o.token_ids) for r in shop.reports for o in r.outputs) == 24
    prefill = sum(r.num_prefill_tokens for r in shop.reports)
    hits = sum(r.num_prefix_hit_tokens for r in shop.reports)
    assert prefill + hits == sum(r.num_prefix_query_tokens for r in shop.reports) == 54
    assert sum(r.num_decode_tokens for r in shop.reports) == 6 * 3
    assert {r.num_blocks for r in shop.reports} == {63}
    assert shop.engine.stats().num_steps == len(shop.reports)


def test_the_longest_sequence_is_known_once_ready(shop: Workshop) -> None:
    assert shop.engine.max_sequence_tokens == 100
    shop.runner.num_blocks = 6
    shop.start()
    assert shop.engine.max_sequence_tokens == 5 * 4
