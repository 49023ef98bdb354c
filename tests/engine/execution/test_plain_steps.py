"""Steps that are one native call, with the host beside them or not, change no answer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import LoadOptions
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.plain_steps import PlainStepInFlight
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.planning.chunks import is_plain
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.setup import make_memory
from penstock.engine.planning.step import StepPlan
from penstock.engine.program.native_steps import NativeStep
from tests.engine.checkpoints import make_checkpoint
from tests.engine.execution.test_steps import REQUESTS, SEATS, StepDriver, ask
from tests.engine.execution.test_verified_steps import AnswerProposer, Drafts
from tests.engine.families import SPARSE, STATES

SHAPES: dict[str, dict[str, Any]] = {
    "qwen3": {},
    "qwen2": {"sliding_window": 6, "use_sliding_window": True, "max_window_layers": 1},
    "mistral": {},
}
"""The second has several block tables, the third a window and a cache of 4 bits."""
FAMILIES = {name: STATES[name] for name in ("Qwen 3.5", "LFM2 MoE")} | {"gpt-oss": SPARSE["gpt-oss"]}
"""Layers with a state, or with experts."""
MORE = (ask("sifted", 7, seed=8, typical_p=0.8), ask("late", 40, seed=9, temperature=0.7, max_tokens=50))


class PlainDriver(StepDriver):
    """Goes on beside plain steps, as the engine does, or beside none."""

    def __init__(
        self,
        model: LoadedModel,
        *,
        beside: bool,
        whole: bool,
        budget: int = 32,
        drafting: Drafting | None = None,
    ) -> None:
        runner = ModelRunner(lambda: model)
        facts = runner.load()
        if not whole:
            runner.steps.plain = None
        (tables,) = make_memory(facts, prefix_cache=True, log=None).parts
        super().__init__(runner, budget=budget, tables=tables, drafting=drafting)
        self.beside = beside
        self.kinds: list[str] = []

    def launch(self, plan: StepPlan) -> StepInFlight:
        plan.is_beside = self.beside and is_plain(plan) and not plan.num_drafts
        step = super().launch(plan)
        if isinstance(step, PlainStepInFlight) and plan.num_drafts:
            self.kinds.append("verified")
        elif isinstance(step, PlainStepInFlight):
            self.kinds.append("beside" if isinstance(step._launched, NativeStep) else "whole")
        else:
            self.kinds.append("apart")
        return step


@pytest.fixture(scope="module", params=[*SHAPES, *FAMILIES])
def model(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    folder: Path = tmp_path_factory.mktemp("model")
    if request.param in SHAPES:
        make_checkpoint(request.param, folder, **SHAPES[request.param])
    else:
        FAMILIES[request.param].make(folder)
    options = LoadOptions(
        device="cpu",
        dtype="float32",
        kv_dtype="int4" if request.param == "mistral" else "auto",
        num_blocks=120,
        max_batch_tokens=32,
        max_num_seqs=SEATS,
    )
    return load_model(folder, options, lambda _: None, lambda *_: None)


@pytest.mark.parametrize("beside", [False, True])
@pytest.mark.parametrize("budget", [32, 5])
def test_plain_steps_change_no_answer(model: LoadedModel, beside: bool, budget: int) -> None:
    """Also when sequences give way, so that tables are sent anew, and while others need more of the host."""
    requests = (*REQUESTS, *MORE)
    expected = PlainDriver(model, beside=False, whole=False).run(*requests).tokens()
    driver = PlainDriver(model, beside=beside, whole=True, budget=budget)
    assert driver.run(*requests, preempt_at=(9, 14)).tokens() == expected
    assert driver.kinds.count("apart") > 5
    assert driver.kinds.count("beside" if beside else "whole") > 4
    assert "whole" not in driver.kinds or not beside


@pytest.mark.parametrize("accuracy", [1.0, 0.7])
def test_drafts_that_are_verified_in_one_call_change_no_answer(model: LoadedModel, accuracy: float) -> None:
    requests = (*REQUESTS, *MORE)
    expected = PlainDriver(model, beside=False, whole=False).run(*requests).tokens()
    drafts = Drafts(AnswerProposer(expected, accuracy))
    driver = PlainDriver(model, beside=True, whole=True, drafting=drafts)
    assert driver.run(*requests, preempt_at=(9, 14)).tokens() == expected
    assert driver.kinds.count("verified") > 4
    assert drafts.count[True] > 20
    assert bool(drafts.count[False]) == (accuracy < 1)


def test_a_step_that_was_never_waited_for_holds_nobody(model: LoadedModel) -> None:
    """As when the engine ends, or a fault comes between: the next is run all the same, after it."""
    request = ask("one", 20, max_tokens=30)
    expected = PlainDriver(model, beside=False, whole=False).run(request).tokens()["one", 0]
    driver = PlainDriver(model, beside=True, whole=True)
    driver.queue.put(request, 0.0)
    while "beside" not in driver.kinds:
        driver.step()
    assert driver.runner.steps.plain is not None  # type: ignore[attr-defined]
    driver.runner.steps.plain.drain()  # type: ignore[attr-defined]
    del driver
    assert PlainDriver(model, beside=True, whole=True).run(request).tokens()["one", 0] == expected


def test_a_seat_that_does_not_exist_is_refused(model: LoadedModel) -> None:
    driver = PlainDriver(model, beside=True, whole=True)
    driver.queue.put(ask("one", 20, max_tokens=30), 0.0)
    while "beside" not in driver.kinds:
        driver.step()
    driver.land(0)
    (sequence,) = driver.scheduler.sequences.running
    seats = driver.runner.steps.seats  # type: ignore[attr-defined]
    seats._seat_of[sequence].number = SEATS + 3
    driver.step()
    with pytest.raises(ValueError, match="a seat does not exist"):
        driver.land(0)
