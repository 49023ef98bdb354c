"""InternLM 2 and 2.5."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope
from penstock.engine.spec import ModelSpec


def internlm2(fields: Fields) -> ModelSpec:
    sizes, bias = Sizes.of(fields), fields.flag("bias")
    attention = sizes.attention(
        qkv=("attention.wqkv",), is_grouped=True, o="attention.wo", qkv_bias=bias, o_bias=bias
    )
    layer = sizes.layer(
        attention,
        sizes.mlp(gate_up=("feed_forward.w1", "feed_forward.w3"), down="feed_forward.w2"),
        input_norm=sizes.norm("attention_norm"),
        post_norm=sizes.norm("ffn_norm"),
    )
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)
