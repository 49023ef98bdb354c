"""The rehearsal: what steps take is known before the engine is ready, and nothing else is left of it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from penstock.engine.engine import Engine, EngineState
from penstock.engine.planning.device import DeviceError
from penstock.engine.planning.rehearsal import Rehearsal
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink, make_request


class _Clock:
    """A clock that goes on by so much whenever it is read."""

    def __init__(self, tick_s: float) -> None:
        self._tick_s = tick_s
        self._now = 0.0

    def __call__(self) -> float:
        self._now += self._tick_s
        return self._now


class _Rehearsed:
    """An engine that rehearses, and all that left it."""

    def __init__(self, tick_s: float = 0.001) -> None:
        self.queue = LaneQueue(threading.Lock(), DEFAULT_POLICIES)
        self.reports: list[StepReport] = []
        self.runner = FakeRunner(200, 4)
        self._ready = threading.Event()
        self.engine = Engine(
            lambda: self.runner,
            self.queue,
            FakeSink(),
            SchedulerLimits(max_batch_tokens=64, max_num_seqs=16, max_model_len=1_000),
            deliver=self.reports.append,
            clock=_Clock(tick_s),
            on_state=lambda state: self._ready.set() if state is not EngineState.STARTING else None,
            rehearsal=Rehearsal(self.queue, 1_000),
        )

    @contextmanager
    def started(self) -> Iterator[EngineState]:
        """Gives the state to which the engine came from STARTING."""
        self.engine.start()
        try:
            assert self._ready.wait(10)
            yield self.engine.state
        finally:
            self.engine.stop(10)


@pytest.mark.parametrize("tick_s", [0.001, 0.2])
def test_the_step_time_is_known_when_the_engine_is_ready_and_nothing_else_is_left(tick_s: float) -> None:
    """With the slower clock the rehearsal is cut off."""
    rehearsed = _Rehearsed(tick_s)
    queue = rehearsed.queue
    assert queue.predict(Lane.INTERACTIVE, 64, 0.0) is None
    with rehearsed.started() as state:
        assert state is EngineState.READY
        assert queue.admission.model.is_known
        assert all(queue.predict(lane, 64, 0.0) is not None for lane in DEFAULT_POLICIES)
        stats = rehearsed.engine.stats()
        assert (stats.num_steps, stats.num_running, stats.num_waiting) == (0, 0, 0)
        assert stats.num_free_blocks == stats.num_blocks
        assert stats.num_cached_blocks == 0
        assert rehearsed.reports == []


def test_a_forecast_is_the_same_after_a_day_without_requests() -> None:
    rehearsed = _Rehearsed()
    with rehearsed.started():
        first, later = (rehearsed.queue.predict(Lane.INTERACTIVE, 64, at_s) for at_s in (10.0, 86_410.0))
    assert first is not None
    assert first == later


def test_a_device_that_is_lost_meanwhile_fails_the_engine_and_leaves_the_queue_as_it_is() -> None:
    rehearsed = _Rehearsed()
    rehearsed.runner.fault = DeviceError("lost")
    rehearsed.queue.put(make_request("waiting", [1, 2, 3]), 0.0)
    with rehearsed.started() as state:
        assert state is EngineState.FAILED
        assert isinstance(rehearsed.engine.failure, DeviceError)
        assert rehearsed.reports == []
        assert rehearsed.queue.cancel("waiting")
