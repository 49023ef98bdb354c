"""The step thread: what it delivers, and what it survives."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from queue import SimpleQueue

import pytest

from penstock.engine.engine import Engine, EngineState
from penstock.engine.planning.device import DeviceError, RunnerFacts
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason, Output
from penstock.engine.planning.request_queue import StepLoad
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.engine.planning.step import ExpertLoad, ExpertUse, StepPlan, StepResult
from penstock.engine.planning.timings import ExpertSums
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink, expected_output, make_request

PATIENCE_S = 10.0


class GatedRunner(FakeRunner):
    """Each step waits for the test to let it through."""

    def __init__(self, *, gated: bool = False, load_error: Exception | None = None) -> None:
        super().__init__(64, 4)
        self.load_error = load_error
        self.entered: SimpleQueue[int] = SimpleQueue()
        self.gate = threading.Semaphore(0 if gated else 1_000_000)

    def load(self) -> RunnerFacts:
        if self.load_error is not None:
            raise self.load_error
        return super().load()

    def execute(self, plan: StepPlan) -> StepResult:
        self.entered.put(len(plan.chunks))
        assert self.gate.acquire(timeout=PATIENCE_S)
        return super().execute(plan)


class EngineHarness:
    """An engine at work, and everything it delivered."""

    def __init__(self, runner: GatedRunner) -> None:
        self.runner = runner
        self.queue = LaneQueue(threading.Lock())
        self.reports: list[StepReport] = []
        self.news = threading.Condition()
        self.states: SimpleQueue[EngineState] = SimpleQueue()
        self.engine = Engine(
            lambda: runner,
            self.queue,
            FakeSink(),
            SchedulerLimits(max_batch_tokens=32, max_num_seqs=4, max_model_len=100),
            deliver=self.deliver,
            clock=time.monotonic,
            on_state=self.states.put,
        )

    def deliver(self, report: StepReport) -> None:
        with self.news:
            self.reports.append(report)
            self.news.notify_all()

    def submit(self, name: str, prompt: list[int], max_tokens: int = 3) -> None:
        self.queue.put(make_request(name, prompt, max_tokens=max_tokens), 0.0)
        self.engine.wake()

    def outputs(self, name: str) -> list[Output]:
        return [o for report in self.reports for o in report.outputs if o.request_id == name]

    def last(self, name: str) -> Output:
        """The output that ends this request."""
        with self.news:
            assert self.news.wait_for(
                lambda: any(o.finish_reason for o in self.outputs(name)), timeout=PATIENCE_S
            )
        return self.outputs(name)[-1]


@pytest.fixture
def harness() -> Iterator[EngineHarness]:
    harness = EngineHarness(GatedRunner())
    harness.engine.start()
    assert harness.states.get(timeout=PATIENCE_S) is EngineState.READY
    yield harness
    assert harness.engine.stop(PATIENCE_S)


@pytest.fixture
def gated() -> Iterator[EngineHarness]:
    harness = EngineHarness(GatedRunner(gated=True))
    harness.engine.start()
    assert harness.states.get(timeout=PATIENCE_S) is EngineState.READY
    yield harness
    harness.runner.gate.release(1_000_000)
    assert harness.engine.stop(PATIENCE_S)


def test_tokens_arrive_in_one_report_per_step(harness: EngineHarness) -> None:
    harness.submit("r", [1, 2, 3])
    assert harness.last("r").finish_reason is FinishReason.LENGTH
    tokens = [t for o in harness.outputs("r") for t in o.token_ids]
    assert tokens == expected_output(make_request("r", [1, 2, 3], max_tokens=3), 0, 100)
    assert len(harness.reports) == 3
    assert [r.num_prefill_tokens for r in harness.reports] == [3, 0, 0]
    assert [r.num_decode_tokens for r in harness.reports] == [0, 1, 1]


def test_a_cancelled_request_is_out_of_the_next_step(gated: EngineHarness) -> None:
    gated.submit("a", [1], max_tokens=90)
    assert gated.runner.entered.get(timeout=PATIENCE_S) == 1
    gated.submit("b", [2], max_tokens=90)
    gated.engine.cancel("a")
    gated.runner.gate.release()
    assert gated.runner.entered.get(timeout=PATIENCE_S) == 1
    gated.engine.cancel("b")
    gated.runner.gate.release()
    assert gated.last("a").finish_reason is FinishReason.CANCELLED
    assert gated.last("b").finish_reason is FinishReason.CANCELLED


def test_cancelling_what_is_not_there_is_nothing(harness: EngineHarness) -> None:
    harness.engine.cancel("never")
    harness.submit("r", [1])
    assert harness.last("r").finish_reason is FinishReason.LENGTH


def test_a_step_that_fails_ends_its_sequences_and_the_next_works(harness: EngineHarness) -> None:
    harness.runner.fault = ValueError("odd shape")
    harness.submit("a", [1])
    last = harness.last("a")
    assert (last.finish_reason, last.error) == (FinishReason.FAILED, "the step failed")
    assert harness.reports[-1].error == "ValueError: odd shape"
    harness.submit("b", [1])
    assert harness.last("b").finish_reason is FinishReason.LENGTH
    assert harness.engine.state is EngineState.READY


def test_a_lost_device_ends_everything_and_the_engine(harness: EngineHarness) -> None:
    harness.runner.fault = DeviceError("device lost")
    harness.submit("a", [1])
    assert harness.last("a").finish_reason is FinishReason.FAILED
    assert harness.states.get(timeout=PATIENCE_S) is EngineState.FAILED
    assert harness.engine.error == "device lost"
    assert harness.engine.stop(PATIENCE_S)
    assert harness.runner.closed


def test_a_model_that_does_not_load_fails_the_engine_with_its_reason() -> None:
    harness = EngineHarness(GatedRunner(load_error=RuntimeError("no such file")))
    harness.engine.start()
    assert harness.states.get(timeout=PATIENCE_S) is EngineState.FAILED
    assert harness.engine.error == "no such file"
    assert isinstance(harness.engine.failure, RuntimeError)
    assert harness.engine.stop(PATIENCE_S)


def test_a_hanging_step_shows_in_the_time_of_last_progress(gated: EngineHarness) -> None:
    gated.submit("a", [1], max_tokens=2)
    gated.runner.entered.get(timeout=PATIENCE_S)
    stuck = gated.engine.last_progress_s
    assert gated.engine.last_progress_s == stuck
    gated.runner.gate.release(2)
    gated.last("a")
    assert gated.engine.last_progress_s > stuck


def test_stats_of_a_resting_engine_show_a_free_pool(harness: EngineHarness) -> None:
    harness.submit("r", list(range(9)))
    harness.last("r")
    stats = harness.engine.stats()
    assert (stats.num_running, stats.num_waiting, stats.num_pool_violations) == (0, 0, 0)
    assert stats.num_free_blocks == stats.num_blocks == 63
    assert stats.num_cached_blocks == 2
    assert stats.num_steps == 3


def test_a_pool_that_does_not_balance_is_started_afresh(
    harness: EngineHarness, caplog: pytest.LogCaptureFixture
) -> None:
    harness.submit("a", [1])
    harness.last("a")
    scheduler = harness.engine._scheduler
    assert scheduler is not None
    scheduler.memory.parts[0].pool.allocate()
    harness.submit("b", [1])
    harness.last("b")
    harness.submit("c", [2])
    harness.last("c")
    assert harness.engine.stop(PATIENCE_S)
    assert harness.engine.stats().num_pool_violations == 1
    assert harness.engine.stats().num_free_blocks == 63
    assert "violation" in caplog.text


def test_the_time_that_drafting_took_is_none_of_the_steps(
    harness: EngineHarness, monkeypatch: pytest.MonkeyPatch
) -> None:
    loads: list[StepLoad] = []
    execute = harness.runner.execute

    def with_drafts(plan: StepPlan) -> StepResult:
        plan.drafting_s = 1.0
        return execute(plan)

    monkeypatch.setattr(harness.runner, "execute", with_drafts)
    monkeypatch.setattr(harness.queue, "observe", loads.append)
    harness.submit("a", [1, 2, 3])
    harness.last("a")
    steps = [report for report in harness.reports if report.num_prefill_tokens or report.num_decode_tokens]
    durations = [report.duration_s - 1.0 for report in steps]
    assert [load.duration_s for load in loads] == pytest.approx(durations)
    assert loads


def test_experts_are_reported_with_the_step_that_counted_it() -> None:
    use = ExpertUse(12, 2, ExpertLoad(experts=1.5, ranks=1.25))

    class CountingRunner(GatedRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            result.experts = use if plan.num_prefill else None
            return result

    harness = EngineHarness(CountingRunner())
    harness.engine.start()
    harness.submit("a", [1, 2, 3])
    harness.last("a")
    assert harness.engine.stop(PATIENCE_S)
    assert [report.experts for report in harness.reports if report.num_prefill_tokens] == [use]
    assert not any(report.experts for report in harness.reports if not report.num_prefill_tokens)


def test_a_reply_tells_the_experts_of_the_steps_after_its_first_token() -> None:
    class CountingRunner(GatedRunner):
        def execute(self, plan: StepPlan) -> StepResult:
            result = super().execute(plan)
            result.experts = ExpertUse(100 if plan.num_prefill else 8, 2)
            return result

    harness = EngineHarness(CountingRunner())
    harness.engine.start()
    for name in ("a", "b"):
        harness.submit(name, [1, 2, 3])
        timings = harness.last(name).timings
        assert timings is not None
        num_later = timings.num_output_tokens - 1
        assert num_later > 0
        assert timings.experts == ExpertSums(8 * num_later, 2 * num_later)
    assert harness.engine.stop(PATIENCE_S)
