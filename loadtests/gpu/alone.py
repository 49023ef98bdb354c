"""The engine without a server: the pace of its steps with nobody attached, and the device's share of it."""

from __future__ import annotations

import statistics
import sys
import threading
import time
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from random import Random
from typing import Any

import torch

from loadtests.gpu.sizes import TEXT_TOKENS
from loadtests.gpu.timing import event
from penstock.app.loop import settle_garbage
from penstock.engine.config import LoadOptions
from penstock.engine.engine import Engine, EngineState
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.model.parse import read_config
from penstock.engine.planning.device import RunnerFacts, StepInFlight
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.engine.planning.step import StepPlan, StepResult
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.text.tokenizer import Tokenizer
from penstock.priority.lanes import Lane
from penstock.priority.queue import LaneQueue

_LOAD_S = 150.0
_HEAD_START_CYCLES = 20_000_000
"""About 10 ms of the device's clock: the host has launched a step before the device begins it."""


@dataclass(frozen=True, slots=True)
class Job:
    model: str
    device: str
    streams: list[int]
    """The numbers of sequences at once, one run after another."""
    prompt_tokens: int
    output_tokens: int
    max_batch_tokens: int
    max_num_seqs: int


@dataclass(frozen=True, slots=True)
class Pace:
    """Medians of the steps in which every sequence decodes."""

    streams: int
    tpot_ms: float
    """Between a sequence's first and last token, by the token."""
    step_ms: float
    """From the end of one step to the end of the next."""
    device_ms: float | None
    """The device's time for a step that was launched before it began; None without CUDA."""


class _TimedStep:
    """A step of which the device notes the end, once its tokens are chosen."""

    def __init__(self, step: StepInFlight, end: torch.cuda.Event) -> None:
        self._step, self._end = step, end

    def choose(self) -> None:
        self._step.choose()
        self._end.record()

    def wait(self) -> StepResult:
        return self._step.wait()


class _Timed:
    """A runner whose steps the device times, each launched while the device still waits."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self.is_timing = False
        self.events: list[tuple[StepPlan, torch.cuda.Event, torch.cuda.Event]] = []

    def load(self) -> RunnerFacts:
        return self._runner.load()

    def forget(self, sequences: Iterable[Sequence]) -> None:
        self._runner.forget(sequences)

    def close(self) -> None:
        self._runner.close()

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        return self._runner.draft(plan, may_stay=may_stay)

    def launch(self, plan: StepPlan) -> StepInFlight:
        if not self.is_timing:
            return self._runner.launch(plan)
        torch.cuda._sleep(_HEAD_START_CYCLES)  # type: ignore[no-untyped-call]
        start, end = event(), event()
        start.record()
        step = self._runner.launch(plan)
        self.events.append((plan, start, end))
        return _TimedStep(step, end)


class Bench:
    """One engine, and runs of it."""

    def __init__(self, job: Job) -> None:
        self.job = job
        folder = Path(job.model)
        config = read_config(folder)
        options = LoadOptions(
            device=job.device,
            max_batch_tokens=job.max_batch_tokens,
            max_num_seqs=job.max_num_seqs,
            max_drafts=0,
        )
        self.runner = _Timed(ModelRunner(lambda: load_model(folder, options, _say, lambda *_: None)))
        self.queue = LaneQueue(threading.Lock())
        self._ready, self._done = threading.Event(), threading.Event()
        self._reports: list[tuple[float, StepReport]] = []
        self._num_left = 0
        self.engine = Engine(
            lambda: self.runner,
            self.queue,
            TextSink(Tokenizer.load(folder), config.eos_token_ids),
            SchedulerLimits(
                max_batch_tokens=job.max_batch_tokens,
                max_num_seqs=job.max_num_seqs,
                max_model_len=config.max_position,
            ),
            deliver=self._take,
            clock=time.monotonic,
            on_state=self._on_state,
        )
        self.random = Random(0)

    def start(self) -> None:
        """
        Raises:
            RuntimeError: the engine did not come up.
        """
        self.engine.start()
        if not self._ready.wait(_LOAD_S) or self.engine.state is not EngineState.READY:
            raise RuntimeError(self.engine.error or "the engine did not come up")
        settle_garbage()

    def pace(self, streams: int) -> Pace:
        self._run(streams, 4)
        reports, elapsed_s = self._run(streams, self.job.output_tokens)
        steps = _steady(reports, streams)
        return Pace(
            streams=streams,
            tpot_ms=statistics.median(elapsed_s) * 1000,
            step_ms=statistics.median(steps) * 1000 if steps else float("nan"),
            device_ms=self._device_ms(streams) if self.job.device == "cuda" else None,
        )

    def _device_ms(self, streams: int) -> float | None:
        self.runner.events.clear()
        self.runner.is_timing = True
        self._run(streams, min(64, self.job.output_tokens))
        self.runner.is_timing = False
        torch.cuda.synchronize()
        decodes = [
            start.elapsed_time(end)
            for plan, start, end in self.runner.events
            if len(plan.chunks) == plan.num_tokens == streams
        ]
        return statistics.median(decodes) if decodes else None

    def _run(self, streams: int, output_tokens: int) -> tuple[list[tuple[float, StepReport]], list[float]]:
        """The reports with the moments they came; and of each sequence, seconds by the token."""
        self._reports = []
        self._num_left = streams
        self._done.clear()
        for number in range(streams):
            self.queue.put(
                self._request(f"{streams}-{output_tokens}-{number}", output_tokens), time.monotonic()
            )
        self.engine.wake()
        while not self._done.wait(1.0):
            if self.engine.state is not EngineState.READY:
                raise RuntimeError(self.engine.error or "the engine ended")
        timings = [o.timings for _, report in self._reports for o in report.outputs if o.timings is not None]
        elapsed_s = [(t.finished_s - t.first_token_s) / (t.num_output_tokens - 1) for t in timings]
        return self._reports, elapsed_s

    def _request(self, name: str, output_tokens: int) -> Request:
        prompt = tuple(self.random.choices(TEXT_TOKENS, k=self.job.prompt_tokens))
        sampling = SamplingParams(temperature=0.0, max_tokens=output_tokens, ignore_eos=True)
        return Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=sampling,
            lane=Lane.BATCH,
            arrival_s=time.monotonic(),
        )

    def _take(self, report: StepReport) -> None:
        self._reports.append((time.monotonic(), report))
        self._num_left -= sum(output.finish_reason is not None for output in report.outputs)
        if self._num_left == 0:
            self._done.set()

    def _on_state(self, state: EngineState) -> None:
        if state is not EngineState.STARTING:
            self._ready.set()


def _steady(reports: ListLike[tuple[float, StepReport]], streams: int) -> list[float]:
    """Seconds between steps that decoded one token of every sequence."""
    return [
        later_s - earlier_s
        for (earlier_s, before), (later_s, after) in pairwise(reports)
        if before.num_decode_tokens == after.num_decode_tokens == streams
        and before.num_prefill_tokens == after.num_prefill_tokens == 0
    ]


def _say(text: str) -> None:
    print(f"gpu: alone: {text}", file=sys.stderr, flush=True)


def measure(**job: Any) -> list[Pace]:
    """The pace of each number of streams of a Job."""
    bench = Bench(Job(**job))
    bench.start()
    paces = [bench.pace(streams) for streams in bench.job.streams]
    bench.engine.stop(10.0)
    return paces
