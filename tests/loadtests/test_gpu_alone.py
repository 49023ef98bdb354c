"""The pace of steps, of an engine whose every step takes a known time."""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from loadtests.gpu import alone
from loadtests.gpu.checkpoints import token_ids
from penstock.engine.engine import EngineState
from penstock.engine.planning.request import FinishReason, Output, Timings
from penstock.engine.planning.step import Plan, StepReport
from penstock.priority.lanes import Lane

PREFILL_S, DECODE_S, DEVICE_S = 0.5, 0.008, 0.006


class FakeEngine:
    """Prefills all prompts at once, and takes DECODE_S for every other step, of which the device has DEVICE_S."""

    made: FakeEngine
    fails = False

    def __init__(
        self, runner: Callable[[], Any], queue: FakeQueue, sink: object, limits: Any, **calls: Any
    ) -> None:
        assert (sink, limits.max_model_len) == (("tokens", [257]), 99)
        assert (limits.max_batch_tokens, limits.max_num_seqs) == (8192, 4)
        self.runner, self.queue = runner(), queue
        self.deliver, self.clock, self.on_state = calls["deliver"], calls["clock"], calls["on_state"]
        self.state = EngineState.STARTING
        self.error: str | None = None
        self.runs: list[list[Any]] = []
        type(self).made = self

    def start(self) -> None:
        self.on_state(EngineState.STARTING)
        self.runner.load()
        self.state, self.error = (EngineState.FAILED, "no room") if self.fails else (EngineState.READY, None)
        self.on_state(self.state)

    def stop(self, patience_s: float) -> None:
        assert patience_s == 10.0
        self.runner.forget(["all"])
        self.runner.close()

    def wake(self) -> None:
        requests, self.queue.requests = self.queue.requests, []
        self.runs.append(requests)
        streams, most = len(requests), requests[0].sampling.max_tokens
        for number in range(most):
            chunks: list[Any] = [SimpleNamespace()] * streams
            step = self.runner.launch(Plan(chunks=chunks, num_tokens=streams * (1 if number else 32)))
            step.choose()
            assert step.wait() == "a result"
            FakeRunner.made.now_s += (DECODE_S if number else PREFILL_S) - DEVICE_S
            if number == 0:
                first_s = self.clock()
            outputs = [Output(str(i), 0) for i in range(streams)]
            if number == most - 1:
                for output in outputs:
                    output.finish_reason = FinishReason.LENGTH
                    output.timings = Timings(
                        arrival_s=0, scheduled_s=0, first_token_s=first_s, finished_s=self.clock(),
                        num_prompt_tokens=32, num_cached_tokens=0, num_output_tokens=most,
                    )  # fmt: skip
            tokens = {"num_decode_tokens": streams} if number else {"num_prefill_tokens": 32 * streams}
            self.deliver(StepReport(outputs=outputs, started_s=0.0, **tokens))  # type: ignore[arg-type]


class FakeQueue:
    def __init__(self, _: object) -> None:
        self.requests: list[Any] = []

    def put(self, request: Any, now_s: float) -> None:
        assert now_s == request.arrival_s
        self.requests.append(request)


class FakeRunner:
    """A runner whose device takes half of its time before a step's tokens are chosen."""

    def __init__(self, _: object) -> None:
        self.now_s = 1000.0
        self.calls: list[object] = []
        FakeRunner.made = self

    made: FakeRunner

    def load(self) -> None:
        self.calls.append("load")

    def close(self) -> None:
        self.calls.append("close")

    def forget(self, sequences: object) -> None:
        self.calls.append(sequences)

    def launch(self, _: Plan) -> FakeRunner:
        self.now_s += DEVICE_S / 2
        return self

    def choose(self) -> None:
        self.now_s += DEVICE_S / 2

    def wait(self) -> str:
        return "a result"


class FakeEvent:
    def record(self) -> None:
        self.at_s = FakeRunner.made.now_s

    def elapsed_time(self, end: FakeEvent) -> float:
        return (end.at_s - self.at_s) * 1000


