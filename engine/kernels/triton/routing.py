"""The choice of experts: one program a row, all of it in registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.spec import Router

_NOTHING = tl.constexpr(-(1 << 63))
"""The key of an expert that cannot be chosen."""


def route(
    logits: Tensor, router: Router, choice_bias: Tensor | None = None, expert_scale: Tensor | None = None
) -> tuple[Tensor, Tensor]:
    """Equals `kernels.experts.route`; it allocates nothing but its results."""
    num_rows, top_k = len(logits), router.top_k
    ids = logits.new_empty((num_rows, top_k), dtype=torch.int32)
    weights = logits.new_empty((num_rows, top_k), dtype=torch.float32)
    group_size = router.num_experts // router.num_groups
    if num_rows:
        route_kernel[(num_rows,)](
            ids,
            weights,
            logits.contiguous(),
            choice_bias,
            expert_scale,
            router.epsilon,
            router.scale,
            SCORING=router.scoring,
            RENORMALIZES=router.renormalizes,
            TOP_K=top_k,
            NUM_GROUPS=router.num_groups,
            TOP_GROUPS=router.top_groups,
            GROUP_BEST=min(router.group_best, group_size),
            GROUP_SIZE=group_size,
            BLOCK_K=triton.next_power_of_2(top_k),
            BLOCK_G=triton.next_power_of_2(router.num_groups),
            BLOCK_S=triton.next_power_of_2(group_size),
            num_warps=1,
            enable_fp_fusion=False,
        )
    return ids, weights


@triton.jit
def route_kernel(
    ids: tl.tensor,
    weights: tl.tensor,
    logits: tl.tensor,
    choice_bias: tl.tensor,
    expert_scale: tl.tensor,
    epsilon: tl.tensor,
    factor: tl.tensor,
    SCORING: tl.constexpr,
    RENORMALIZES: tl.constexpr,
    TOP_K: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    GROUP_SIZE: tl.constexpr,
    BLOCK_K: tl.constexpr,
    BLOCK_G: tl.constexpr,
    BLOCK_S: tl.constexpr,
) -> None:
    """Routes one row, whose experts lie in a tile [BLOCK_G, BLOCK_S], a group in each row of it."""
    row = tl.program_id(0).to(tl.int64)
    groups = tl.arange(0, BLOCK_G)
    places = tl.arange(0, BLOCK_S)
    experts = groups[:, None] * GROUP_SIZE + places[None, :]
    inside = (groups[:, None] < NUM_GROUPS) & (places[None, :] < GROUP_SIZE)
    read = logits + row * (NUM_GROUPS * GROUP_SIZE) + experts
    logit = tl.load(read, mask=inside, other=-float("inf")).to(tl.float32)
    by = logit
    if SCORING == "sigmoid":
        score = 1.0 / (1.0 + tl.exp(-logit))
    else:
        score = tl.exp(logit - tl.max(logit))
        score = score / tl.sum(score)
    if choice_bias is not None:
        by = score + tl.load(choice_bias + experts, mask=inside, other=0.0)
    elif NUM_GROUPS > 1:
        by = score
    keys = tl.where(inside, _keys(by, experts), _NOTHING)
    if NUM_GROUPS > 1:
        is_kept = _best_groups(keys, groups, TOP_GROUPS, GROUP_BEST, NUM_GROUPS, BLOCK_G)
        by = tl.where(is_kept[:, None] > 0, by, -float("inf"))
        keys = tl.where(inside, _keys(by, experts), _NOTHING)
    choices = tl.arange(0, BLOCK_K)
    chosen, found = tl.zeros([BLOCK_K], tl.int32), tl.zeros([BLOCK_K], tl.float32)
    value = logit if SCORING == "softmax_of_chosen" else score
    for choice in tl.static_range(TOP_K):
        expert = _number(tl.max(tl.max(keys, 1), 0))
        is_it = experts == expert
        keys = tl.where(is_it, _NOTHING, keys)
        chosen = tl.where(choices == choice, expert, chosen)
        its_value = tl.sum(tl.sum(tl.where(is_it & inside, value, 0.0), 1), 0)
        found = tl.where(choices == choice, its_value, found)
    kept = choices < TOP_K
    if SCORING == "softmax_of_chosen":
        found = tl.where(kept, found, -float("inf"))
        found = tl.exp(found - tl.max(found, 0))
        found = found / tl.sum(found, 0)
    if RENORMALIZES:
        found = found / (tl.sum(found, 0) + epsilon)
    found *= factor
    if expert_scale is not None:
        found *= tl.load(expert_scale + chosen, mask=kept, other=0.0)
    tl.store(ids + row * TOP_K + choices, chosen, mask=kept)
    tl.store(weights + row * TOP_K + choices, found, mask=kept)


@triton.jit
def _best_groups(
    keys: tl.tensor,
    groups: tl.tensor,
    TOP_GROUPS: tl.constexpr,
    GROUP_BEST: tl.constexpr,
    NUM_GROUPS: tl.constexpr,
    BLOCK_G: tl.constexpr,
) -> tl.tensor:
    """[BLOCK_G] 1 for the groups that can be chosen from."""
    total = tl.zeros([BLOCK_G], tl.float32)
    for _ in tl.static_range(GROUP_BEST):
        best = tl.max(keys, 1)
        total += _float(best)
        keys = tl.where(keys == best[:, None], _NOTHING, keys)
    of_groups = tl.where(groups < NUM_GROUPS, _keys(total, groups), _NOTHING)
    is_kept = tl.zeros([BLOCK_G], tl.int32)
    for _ in tl.static_range(TOP_GROUPS):
        is_best = groups == _number(tl.max(of_groups, 0))
        is_kept = tl.where(is_best, 1, is_kept)
        of_groups = tl.where(is_best, _NOTHING, of_groups)
    return is_kept


@triton.jit
def _keys(x: tl.tensor, numbers: tl.tensor) -> tl.tensor:
    """Integers of 64 bits in the order of floats, the lower number first among equals; NaN is the largest of all."""
    bits = tl.where(x == 0.0, 0.0, x).to(tl.int32, bitcast=True)
    ordered = tl.where(x == x, bits ^ ((bits >> 31) & 0x7FFFFFFF), 0x7FFFFFFF)
    return ordered.to(tl.int64) << 32 | (0x7FFFFFFF - numbers).to(tl.int64)


@triton.jit
def _number(key: tl.tensor) -> tl.tensor:
    return 0x7FFFFFFF - (key & 0x7FFFFFFF).to(tl.int32)


@triton.jit
def _float(key: tl.tensor) -> tl.tensor:
    ordered = (key >> 32).to(tl.int32)
    return (ordered ^ ((ordered >> 31) & 0x7FFFFFFF)).to(tl.float32, bitcast=True)
