"""DeepSeek V2, V3 and R1, and the models of others with their attention: Kimi K2, GLM-4.7 Flash, Mistral Small 4."""

from __future__ import annotations

from dataclasses import replace

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, names_behind, read_rope, yarn_magnitude
from penstock.engine.model.families.routers import MAX_EXPERTS, read_router, sigmoid_router
from penstock.engine.spec import LatentAttention, ModelSpec, Rope, Router


def deepseek_v2(fields: Fields) -> ModelSpec:
    has_groups = fields.text("topk_method", "greedy") == "group_limited_greedy"
    router = read_router(fields, has_groups=has_groups, scale=fields.positive("routed_scaling_factor", 1.0))
    return _model(fields, router, fields.integer("first_k_dense_replace", 0), predicts=False)


def deepseek_v3(fields: Fields) -> ModelSpec:
    """Describes DeepSeek V3, R1 and Kimi K2: the layer after the last one drafts."""
    return _model(fields, sigmoid_router(fields), fields.integer("first_k_dense_replace", 3))


def glm4_moe_lite(fields: Fields) -> ModelSpec:
    kinds = fields.strings("mlp_layer_types", "dense", "sparse")
    num_dense = kinds.index("sparse") if "sparse" in kinds else fields.integer("first_k_dense_replace", 1)
    if "dense" in kinds[num_dense:]:
        raise fields.error("mlp_layer_types has a dense layer after a sparse one")
    return _model(fields, sigmoid_router(fields), num_dense)


def mistral4(fields: Fields) -> ModelSpec:
    router = read_router(
        fields,
        has_groups=True,
        group_best=2,
        renormalizes=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.positive("routed_scaling_factor", 1.0),
    )
    return _model(fields, router, fields.integer("first_k_dense_replace", 0), predicts=False)


def _model(fields: Fields, router: Router, num_dense: int, *, predicts: bool = True) -> ModelSpec:
    """A model whose first layers are dense."""
    fields.says_nothing("moe_layer_freq", 1)
    sizes = replace(Sizes.of(fields, head_dim=2), head_dim=fields.size("qk_rope_head_dim", 64))
    # A `partial_rotary_factor` is that of a whole head, of which the rotated numbers are a part of their own here.
    head = replace(sizes, head_dim=sizes.head_dim + fields.size("qk_nope_head_dim", 128))
    rope = replace(read_rope(fields, head), share=1.0)
    num_shared, inner = fields.integer("n_shared_experts", 0), fields.size("moe_intermediate_size")
    if not 0 <= num_shared <= MAX_EXPERTS:
        raise fields.error(f"n_shared_experts is {num_shared}, and it must be at least 0")
    shared = sizes.shared("mlp.shared_experts", num_shared * inner) if num_shared else None
    experts = sizes.experts(router, inner_size=inner, shared=shared)
    attention = _attention(fields, sizes, rope)
    *layers, behind = (
        sizes.layer(attention, None if number < num_dense else experts)
        for number in range(sizes.num_layers + 1)
    )
    prediction = sizes.prediction(fields, behind, names_behind(sizes.num_layers)) if predicts else None
    return sizes.model(layers, [rope], fields, prediction=prediction)


def _attention(fields: Fields, sizes: Sizes, rope: Rope) -> LatentAttention:
    """Raises:
    CheckpointError: the rotated numbers do not divide the latent, as groups that share a scale in 8 bits do.
    """
    plain, latent = fields.size("qk_nope_head_dim", 128), fields.size("kv_lora_rank", 512)
    if latent % sizes.head_dim:
        raise fields.error(
            f"kv_lora_rank is {latent}, and not a multiple of qk_rope_head_dim, {sizes.head_dim}"
        )
    stretched = fields.nested("rope_parameters" if fields.has("rope_parameters") else "rope_scaling")
    magnitude = yarn_magnitude(rope.factor, stretched.number("mscale_all_dim", 0.0))
    beta = stretched.number("llama_4_scaling_beta", 0.0)
    return LatentAttention(
        hidden_size=sizes.hidden,
        num_heads=sizes.num_heads,
        query_rank=fields.optional_size("q_lora_rank") or 0,
        latent_size=latent,
        plain_size=plain,
        rotated_size=sizes.head_dim,
        value_size=fields.size("v_head_dim", 128),
        scale=(plain + sizes.head_dim) ** -0.5 * magnitude**2,
        temperature=(beta, rope.original_max_position, 0) if beta else None,
        is_interleaved=fields.flag("rope_interleave", True),
        has_bias=fields.flag("attention_bias"),
    )
