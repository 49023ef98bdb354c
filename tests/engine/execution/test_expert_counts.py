"""How unevenly tokens choose experts: what is counted of it, and what it costs no other step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from engine.execution.expert_counts import _EVERY, ExpertCounts, counted
from engine.kernels.experts import route
from engine.kernels.ops import reference_kernels
from engine.model.parse import read_config
from engine.model.split import split_config
from engine.planning.step import ExpertLoad, StepReport
from engine.spec import Router
from gateway.metrics import Metrics
from tests.engine.driver import Driver
from tests.engine.families import SPARSE, TINY
from tests.engine.test_family_runs import request

ROUTER = Router(num_experts=4, top_k=1)


def choosing(*experts: int) -> Tensor:
    """Logits of tokens that choose these."""
    return torch.nn.functional.one_hot(torch.tensor(experts), 4).float()


def test_the_most_chosen_expert_and_rank_are_held_against_the_mean() -> None:
    counts = ExpertCounts(route, num_layers=2, num_experts=4, own=2)
    assert counts.take() is None
    counts.route(choosing(0, 0, 0, 1), ROUTER, None, None)
    counts.route(choosing(0, 1, 2, 3), ROUTER, None, None)
    assert counts.take() == ExpertLoad(experts=(3.0 + 1.0) / 2, ranks=(2.0 + 1.0) / 2)
    assert counts.take() is None


def test_only_some_passes_are_counted_and_old_ones_fade() -> None:
    counts = ExpertCounts(route, num_layers=1, num_experts=4, own=4)
    for number in range(1 + 400 * _EVERY):
        counts.route(choosing(*([3] if number == 0 else [0, 1, 2])), ROUTER, None, None)
        assert (counts.take() is not None) == (number % _EVERY == 0)
    counts._is_new = True
    found = counts.take()
    assert found is not None
    assert found.experts == pytest.approx(4 / 3, rel=1e-3)
    assert found.ranks == 1.0


def test_choices_are_those_without_a_count() -> None:
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    router = Router(num_experts=4, top_k=2, renormalizes=True)
    counts = ExpertCounts(route, num_layers=1, num_experts=4, own=4)
    for found, expected in zip(counts.route(logits, router, None, None), route(logits, router), strict=True):
        assert torch.equal(found, expected)


def test_a_run_tells_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    driver, taken = Driver(SPARSE["Qwen 3 MoE"].make(tmp_path), num_blocks=64), []
    if driver.runner.model.expert_counts is None:
        pytest.skip("native kernels choose the experts")
    take = ExpertCounts.take

    def told(self: ExpertCounts) -> ExpertLoad | None:
        taken.append(take(self))
        return taken[-1]

    monkeypatch.setattr(ExpertCounts, "take", told)
    driver.run(request("short"))
    loads = [load for load in taken if load is not None]
    assert 1 <= len(loads) < len(taken)
    assert all(load.ranks == 1.0 < load.experts <= 8.0 for load in loads)


def test_ranks_are_told_apart_where_each_has_some_experts(tmp_path: Path) -> None:
    config = read_config(SPARSE["Qwen 3 MoE"].make(tmp_path))
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    for expert_parallel, own in (("on", 4), ("off", 8)):
        made, counts = counted(kernels, split_config(config, 2, 1, expert_parallel))
        assert counts is not None
        assert made.route == counts.route
        assert counts._own == own


def test_dense_models_have_no_count(tmp_path: Path) -> None:
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    assert counted(kernels, read_config(TINY["Qwen 3"].make(tmp_path))) == (kernels, None)


def test_the_metrics_show_it() -> None:
    metrics = Metrics()
    for load in (ExpertLoad(experts=2.5, ranks=1.25), None):
        metrics.note_step(StepReport(outputs=[], started_s=0.0, expert_load=load), 0)
        for among, value in (("experts", 2.5), ("ranks", 1.25)):
            found = metrics.registry.get_sample_value("penstock_expert_imbalance_ratio", {"among": among})
            assert found == value
