"""Phi 3 and 4, and GLM-4-0414: fused linear maps, and heads of which a part is rotated."""

from __future__ import annotations

from engine.fields import Fields
from engine.model.families.common import FUSED_GATE_UP, FUSED_QKV, Sizes, read_rope
from engine.spec import ModelSpec


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
