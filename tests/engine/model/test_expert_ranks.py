"""The feed-forward part of ranks that share experts, beside shared ones, against that of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from pathlib import Path
from threading import Barrier
from typing import cast

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from penstock.engine.config import ModelConfig
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.ranks import Ranks
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.files import open_files
from penstock.engine.model.safetensors import TensorFiles
from penstock.engine.model.split import split_config
from penstock.engine.model.split_files import SplitFiles
from penstock.engine.model.tensors import AS_IT_IS, Recipe
from penstock.engine.model.weights import load_weights
from penstock.engine.program.expert_layer import run_experts
from penstock.engine.program.parameters import ExpertsWeights
from penstock.engine.spec import Experts, Mlp, Norm
from tests.engine.families import SPARSE

HIDDEN = 64
NORMS = {
    "out_norm": Norm(name="mlp.routed_norm", size=HIDDEN),
    "shared_norm": Norm(name="mlp.before_shared_norm", size=HIDDEN),
    "shared_out_norm": Norm(name="mlp.shared_norm", size=HIDDEN),
}
SHARED = Mlp(
    hidden_size=HIDDEN,
    inner_size=48,
    gate_up=("mlp.shared.gate_proj", "mlp.shared.up_proj"),
    down="mlp.shared.down_proj",
    has_bias=True,
)


@dataclass
class Meeting:
    """Where ranks meet that are threads of one process."""

    size: int
    num_sums: int = 0
    _given: dict[int, Tensor] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._barrier = Barrier(self.size)

    def sum(self, rank: int, x: Tensor) -> Tensor:
        self._given[rank] = x
        self._barrier.wait()
        total = torch.stack([self._given[rank] for rank in range(self.size)]).sum(0)
        self.num_sums += rank == 0
        self._barrier.wait()
        return total


@dataclass(frozen=True)
class Thread:
    """A rank of a meeting."""

    rank: int
    meeting: Meeting

    @property
    def size(self) -> int:
        return self.meeting.size

    def sum(self, x: Tensor) -> Tensor:
        return self.meeting.sum(self.rank, x)


def with_shared(folder: Path, **norms: Norm) -> ModelConfig:
    """Gives layer 0 of a checkpoint shared experts with a gate, and norms; returns the config that says so."""
    config = read_config(SPARSE["Qwen 3 MoE"].make(folder, intermediate_size=128))
    first, *others = config.layers
    first = first.with_feed_forward(has_bias=True, shared=SHARED, shared_gate="mlp.shared_gate", **norms)
    whole = replace(config, spec=replace(config.spec, layers=(first, *others)))
    tensors, noise = load_file(folder / "model.safetensors"), torch.Generator().manual_seed(1)
    assert first.feed_forward is not None
    maps = {rows.name: (rows.count, map) for map in first.feed_forward.maps().values() for rows in map.rows}
    for name, (count, map) in maps.items():
        shapes = {"weight": (count, map.in_features)} | ({"bias": (count,)} if map.has_bias else {})
        for kind, shape in shapes.items():
            tensors.setdefault(f"model.layers.0.{name}.{kind}", torch.randn(shape, generator=noise) / 4)
    for norm in norms.values():
        tensors[f"model.layers.0.{norm.tensor}"] = torch.rand(HIDDEN, generator=noise)
    save_file(tensors, folder / "model.safetensors")
    return whole


def part(
    config: ModelConfig, files: TensorFiles, kernels: Kernels, recipe: Recipe = AS_IT_IS, layer: int = 0
) -> ExpertsWeights:
    """The feed-forward part of a layer."""
    found = load_weights(config, files, kernels, lambda *_: None, recipe).layers[layer].feed_forward
    assert isinstance(found, ExpertsWeights)
    return found


@pytest.mark.parametrize("expert_parallel", ["on", "off"])
@pytest.mark.parametrize("has_norms", [False, True])
@pytest.mark.parametrize("size", [2, 4])
def test_routed_and_shared_experts_are_summed_at_once(
    tmp_path: Path, size: int, has_norms: bool, expert_parallel: str
) -> None:
    config = with_shared(tmp_path, **(NORMS if has_norms else {}))
    kernels = reference_kernels(torch.device("cpu"), torch.float32)
    whole, meeting = part(config, open_files(tmp_path), kernels), Meeting(size)
    x = torch.randn(19, HIDDEN, generator=torch.Generator().manual_seed(0))

    def run(rank: int) -> Tensor:
        ranks = cast("Ranks", Thread(rank, meeting))
        own = split_config(config, size, rank, expert_parallel)
        assert isinstance(experts := own.layers[0].feed_forward, Experts)
        assert len(experts.own) == (8 // size if expert_parallel == "on" else 8)
        files = SplitFiles(open_files(tmp_path), config, own, ranks)
        of_rank = replace(kernels, ranks=ranks)
        made = part(own, files, of_rank)
        meeting.num_sums = 0
        return run_experts(made, x, of_rank, own.spec.norm_eps)

    with ThreadPoolExecutor(size) as threads:
        found = list(threads.map(run, range(size)))
    expected = run_experts(whole, x, kernels, config.spec.norm_eps)
    assert expected.abs().max() > 0.1
    for own in found:
        torch.testing.assert_close(own, expected, atol=1e-5, rtol=1e-5)
        assert torch.equal(own, found[0])
    assert meeting.num_sums == 1
