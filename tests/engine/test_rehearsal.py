"""The rehearsal: what steps take is known before the engine is ready, and nothing else is left of it."""

from __future__ import annotations

import threading

import pytest

from penstock.engine.engine import Engine, EngineState
from penstock.engine.planning.rehearsal import Rehearsal
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.engine.planning.step import StepReport
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink


class _Clock:
    """A clock that goes on by so much whenever it is read."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._tick_s
        return self._now


@pytest.mark.parametrize("tick_s", [0.001, 0.2])
def test_the_step_time_is_known_when_the_engine_is_ready_and_nothing_else_is_left(tick_s: float) -> None:
    """With the slower clock the rehearsal is cut off."""
    queue, reports, ready = (
        LaneQueue(threading.Lock(), DEFAULT_POLICIES),
        list[StepReport](),
        threading.Event(),
    )
    runner = FakeRunner(200, 4)
    engine = Engine(
        lambda: runner,
        queue,
        FakeSink(),
        SchedulerLimits(max_batch_tokens=64, max_num_seqs=16, max_model_len=1_000),
        deliver=reports.append,
        clock=_Clock(tick_s),
        on_state=lambda state: ready.set() if state is not EngineState.STARTING else None,
        rehearsal=Rehearsal(queue, 1_000),
    )
    assert queue.predict(Lane.INTERACTIVE, 64, 0.0) is None
    engine.start()
    try:
        assert ready.wait(10)
        assert engine.state is EngineState.READY
        assert queue.admission.model.is_known
        assert all(queue.predict(lane, 64, 0.0) is not None for lane in DEFAULT_POLICIES)
        stats = engine.stats()
        assert (stats.num_steps, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_cached_blocks == 0
        assert reports == []
    finally:
        engine.stop(10)
