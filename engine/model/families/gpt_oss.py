"""gpt-oss: heads with sinks, windows in every other layer, and experts with biases and a clamped gate."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FULL, Sizes, layer_types, read_rope
from penstock.engine.model.families.routers import read_router
from penstock.engine.spec import Activation, ModelSpec, Stack


def gpt_oss(fields: Fields) -> ModelSpec:
    sizes, bias = Sizes.of(fields, head_dim=64), fields.flag("attention_bias", True)
    experts = sizes.experts(
        read_router(fields, name="mlp.router", scoring="softmax_of_chosen", has_bias=True),
        activation=Activation(limit=fields.positive("swiglu_limit", 7.0), alpha=1.702, shift=1.0),
        has_bias=True,
        stacks=(
            Stack(
                "mlp.experts.gate_up_proj", ("gate_proj", "up_proj"), is_interleaved=True, is_transposed=True
            ),
            Stack("mlp.experts.down_proj", ("down_proj",), is_transposed=True),
        ),
    )
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, sinks="self_attn.sinks")
    layer, window = sizes.layer(attention, experts), fields.size("sliding_window", 128)
    kinds = layer_types(fields, sizes.num_layers, lambda number: number % 2 == 1)
    layers = [layer.with_attention(window=0 if kind == FULL else window) for kind in kinds]
    return sizes.model(layers, [read_rope(fields, sizes, theta=150_000.0)], fields)
