"""RMSNorm, alone or after adding to the residual stream, and LayerNorm; each program has one row."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Does what `reference.rms_norm` does; its result is all that is allocated."""
    return _normed(x, None, None, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Does what `reference.layer_norm` does; its result is all that is allocated."""
    return _normed(x, None, None, weight, eps, centered=True)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Does what `reference.add_rms_norm` does, in one pass; both results are all that is allocated."""
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return total, _normed(hidden, delta.contiguous(), total, weight, eps)


def num_warps(block: int) -> int:
    """The warps for a row of `block` elements: each thread has 16 of them, and there are 256 to 512 threads."""
    return min(max(block // 512, 8), 16)


def _normed(
    x: Tensor,
    delta: Tensor | None,
    total: Tensor | None,
    weight: Tensor,
    eps: float,
    *,
    centered: bool = False,
) -> Tensor:
    """The norm of x, or of x + `delta`, which is written to `total`."""
    normed = torch.empty_like(x, memory_format=torch.contiguous_format)
    size = x.shape[-1]
    if num_rows := x.numel() // size:
        block = triton.next_power_of_2(size)
        rms_norm_kernel[(num_rows,)](
            x.contiguous(),
            delta,
            weight,
            total,
            normed,
            eps,
            ADDS=delta is not None,
            CENTERED=centered,
            SIZE=size,
            BLOCK=block,
            num_warps=num_warps(block),
            enable_fp_fusion=False,
        )
    return normed


@triton.jit
def rms_norm_kernel(
    x: tl.tensor,
    delta: tl.tensor,
    weight: tl.tensor,
    total: tl.tensor,
    normed: tl.tensor,
    eps: tl.tensor,
    ADDS: tl.constexpr,
    CENTERED: tl.constexpr,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    columns = tl.arange(0, BLOCK)
    inside = columns < SIZE
    places = tl.program_id(0).to(tl.int64) * SIZE + columns
    weights = tl.load(weight + columns, mask=inside, other=0.0)  # early: they arrive while the sum is made
    row = tl.load(x + places, mask=inside, other=0.0)
    if ADDS:
        row += tl.load(delta + places, mask=inside, other=0.0)
        tl.store(total + places, row, mask=inside)
    wide = row.to(tl.float32)
    if CENTERED:
        wide = tl.where(inside, wide - tl.sum(wide) / SIZE, 0.0)
        weights = weights.to(tl.float32)
    scale = tl.rsqrt(tl.sum(wide * wide) / SIZE + eps)
    tl.store(normed + places, (weights * (wide * scale).to(weights.dtype)).to(row.dtype), mask=inside)
