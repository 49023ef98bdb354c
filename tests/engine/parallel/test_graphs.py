"""Graphs hold what the ranks do together, on a CUDA device and among ranks that are not there."""

from __future__ import annotations

from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.sampling.tables import Filters
from tests.engine import skip_reasons
from tests.engine.checkpoints import make_checkpoint
from tests.engine.execution.test_steps import SEATS, StepDriver, ask
from tests.engine.fake_cuda import FakeCuda, patched

pytest.importorskip("triton", reason=skip_reasons.TRITON)

NUM_LAYERS = 2


class FirstOfTwo:
    """Rank 0 of one stage, whose other rank has nothing: each call is an operation of the device, and counted."""

    rank, size = 0, 2
    stage, num_stages = 0, 1

    def __init__(self) -> None:
        self.calls: Counter[str] = Counter()
        self.captured: Counter[str] = Counter()
        """Counts the calls that were made while a graph was recorded."""

    @property
    def ranks(self) -> FirstOfTwo:
        return self

    def sum(self, x: Tensor) -> Tensor:
        self._count("sum")
        return x.add_(0)

    def gather(self, x: Tensor) -> Tensor:
        self._count("gather")
        return torch.cat((x, x), dim=-1)

    def copy_first(self, x: Tensor) -> None:
        self._count("copy_first")
        x.add_(0)

    def least(self, number: int) -> int:
        self._count("least")
        return number

    def receive(self, hidden: Tensor) -> None:
        raise AssertionError(f"there is one stage, and no {hidden}")

    send = receive

    def _count(self, name: str) -> None:
        self.calls[name] += 1
        if FakeCuda.active.recorded is not None:
            self.captured[name] += 1


def test_replayed_steps_ask_the_ranks_for_nothing_that_is_not_in_the_graphs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint("qwen3", tmp_path, num_hidden_layers=NUM_LAYERS)
    options = LoadOptions(
        device="cuda",
        dtype="bfloat16",
        num_blocks=60,
        max_batch_tokens=32,
        max_num_seqs=SEATS,
        max_drafts=0,
    )
    monkeypatch.setattr(torch.cuda, "set_device", lambda _: None)
    ranks = FirstOfTwo()
    with patched(monkeypatch) as cuda:
        runner = ModelRunner(
            lambda: load_model(folder, options, lambda _: None, lambda *_: None, world=ranks)
        )
        runner.load()
        num_passes = len(runner.steps.passes.graphs)
        of_choices = {filters: len(ladder.graphs) for filters, ladder in runner.steps.choices.items()}
        num_choices = sum(of_choices.values())
        assert ranks.captured == {
            "sum": num_passes * (1 + 2 * NUM_LAYERS),  # the embedding, then attention and feed-forward part
            "gather": num_choices,  # candidates, or with filters whole rows
            "copy_first": num_choices - of_choices[Filters(top_k=False, top_p=False)],
        }
        assert num_passes == len(runner.steps.passes.shapes)
        assert ranks.calls["least"] > num_passes + num_choices, "each graph is agreed on"
        ranks.calls.clear()
        driver = StepDriver(runner).run(ask("a", 20), ask("b", 9, n=2, temperature=0.8))
        assert all(len(tokens) == 9 for tokens in driver.tokens().values())
        assert cuda.num_replays
        assert not ranks.calls, "no step went beside the graphs"
