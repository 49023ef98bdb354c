"""Granite 3, and the dense models of Granite 4: Llama with four multipliers."""

from __future__ import annotations

from dataclasses import replace

from engine.fields import Fields
from engine.model.families.common import Sizes, read_rope
from engine.spec import Attention, GatedMlp, ModelSpec


def granite(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields)
    attention = _attention(fields, sizes)
    return _model(fields, sizes, attention, sizes.mlp(has_bias=fields.flag("mlp_bias")))


def granite4(fields: Fields) -> ModelSpec:
    """The hybrid architecture where no layer has a state and none has experts."""
    sizes = Sizes.of(fields)
    others = {*fields.strings("layer_types")} - {"attention", "full_attention"}
    if others or not fields.strings("layer_types"):
        raise fields.error(
            f"layer_types {', '.join(sorted(others)) or 'is missing'}: Granite's layers with a state "
            "are not served yet"
        )
    if fields.integer("num_local_experts", 8):
        raise fields.error("num_local_experts: Granite's experts are not served yet")
    attention = _attention(fields, sizes)
    if fields.text("position_embedding_type", "") != "rope":
        attention = replace(attention, rope=None)
    mlp = sizes.mlp(
        inner_size=fields.size("shared_intermediate_size", 1024),
        gate_up=("shared_mlp.input_linear",),
        down="shared_mlp.output_linear",
    )
    return _model(fields, sizes, attention, mlp)


def _attention(fields: Fields, sizes: Sizes) -> Attention:
    bias = fields.flag("attention_bias")
    return sizes.attention(scale=fields.positive("attention_multiplier", 1.0), qkv_bias=bias, o_bias=bias)


def _model(fields: Fields, sizes: Sizes, attention: Attention, mlp: GatedMlp) -> ModelSpec:
    layer = sizes.layer(attention, mlp, residual_scale=fields.positive("residual_multiplier", 1.0))
    return sizes.model(
        [layer] * sizes.num_layers,
        [read_rope(fields, sizes)],
        fields,
        embedding_scale=fields.positive("embedding_multiplier", 1.0),
        logit_scale=1.0 / fields.positive("logits_scaling", 1.0),
    )
