"""The gate of the feed-forward layer."""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

BLOCK = 1024


def glu(gate_up: Tensor, activation: str = "silu") -> Tensor:
    """Does what `reference.glu` does, in one pass; its result is all that is allocated."""
    gelu = activation == "gelu_tanh"
    size = gate_up.shape[-1] // 2
    out = gate_up.new_empty((*gate_up.shape[:-1], size))
    if num_rows := gate_up.numel() // (2 * size):
        grid = (num_rows, triton.cdiv(size, BLOCK))
        glu_kernel[grid](
            gate_up.contiguous(), out, GELU=gelu, SIZE=size, BLOCK=BLOCK, num_warps=4, enable_fp_fusion=False
        )
    return out


@triton.jit
def glu_kernel(
    gate_up: tl.tensor, out: tl.tensor, GELU: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr
) -> None:
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    inside = columns < SIZE
    gates = gate_up + row * 2 * SIZE + columns
    gate = tl.load(gates, mask=inside, other=0.0).to(tl.float32)
    up = tl.load(gates + SIZE, mask=inside, other=0.0)
    # gelu's approximation with tanh is x times the sigmoid of another number.
    steep = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate) if GELU else gate
    active = (gate / (1.0 + tl.exp(-steep))).to(up.dtype)
    tl.store(out + row * SIZE + columns, active * up, mask=inside)
