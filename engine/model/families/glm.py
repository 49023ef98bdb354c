"""GLM-4-0414, and GLM-4.5 to 4.7."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import FUSED_GATE_UP, Sizes, names_behind, read_rope
from penstock.engine.model.families.routers import MAX_EXPERTS, sigmoid_router
from penstock.engine.spec import ModelSpec


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


def glm4_moe(fields: Fields) -> ModelSpec:
    """Describes GLM-4.5: the first layers are dense, and the layer after the last one drafts."""
    sizes = Sizes.of(fields)
    rope = read_rope(fields, sizes, share=0.5)
    inner = fields.size("moe_intermediate_size")
    num_shared = fields.size("n_shared_experts", 1, most=MAX_EXPERTS)
    experts = sizes.experts(
        sigmoid_router(fields),
        inner_size=inner,
        shared=sizes.shared("mlp.shared_experts", num_shared * inner),
    )
    attention = sizes.attention(
        qkv_bias=fields.flag("attention_bias"),
        rotated=int(sizes.head_dim * rope.share),
        **(sizes.head_norms() if fields.flag("use_qk_norm") else {}),
    )
    num_dense = fields.integer("first_k_dense_replace", 1)
    *layers, behind = (
        sizes.layer(attention, None if number < num_dense else experts)
        for number in range(sizes.num_layers + 1)
    )
    prediction = sizes.prediction(fields, behind, names_behind(sizes.num_layers))
    return sizes.model(layers, [rope], fields, prediction=prediction)
