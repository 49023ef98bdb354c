"""RMSNorm, alone, after adding to the residual stream, or of heads with gates, and LayerNorm."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def rms_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Equals `reference.rms_norm`; it allocates nothing but its result."""
    return _normed(x, None, None, weight, eps)


def layer_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """Equals `reference.layer_norm`; it allocates nothing but its result."""
    return _normed(x, None, None, weight, eps, centered=True)


def add_rms_norm(hidden: Tensor, delta: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """Equals `reference.add_rms_norm`, in one pass; it allocates nothing but both results."""
    total = torch.empty_like(hidden, memory_format=torch.contiguous_format)
    return total, _normed(hidden, delta.contiguous(), total, weight, eps)


PART_OF_ROW = 1024
"""Numbers that a program of `gated_rms_norm` has at least, if a row has as many."""


def gated_rms_norm(
    made: Tensor,
    weight: Tensor,
    eps: float,
    gates: Tensor,
    size: int,
    query_starts: Tensor,
    *,
    gates_first: bool,
) -> Tensor:
    """Returns RMSNorm of each part of a row, times SiLU(gates); it allocates nothing but its result.

    Args:
        made: [T, n] float32
        weight: [size], or [n] if gates come first.
        gates: [T, n], whose rows may be parts of longer ones.
        size: of a part.
        query_starts: see `Batch`.
        gates_first: whether the gates multiply before the norm.

    Returns:
        [T, n] in the type of the gates; zeros for rows of no sequence.
    """
    num_rows, width = made.shape
    out = torch.empty(num_rows, width, dtype=gates.dtype, device=made.device)
    block, parts, warps = parts_of(width, size)
    if num_rows:
        gated_rms_norm_kernel[(num_rows, triton.cdiv(width // size, parts))](
            made,
            weight,
            gates,
            gates.stride(0),
            query_starts,
            query_starts.numel() - 1,
            out,
            eps,
            GATES_FIRST=gates_first,
            NUM_PARTS=width // size,
            SIZE=size,
            PARTS=parts,
            BLOCK=block,
            num_warps=warps,
        )
    return out


def parts_of(width: int, size: int) -> tuple[int, int, int]:
    """The numbers, the parts and the warps that a program of `gated_rms_norm` has."""
    block = triton.next_power_of_2(size)
    parts = max(1, min(triton.next_power_of_2(width // size), PART_OF_ROW // block))
    return block, parts, 4 if parts * block <= PART_OF_ROW else num_warps(block)


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


@triton.jit(do_not_specialize=["num_sequences"])
def gated_rms_norm_kernel(
    made: tl.tensor,
    weight: tl.tensor,
    gates: tl.tensor,
    gate_stride: tl.tensor,
    query_starts: tl.tensor,
    num_sequences: tl.tensor,
    out: tl.tensor,
    eps: tl.tensor,
    GATES_FIRST: tl.constexpr,
    NUM_PARTS: tl.constexpr,
    SIZE: tl.constexpr,
    PARTS: tl.constexpr,
    BLOCK: tl.constexpr,
) -> None:
    row = tl.program_id(0).to(tl.int64)
    parts = tl.program_id(1) * PARTS + tl.arange(0, PARTS)[:, None]
    columns = tl.arange(0, BLOCK)[None, :]
    places = parts * SIZE + columns
    inside = (parts < NUM_PARTS) & (columns < SIZE)
    end = tl.where(row < tl.load(query_starts + num_sequences), SIZE, 0)
    is_known = inside & (columns < end)
    z = tl.load(gates + row * gate_stride + places, mask=is_known, other=0.0).to(tl.float32)
    weights = tl.load(weight + (places if GATES_FIRST else columns), mask=inside, other=0.0)
    x = tl.load(made + row * (NUM_PARTS * SIZE) + places, mask=is_known, other=0.0)
    gate = z / (1.0 + tl.exp(-z))
    if GATES_FIRST:
        x *= gate
    x *= tl.rsqrt(tl.sum(x * x, 1) / SIZE + eps)[:, None] * weights
    if not GATES_FIRST:
        x *= gate
    tl.store(out + row * (NUM_PARTS * SIZE) + places, x.to(out.dtype.element_ty), mask=inside)
