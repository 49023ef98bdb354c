"""What is wrong with --tensor-parallel and --pipeline-parallel is said in one line, before anything is started."""

from __future__ import annotations

import pytest
import torch

from penstock.app.build import build_core, load_options
from penstock.app.errors import OperatorError
from penstock.app.settings import Settings
from penstock.engine.errors import CheckpointError
from penstock.engine.parallel.leader import start_ranks


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            {"tensor_parallel": "3"},
            "--tensor-parallel 3: the model has 4 attention heads, which do not split",
        ),
        (
            {"tensor_parallel": "2", "draft": "folder"},
            "--draft folder: with --tensor-parallel there are no drafts",
        ),
        (
            {"pipeline_parallel": "2", "draft": "folder"},
            "--draft folder: with --pipeline-parallel there are no drafts",
        ),
        ({"pipeline_parallel": "20"}, "--pipeline-parallel 20: the model has 4 layers, which are too few"),
        (
            {"pipeline_parallel": "33", "tensor_parallel": "2"},
            "--pipeline-parallel 33: with --tensor-parallel 2 there would be 66 processes, and 64 are the most",
        ),
        ({"expert_parallel": "on"}, "--expert-parallel on: the model has no experts"),
        (
            {"tensor_parallel": "2", "data_parallel_attention": "true"},
            "--data-parallel-attention: the model has no experts",
        ),
        (
            {"data_parallel_attention": "true"},
            "--data-parallel-attention: one process has all sequences; see --tensor-parallel",
        ),
        ({"tensor_parallel": "65"}, "--tensor-parallel: input should be less than or equal to 64, not '65'"),
    ],
)
def test_what_cannot_be(flags: dict[str, str], said: str) -> None:
    with pytest.raises(OperatorError) as refused:
        build_core(Settings.load(flags), lambda _: None, lambda _: None)
    assert str(refused.value) == said


def test_there_are_no_drafts() -> None:
    assert load_options(Settings.load({"tensor_parallel": "2"})).max_drafts == 0
    assert load_options(Settings.load({"pipeline_parallel": "2"})).max_drafts == 0
    assert load_options(Settings.load({})).max_drafts > 0


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"tensor_parallel": "2"}, "--tensor-parallel 2"),
        ({"pipeline_parallel": "2"}, "--pipeline-parallel 2"),
        ({"tensor_parallel": "2", "pipeline_parallel": "3"}, "--tensor-parallel 2 --pipeline-parallel 3"),
    ],
)
def test_more_ranks_than_gpus(monkeypatch: pytest.MonkeyPatch, flags: dict[str, str], said: str) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
    options = load_options(Settings.load({**flags, "device": "cuda"}))
    with pytest.raises(CheckpointError, match=f"^{said}: torch sees 1 GPUs$"):
        start_ranks(options, lambda _: None)
