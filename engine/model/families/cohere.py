"""Command R, Aya (Cohere) and Command R7B, Command A (Cohere 2): attention and feed-forward part side by side."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FINAL_NORM, FULL, Sizes, layer_types, read_rope
from penstock.engine.spec import Layer, ModelSpec


def cohere(fields: Fields) -> ModelSpec:
    """Every layer rotates neighbouring pairs."""
    fields.says_nothing("use_qk_norm", False)
    sizes = Sizes.of(fields, eps="layer_norm_eps")
    return _model(fields, sizes, [_layer(fields, sizes)] * sizes.num_layers, theta=500_000.0)


def cohere2(fields: Fields) -> ModelSpec:
    """Layers with a window rotate neighbouring pairs; the others know no positions."""
    sizes, window = Sizes.of(fields, eps="layer_norm_eps"), fields.size("sliding_window", 4096)
    pattern, layer = fields.size("sliding_window_pattern", 4), _layer(fields, sizes)
    kinds = layer_types(fields, sizes.num_layers, lambda layer: (layer + 1) % pattern == 0)
    layers = [
        layer.with_attention(window=0, rope=None) if kind == FULL else layer.with_attention(window=window)
        for kind in kinds
    ]
    return _model(fields, sizes, layers, theta=10_000.0)


def _layer(fields: Fields, sizes: Sizes) -> Layer:
    """Returns a layer whose parts both read one LayerNorm of the stream."""
    bias = fields.flag("attention_bias")
    return sizes.layer(
        sizes.attention(qkv_bias=bias, o_bias=bias, is_interleaved=True),
        input_norm=sizes.norm("input_layernorm", is_centered=True),
        post_norm=None,
        is_parallel=True,
    )


def _model(fields: Fields, sizes: Sizes, layers: list[Layer], theta: float) -> ModelSpec:
    return sizes.model(
        layers,
        [read_rope(fields, sizes, theta=theta)],
        fields,
        final_norm=sizes.norm(FINAL_NORM, is_centered=True),
        logit_scale=fields.positive("logit_scale", 0.0625),
    )
