"""Qwen 2 and 3 MoE, Mixtral, MiniMax M2 and OLMoE: layers of Llama's kind whose feed-forward parts are experts."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engine.fields import Fields
from penstock.engine.model.families.common import Sizes, read_rope
from penstock.engine.model.families.llama import upper_windows
from penstock.engine.spec import Attention, Experts, ModelSpec, Router, Stack, default_stacks

MAX_EXPERTS = 1 << 16
"""More than any layer has: each is some tensors."""


def qwen3_moe(fields: Fields, **changes: Any) -> ModelSpec:
    sizes, bias = Sizes.of(fields, head_dim=128), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, **sizes.head_norms())
    inner = fields.size("moe_intermediate_size")
    return _qwen(fields, sizes, attention, sizes.experts(read_router(fields), inner_size=inner, **changes))


def qwen3_vl_moe(fields: Fields) -> ModelSpec:
    """Stacks lie transposed."""
    stacks = (replace(stack, is_transposed=True) for stack in default_stacks("mlp.experts"))
    return qwen3_moe(fields, stacks=tuple(stacks))


def qwen2_moe(fields: Fields) -> ModelSpec:
    """Describes Qwen 2 MoE: a gate multiplies the output of the shared expert."""
    sizes = Sizes.of(fields)
    inner = fields.size("shared_expert_intermediate_size", 5632)
    experts = sizes.experts(
        read_router(fields),
        inner_size=fields.size("moe_intermediate_size"),
        shared=sizes.shared("mlp.shared_expert", inner),
        shared_gate="mlp.shared_expert_gate",
    )
    return _qwen(fields, sizes, sizes.attention(qkv_bias=fields.flag("qkv_bias", True)), experts)


def _qwen(fields: Fields, sizes: Sizes, attention: Attention, experts: Experts) -> ModelSpec:
    sparse, dense = sizes.layer(attention, experts), sizes.layer(attention)
    layers = [
        (sparse if is_sparse(fields, number) else dense).with_attention(window=window)
        for number, window in enumerate(upper_windows(fields, sizes))
    ]
    return sizes.model(layers, [read_rope(fields, sizes)], fields)


def is_sparse(fields: Fields, number: int) -> bool:
    """Returns whether Qwen's layer of that number has experts.

    Layers of `mlp_only_layers` are dense, and so are layers whose number is not a multiple of `decoder_sparse_step`.
    """
    dense_layers, every = fields.integers("mlp_only_layers"), fields.size("decoder_sparse_step", 1)
    return number not in dense_layers and (number + 1) % every == 0


def mixtral(fields: Fields) -> ModelSpec:
    router = read_router(fields, name="block_sparse_moe.gate", renormalizes=True)
    sizes = Sizes.of(fields)
    window = fields.optional_size("sliding_window") or 0
    attention = sizes.attention(window=window, is_interleaved=fields.flag("rope_interleave"))
    layer = sizes.layer(attention, sizes.experts(router, **_MIXTRAL))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes, theta=1e6)], fields)


def minimax_m2(fields: Fields) -> ModelSpec:
    """Queries and keys are normed as one row each, and the first dimensions of a head are rotated."""
    router = read_router(
        fields,
        name="block_sparse_moe.gate",
        scoring="sigmoid",
        choice_bias="block_sparse_moe.e_score_correction_bias",
        renormalizes=True,
    )
    sizes = Sizes.of(fields, head_dim=128)
    share = (fields.optional_size("rotary_dim") or sizes.head_dim) / sizes.head_dim
    rope = read_rope(fields, sizes, theta=5e6, share=share)
    attention = sizes.attention(rotated=int(sizes.head_dim * rope.share), **sizes.row_norms())
    layer = sizes.layer(attention, sizes.experts(router, **_MIXTRAL))
    return sizes.model([layer] * sizes.num_layers, [rope], fields)


def olmoe(fields: Fields) -> ModelSpec:
    """Queries and keys are normed as one row each."""
    if fields.has("clip_qkv"):
        raise fields.error("clip_qkv is not supported")
    sizes, bias = Sizes.of(fields), fields.flag("attention_bias")
    attention = sizes.attention(qkv_bias=bias, o_bias=bias, **sizes.row_norms())
    layer = sizes.layer(attention, sizes.experts(read_router(fields)))
    return sizes.model([layer] * sizes.num_layers, [read_rope(fields, sizes)], fields)


_COUNTS = ("num_local_experts", "num_experts", "n_routed_experts", "moe_num_experts")
_CHOICES = ("num_experts_per_tok", "moe_k", "moe_topk", "top_k_experts")
"""The entries in which families give the number of experts, and the number of experts of a token."""


def read_router(fields: Fields, *, has_groups: bool = False, **changes: object) -> Router:
    """The router that a config.json describes, with the changes that the family alone gives.

    Args:
        has_groups: the family chooses among groups of experts first.

    Raises:
        CheckpointError: an entry is missing or malformed, a token has more experts than can be chosen, or scores or
            choices are made in a way that the family does not have.
    """
    count, choices = fields.first(*_COUNTS), fields.first(*_CHOICES)
    plain = {
        "num_experts": fields.size(count, most=MAX_EXPERTS),
        "top_k": changes.get("top_k") or fields.size(choices, most=MAX_EXPERTS),
        "renormalizes": fields.flag("norm_topk_prob"),
    }
    router = Router(**{**plain, **changes})  # type: ignore[arg-type]
    if router.top_k > router.num_experts:
        raise fields.error(
            f"{choices} is {router.top_k}, and there are {router.num_experts} experts ({count})"
        )
    fields.one_of("scoring_func", router.scoring, default=router.scoring)
    method = "noaux_tc" if router.choice_bias else "greedy"
    fields.one_of("topk_method", method, default=method)
    if "scale" not in changes:
        fields.says_nothing("routed_scaling_factor", 0, 1)
    if has_groups:
        return _in_groups(fields, router)
    for name in ("n_group", "topk_group"):
        fields.says_nothing(name, 0, 1)
    return router


def _in_groups(fields: Fields, router: Router) -> Router:
    """The router, with the groups of experts that it chooses from; the two best experts of each make its score.

    Raises:
        CheckpointError: experts do not lie in so many groups, or the chosen ones have fewer than a token needs.
    """
    num_groups, top_groups = fields.size("n_group", 1), fields.size("topk_group", 1)
    in_group, rest = divmod(router.num_experts, num_groups)
    if rest or not router.top_k <= top_groups * in_group <= router.num_experts:
        raise fields.error(
            f"n_group is {num_groups} and topk_group {top_groups}: {router.num_experts} experts do not lie in such "
            f"groups, or a token cannot have {router.top_k} of them"
        )
    return replace(router, num_groups=num_groups, top_groups=top_groups, group_best=2)


def numbered_experts(prefix: str) -> dict[str, Any]:
    """Mixtral's names of experts, whose gates are w1 and ups w3."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    stacks = (Stack(stack.name, tuple(names[map] for map in stack.maps)) for stack in default_stacks(prefix))
    return {"prefix": prefix, "gate_up": ("w1", "w3"), "down": "w2", "stacks": tuple(stacks)}


_MIXTRAL = numbered_experts("block_sparse_moe.experts")
