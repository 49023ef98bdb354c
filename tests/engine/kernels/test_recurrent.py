"""Layers with a state: the forms of transformers as the oracle, and states that no cut of their tokens changes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from penstock.engine.kernels.state_cache import StateCache, StateLayout
from penstock.engine.spec import Mamba2
from tests.engine.configs import state_config
from tests.engine.kernels.state_layers import CPU, DELTA, EPS, MIXERS, NUM_PENDING, Layer, check_cuts


def theirs(module: Any, layer: Layer, names: dict[str, str]) -> None:
    """Gives a module of transformers the weights of a layer."""
    own = layer.own
    with torch.no_grad():
        for field, name in names.items():
            tensor = getattr(own, field)
            parameter = module.get_parameter(name)
            parameter.copy_((-tensor).log() if field == "decay" else tensor.view(parameter.shape))


@pytest.mark.parametrize("num_tokens", [1, 70])
def test_gated_delta_is_that_of_transformers(num_tokens: int) -> None:
    from transformers import Qwen3_5TextConfig

    layer = Layer.random(DELTA, [num_tokens])
    config = Qwen3_5TextConfig(
        hidden_size=DELTA.hidden_size,
        linear_num_key_heads=DELTA.num_key_heads,
        linear_num_value_heads=DELTA.num_value_heads,
        linear_key_head_dim=DELTA.key_dim,
        linear_value_head_dim=DELTA.value_dim,
        rms_norm_eps=EPS,
    )
    module = modeling_qwen3_5.Qwen3_5GatedDeltaNet(config, 0)
    names = {"conv": "conv1d.weight", "decay": "A_log", "step_bias": "dt_bias", "gated_norm": "norm.weight"}
    theirs(module, layer, names)
    size = DELTA.history_channels
    given_rows = {"in_proj_qkv": layer.rows[0][:, :size], "in_proj_z": layer.rows[0][:, size:]}
    betas, steps = layer.gates[0].chunk(2, dim=1)
    for name, rows in (given_rows | {"in_proj_b": betas, "in_proj_a": steps}).items():
        setattr(module, name, Given(rows))
    module.out_proj = torch.nn.Identity()
    expected = module(torch.zeros(1, num_tokens, 8))[0]
    torch.testing.assert_close(layer.whole(0), expected, rtol=1e-4, atol=1e-5)


class Given(torch.nn.Module):
    """A linear map that makes what it was made with."""

    def __init__(self, rows: Tensor) -> None:
        super().__init__()
        self.rows = rows

    def forward(self, _: Tensor) -> Tensor:
        return self.rows[None]


@pytest.mark.parametrize("limits", [(0.0, float("inf")), (0.5, 1.0)])
def test_mamba2_is_that_of_transformers(limits: tuple[float, float]) -> None:
    from transformers import Mamba2Config

    spec = MIXERS["mamba"]
    assert isinstance(spec, Mamba2)
    layer = Layer.random(replace(spec, step_limits=limits), [70])
    config = Mamba2Config(
        hidden_size=spec.inner_size // 2,
        num_heads=spec.num_heads,
        head_dim=spec.head_dim,
        n_groups=spec.num_groups,
        state_size=spec.state_size,
        layer_norm_epsilon=EPS,
        time_step_limit=limits,
        chunk_size=32,
        num_hidden_layers=1,
    )
    module = modeling_mamba2.Mamba2Mixer(config, 0).eval()
    names = {"conv": "conv1d.weight", "conv_bias": "conv1d.bias", "decay": "A_log", "step_bias": "dt_bias"}
    theirs(module, layer, names | {"skip": "D", "gated_norm": "norm.weight"})
    module.in_proj, module.out_proj = Given(layer.rows[0]), torch.nn.Identity()
    expected = module(torch.zeros(1, 70, 15))[0]
    torch.testing.assert_close(layer.whole(0), expected, rtol=1e-4, atol=1e-5)


def test_a_short_convolution_sees_the_rows_before() -> None:
    spec = MIXERS["conv"]
    layer = Layer.random(spec, [20])
    before, behind, x = layer.rows[0].chunk(3, dim=1)
    assert layer.own.conv_bias is not None
    convolved = torch.nn.functional.conv1d(
        (before * x).T[None], layer.own.conv[:, None], layer.own.conv_bias, padding=2, groups=9
    )
    torch.testing.assert_close(layer.whole(0), behind * convolved[0, :, :20].T)


def test_heads_of_values_read_the_key_heads_that_the_layout_says() -> None:
    """A tiled layer is the other one with value heads in another order: 0, 3, 1, 4, 2, 5 of 6 over 2 key heads."""
    layer = Layer.random(DELTA, [20])
    heads = torch.tensor([0, 3, 1, 4, 2, 5])
    qk, v, z = torch.split(layer.rows[0], [2 * DELTA.key_size, DELTA.value_size, DELTA.value_size], dim=1)

    def moved(x: Tensor) -> Tensor:
        return x.view(20, 6, -1)[:, heads].flatten(1)

    conv_qk, conv_v = torch.split(layer.own.conv, [2 * DELTA.key_size, DELTA.value_size])
    assert layer.own.decay is not None
    assert layer.own.step_bias is not None
    own = replace(
        layer.own,
        conv=torch.cat((conv_qk, conv_v.view(6, -1, 4)[heads].flatten(0, 1))),
        decay=layer.own.decay[heads],
        step_bias=layer.own.step_bias[heads],
    )
    gates = torch.cat([gate[:, heads] for gate in layer.gates[0].chunk(2, dim=1)], dim=1)
    tiled = replace(
        layer,
        spec=MIXERS["tiled delta"],
        own=own,
        rows=[torch.cat((qk, moved(v), moved(z)), dim=1)],
        gates=[gates],
    )
    torch.testing.assert_close(tiled.whole(0), moved(layer.whole(0)))


@pytest.mark.parametrize("name", MIXERS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rows_do_not_depend_on_cuts_batches_replays_forks_or_snapshots(name: str, seed: int) -> None:
    check_cuts(Layer.random(MIXERS[name], [12, 7, 1]), seed)


def test_a_slot_has_the_states_of_all_layers_apart() -> None:
    mixers = list(MIXERS.values())
    layout = StateLayout.of(state_config(None, *mixers), NUM_PENDING)
    cache = StateCache(layout, 3, CPU)
    assert [*layout.places] == [1, 2, 3, 4]
    assert layout.slot_bytes == cache.data[0].nbytes
    for number, mixer in enumerate(mixers, start=1):
        states = cache.layer(number)
        parts = (states.state, states.history, states.pending)
        assert [part.shape[1:] for part in parts] == [
            mixer.state_shape,
            (mixer.kernel - 1, mixer.history_channels),
            (NUM_PENDING, mixer.row_floats),
        ]
        for part in parts:
            assert not part.any()
            part[2] = number
    assert int(cache.data[2].count_nonzero()) == sum(
        part[2].numel()
        for number in layout.places
        for states in (cache.layer(number),)
        for part in (states.state, states.history, states.pending)
    )
