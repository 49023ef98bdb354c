"""Mistral, Ministral and Mixtral."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope, window_of
from penstock.engine.model.families.routers import MIXTRAL_EXPERTS, read_router
from penstock.engine.spec import ModelSpec


def mistral(fields: Fields) -> ModelSpec:
    """All layers have the same window: null is no window, and a missing entry is the 4096 of the first Mistral 7B."""
    sizes = Sizes.of(fields)
    is_interleaved = fields.flag("rope_interleave")
    layer = sizes.layer(sizes.attention(window=window_of(fields), is_interleaved=is_interleaved))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def ministral3(fields: Fields) -> ModelSpec:
    sizes, rope = Sizes.of(fields, head_dim=128), fields.nested("rope_parameters")
    beta = rope.number("llama_4_scaling_beta", 0.0)
    attention = sizes.attention(
        window=fields.optional_size("sliding_window") or 0,
        is_interleaved=fields.flag("rope_interleave"),
        temperature=(beta, rope.size("original_max_position_embeddings"), 0) if beta else None,
    )
    return sizes.model([sizes.layer(attention)] * sizes.num_layers, [read_rope(fields, sizes)], fields)


def mixtral(fields: Fields) -> ModelSpec:
    router = read_router(fields, name="block_sparse_moe.gate", renormalizes=True)
    sizes = Sizes.of(fields)
    window = fields.optional_size("sliding_window") or 0
    attention = sizes.attention(window=window, is_interleaved=fields.flag("rope_interleave"))
    layer = sizes.layer(attention, sizes.experts(router, **MIXTRAL_EXPERTS))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes, theta=1e6)], fields)
