"""Llama, which many others are in all but name."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope
from penstock.engine.spec import ModelSpec


def llama(fields: Fields) -> ModelSpec:
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias)
    layer = sizes.layer(attention, sizes.mlp(has_bias=fields.flag("mlp_bias")))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)
