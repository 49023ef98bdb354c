"""The activations between the linear maps of a feed-forward part, with gates and without."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def glu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Equals `reference.glu`, in one pass; it allocates nothing but its result."""
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    if num_rows := gate_up.numel() // (2 * size):
        grid = (num_rows, triton.cdiv(size, BLOCK))
        glu_kernel[grid](
            gate_up.contiguous(),
            out,
            KIND=activation,
            SIZE=size,
            BLOCK=BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def activated(up: Tensor, activation: str) -> Tensor:  # noqa: ARG001
    """Equals `reference.activated`, in one pass; it allocates nothing but its result."""
    out = torch.empty_like(up, memory_format=torch.contiguous_format)
    if size := up.numel():
        grid = (triton.cdiv(size, BLOCK),)
        relu2_kernel[grid](up.contiguous(), out, size, BLOCK=BLOCK, num_warps=4)
    return out


@triton.jit
def glu_kernel(
    gate_up: tl.tensor, out: tl.tensor, KIND: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gates = gate_up + row * 2 * SIZE + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=inside, other=0.0)
    tl.store(out + row * SIZE + columns, activate(gate, KIND, 1.0).to(up.dtype) * up, mask=inside)


@triton.jit
def activate(x: tl.tensor, KIND: tl.constexpr, ALPHA: tl.constexpr) -> tl.tensor:
    """silu of ALPHA, gelu, or its approximation with tanh, which is x times the sigmoid of another number."""
    if KIND == "gelu":
        active = 0.5 * x * (1.0 + tl.erf(0.7071067811865476 * x))
    else:
        steep = 1.5957691216057308 * (x + 0.044715 * x * x * x) if KIND == "gelu_tanh" else ALPHA * x
        active = x / (1.0 + tl.exp(-steep))
    return active


@triton.jit
def relu2_kernel(up: tl.tensor, out: tl.tensor, size: tl.tensor, BLOCK: tl.constexpr) -> None:
    places = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(up + places, mask=places < size, other=0.0)
    tl.store(out + places, tl.where(x < 0, 0.0, x * x).to(x.dtype), mask=places < size)
