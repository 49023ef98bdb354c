"""How unevenly tokens choose experts: what is counted of it, and what it costs no other step."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from penstock.engine.execution import expert_counts, loader
from penstock.engine.execution.expert_counts import (
    _EVERY,
    DecodedExperts,
    ExpertCounts,
    RoutedExperts,
    Spread,
    counted,
)
from penstock.engine.kernels.experts import route
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.parse import read_config
from penstock.engine.model.split import split_config
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.step import ExpertLoad, ExpertUse
from penstock.engine.planning.timings import ExpertSums
from penstock.engine.spec import Experts, Router
from penstock.gateway.metrics import Metrics
from tests.engine.driver import Driver
from tests.engine.families import SPARSE, TINY
from tests.engine.test_family_runs import MAX_TOKENS, request

ROUTER = Router(num_experts=4, top_k=1)


def choosing(*experts: int) -> Tensor:
    """Logits of tokens that choose these."""
    return torch.nn.functional.one_hot(torch.tensor(experts), 4).float()


def counting(num_layers: int, own: int = 4) -> RoutedExperts:
    return RoutedExperts(route, Spread(num_layers, 4, own), num_layers, 4)


def test_the_most_chosen_expert_and_rank_are_held_against_the_mean() -> None:
    counts = counting(num_layers=2, own=2)
    assert counts.take() is None
    counts.route(choosing(0, 0, 0, 1), ROUTER, None, None)
    counts.route(choosing(0, 1, 2, 3), ROUTER, None, None)
    load = ExpertLoad(experts=(3.0 + 1.0) / 2, ranks=(2.0 + 1.0) / 2)
    assert counts.take() == ExpertUse(num_touched=2 + 4, num_layers=2, load=load)
    assert counts.take() is None


def test_only_some_passes_are_counted_and_old_ones_fade() -> None:
    counts, found = counting(num_layers=1), list[ExpertUse]()
    for number in range(1 + 400 * _EVERY):
        counts.route(choosing(*([3] if number == 0 else [0, 1, 2])), ROUTER, None, None)
        use = counts.take()
        assert (use is not None) == (number % _EVERY == 0)
        found += [] if use is None else [use]
    assert {use.num_touched for use in found[1:]} == {3}
    load = found[-1].load
    assert load is not None
    assert load.experts == pytest.approx(4 / 3, rel=1e-3)
    assert load.ranks == 1.0


def test_choices_are_those_without_a_count() -> None:
    logits = torch.randn(9, 4, generator=torch.Generator().manual_seed(0))
    router = Router(num_experts=4, top_k=2, renormalizes=True)
    counts = counting(num_layers=1)
    for found, expected in zip(counts.route(logits, router, None, None), route(logits, router), strict=True):
        assert torch.equal(found, expected)


def of_a_run(
    folder: Path, kind: type[ExpertCounts], monkeypatch: pytest.MonkeyPatch
) -> tuple[Driver, list[ExpertUse]]:
    """A driver that has answered one request, and what its steps counted."""
    driver, taken, take = (
        Driver(SPARSE["Qwen 3 MoE"].make(folder), num_blocks=64),
        list[ExpertUse](),
        kind.take,
    )
    if not isinstance(driver.runner.model.expert_counts, kind):
        pytest.skip("there are no native kernels")

    def told(self: ExpertCounts) -> ExpertUse | None:
        use = take(self)
        taken.extend([] if use is None else [use])
        return use

    monkeypatch.setattr(kind, "take", told)
    driver.run(request("short"))
    return driver, taken


def test_a_run_over_plain_torch_tells_some_of_its_passes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    plain = reference_kernels(torch.device("cpu"), torch.float32)
    monkeypatch.setattr(loader, "select", lambda *_: plain)
    _, taken = of_a_run(tmp_path, RoutedExperts, monkeypatch)
    assert 1 <= len(taken) < MAX_TOKENS
    loads = [use.load for use in taken if use.load is not None]
    assert len(loads) == len(taken)
    assert all(load.ranks == 1.0 < load.experts <= 8.0 for load in loads)
    assert all(3 * use.num_layers <= use.num_touched <= 8 * use.num_layers for use in taken)


def test_a_native_run_tells_each_step_and_the_load_now_and_then(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(expert_counts, "_READ_EVERY", 4)
    driver, taken = of_a_run(tmp_path, DecodedExperts, monkeypatch)
    num_layers, num_later = taken[0].num_layers, MAX_TOKENS - 1
    assert num_layers == sum(
        isinstance(layer.feed_forward, Experts) for layer in driver.runner.model.config.layers
    )
    assert [(use.num_touched, use.num_layers) for use in taken[-num_later:]] == num_later * [
        (3 * num_layers, num_layers)
    ]
    loads = [use.load for use in taken if use.load is not None]
    assert 0 < len(loads) < len(taken)
    assert all(load.ranks == 1.0 < load.experts <= 8.0 for load in loads)
    timings = driver.outputs["short", 0][-1].timings
    assert timings is not None
    assert timings.experts == ExpertSums(3 * num_layers * num_later, num_layers * num_later)


def test_ranks_are_told_apart_where_each_has_some_experts(tmp_path: Path) -> None:
    config = read_config(SPARSE["Qwen 3 MoE"].make(tmp_path))
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    for expert_parallel, own in (("on", 4), ("off", 8)):
        made, counts = counted(kernels, split_config(config, 2, 1, expert_parallel))
        assert isinstance(counts, RoutedExperts)
        assert made.route == counts.route
        assert counts._spread._own == own


def test_dense_models_have_no_count(tmp_path: Path) -> None:
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    assert counted(kernels, read_config(TINY["Qwen 3"].make(tmp_path))) == (kernels, None)


def test_the_metrics_show_it() -> None:
    metrics = Metrics()
    load = ExpertLoad(experts=2.5, ranks=1.25, rows=1.5)
    for use in (ExpertUse(30, 4, load), ExpertUse(12, 4), None):
        metrics.note_step(StepReport(outputs=[], started_s=0.0, experts=use), 0)
        for among, value in (("experts", 2.5), ("ranks", 1.25), ("sequences", 1.5)):
            assert metrics.expert_imbalance(among).value == value
    assert metrics.experts_touched.value == 42
    assert metrics.expert_layers.value == 8
