"""Linear maps of a few rows with weights in the type of x: such a product takes as long as its weights take to come."""

from __future__ import annotations

from typing import Any

import torch.nn.functional as F
import triton
import triton.language as tl
from torch import Tensor

from penstock.engine.kernels.linear import DenseLinear

MOST_ROWS = 8
"""With more rows, tensor cores multiply while the weights come, and these products no longer do."""
_PRODUCTS = 8192
"""Products that a program of eight warps has in its registers: 32 in each thread."""
_OUTPUTS = 8
"""Of a program: so few that a map of 1,024 outputs has one for each multiprocessor, without parts of the inputs, and so
many that more weights are read than inputs."""


class FewRowsLinear(DenseLinear):
    """A DenseLinear with a kernel of its own for fewer rows than `boundary`, which the card's file of tiles has."""

    def __init__(self, weight: Tensor, bias: Tensor | None, boundary: int) -> None:
        super().__init__(weight, bias)
        self._most_rows = min(boundary - 1, MOST_ROWS)

    def __call__(self, x: Tensor) -> Tensor:
        if 0 < x.numel() <= self._most_rows * x.shape[-1]:
            return multiply_few(x.reshape(-1, x.shape[-1]), self.weight, self.bias).view(*x.shape[:-1], -1)
        return F.linear(x, self.weight, self.bias)


def multiply_few(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [M, in] @ weight [out, in].T + bias [out], for 1 to MOST_ROWS rows; sums are float32, rounded once to x's type.

    A row's result does not depend on the others while their number stays below the same power of two.
    """
    num_outputs, in_features = weight.shape
    out = x.new_empty((len(x), num_outputs))
    tiling = few_rows_tiling(len(x), in_features)
    few_rows_kernel[(triton.cdiv(num_outputs, tiling["BLOCK_N"]),)](
        out,
        x.contiguous(),
        weight.contiguous(),
        bias,
        len(x),
        num_outputs,
        in_features,
        **tiling,
        num_warps=4 if tiling["ROWS"] == 1 else 8,
    )
    return out


def few_rows_tiling(num_rows: int, in_features: int) -> dict[str, Any]:
    """The constants of the kernel: the more rows, the fewer inputs at a time."""
    rows = triton.next_power_of_2(num_rows)
    most_inputs = min(512, _PRODUCTS // (rows * _OUTPUTS))
    block_k = min(most_inputs, triton.next_power_of_2(in_features))
    return {"ROWS": rows, "BLOCK_N": _OUTPUTS, "BLOCK_K": block_k, "STAGES": 4}


@triton.jit(do_not_specialize=["num_rows"])
def few_rows_kernel(
    out: tl.tensor,
    x: tl.tensor,
    weight: tl.tensor,
    bias: tl.tensor,
    num_rows: tl.tensor,
    out_features: tl.tensor,
    in_features: tl.tensor,
    ROWS: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    STAGES: tl.constexpr,
) -> None:
    """Multiplies all rows with BLOCK_N rows of weights; each weight is read once, and products are added at the end."""
    rows, places = tl.arange(0, ROWS), tl.arange(0, BLOCK_K)
    outputs = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    read = tl.minimum(outputs, out_features - 1)
    row_weights = weight + read.to(tl.int64)[:, None] * in_features + places[None, :]
    row_x = x + rows[:, None] * in_features + places[None, :]
    is_row = (rows < num_rows)[:, None]
    summed = tl.zeros([ROWS, BLOCK_N, BLOCK_K], tl.float32)
    for start in tl.range(0, in_features, BLOCK_K, num_stages=STAGES):
        inside = places[None, :] < in_features - start
        weights = tl.load(row_weights + start, mask=inside, other=0.0).to(tl.float32)
        columns = tl.load(row_x + start, mask=is_row & inside, other=0.0).to(tl.float32)
        summed += columns[:, None, :] * weights[None, :, :]
    result = tl.sum(summed, 2)
    if bias is not None:
        result += tl.load(bias + read).to(tl.float32)[None, :]
    kept = is_row & (outputs < out_features)[None, :]
    tl.store(
        out + rows[:, None] * out_features + outputs[None, :], result.to(out.dtype.element_ty), mask=kept
    )
