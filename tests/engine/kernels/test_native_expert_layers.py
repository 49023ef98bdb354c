"""Layers with experts in the native decoder against the decoder over plain torch: every field of their description."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.kernels.cpu.native import Team
from penstock.engine.kernels.experts import ExpertLinear
from penstock.engine.kernels.linear import Linear
from penstock.engine.kernels.ops import Kernels, reference_kernels
from penstock.engine.kernels.select import native_kernels
from penstock.engine.program.decoders import ForwardPass, make_decoder
from penstock.engine.program.native import NativeDecoder
from penstock.engine.program.parameters import (
    AttentionWeights,
    ExpertsWeights,
    LayerWeights,
    MlpWeights,
    Weights,
)
from penstock.engine.quant.formats import DENSE
from penstock.engine.spec import Activation, Experts, Mlp, Norm, Router, expert_field
from tests.engine.kernels.random_model import CPU, MAX_POSITION, Checkpoint, Prompts
from tests.engine.kernels.random_model import config as random_config


def norm(name: str) -> Norm:
    return Norm(name=name, size=HIDDEN)


HIDDEN, INNER, NUM_EXPERTS = 48, 24, 8
ROUTER = Router(num_experts=NUM_EXPERTS, top_k=3)
SHARED = Mlp(hidden_size=HIDDEN, inner_size=40)
PLAIN = Experts(hidden_size=HIDDEN, inner_size=INNER, router=ROUTER)
PARTS: dict[str, Experts] = {
    "plain": PLAIN,
    "renormalized": replace(PLAIN, router=replace(ROUTER, renormalizes=True, epsilon=1e-20, scale=2.5)),
    "one of them": replace(PLAIN, router=replace(ROUTER, top_k=1, scoring="sigmoid", weighs_inputs=True)),
    "softmax of the chosen": replace(
        PLAIN,
        router=replace(ROUTER, scoring="softmax_of_chosen", has_bias=True),
        activation=Activation(limit=0.5, alpha=1.702, shift=1),
        has_bias=True,
    ),
    "groups and a bias": replace(
        PLAIN,
        router=replace(
            ROUTER, scoring="sigmoid", num_groups=4, top_groups=2, group_best=2, choice_bias="bias"
        ),
        shared=SHARED,
    ),
    "shared ones behind a gate": replace(
        PLAIN, shared=replace(SHARED, activation="gelu"), shared_gate="gate"
    ),
    "norms of each": replace(
        PLAIN,
        router=replace(ROUTER, renormalizes=True, expert_scale="scale", norm=norm("router")),
        activation=Activation(kind="gelu"),
        norm=norm("norm"),
        out_norm=norm("out_norm"),
        shared=replace(SHARED, activation="gelu_tanh"),
        shared_norm=norm("shared_norm"),
        shared_out_norm=norm("shared_out_norm"),
    ),
    "no gates": replace(PLAIN, activation=Activation(kind="relu2", is_gated=False), gate_up=("up_proj",)),
}


def random_layer(part: Experts, dtype: torch.dtype, generator: torch.Generator) -> dict[str, Tensor]:
    """The tensors of a part by its fields, the biases of its maps behind them."""

    def random(*shape: int) -> Tensor:
        made: Tensor = torch.randn(*shape, generator=generator)
        return made

    made: dict[str, Tensor] = {}
    for name, map in part.maps().items():
        rows = sum(own.count for own in map.rows)
        made[name] = (random(rows, map.in_features) / map.in_features**0.5).to(dtype).float()
        if map.has_bias:
            made[f"{name} bias"] = random(rows) / 4
    norms = {name: 1 + random(HIDDEN) / 8 for name in part.norms()}
    return made | norms | {name: 1 + random(NUM_EXPERTS) / 4 for name in part.vectors()}


def packed(kernels: Kernels, part: Experts, tensors: dict[str, Tensor]) -> ExpertsWeights:
    def linear(name: str, *, gated: bool = False) -> Linear:
        return kernels.linear({"weight": tensors[name]}, DENSE, tensors.get(f"{name} bias"), gated=gated)

    def experts(field: str, *, gated: bool = False) -> ExpertLinear:
        names = [expert_field(number, field) for number in part.own]
        each = [({"weight": tensors[name]}, tensors.get(f"{name} bias")) for name in names]
        return kernels.pack_experts(each, DENSE, len(each), len(tensors[names[0]]), gated=gated)

    shared = None
    if part.shared is not None:
        gate_up = linear("shared_gate_up", gated=True)
        shared = MlpWeights(gate_up, linear("shared_down"))
    return ExpertsWeights(
        spec=part,
        router=linear("router"),
        gate_up=experts("gate_up", gated=part.activation.is_gated),
        down=experts("down"),
        shared=shared,
        shared_gate=linear("shared_gate") if part.shared_gate else None,
        **{name: tensors[name] for name in (*part.norms(), *part.vectors())},
    )


class Model:
    """A random model whose layers but the second have such a part: kernels -> its decoder."""

    def __init__(self, part: Experts, dtype: torch.dtype, **changes: Any) -> None:
        plain = random_config()
        self.checkpoint = Checkpoint(plain, dtype)
        layers = [replace(layer, feed_forward=part, **changes) for layer in plain.layers]
        layers[1] = plain.layers[1]
        self.config = replace(plain, spec=replace(plain.spec, layers=tuple(layers)))
        generator = torch.Generator().manual_seed(9)
        self.parts = [random_layer(part, dtype, generator) for _ in layers]

    def decoder(self, kernels: Kernels) -> ForwardPass:
        layers = [self._layer(kernels, number) for number in range(len(self.config.layers))]
        own = self.checkpoint
        weights = Weights(own.embedding, layers, own.final_norm, lambda x: x, is_tied=False)
        kv = own.kv(torch.float32)
        return make_decoder(self.config, weights, kernels, kv, MAX_POSITION)

    def _layer(self, kernels: Kernels, number: int) -> LayerWeights:
        own, (input_norm, last, *_) = self.checkpoint.layers[number], self.checkpoint.norms[number]
        layer, part = self.config.layers[number], self.config.layers[number].feed_forward

        def linear(name: str, *, gated: bool = False) -> Linear:
            return kernels.linear({"weight": own[name][0]}, DENSE, None, gated=gated)

        feed_forward: MlpWeights | ExpertsWeights = MlpWeights(linear("gate_up", gated=True), linear("down"))
        if isinstance(part, Experts):
            feed_forward = packed(kernels, part, self.parts[number])
        return LayerWeights(
            mixer=AttentionWeights(qkv=linear("qkv"), o=linear("o")),
            input_norm=input_norm,
            post_norm=None if layer.post_norm is None else last,
            feed_forward_norm=None if layer.feed_forward_norm is None else last,
            feed_forward=feed_forward,
        )


CASES: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in PARTS),
    ("norms of each", {"post_norm": None, "feed_forward_norm": norm("last")}),
    ("shared ones behind a gate", {"is_parallel": True, "residual_scale": 0.5}),
    ("plain", {"feed_forward_norm": norm("last"), "residual_scale": 0.5}),
]


@pytest.mark.parametrize(("name", "changes"), CASES, ids=str)
def test_layers_are_those_of_plain_torch(team: Team, name: str, changes: dict[str, Any]) -> None:
    model = Model(PARTS[name], torch.float32, **changes)
    plain = model.decoder(reference_kernels(CPU, torch.float32))
    native = model.decoder(native_kernels(team, torch.float32))
    prompts = Prompts(83, [40, 17, 1])
    for ranges in ({0: (0, 30), 2: (0, 1)}, {0: (30, 31)}, {0: (31, 40), 1: (0, 17)}):
        batch = prompts.batch(ranges)
        torch.testing.assert_close(native(batch), plain(batch), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", ["shared ones behind a gate", "norms of each"])
def test_a_token_has_the_same_bits_in_any_company(team: Team, name: str, dtype: torch.dtype) -> None:
    model = Model(PARTS[name], dtype)
    prompts = Prompts(83, [40, 17, 9])
    native = model.decoder(native_kernels(team, dtype))
    together = native(prompts.batch({0: (0, 40), 1: (0, 17), 2: (0, 9)}))
    alone = model.decoder(native_kernels(team, dtype))
    rows = [alone(prompts.batch({1: (at, at + 1)})) for at in range(17)]
    assert torch.equal(torch.cat(rows), together[40:57])


def test_a_step_says_how_many_experts_it_touched(team: Team) -> None:
    native = Model(PARTS["plain"], torch.float32).decoder(native_kernels(team, torch.float32))
    assert isinstance(native, NativeDecoder)
    prompts = Prompts(83, [40])
    assert native.take_experts_touched() == (0, 0)
    native(prompts.batch({0: (0, 1)}))
    assert native.take_experts_touched() == (2 * ROUTER.top_k, 2)
    assert native.take_experts_touched() == (0, 0)
    native(prompts.batch({0: (1, 40)}))
    touched, layers = native.take_experts_touched()
    assert layers == 2
    assert 2 * ROUTER.top_k < touched <= 2 * NUM_EXPERTS


def test_steps_add_up_the_tokens_of_each_expert(team: Team) -> None:
    model, chosen = Model(PARTS["plain"], torch.float32), list[Tensor]()
    plain = reference_kernels(CPU, torch.float32)

    def noting(
        logits: Tensor, router: Router, choice_bias: Tensor | None, expert_scale: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        ids, weights = plain.route(logits, router, choice_bias, expert_scale)
        chosen.append(torch.bincount(ids.flatten(), minlength=NUM_EXPERTS))
        return ids, weights

    native = model.decoder(native_kernels(team, torch.float32))
    expected = model.decoder(replace(plain, route=noting))
    assert isinstance(native, NativeDecoder)
    assert not native.take_rows_of_experts().any()
    for ranges in ({0: (0, 3)}, {0: (3, 40), 1: (0, 17)}):  # the second one makes it find more memory
        batch = Prompts(83, [40, 17]).batch(ranges)
        native(batch), expected(batch)
    assert torch.equal(
        native.take_rows_of_experts(), torch.stack([chosen[0] + chosen[2], chosen[1] + chosen[3]])
    )
    assert not native.take_rows_of_experts().any()


def test_an_expert_of_another_shape_is_refused(team: Team) -> None:
    model = Model(PARTS["plain"], torch.float32)
    model.parts[0][expert_field(3, "down")] = torch.zeros(HIDDEN, INNER + 1)
    with pytest.raises(ValueError, match="down"):
        model.decoder(native_kernels(team, torch.float32))
