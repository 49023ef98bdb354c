"""Command R7B and Command A (Cohere 2): attention and feed-forward part side by side, behind one LayerNorm."""

from __future__ import annotations

from engine.fields import Fields
from engine.model.families.common import FINAL_NORM, FULL, Sizes, layer_types, read_rope
from engine.spec import ModelSpec


def cohere2(fields: Fields) -> ModelSpec:
    """Layers with a window rotate neighbouring pairs; the others know no positions."""
    sizes, window = Sizes.of(fields, eps="layer_norm_eps"), fields.size("sliding_window", 4096)
    pattern = fields.size("sliding_window_pattern", 4)
    bias = fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, is_interleaved=True)
    layer = sizes.layer(
        attention,
        input_norm=sizes.norm("input_layernorm", is_centered=True),
        post_norm=None,
        is_parallel=True,
    )
    kinds = layer_types(fields, sizes.num_layers, lambda layer: (layer + 1) % pattern == 0)
    layers = [
        layer.with_attention(window=0, rope=None) if kind == FULL else layer.with_attention(window=window)
        for kind in kinds
    ]
    return sizes.model(
        layers,
        [read_rope(fields, sizes)],
        fields,
        final_norm=sizes.norm(FINAL_NORM, is_centered=True),
        logit_scale=fields.positive("logit_scale", 0.0625),
    )
