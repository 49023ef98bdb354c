"""Routers of experts, as the entries of a config.json say."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from penstock.engine.fields import Fields
from penstock.engine.spec import Router, Stack, default_stacks

MAX_EXPERTS = 1 << 16
"""More than any layer has: each is some tensors."""
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
    of_groups = ["group_limited_greedy"] if has_groups else []
    methods = ["noaux_tc"] if router.choice_bias else ["greedy", *of_groups]
    fields.one_of("topk_method", *methods, default=methods[0])
    if "scale" not in changes:
        fields.says_nothing("routed_scaling_factor", 0, 1)
    if has_groups:
        return _in_groups(fields, router)
    for name in ("n_group", "topk_group"):
        fields.says_nothing(name, 0, 1)
    return router


def sigmoid_router(fields: Fields) -> Router:
    """DeepSeek V3's: scores of their own for the choice, the two best experts of a group make its score."""
    return read_router(
        fields,
        has_groups=True,
        group_best=2,
        scoring="sigmoid",
        choice_bias="mlp.gate.e_score_correction_bias",
        renormalizes=fields.flag("norm_topk_prob", True),
        epsilon=1e-20,
        scale=fields.positive("routed_scaling_factor", 1.0),
    )


def _in_groups(fields: Fields, router: Router) -> Router:
    """The router, with the groups of experts that it chooses from.

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
    return replace(router, num_groups=num_groups, top_groups=top_groups)


def numbered_experts(prefix: str) -> dict[str, Any]:
    """Mixtral's names of experts, whose gates are w1 and ups w3."""
    names = {"gate_proj": "w1", "up_proj": "w3", "down_proj": "w2"}
    stacks = (Stack(stack.name, tuple(names[map] for map in stack.maps)) for stack in default_stacks(prefix))
    return {"prefix": prefix, "gate_up": ("w1", "w3"), "down": "w2", "stacks": tuple(stacks)}


MIXTRAL_EXPERTS = numbered_experts("block_sparse_moe.experts")
