"""GLM-4.5, ERNIE 4.5 MoE and Hunyuan MoE: experts and shared experts."""

from __future__ import annotations

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, names_behind, read_rope
from penstock.engine.model.families.experts import MAX_EXPERTS, read_router
from penstock.engine.spec import ModelSpec


def glm4_moe(fields: Fields) -> ModelSpec:
    """Describes GLM-4.5: the first layers are dense, and the layer after the last one drafts."""
    sizes = Sizes.of(fields)
    rope = read_rope(fields, sizes, share=0.5)
    router = read_router(
        fields,
        has_groups=True,
        scoring="sigmoid",
        choice_bias="mlp.gate.e_score_correction_bias",
        renormalizes=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    inner = fields.size("moe_intermediate_size")
    num_shared = fields.size("n_shared_experts", 1, most=MAX_EXPERTS)
    experts = sizes.experts(
        router,
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


def ernie4_5_moe(fields: Fields) -> ModelSpec:
    """Neighbouring pairs of a head are rotated. Layers from `moe_layer_start_index` on have experts."""
    sizes, bias = Sizes.of(fields), fields.flag("use_bias")
    fields.one_of("moe_gate_act", "softmax", default="softmax")
    router = read_router(
        fields,
        choice_bias="mlp.moe_statics.e_score_correction_bias",
        renormalizes=True,
        epsilon=fields.positive("moe_norm_min", 1e-12),
    )
    inner = fields.size("moe_intermediate_size", 1536)
    num_shared = int(fields.within("moe_num_shared_experts", 0, MAX_EXPERTS) or 0)
    shared = sizes.shared("mlp.shared_experts", num_shared * inner, has_bias=bias) if num_shared else None
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, is_interleaved=True)
    sparse = sizes.layer(attention, sizes.experts(router, inner_size=inner, shared=shared))
    dense = sizes.layer(attention, sizes.mlp(has_bias=bias))
    first, last = fields.integer("moe_layer_start_index", 1), fields.integer("moe_layer_end_index", -1)
    every = fields.size("moe_layer_interval", 1)
    layers = [
        sparse if (number + 1) % every == 0 and first <= number <= last % sizes.num_layers else dense
        for number in range(sizes.num_layers)
    ]
    return sizes.model(layers, [read_rope(fields, sizes, theta=500_000.0)], fields)


def hunyuan_moe(fields: Fields) -> ModelSpec:
    """Queries and keys are normed after the rotation; each layer may have experts of its own sizes."""
    if fields.flag("use_cla"):
        raise fields.error("use_cla is not supported: layers share keys and values")
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    norms = sizes.head_norms(q="query_layernorm", k="key_layernorm")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, norms_after_rotation=True, **norms)
    inner, top_k, num_shared = (
        fields.layer_sizes(name, sizes.num_layers, default)
        for name, default in (
            ("moe_intermediate_size", sizes.inner),
            ("moe_topk", 1),
            ("num_shared_expert", 1),
        )
    )
    layers = [
        sizes.layer(
            attention,
            sizes.experts(
                read_router(fields, name="mlp.gate.wg", renormalizes=True, top_k=top_k[number]),
                inner_size=inner[number],
                shared=sizes.shared("mlp.shared_mlp", num_shared[number] * sizes.inner),
            ),
        )
        for number in range(sizes.num_layers)
    ]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)
