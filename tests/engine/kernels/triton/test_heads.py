"""Heads that draft for a model on a GPU, as Triton computes them: they draft what plain torch drafts."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import pytest
import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.execution import companions, loader
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.select import triton_kernels
from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.step import StepPlan
from tests.engine.checkpoints import make_checkpoint
from tests.engine.eagle_heads import make_eagle
from tests.engine.execution.test_steps import RepeatingDevice, StepDriver, ask
from tests.engine.fake_runner import UnpricedDrafting
from tests.engine.predictions import make_predicting

CPU = torch.device("cpu")
OPTIONS = LoadOptions(dtype="float32", num_blocks=12, max_num_seqs=2, max_batch_tokens=8, max_drafts=3)
REQUESTS = (
    ask("greedy", 10, max_tokens=6, temperature=0.0),
    ask("drawn", 2, max_tokens=6, seed=3, temperature=0.7),
)

pytestmark = pytest.mark.filterwarnings("ignore:(overflow|divide by zero|invalid value):RuntimeWarning")


def drafted(
    folder: Path,
    draft: DraftSource | None,
    device: torch.device,
    kernels: Callable[[ModelConfig], Kernels],
    graphs: RepeatingDevice | None,
    *,
    may_stay: bool,
    may_follow: bool = False,
) -> tuple[dict[tuple[str, int], list[int]], list[list[list[int]]]]:
    """The tokens of a run, and the drafts of each of its plans, which stay on the device, if they may.

    Args:
        may_follow: whether steps with drafts are followed before they are back.
    """
    options = replace(OPTIONS, device=device.type)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "select", lambda config, *_: kernels(config))
        patch.setattr(companions, "_own_kernels", lambda _, config, *__: kernels(config))
        runner = ModelRunner(
            lambda: load_model(folder, options, lambda _: None, lambda *_: None, draft),
            make_device=lambda _: graphs,
        )
        runner.load()
    told, make_drafts = list[list[list[int]]](), runner.draft

    def drafts_of(plan: StepPlan, **_: object) -> list[list[int]] | None:
        made = make_drafts(plan, may_stay=may_stay)
        told.extend([] if made is None else [made])
        return made

    class Noting(UnpricedDrafting):
        def note_made(self, plan: StepPlan, made: Sequence[list[int]], seconds: float) -> None:
            assert may_stay
            assert seconds > 0
            told.append([*made])
            super().note_made(plan, made, seconds)

    runner.draft = drafts_of  # type: ignore[method-assign]
    drafting = Noting(None, 3, random.Random(0), has_model=True, may_follow=may_follow)
    driver = StepDriver(runner, budget=8, num_blocks=12, drafting=drafting).run(*REQUESTS)
    assert not drafting.failed
    return driver.tokens(), told


def check(folder: Path, draft: DraftSource | None, device: torch.device) -> None:
    def triton(config: ModelConfig) -> Kernels:
        return triton_kernels(config, device, torch.float32, OPTIONS)

    graphs = RepeatingDevice()
    found = drafted(folder, draft, device, triton, graphs, may_stay=True, may_follow=True)
    plain = partial(drafted, folder, draft, CPU, lambda _: reference_kernels(CPU, torch.float32), None)
    assert found == plain(may_stay=True, may_follow=True)
    waiting = plain(may_stay=False)
    assert waiting == plain(may_stay=True)
    assert waiting[0] == found[0]
    assert max(len(drafts) for step in found[1] for drafts in step) > 1
    assert graphs.replays


@pytest.mark.long("whole steps by Triton's interpreter")
def test_a_head_of_eagle_drafts_what_plain_torch_drafts(tmp_path: Path, device: torch.device) -> None:
    """Its first passes over prompts and over what was accepted, and passes of its own hidden states, out of graphs."""
    folder = make_checkpoint("qwen3", tmp_path / "model", num_hidden_layers=3)
    check(folder, DraftSource(make_eagle(tmp_path / "head")), device)


@pytest.mark.long("whole steps by Triton's interpreter")
def test_a_models_own_layer_drafts_what_plain_torch_drafts(tmp_path: Path, device: torch.device) -> None:
    check(make_predicting("GLM-4.5", tmp_path), None, device)
