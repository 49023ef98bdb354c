"""Layers with a state by Triton: what the specification makes of their rows, and bits that no cut changes."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import LoadOptions
from penstock.engine.kernels.select import trials, triton_kernels
from penstock.engine.kernels.triton import states
from penstock.engine.kernels.triton.state_tiles import SAVES
from penstock.engine.kernels.triton.states import CONVOLVED, ROWS
from penstock.engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer
from tests.engine.configs import state_config
from tests.engine.kernels.state_layers import Layer, batch, check_cuts, check_step
from tests.engine.kernels.triton.dtypes import DTYPES
from tests.few import examples

pytestmark = pytest.mark.filterwarnings("ignore:overflow encountered in exp:RuntimeWarning")
DELTA = GatedDelta(hidden_size=8, num_key_heads=1, num_value_heads=1, key_dim=5, value_dim=7)
MAMBA = Mamba2(hidden_size=8, num_heads=1, head_dim=5, num_groups=1, state_size=7)
CONV = ShortConv(hidden_size=9, channels=9, has_bias=True)
MIXERS: dict[str, StateMixer] = {"delta": DELTA, "mamba": MAMBA, "conv": CONV}
ODD: dict[str, StateMixer] = {
    "limited mamba": replace(MAMBA, kernel=2, step_limits=(0.5, 1.0), has_conv_bias=False),
    "long conv": ShortConv(hidden_size=9, channels=CONVOLVED + 3, kernel=ROWS + 2),
}
HEADS: dict[str, StateMixer] = {
    "wide delta": replace(DELTA, key_dim=100, value_dim=35),
    "delta": replace(DELTA, num_key_heads=2, num_value_heads=4),
    "tiled delta": replace(DELTA, num_key_heads=2, num_value_heads=4, is_tiled=True),
    "mamba": replace(MAMBA, num_heads=4, num_groups=2),
}


def layer_of(
    spec: StateMixer, lengths: list[int], device: torch.device, dtype: torch.dtype = torch.float32
) -> Layer:
    return Layer.random(spec, lengths, kernels=states, device=device, dtype=dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("name", MIXERS | ODD)
@pytest.mark.combinations("layers with a state by Triton's interpreter")
def test_rows_and_slots_are_those_of_the_specification(
    name: str, dtype: torch.dtype, device: torch.device
) -> None:
    """A prompt, a step in place after right drafts, one of wrong drafts, a fork, a replay of all, and nothing."""
    layer = layer_of((MIXERS | ODD)[name], [5, 1, 3, 0, 0], device, dtype)
    slots = [[0, 1, 0, 5], [2, 2, 2, 1], [3, 4, 1, 1], [5, 6, 3, 0], [0, 0, 0, 0]]
    saves = [[0, 3, 8, 2], [-1, 0, 9, 0], [2, 0, 10, 1], [0, 0, 11, 0], [0, 5, 12, 0], [0, 5, 13, 0]]
    check_step(layer, slots, saves)


@pytest.mark.parametrize("name", HEADS)
def test_heads_share_keys_as_the_layer_says(name: str, device: torch.device) -> None:
    check_step(layer_of(HEADS[name], [2], device), [[1, 1, 0, 2]], [])


@pytest.mark.parametrize("name", MIXERS)
def test_as_many_rows_and_saves_as_there_are(name: str, device: torch.device) -> None:
    num_rows = 2 * ROWS + 3 if name == "conv" else 5
    layer = layer_of(MIXERS[name], [num_rows], device)
    saves = [[-1, 0, 0, 0]] * SAVES + [[0, 3, 2, 1], [0, 2, 3, 0]]
    check_step(layer, [[1, 1, 1, num_rows - 2]], saves)


@pytest.mark.parametrize("name", ["delta", "conv", pytest.param("mamba", marks=pytest.mark.long("as delta"))])
@settings(max_examples=examples(2), deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rows_do_not_depend_on_cuts_batches_replays_forks_or_snapshots(
    name: str, device: torch.device, seed: int
) -> None:
    check_cuts(layer_of(MIXERS[name], [4, 2], device), seed)


@pytest.mark.parametrize("name", MIXERS)
def test_rows_of_no_sequence_become_zeros(name: str, device: torch.device) -> None:
    """As in a graph for more tokens than there are; nothing is kept where there are no slots."""
    layer = layer_of(MIXERS[name], [3], device)
    rows, gates = (
        torch.cat((own, own.new_full((20, own.shape[1]), torch.nan))) for (own,) in (layer.rows, layer.gates)
    )
    found = layer.run(batch([3, 0]).to(device), rows, gates, layer.cache().layer(0))
    assert torch.equal(found[:3], layer.whole(0))
    assert not found[3:].any()


@pytest.mark.parametrize("name", MIXERS)
def test_rows_may_be_parts_of_wider_ones(name: str, device: torch.device) -> None:
    layer = layer_of(MIXERS[name], [3], device)
    rows, gates = (torch.cat((own, own), 1)[:, : own.shape[1]] for (own,) in (layer.rows, layer.gates))
    assert torch.equal(layer.run(batch([3]).to(device), rows, gates, None), layer.whole(0))


def test_what_a_server_tries_when_it_starts_runs(device: torch.device) -> None:
    config, options = state_config(*MIXERS.values()), LoadOptions(max_num_seqs=4)
    tried = trials(triton_kernels(config, device, torch.float32, options), config, options)
    for name in ("gated_delta", "mamba2", "short_conv"):
        assert tried[name]() is not None
