"""SmolLM 3; the ones before it are Llamas."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, Sizes, layer_types, read_rope, rotating
from penstock.engine.spec import ModelSpec


def smollm3(fields: Fields) -> ModelSpec:
    """SmolLM3 does not rotate positions in the layers whose `no_rope_layers` is 0."""
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    rotates = rotating(fields, sizes.num_layers)
    window = fields.optional_size("sliding_window") if fields.flag("use_sliding_window") else None
    kinds = layer_types(fields, sizes.num_layers, lambda layer: not window or rotates[layer])
    layer = sizes.layer(
        sizes.attention(qkv_bias=bias, o_bias=bias), sizes.mlp(has_bias=fields.flag("mlp_bias"))
    )
    layers = [
        layer.with_attention(rope=0 if rotates[number] else None, window=0 if kind == FULL else window or 0)
        for number, kind in enumerate(kinds)
    ]
    return sizes.model(layers, [read_rope(fields, sizes, theta=2e6)], fields)
