"""Hunyuan, dense and with experts."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import ModelSpec


def hunyuan(fields: Fields) -> ModelSpec:
    """Queries and keys are normed after the rotation."""
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    norms = sizes.head_norms(q="query_layernorm", k="key_layernorm")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, norms_after_rotation=True, **norms)
    return sizes.model([sizes.layer(attention)] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def hunyuan_moe(fields: Fields) -> ModelSpec:
    """Queries and keys are normed after the rotation; each layer may have experts of its own sizes."""
    if fields.flag("use_cla"):
        raise fields.error("use_cla is not supported: layers share keys and values")
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    norms = sizes.head_norms(q="query_layernorm", k="key_layernorm")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, norms_after_rotation=True, **norms)
    inner, top_k, num_shared = (
        fields.layer_sizes(name, sizes.num_layers, default)
        for name, default in (
            ("moe_intermediate_size", sizes.inner),
            ("moe_topk", 1),
            ("num_shared_expert", 1),
        )
    )
    layers = [
        sizes.layer(
            attention,
            sizes.experts(
                read_router(fields, name="mlp.gate.wg", renormalizes=True, top_k=top_k[number]),
                inner_size=inner[number],
                shared=sizes.shared("mlp.shared_mlp", num_shared[number] * sizes.inner),
            ),
        )
        for number in range(sizes.num_layers)
    ]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)
