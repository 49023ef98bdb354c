"""Experts by Triton: the pairs of rows and experts are sorted, multiplied tile by tile, and summed row by row.

    sort_pairs     the pairs by expert, and the tiles of each; a single row has nothing to be sorted
    expert_linear  gates and ups of every pair, and what the activation makes of them
    expert_linear  what experts make of that, times their weights
    sum_choices    the sum of each row, in the order of choice

Nothing waits for the device. A row's bits depend on itself, its experts and their weights alone: whatever shares its
tile, its products are added up in the order of the inputs, by steps whose size is the same in all tiles.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from torch import Tensor

from penstock.engine.kernels.experts import ExpertLinear
from penstock.engine.kernels.triton.expert_kernels import (
    expert_linear_kernel,
    sort_pairs_kernel,
    sum_choices_kernel,
)
from penstock.engine.kernels.triton.expert_weights import PackedExperts
from penstock.engine.kernels.triton.packed_linear import in_stages, rotate_rows
from penstock.engine.kernels.triton.tiles import ROW_CLASSES, Card, ProductTiling, expert_rows
from penstock.engine.spec import Activation

SORT_BLOCK, SUM_BLOCK = 2048, 1024


@dataclass(frozen=True, slots=True)
class SortedPairs:
    """The pairs of a row and one of its experts: see `sort_pairs_kernel`."""

    ids: Tensor
    """[n, k] int32"""
    order: Tensor | None
    """None: every pair is a tile of its own."""
    tile_experts: Tensor | None
    num_tiles: int

    @classmethod
    def of(cls, ids: Tensor, num_experts: int, block_m: int) -> SortedPairs:
        num_pairs = ids.numel()
        if len(ids) == 1:
            return cls(ids, None, None, num_pairs)
        num_tiles = most_tiles(num_pairs, num_experts, block_m)
        order, tile_experts = ids.new_empty(num_pairs), ids.new_empty(3, num_tiles)
        sort_pairs_kernel[(num_experts,)](
            ids,
            order,
            tile_experts,
            num_pairs,
            num_tiles,
            NUM_EXPERTS=num_experts,
            BINS=triton.next_power_of_2(num_experts),
            BLOCK=min(triton.next_power_of_2(num_pairs), SORT_BLOCK),
            BLOCK_M=block_m,
            num_warps=4,
            enable_fp_fusion=False,
        )
        return cls(ids, order, tile_experts, num_tiles)


def most_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """Returns the most tiles that pairs can make, for any choice of experts."""
    return min(num_pairs, (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m)


@dataclass(frozen=True, slots=True)
class TritonExperts:
    """`kernels.experts.run_experts` for `PackedExperts` on one card."""

    card: Card

    def __call__(
        self,
        x: Tensor,
        ids: Tensor,
        weights: Tensor,
        gate_up: ExpertLinear,
        down: ExpertLinear,
        activation: Activation,
        *,
        weighs_inputs: bool = False,
    ) -> Tensor:
        assert isinstance(gate_up, PackedExperts)
        assert isinstance(down, PackedExperts)
        assert gate_up.is_gated == activation.is_gated
        if not len(x):
            return x.new_empty(x.shape)
        if weighs_inputs:
            x = (x[:, None] * weights[..., None]).to(x.dtype).flatten(0, 1)
        first, second = (self.tiling(each, x.dtype, ids.numel()) for each in (gate_up, down))
        pairs = SortedPairs.of(ids.contiguous(), gate_up.num_experts, first.block_m)
        active = multiply(x.contiguous(), pairs, gate_up, first, activation)
        if second.block_m != first.block_m:
            pairs = SortedPairs.of(pairs.ids, down.num_experts, second.block_m)
        made = multiply(active, pairs, down, second, weights=None if weighs_inputs else weights.contiguous())
        return sum_choices(made, pairs.ids, down.num_experts)

    def try_out(self, experts: PackedExperts, dtype: torch.dtype) -> None:
        """Multiplies a single row, and some rows of every class."""
        activation = Activation() if experts.is_gated else None
        fewest = (most * experts.num_experts // 2 + 1 for most in ROW_CLASSES[:-1])
        for rows in (1, 2, *fewest):
            ids = experts.codes.new_zeros((rows, 1), dtype=torch.int32)
            x = experts.codes.new_zeros((rows, experts.in_features), dtype=dtype)
            tiling = self.tiling(experts, dtype, rows)
            pairs = SortedPairs.of(ids, experts.num_experts, tiling.block_m)
            multiply(x, pairs, experts, tiling, activation)

    def tiling(self, experts: PackedExperts, dtype: torch.dtype, num_pairs: int) -> ProductTiling:
        rows, weight = expert_rows(num_pairs, experts.num_experts), experts.weight
        tiling = self.card.expert_tiling(experts.code, dtype, rows)
        return tiling if isinstance(weight, Tensor) else in_stages(tiling, weight)


def multiply(
    x: Tensor,
    pairs: SortedPairs,
    experts: PackedExperts,
    tiling: ProductTiling,
    activation: Activation | None = None,
    weights: Tensor | None = None,
) -> Tensor:
    """Returns [pairs, out], the experts' products with rows [n, in], which all pairs of a row share, or one for each.

    Pairs of no expert are left as they are. Gated experts have an activation. Weights multiply the products.
    """
    assert activation is not None or not experts.is_gated
    if experts.rotation:
        x = rotate_rows(x, experts.rotation)
    num_pairs, shape = pairs.ids.numel(), activation or Activation()
    out = x.new_empty((num_pairs, experts.out_features // (2 if experts.is_gated else 1)))
    expert_linear_kernel[triton.cdiv(experts.num_rows, tiling.block_n), pairs.num_tiles](
        out,
        x,
        pair_weights=weights,
        ids=pairs.ids,
        order=pairs.order,
        tile_experts=pairs.tile_experts,
        num_tiles=pairs.num_tiles,
        out_features=out.shape[1],
        NUM_READERS=num_pairs // len(x),
        KIND="" if activation is None else activation.kind,
        LIMIT=shape.limit,
        ALPHA=shape.alpha,
        SHIFT=shape.shift,
        **experts.layout(tiling),
        **tiling.options,
        enable_fp_fusion=False,
    )
    return out


def sum_choices(made: Tensor, ids: Tensor, num_experts: int) -> Tensor:
    """[pairs, size] -> [n, size]: the sum of each row, without the choices that are no experts here."""
    (num_rows, num_choices), size = ids.shape, made.shape[1]
    out = made.new_empty((num_rows, size))
    sum_choices_kernel[num_rows, triton.cdiv(size, SUM_BLOCK)](
        out,
        made,
        ids,
        NUM_EXPERTS=num_experts,
        NUM_CHOICES=num_choices,
        SIZE=size,
        BLOCK=SUM_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out