@pytest.fixture(autouse=True)
def slept(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The cycles that the device was made to wait before it began a step."""
    found: list[int] = []
    config = SimpleNamespace(eos_token_ids=[257], max_position=99)
    monkeypatch.setattr(alone, "read_config", lambda _: config)
    monkeypatch.setattr(alone, "Tokenizer", SimpleNamespace(load=lambda _: "tokens"))
    monkeypatch.setattr(alone, "TextSink", lambda *arguments: arguments)
    monkeypatch.setattr(alone, "ModelRunner", FakeRunner)
    monkeypatch.setattr(alone, "LaneQueue", FakeQueue)
    monkeypatch.setattr(alone, "Engine", FakeEngine)
    monkeypatch.setattr(alone, "event", FakeEvent)
    monkeypatch.setattr(alone, "time", SimpleNamespace(monotonic=lambda: FakeRunner.made.now_s))
    monkeypatch.setattr(torch.cuda, "synchronize", lambda: None)
    monkeypatch.setattr(torch.cuda, "_sleep", found.append)
    return found


JOB: dict[str, Any] = {
    "model": "/nowhere", "device": "cuda", "streams": [1, 4], "prompt_tokens": 32, "output_tokens": 100,
    "max_batch_tokens": 8192, "max_num_seqs": 4,
}  # fmt: skip


def test_steps_that_decode_are_counted_and_the_device_is_timed_apart(slept: list[int]) -> None:
    paces = [(pace.streams, pace.tpot_ms, pace.step_ms, pace.device_ms) for pace in alone.measure(**JOB)]
    assert paces == [(streams, *map(pytest.approx, (8, 8, 6))) for streams in (1, 4)]
    assert [(len(run), run[0].sampling.max_tokens) for run in FakeEngine.made.runs] == [
        (1, 4), (1, 100), (1, 64), (4, 4), (4, 100), (4, 64),
    ]  # fmt: skip
    assert slept == [20_000_000] * 2 * 64, "before the steps that are timed alone"
    assert FakeRunner.made.calls == ["load", ["all"], "close"]
    requests = [request for run in FakeEngine.made.runs for request in run]
    assert len({request.request_id for request in requests}) == len(requests)
    assert len({request.prompt_token_ids for request in requests}) == len(requests)
    for request in requests:
        assert len(request.prompt_token_ids) == 32
        assert all(token in token_ids() for token in request.prompt_token_ids)
        assert (request.lane, request.sampling.temperature, request.sampling.ignore_eos) == (
            Lane.BATCH,
            0.0,
            True,
        )


def test_a_cpu_has_no_time_of_its_own() -> None:
    (pace,) = alone.measure(**JOB | {"device": "cpu", "streams": [2], "output_tokens": 8})
    assert (pace.streams, pace.device_ms) == (2, None)
    assert (pace.tpot_ms, pace.step_ms) == pytest.approx((8, 8))
    assert [run[0].sampling.max_tokens for run in FakeEngine.made.runs] == [4, 8]


def test_only_steps_of_all_streams_that_prefill_nothing_are_a_pace() -> None:
    def report(num_decode_tokens: int, num_prefill_tokens: int = 0) -> StepReport:
        return StepReport(
            outputs=[],
            started_s=0.0,
            num_decode_tokens=num_decode_tokens,
            num_prefill_tokens=num_prefill_tokens,
        )

    reports = [
        (0.0, report(3)),
        (1.0, report(2)),
        (3.0, report(2)),
        (7.0, report(2, 5)),
        (15.0, report(2)),
        (31.0, report(2)),
        (63.0, report(1)),
    ]
    assert alone._steady(reports, 2) == [2.0, 16.0]


def test_an_engine_that_does_not_come_up_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeEngine, "fails", True)
    with pytest.raises(RuntimeError, match=r"^no room$"):
        alone.measure(**JOB)


def test_an_engine_that_ends_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    def end(engine: FakeEngine) -> None:
        engine.state, engine.error = EngineState.FAILED, "the card is lost"

    monkeypatch.setattr(FakeEngine, "wake", end)
    monkeypatch.setattr(threading.Event, "wait", lambda event, _: event.is_set())
    with pytest.raises(RuntimeError, match=r"^the card is lost$"):
        alone.measure(**JOB)
