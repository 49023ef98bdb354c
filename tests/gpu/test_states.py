"""Layers with a state on a GPU: sizes of real models, the bits of rows, graphs, and families with them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.triton import state_tiles, states
from penstock.engine.planning.request import Output
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer
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

TILED = [name for name, mixer in MIXERS.items() if not isinstance(mixer, ShortConv)]
OFF = {torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""How far prompts in tiles are off the specification, as a part of what rows and states are."""


def layer_of(name: str, lengths: list[int], dtype: torch.dtype = torch.bfloat16) -> Layer:
    return Layer.random(MIXERS[name], lengths, kernels=states, device=DEVICE, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", MIXERS)
def test_sizes_of_real_models(name: str, dtype: torch.dtype) -> None:
    """A short prompt with a snapshot, decodes in place, drafts, and a fork: all are taken row by row."""
    slots = [[0, 1, 0, 31], [2, 2, 0, 1], [3, 3, 2, 1], [4, 5, 1, 1]]
    check_step(layer_of(name, [31, 1, 4, 1], dtype), slots, [[0, 28, 6, 3], [-1, 0, 0, 0]])


@pytest.mark.parametrize("dtype", state_tiles.TILED, ids=str)
@pytest.mark.parametrize("name", TILED)
def test_prompts_of_real_models_in_tiles(name: str, dtype: torch.dtype) -> None:
    """One from within a tile after replayed rows, with snapshots, one that begins, and a decode."""
    slots = [[1, 1, 2, 325], [2, 2, 0, 1], [0, 3, 0, 65]]
    saves = [[0, 58, 6, 3], [0, 200, 7, 1], [0, 0, 8, 0], [2, 64, 9, 1], [-1, 0, 0, 0]]
    check_step(layer_of(name, [331, 8, 65], dtype), slots, saves, starts=[6, 7, 0], off=OFF[dtype])


@pytest.mark.parametrize("dtype", state_tiles.TILED, ids=str)
@pytest.mark.parametrize("name", TILED)
def test_cuts_between_tiles_other_sequences_and_snapshots_change_no_bit(
    name: str, dtype: torch.dtype
) -> None:
    layer = layer_of(name, [200, 70], dtype)
    cache = layer.cache()
    whole, _ = layer.step(cache, [(0, 0, 200), (1, 0, 70)], [[0, 1, 0, 200], [0, 2, 0, 70]], [[0, 150, 3, 0]])
    first = layer.step(cache, [(0, 0, 64)], [[0, 4, 0, 64]])
    second = layer.step(cache, [(1, 7, 66), (0, 64, 128)], [[5, 6, 0, 59], [4, 4, 0, 64]])
    third = layer.step(cache, [(0, 128, 200)], [[4, 4, 0, 72]])
    assert torch.equal(torch.cat([first[0], second[1], third[0]]), whole)
    assert torch.equal(cache.data[4], cache.data[1])
    layer.step(cache, [(0, 0, 150)], [[0, 7, 0, 150]])
    assert torch.equal(cache.data[7], cache.data[3])


@pytest.mark.parametrize("name", MIXERS)
def test_rows_do_not_depend_on_cuts_batches_replays_forks_or_snapshots(name: str) -> None:
    """Rows one by one; a short convolution's are so in prompts, too."""
    for seed in range(3):
        check_cuts(layer_of(name, [30, 20, 7] if name in TILED else [130, 40, 7]), seed)


@pytest.mark.parametrize("rows_of_each", [3, 40])
@pytest.mark.parametrize("name", MIXERS)
def test_a_captured_step_follows_its_slots_and_saves(name: str, rows_of_each: int) -> None:
    """Captured with nothing in the slots, and replayed with drafts, a fork and a save: it makes the same bits."""
    layer = layer_of(name, [rows_of_each] * 5)
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
    certain = [rows_of_each - drafts for drafts in (2, 0, 1, 2)]
    places = [[1, 1, 2], [2, 2, 0], [3, 8, 1], [3, 9, 1]]
    slots = [*([*own, rows] for own, rows in zip(places, certain, strict=True)), [0, 0, 0, 0]]
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
