"""Layers with a state on a GPU: sizes of real models, the bits of rows, graphs, and families with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from engine.kernels.batch import Batch
from engine.kernels.triton import states
from engine.planning.request import Output
from engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer
from tests.engine.families import STATES
from tests.engine.kernels.state_layers import Layer, batch, check_cuts, check_step
from tests.gpu.cuda import DEVICE, DTYPES, needs_cuda
from tests.gpu.engines import RunningEngine
from tests.gpu.test_engine import Oracle, check, mixed

pytestmark = needs_cuda

SMALL = GatedDelta(hidden_size=1024, num_key_heads=16, num_value_heads=16, key_dim=128, value_dim=128)
MIXERS: dict[str, StateMixer] = {
    "Qwen 3.5 0.8B": SMALL,
    "Qwen 3.5 27B": replace(SMALL, num_value_heads=48),
    "Qwen 3.5 27B, tiled": replace(SMALL, num_value_heads=48, is_tiled=True),
    "Granite 4 H": Mamba2(hidden_size=1536, num_heads=48, head_dim=64, num_groups=1, state_size=128),
    "Nemotron 3": Mamba2(hidden_size=2688, num_heads=64, head_dim=64, num_groups=8, state_size=128),
    "LFM2": ShortConv(hidden_size=2048, channels=2048),
}


def layer_of(name: str, lengths: list[int], dtype: torch.dtype = torch.bfloat16) -> Layer:
    return Layer.random(MIXERS[name], lengths, kernels=states, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_sizes_of_real_models(name: str, dtype: torch.dtype) -> None:
    """A prompt with a snapshot, decodes in place, drafts, and a fork."""
    slots = [[0, 1, 0, 70], [2, 2, 0, 1], [3, 3, 2, 1], [4, 5, 1, 1]]
    check_step(layer_of(name, [70, 1, 4, 1], dtype), slots, [[0, 64, 6, 3], [-1, 0, 0, 0]])


@pytest.mark.parametrize("name", MIXERS)
def test_rows_do_not_depend_on_cuts_batches_replays_forks_or_snapshots(name: str) -> None:
    for seed in range(3):
        check_cuts(layer_of(name, [130, 40, 7]), seed)


@pytest.mark.parametrize("name", MIXERS)
def test_a_captured_step_follows_its_slots_and_saves(name: str) -> None:
    """Captured with nothing in the slots, and replayed with drafts, a fork and a save: it makes the same bits."""
    layer, rows_of_each = layer_of(name, [3] * 5), 3
    rows, gates = (torch.cat(of) for of in (layer.rows, layer.gates))
    caches = [layer.cache() for _ in range(2)]
    for cache in caches:
        cache.data[1:8] = torch.randn(cache.data[1:8].shape, generator=torch.Generator().manual_seed(0)).to(
            DEVICE
        )

    def step(slots: list[list[int]], saves: list[list[int]]) -> Batch:
        own = replace(
            batch([rows_of_each] * 5),
            state_slots=torch.tensor(slots, dtype=torch.int32),
            state_saves=torch.tensor(saves, dtype=torch.int32),
        )
        return own.to(DEVICE)

    captured = step([[0] * 4] * 5, [[-1, 0, 0, 0]] * 2)
    layer.run(captured, rows, gates, caches[0].layer(0))
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = layer.run(captured, rows, gates, caches[0].layer(0))
    slots = [[1, 1, 2, 1], [2, 2, 0, 3], [3, 8, 1, 2], [3, 9, 1, 1], [0, 0, 0, 0]]
    replayed = step(slots, [[1, 2, 10, 1], [-1, 0, 0, 0]])
    for name_of, tensor in replayed.tensors().items():
        captured.tensors()[name_of].copy_(tensor)
    graph.replay()
    assert torch.equal(found, layer.run(replayed, rows, gates, caches[1].layer(0)))
    assert torch.equal(caches[0].data, caches[1].data)


@pytest.mark.parametrize("family", ["Qwen 3.5", "LFM2", "Granite 4 H MoE", "Mamba 2"])
def test_families_with_a_state_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    """Out of graphs; then by prefixes that are found again, and after interruptions."""
    folder = STATES[family].make(tmp_path)
    oracle, requests = Oracle(folder), mixed(12)
    with RunningEngine(folder) as engine:
        assert engine.runner.model.buffers is not None, "steps are captured"
        for _ in range(2):
            engine.run(*requests)
            check(engine, oracle, *requests)
        assert sum(num_cached(found) > 0 for found in engine.outputs.values()) == 11, "all but one token's"


def num_cached(outputs: list[Output]) -> int:
    timings = outputs[-1].timings
    assert timings is not None
    return timings.num_cached_tokens
