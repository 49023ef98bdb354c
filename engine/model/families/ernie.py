"""ERNIE 4.5, dense and with experts."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope
from penstock.engine.model.families.routers import MAX_EXPERTS, read_router
from penstock.engine.spec import ModelSpec


def ernie4_5(fields: Fields) -> ModelSpec:
    """Neighbouring pairs of a head are rotated."""
    sizes, bias = Sizes.of(fields, head_dim=128), fields.flag("use_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, is_interleaved=True)
    layer = sizes.layer(attention, sizes.mlp(has_bias=bias))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes, theta=500_000.0)], fields)


def ernie4_5_moe(fields: Fields) -> ModelSpec:
    """Neighbouring pairs of a head are rotated. Layers from `moe_layer_start_index` on have experts."""
    sizes, bias = Sizes.of(fields), fields.flag("use_bias")
    fields.one_of("moe_gate_act", "softmax", default="softmax")
    router = read_router(
        fields,
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        renormalizes=True,
        epsilon=fields.positive("moe_norm_min", 1e-12),
    )
    inner = fields.size("moe_intermediate_size", 1536)
    num_shared = int(fields.within("moe_num_shared_experts", 0, MAX_EXPERTS) or 0)
    shared = sizes.shared("mlp.shared_experts", num_shared * inner, has_bias=bias) if num_shared else None
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, is_interleaved=True)
    sparse = sizes.layer(attention, sizes.experts(router, inner_size=inner, shared=shared))
    dense = sizes.layer(attention, sizes.mlp(has_bias=bias))
    first, last = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_end_index", -1)
    every = fields.size("moe_layer_interval", 1)
    layers = [
        sparse if (number + 1) % every == 0 and first <= number <= last % sizes.num_layers else dense
        for number in range(sizes.num_layers)
    ]
    return sizes.model(layers, [read_rope(fields, sizes, theta=500_000.0)], fields)
