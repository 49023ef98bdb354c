"""Qwen 1.5 to 3, dense and with experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, Sizes, layer_types, read_rope, window_of
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import Attention, Experts, ModelSpec, default_stacks


def qwen2(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields)
    attention = sizes.attention(qkv_bias=True)
    layers = [sizes.layer(attention).with_attention(window=window) for window in upper_windows(fields, sizes)]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def qwen3(fields: Fields) -> ModelSpec:
    sizes, bias = Sizes.of(fields, head_dim=128), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, **sizes.head_norms())
    layers = [sizes.layer(attention).with_attention(window=window) for window in upper_windows(fields, sizes)]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def qwen2_moe(fields: Fields) -> ModelSpec:
    """Describes Qwen 2 MoE: a gate multiplies the output of the shared expert."""
    sizes = Sizes.of(fields)
    inner = fields.size("shared_expert_intermediate_size", 5632)
    experts = sizes.experts(
        read_router(fields),
        inner_size=fields.size("moe_intermediate_size"),
        shared=sizes.shared("mlp.shared_expert", inner),
        shared_gate="mlp.shared_expert_gate",
    )
    return _qwen(fields, sizes, sizes.attention(qkv_bias=fields.flag("qkv_bias", True)), experts)


def qwen3_moe(fields: Fields, **changes: Any) -> ModelSpec:
    sizes, bias = Sizes.of(fields, head_dim=128), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, **sizes.head_norms())
    inner = fields.size("moe_intermediate_size")
    return _qwen(fields, sizes, attention, sizes.experts(read_router(fields), inner_size=inner, **changes))


def qwen3_vl_moe(fields: Fields) -> ModelSpec:
    """Stacks lie transposed."""
    stacks = (replace(stack, is_transposed=True) for stack in default_stacks("mlp.experts"))
    return qwen3_moe(fields, stacks=tuple(stacks))


def _qwen(fields: Fields, sizes: Sizes, attention: Attention, experts: Experts) -> ModelSpec:
    sparse, dense = sizes.layer(attention, experts), sizes.layer(attention)
    layers = [
        (sparse if is_sparse(fields, number) else dense).with_attention(window=window)
        for number, window in enumerate(upper_windows(fields, sizes))
    ]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def is_sparse(fields: Fields, number: int) -> bool:
    """Returns whether Qwen's layer of that number has experts.

    Layers of `mlp_only_layers` are dense, and so are layers whose number is not a multiple of `decoder_sparse_step`.
    """
    dense_layers, every = fields.integers("mlp_only_layers"), fields.size("decoder_sparse_step", 1)
    return number not in dense_layers and (number + 1) % every == 0


def upper_windows(fields: Fields, sizes: Sizes) -> list[int]:
    """Returns Qwen's window for each layer; windows are off unless `use_sliding_window` is set.

    If it is, the layers that `layer_types` names have one, or without it the layers from `max_window_layers` on.
    """
    window = window_of(fields) if fields.flag("use_sliding_window") else 0
    if not window:
        return [0] * sizes.num_layers
    first = fields.integer("max_window_layers", 28)
    kinds = layer_types(fields, sizes.num_layers, lambda layer: layer < first)
    return [0 if kind == FULL else window for kind in kinds]
