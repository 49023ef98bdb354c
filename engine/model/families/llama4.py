"""Llama 4, text: layers that see a chunk and rotate positions, between layers that do neither, and weighed inputs."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import CHUNKED, FULL, Sizes, layer_types, read_rope, rotating
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import Experts, Layer, Mlp, ModelSpec, Norm, Stack

LLAMA4 = {
    "head_dim": 128,
    "rms_norm_eps": 1e-5,
    "num_local_experts": 16,
    "num_experts_per_tok": 1,
}
"""The values of missing entries."""


def llama4(fields: Fields) -> ModelSpec:
    """Layers that rotate norm queries and keys without weights; in others, queries grow with the position."""
    sizes = Sizes.of(fields)
    rotates = rotating(fields, sizes.num_layers)
    kinds = layer_types(fields, sizes.num_layers, lambda number: not rotates[number], CHUNKED)
    every = fields.size("interleave_moe_layer_step", 1)
    sparse = fields.integers("moe_layers") or range(every - 1, sizes.num_layers, every)
    experts = _experts(fields, sizes)
    dense = sizes.shared("feed_forward", fields.size("intermediate_size_mlp", 16_384))
    layers = [
        _layer(fields, sizes, experts if number in sparse else dense, kind, rotates=rotates[number])
        for number, kind in enumerate(kinds)
    ]
    return sizes.model(layers, [read_rope(fields, sizes, theta=500_000.0)], fields)


def _layer(fields: Fields, sizes: Sizes, own: Experts | Mlp, kind: str, *, rotates: bool) -> Layer:
    norm = Norm(name="", size=sizes.head_dim) if rotates and fields.flag("use_qk_norm", True) else None
    temperature = fields.number("attn_scale", 0.1), fields.size("floor_scale", 8192), 1
    bias = fields.flag("attention_bias")
    attention = sizes.attention(
        rope=0 if rotates else None,
        window=0 if kind == FULL else fields.size("attention_chunk_size", 8192),
        is_chunked=kind != FULL,
        q_norm=norm,
        k_norm=norm,
        norms_after_rotation=True,
        is_interleaved=True,
        temperature=None if rotates or not _tunes(fields) else temperature,
        qkv_bias=bias,
        o_bias=bias,
    )
    return sizes.layer(attention, own)


def _tunes(fields: Fields) -> bool:
    """Some files have a number there."""
    name = "attn_temperature_tuning"
    return fields.flag(name) if fields.is_flag(name) else fields.integer(name, 1) != 0


def _experts(fields: Fields, sizes: Sizes) -> Experts:
    prefix = "feed_forward.experts"
    return sizes.experts(
        read_router(fields, name="feed_forward.router", scoring="sigmoid", weighs_inputs=True),
        prefix=prefix,
        stacks=(
            Stack(f"{prefix}.gate_up_proj", ("gate_proj", "up_proj"), is_transposed=True),
            Stack(f"{prefix}.down_proj", ("down_proj",), is_transposed=True),
        ),
        shared=sizes.shared("feed_forward.shared_expert", sizes.inner),
    )
