"""Phi 3 and 4, GLM-4-0414 and InternLM 2.5: fused linear maps, and heads of which a part is rotated."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FUSED_GATE_UP, FUSED_QKV, Sizes, read_rope
from penstock.engine.spec import ModelSpec


def phi3(fields: Fields) -> ModelSpec:
    sizes = Sizes.of(fields)
    rope = read_rope(fields, sizes)
    attention = sizes.attention(
        qkv=FUSED_QKV,
        window=fields.optional_size("sliding_window") or 0,
        rotated=int(sizes.head_dim * rope.share),
    )
    layer = sizes.layer(attention, sizes.mlp(gate_up=FUSED_GATE_UP))
    return sizes.model([layer] * sizes.num_layers, [rope], fields)


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


def glm4(fields: Fields) -> ModelSpec:
    """Norms before and after each part."""
    sizes = Sizes.of(fields)
    rope = read_rope(fields, sizes, share=0.5)
    attention = sizes.attention(
        qkv_bias=fields.flag("attention_bias", True),
        rotated=int(sizes.head_dim * rope.share),
        is_interleaved=True,
    )
    layer = sizes.layer(
        attention,
        sizes.mlp(gate_up=FUSED_GATE_UP),
        attention_norm=sizes.norm("post_self_attn_layernorm"),
        feed_forward_norm=sizes.norm("post_mlp_layernorm"),
    )
    return sizes.model([layer] * sizes.num_layers, [rope], fields)
