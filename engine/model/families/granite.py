"""Granite 3, its mixtures of experts, and Granite 4, most of whose layers are Mamba-2: four multipliers each."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from engine.fields import Fields
from engine.model.families.common import FULL, LINEAR, MAX_KERNEL, Sizes, layer_types, read_rope
from engine.model.families.experts import read_router
from engine.model.families.mamba import checked, mamba_names, step_limits
from engine.spec import Attention, Experts, Mamba2, Mixer, Mlp, ModelSpec, Stack

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
    mixers = {kind: attention if kind == FULL else _mamba(fields, sizes) for kind in {*kinds}}
    return _model(fields, sizes, [mixers[kind] for kind in kinds], own)


def _mamba(fields: Fields, sizes: Sizes) -> Mamba2:
    inner, num_heads = fields.size("mamba_expand", 2) * sizes.hidden, fields.size("mamba_n_heads", 128)
    head_dim = inner // num_heads
    if not fields.is_text("mamba_d_head"):  # "auto" is what follows from the others
        head_dim = fields.size("mamba_d_head", head_dim)
    if head_dim * num_heads != inner:
        raise fields.error(
            f"mamba_n_heads is {num_heads} and mamba_d_head {head_dim}, and mamba_expand says {inner} numbers"
        )
    mixer = Mamba2(
        hidden_size=sizes.hidden,
        num_heads=num_heads,
        head_dim=head_dim,
        num_groups=fields.size("mamba_n_groups", 1),
        state_size=fields.size("mamba_d_state", 256),
        kernel=fields.size("mamba_d_conv", 4, most=MAX_KERNEL),
        step_limits=step_limits(fields),
        has_bias=fields.flag("mamba_proj_bias"),
        has_conv_bias=fields.flag("mamba_conv_bias", True),
        **mamba_names("mamba"),
    )
    return checked(fields, mixer)


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
