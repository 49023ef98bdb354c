"""Granite 3, its mixtures of experts, and Granite 4, most of whose layers are Mamba-2: four multipliers each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, LINEAR, Sizes, layer_types, read_rope
from penstock.engine.model.families.mamba import hybrid_mixer
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import Attention, Experts, Mixer, Mlp, ModelSpec, Stack

MAX_INNER = 1 << 24
"""More than any feed-forward part is wide."""


def granite(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields)
    attention = _attention(fields, sizes)
    return _model(fields, sizes, [attention] * sizes.num_layers, sizes.mlp(has_bias=fields.flag("mlp_bias")))


def granite4(fields: Fields) -> ModelSpec:
    """The hybrid architecture; some of its models have attention alone."""
    sizes = Sizes.of(fields)
    attention = _attention(fields, sizes)
    if fields.one_of("position_embedding_type", "rope", "nope", default="nope") == "nope":
        attention = replace(attention, rope=None)
    shared = _shared(sizes, fields.size("shared_intermediate_size", 1024))
    own = _experts(fields, sizes, shared) if fields.integer("num_local_experts", 8) else shared
    kinds = layer_types(fields, sizes.num_layers, lambda _: False, LINEAR)
    mixers = {kind: attention if kind == FULL else hybrid_mixer(fields, sizes) for kind in {*kinds}}
    return _model(fields, sizes, [mixers[kind] for kind in kinds], own)


def granite_moe(fields: Fields) -> ModelSpec:
    """Experts, and if `shared_intermediate_size` says so, shared ones."""
    sizes = Sizes.of(fields)
    inner = int(fields.within("shared_intermediate_size", 0, MAX_INNER) or 0)
    shared = _shared(sizes, inner) if inner else None
    mixers = [_attention(fields, sizes)] * sizes.num_layers
    return _model(fields, sizes, mixers, _experts(fields, sizes, shared))


def _shared(sizes: Sizes, inner_size: int) -> Mlp:
    return sizes.mlp(
        inner_size=inner_size, gate_up=("shared_mlp.input_linear",), down="shared_mlp.output_linear"
    )


def _experts(fields: Fields, sizes: Sizes, shared: Mlp | None) -> Experts:
    prefix = "block_sparse_moe"
    stacks = (
        Stack(f"{prefix}.input_linear", ("gate_proj", "up_proj")),
        Stack(f"{prefix}.output_linear", ("down_proj",)),
    )
    router = read_router(fields, name=f"{prefix}.router.layer", scoring="softmax_of_chosen")
    return sizes.experts(router, prefix=f"{prefix}.experts", stacks=stacks, shared=shared)


def _attention(fields: Fields, sizes: Sizes) -> Attention:
    bias = fields.flag("attention_bias")
    return sizes.attention(scale=fields.positive("attention_multiplier", 1.0), qkv_bias=bias, o_bias=bias)


def _model(fields: Fields, sizes: Sizes, mixers: Sequence[Mixer], own: Mlp | Experts) -> ModelSpec:
    scale = fields.positive("residual_multiplier", 1.0)
    return sizes.model(
        [sizes.layer(mixer, own, residual_scale=scale) for mixer in mixers],
        [read_rope(fields, sizes)],
        fields,
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.positive("logits_scaling", 1.0),
    )
