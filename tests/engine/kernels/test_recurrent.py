"""Layers with a state: the forms of transformers as the oracle, and states that no cut of their tokens changes."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from transformers.models.mamba2 import modeling_mamba2
from transformers.models.qwen3_5 import modeling_qwen3_5

from engine.kernels import recurrent
from engine.kernels.batch import Batch, blank_batch
from engine.kernels.recurrent import StateVectors
from engine.kernels.state_cache import LayerStates, StateCache, StateLayout
from engine.spec import GatedDelta, Mamba2, ShortConv, StateMixer
from tests.engine.configs import state_config

CPU = torch.device("cpu")
EPS = 1e-6
DELTA = GatedDelta(hidden_size=8, num_key_heads=2, num_value_heads=6, key_dim=5, value_dim=7)
MIXERS: dict[str, StateMixer] = {
    "delta": DELTA,
    "tiled delta": replace(DELTA, is_tiled=True),
    "mamba": Mamba2(hidden_size=8, num_heads=6, head_dim=5, num_groups=2, state_size=7),
    "conv": ShortConv(hidden_size=9, channels=9, has_bias=True),
}
NUM_PENDING = 3


def vectors_of(spec: StateMixer, generator: torch.Generator) -> StateVectors:
    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator)

    found = {field: random(*vector.shape) for field, vector in spec.vectors().items()}
    if "decay" in found:
        found["decay"] = -found["decay"].exp()
    return StateVectors(**found, **{field: random(norm.size) for field, norm in spec.norms().items()})


@dataclass
class Layer:
    """A random layer, and random rows of some sequences."""

    spec: StateMixer
    own: StateVectors
    rows: list[Tensor]
    gates: list[Tensor]

    @classmethod
    def random(cls, spec: StateMixer, lengths: Sequence[int], seed: int = 0) -> Layer:
        generator = torch.Generator().manual_seed(seed)
        maps = spec.maps()
        widths = [
            sum(rows.count for rows in maps[name].rows) if name in maps else 0 for name in ("into", "gates")
        ]
        rows, gates = ([torch.randn(n, width, generator=generator) for n in lengths] for width in widths)
        return cls(spec, vectors_of(spec, generator), rows, gates)

    def cache(self, num_slots: int = 16) -> StateCache:
        return StateCache(StateLayout.of(state_config(self.spec), NUM_PENDING), num_slots, CPU)

    def run(self, batch: Batch, rows: Tensor, gates: Tensor, states: LayerStates | None) -> Tensor:
        spec = self.spec
        if isinstance(spec, GatedDelta):
            return recurrent.gated_delta(rows, gates, spec, self.own, EPS, states, batch)
        if isinstance(spec, Mamba2):
            return recurrent.mamba2(rows, spec, self.own, EPS, states, batch)
        return recurrent.short_conv(rows, spec, self.own, states, batch)

    def whole(self, sequence: int) -> Tensor:
        """What all rows of a sequence become, at once and alone."""
        rows = self.rows[sequence]
        return self.run(batch([len(rows)]), rows, self.gates[sequence], None)

    def step(
        self,
        cache: StateCache,
        parts: Sequence[tuple[int, int, int]],
        slots: Sequence[Sequence[int]],
        saves: Sequence[Sequence[int]] = (),
    ) -> list[Tensor]:
        """What some rows (sequence, first, end) become in one step."""
        own = replace(
            batch([end - first for _, first, end in parts]),
            state_slots=torch.tensor(slots, dtype=torch.int32),
            state_saves=torch.tensor(saves, dtype=torch.int32).view(-1, 4),
        )
        rows, gates = (torch.cat([of[s][a:b] for s, a, b in parts]) for of in (self.rows, self.gates))
        made = self.run(own, rows, gates, cache.layer(0))
        return list(torch.split(made, [end - first for _, first, end in parts]))


def batch(counts: list[int]) -> Batch:
    return blank_batch(counts, counts, torch.zeros(len(counts), 1, dtype=torch.int32))


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
    tiled = Layer(MIXERS["tiled delta"], own, [torch.cat((qk, moved(v), moved(z)), dim=1)], [gates])
    torch.testing.assert_close(tiled.whole(0), moved(layer.whole(0)))


@pytest.mark.parametrize("name", MIXERS)
@settings(max_examples=20, deadline=None)
@given(seed=st.integers(0, 2**32))
def test_rows_do_not_depend_on_cuts_batches_replays_forks_or_snapshots(name: str, seed: int) -> None:
    """Three sequences take steps of some rows, of which the last may turn out wrong; snapshots go on like them."""
    lengths, choose = [12, 7, 1], random.Random(seed)
    layer = Layer.random(MIXERS[name], lengths)
    expected = [layer.whole(sequence) for sequence in range(3)]
    cache, free = layer.cache(100), list(range(1, 100))
    at, slots, replayed = [0, 0, 0], [0, 0, 0], [0, 0, 0]
    saved: dict[tuple[int, int], tuple[int, int]] = {}
    while unfinished := [sequence for sequence in range(3) if at[sequence] < lengths[sequence]]:
        parts, entries, saves = list[tuple[int, int, int]](), list[list[int]](), list[list[int]]()
        for sequence in choose.sample(unfinished, choose.randint(1, len(unfinished))):
            count = choose.randint(1, lengths[sequence] - at[sequence])
            certain = count - choose.randint(0, min(NUM_PENDING, count - 1))
            target = free.pop() if not slots[sequence] or choose.random() < 0.5 else slots[sequence]
            if choose.random() < 0.5:
                rows = choose.randint(0, certain)
                kept = choose.randint(0, min(NUM_PENDING, certain - rows))
                saves.append([len(parts), rows, free.pop(), kept])
                for again in range(kept + 1):
                    saved[sequence, at[sequence] + rows + again] = saves[-1][2], again
            parts.append((sequence, at[sequence], at[sequence] + count))
            entries.append([slots[sequence], target, replayed[sequence], certain])
        made = layer.step(cache, parts, entries, saves)
        for rows_made, (sequence, first, end), (_, target, _, certain) in zip(
            made, parts, entries, strict=True
        ):
            assert torch.equal(rows_made, expected[sequence][first:end])
            slots[sequence], replayed[sequence] = target, choose.randint(0, end - first - certain)
            at[sequence] = first + certain + replayed[sequence]
    for (sequence, first), (slot, again) in saved.items():
        (rest,) = layer.step(cache, [(sequence, first, lengths[sequence])], [[slot, 0, again, 0]])
        assert torch.equal(rest, expected[sequence][first:])
    assert not cache.data[0].any(), "slot 0 is never written"


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
