"""The stages of a model with graphs, both in this process: what goes from one to the other is not in the graphs."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.execution import loader
from penstock.engine.execution.buffers import StepBuffers
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.planning.device import RunnerFacts, StepInFlight
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import StepPlan, StepResult
from tests.engine.checkpoints import make_checkpoint
from tests.engine.execution.test_steps import REQUESTS, SEATS, RepeatingDevice, StepDriver, padded

OPTIONS = LoadOptions(
    device="cpu", dtype="float32", num_blocks=60, max_batch_tokens=32, max_num_seqs=SEATS, max_drafts=0
)


@dataclass
class OneOfTwo:
    """A stage of two, the other of which is in this process, too."""

    stage: int
    sent: deque[Tensor] = field(default_factory=deque)
    size = num_stages = 2
    ranks = None

    @property
    def rank(self) -> int:
        return self.stage

    def least(self, number: int) -> int:
        return number

    def receive(self, hidden: Tensor) -> None:
        hidden.copy_(self.sent.popleft())

    def send(self, hidden: Tensor) -> None:
        self.sent.append(hidden)


class Stages:
    """The runners of two stages as one: see `planning.device.Runner`."""

    def __init__(self, *runners: ModelRunner) -> None:
        self._runners = runners

    def load(self) -> RunnerFacts:
        first, _ = [runner.load() for runner in self._runners]
        return first

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        raise NotImplementedError

    def launch(self, plan: StepPlan) -> StepInFlight:
        steps = [runner.launch(replace(plan, copies=[*plan.copies])) for runner in self._runners]
        plan.copies = []
        return StagesStep(steps)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        gone = list(sequences)
        for runner in self._runners:
            runner.forget(gone)

    def close(self) -> None:
        for runner in self._runners:
            runner.close()


class StagesStep:
    def __init__(self, steps: list[StepInFlight]) -> None:
        self._steps = steps

    def choose(self) -> None:
        for step in self._steps:
            step.choose()

    def wait(self) -> StepResult:
        first, last = (step.wait() for step in self._steps)
        assert first == StepResult([])
        return last


def stage_runner(folder: Path, world: OneOfTwo, device: RepeatingDevice | None) -> ModelRunner:
    def load() -> LoadedModel:
        model = load_model(folder, OPTIONS, lambda _: None, lambda *_: None, world=world)
        spec = model.config.spec
        buffers = StepBuffers(
            OPTIONS.max_rows,
            OPTIONS.max_batch_tokens,
            model.config.vocab_size if spec.has_head else 0,
            torch.float32,
            model.device,
            hidden_size=spec.hidden_size,
        )
        return replace(model, decoder=padded(model.decoder), buffers=buffers if device else None)

    return ModelRunner(load, make_device=lambda _: device)


LONG = pytest.mark.long("stages of which some have no graphs")


@pytest.mark.parametrize(
    "with_graphs",
    [
        (True, True),
        *(pytest.param(some, marks=LONG) for some in ((True, False), (False, True), (False, False))),
    ],
    ids=str,
)
def test_graphs_of_stages_change_no_token(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, with_graphs: tuple[bool, bool]
) -> None:
    """Stages need not have the same graphs: as many rows go from one to the other as the step has tokens."""
    monkeypatch.setattr(loader, "select", lambda _, device, dtype, *__: reference_kernels(device, dtype))
    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=2)
    whole = ModelRunner(lambda: load_model(folder, OPTIONS, lambda _: None, lambda *_: None), num_ahead=0)
    whole.load()
    expected = StepDriver(whole, num_ahead=0).run(*REQUESTS, preempt_at=(4, 9)).tokens()
    link = deque[Tensor]()
    devices = [RepeatingDevice() if has else None for has in with_graphs]
    runners = [stage_runner(folder, OneOfTwo(stage, link), device) for stage, device in enumerate(devices)]
    stages = Stages(*runners)
    facts = stages.load()
    assert (facts.num_ahead, facts.num_stages) == (1, 2)
    driver = StepDriver(stages, num_ahead=1, num_stages=2).run(*REQUESTS, preempt_at=(4, 9))
    assert driver.tokens() == expected
    assert not link
    assert [bool(device and device.replays) for device in devices] == [*with_graphs]
