"""AWQ: scales up the inputs of a linear map that matter most, so that rounding hurts them least.

Lin, Tang, Tang, Yang, Chen, Wang, Xiao, Dang, Gan, Han: "AWQ: Activation-aware Weight Quantization for LLM Compression
and Acceleration", 2023, https://arxiv.org/abs/2306.00978. Errors of outputs are taken from the Hessian E[x x^T], which
gives them exactly without the inputs themselves.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from penstock.engine.quant.grid import WIDE_SHARES, Grid, Rounded, group_blocks

_EXPONENTS = tuple(i / 10 for i in range(10))
_SMALLEST = 1e-4


def input_scales(
    weights: Sequence[Tensor], hessian: Tensor, grid: Grid, shared: tuple[int, ...] | None = None
) -> Tensor:
    """Returns [in], the factors of the columns of linear maps with the same inputs, and the divisors of the inputs.

    It is a power of the inputs' root mean square, of which `round_clipped` leaves the smallest error of the outputs.

    Args:
        weights: of each linear map [out, in] float32.
        shared: a shape (a, b, c) of the inputs, in which inputs that differ in b only must have the same scale.
    """
    squares = hessian.diagonal()
    if shared is not None:
        squares = squares.view(shared).mean(1, keepdim=True).expand(shared).reshape(-1)
    best = torch.ones_like(squares)
    least = torch.inf
    for exponent in _EXPONENTS:
        scales = squares.sqrt().clamp(min=_SMALLEST) ** exponent
        scales = scales / (scales.max() * scales.min()).sqrt()
        error = sum(_error(weight, scales, hessian, grid) for weight in weights)
        if error < least:
            best, least = scales, error
    return best


def _error(weight: Tensor, scales: Tensor, hessian: Tensor, grid: Grid) -> float:
    """The mean square of the error of the outputs, summed over them."""
    seen = hessian / torch.outer(scales, scales)  # E[x x^T] of the inputs once they are divided
    wrong = round_clipped(weight * scales, seen, grid).weight() / scales - weight
    return float(((wrong @ hessian) * wrong).sum())


def round_clipped(weight: Tensor, hessian: Tensor, grid: Grid) -> Rounded:
    """Clips each group's range where that leaves its share of the outputs with the smallest error; a `grid.Method`."""
    blocks = group_blocks(hessian, grid.group_size_of(weight.shape[1])) if grid.bits < 8 else None
    return grid.nearest(weight, grid.fitted(weight, blocks, WIDE_SHARES))
