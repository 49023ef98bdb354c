"""Prompts through layers with a state in tiles: what the specification makes of them, wherever they begin and end."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.kernels.triton import state_tiles, states
from penstock.engine.kernels.triton.state_tile_rows import TILE
from penstock.engine.kernels.triton.state_tiles import FEWEST, num_tiles
from penstock.engine.spec import GatedDelta, Mamba2
from tests.engine.kernels.state_layers import Layer, check_step
from tests.engine.kernels.triton.dtypes import DTYPES

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DELTA = GatedDelta(hidden_size=8, num_key_heads=1, num_value_heads=1, key_dim=5, value_dim=7)
MAMBA = Mamba2(hidden_size=8, num_heads=1, head_dim=5, num_groups=1, state_size=7)
MIXERS: dict[str, GatedDelta | Mamba2] = {"delta": DELTA, "mamba": MAMBA}
HEADS: dict[str, GatedDelta | Mamba2] = {
    "wide delta": replace(DELTA, key_dim=40, value_dim=35),
    "delta": replace(DELTA, num_key_heads=2, num_value_heads=4),
    "tiled delta": replace(DELTA, num_key_heads=2, num_value_heads=4, is_tiled=True),
    "limited mamba": replace(
        MAMBA, num_heads=4, num_groups=2, kernel=2, step_limits=(0.5, 1.0), has_conv_bias=False
    ),
}
OFF = {torch.float32: 1e-6, torch.float16: 1e-3, torch.bfloat16: 1e-2}
"""How far rows and states are off the specification's, as a part of what they are."""


@pytest.fixture(autouse=True)
def _all_types_are_tiled(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter, where float32 is as good as 16 bits are coarse."""
    if not torch.cuda.is_available():
        monkeypatch.setattr(state_tiles, "TILED", (*state_tiles.TILED, torch.float32))


def layer_of(
    spec: GatedDelta | Mamba2, lengths: list[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Layer:
    return Layer.random(spec, lengths, kernels=states, device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXERS)
def test_rows_and_slots_are_those_of_the_specification(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """A prompt from within a tile, after replayed rows; a decode; one from its first row; one with rows that are not
    certain. Snapshots of no row, within tiles and at their ends."""
    layer = layer_of(MIXERS[name], [141, 8, 45, 103], device, dtype)
    slots = [[1, 1, 2, 135], [2, 2, 0, 1], [0, 3, 0, 45], [4, 5, 3, 36]]
    saves = [[0, 0, 6, 1], [0, 58, 7, 2], [0, 9, 8, 3], [-1, 0, 9, 0], [2, 0, 10, 0], [3, 36, 11, 2]]
    check_step(layer, slots, saves, starts=[6, 7, 0, 64], off=OFF[dtype])


@pytest.mark.parametrize("name", HEADS)
def test_heads_share_keys_as_the_layer_says(name: str, device: torch.device) -> None:
    check_step(layer_of(HEADS[name], [FEWEST], device), [[1, 1, 0, FEWEST]], [], off=1e-6)


@pytest.mark.parametrize("name", MIXERS)
def test_cuts_between_tiles_other_sequences_and_snapshots_change_no_bit(
    name: str, device: torch.device
) -> None:
    layer = layer_of(MIXERS[name], [96, 40], device)
    cache = layer.cache()
    whole, _ = layer.step(cache, [(0, 0, 96), (1, 0, 40)], [[0, 1, 0, 96], [0, 2, 0, 40]], [[0, 70, 3, 0]])
    first = layer.step(cache, [(0, 0, 64)], [[0, 4, 0, 64]])
    second = layer.step(cache, [(1, 7, 39), (0, 64, 96)], [[5, 6, 0, 32], [4, 4, 0, 32]])
    assert torch.equal(torch.cat([first[0], second[1]]), whole)
    assert torch.equal(cache.data[4], cache.data[1])
    layer.step(cache, [(0, 0, 70)], [[0, 7, 0, 70]])
    assert torch.equal(cache.data[7], cache.data[3])


def test_keys_that_are_all_alike_are_solved(device: torch.device) -> None:
    """Of a token that repeats, each row erases what the one before added: the triangle is full."""
    layer = layer_of(DELTA, [70], device)
    layer.rows[0][:] = layer.rows[0][0]
    layer.gates[0][:, 0], layer.gates[0][:, 1] = 20.0, -20.0
    plain = Layer(layer.spec, layer.own, layer.rows, layer.gates, Layer.random(DELTA, []).kernels)
    torch.testing.assert_close(layer.whole(0), plain.whole(0), rtol=1e-5, atol=1e-5)


@given(
    sequences=st.lists(
        st.tuples(st.integers(1, 300), st.integers(0, 8), st.integers(0, 200)), min_size=1, max_size=40
    )
)
def test_no_step_has_more_tiles_than_it_has_room_for(sequences: list[tuple[int, int, int]]) -> None:
    """Sequences are (rows, replayed, rows before these)."""
    size, used = TILE.value, 0
    for rows, replayed, before in sequences:
        if rows >= FEWEST:
            used += (before + replayed + rows - 1) // size - before // size + 1
    assert used <= num_tiles(sum(rows for rows, _, _ in sequences), len(sequences), 8)
