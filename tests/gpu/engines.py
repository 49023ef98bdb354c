"""A whole engine on the GPU, with its own step thread: requests go in, tokens come out."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import replace
from pathlib import Path
from types import TracebackType
from typing import Any

from penstock.engine.config import LoadOptions
from penstock.engine.engine import Engine, EngineState
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.planning.device import RunnerFacts, StepInFlight
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import Output, Request, Sequence
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.engine.planning.step import StepPlan
from penstock.priority.queue import LaneQueue
from tests.engine.driver import NoText
from tests.gpu.cuda import DEVICE

_PATIENCE_S = 120.0


class OneByOne:
    """A runner with no step ahead of another."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner

    def load(self) -> RunnerFacts:
        return replace(self._runner.load(), num_ahead=0)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        self._runner.forget(sequences)

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        return self._runner.draft(plan, may_stay=may_stay)

    def launch(self, plan: StepPlan) -> StepInFlight:
        return self._runner.launch(plan)

    def close(self) -> None:
        self._runner.close()


class RunningEngine:
    """Entering loads the model and captures its graphs; leaving ends the step thread."""

    def __init__(self, folder: Path, *, overlap: bool = True, dtype: str = "float32", **options: Any) -> None:
        wanted = {"num_blocks": 512, "max_batch_tokens": 256, "max_num_seqs": 32, **options}
        self.options = LoadOptions(device=DEVICE.type, dtype=dtype, **wanted)
        self.said: list[str] = []
        self.runner = ModelRunner(lambda: load_model(folder, self.options, self.said.append, lambda *_: None))
        self.outputs: dict[tuple[str, int], list[Output]] = {}
        self.num_preemptions = 0
        self._queue = LaneQueue(threading.Lock(), promises=False)
        self._news = threading.Condition()
        self._num_left = 0
        self._engine = Engine(
            lambda: self.runner if overlap else OneByOne(self.runner),
            self._queue,
            NoText(),
            SchedulerLimits(
                max_batch_tokens=self.options.max_batch_tokens,
                max_num_seqs=self.options.max_num_seqs,
                max_model_len=512,
            ),
            deliver=self._take,
            clock=time.monotonic,
            on_state=self._on_state,
        )

    def run(self, *requests: Request, after_tokens: Callable[[int], None] = lambda _: None) -> None:
        """To the end of all of them; `after_tokens` is told, after every step, how many tokens there are by then."""
        self.outputs, self._num_left = {}, sum(request.n for request in requests)
        for request in requests:
            self._queue.put(request, time.monotonic())
        self._engine.wake()
        seen = 0
        with self._news:
            while self._num_left:
                assert self._news.wait(_PATIENCE_S), "nothing came for two minutes"
                assert self._engine.state is EngineState.READY, self._engine.error
                total = sum(len(output.token_ids) for found in self.outputs.values() for output in found)
                if total > seen:
                    seen = total
                    after_tokens(total)

    def cancel(self, request_id: str) -> None:
        self._engine.cancel(request_id)

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return [token for output in self.outputs[name, index] for token in output.token_ids]

    def __enter__(self) -> RunningEngine:
        self._engine.start()
        with self._news:
            assert self._news.wait_for(lambda: self._engine.state is not EngineState.STARTING, _PATIENCE_S)
        assert self._engine.state is EngineState.READY, self._engine.error
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        assert self._engine.stop(30.0)
        assert self._engine.stats().num_pool_violations == 0

    def _take(self, report: StepReport) -> None:
        with self._news:
            self.num_preemptions += report.num_preemptions
            for output in report.outputs:
                self.outputs.setdefault((output.request_id, output.index), []).append(output)
                self._num_left -= output.finish_reason is not None
            self._news.notify_all()

    def _on_state(self, state: EngineState) -> None:  # noqa: ARG002
        with self._news:
            self._news.notify_all()
