"""GPTQ: rounds the inputs of a linear map one after another, and compensates each one's error in the later ones.

Frantar, Ashkboos, Hoefler, Alistarh: "GPTQ: Accurate Post-Training Quantization for Generative Pre-trained
Transformers", 2022, https://arxiv.org/abs/2210.17323, algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.quant.grid import WIDE_SHARES, Grid, Levels, Rounded

_BLOCK = 128
"""So many inputs are rounded before the later ones are updated, in one product."""

_MOST_DAMPING = 1e3


@dataclass(frozen=True, slots=True)
class Gptq:
    """A method of rounding; see `grid.Method`.

    The levels of all groups are chosen first, with errors weighed by the mean square of the inputs. So groups consist
    of neighbours in any order of rounding, and the checkpoint needs no list of them.
    """

    by_activation: bool = False
    """The inputs with the largest mean square are rounded first ("act-order")."""
    damping: float = 0.01
    """This share of the mean of the Hessian's diagonal is added to it, so that it has an inverse."""

    def __call__(self, weight: Tensor, hessian: Tensor, grid: Grid) -> Rounded:
        group_size = grid.group_size_of(weight.shape[1])
        squares = hessian.diagonal()
        inner_product = torch.diag_embed(squares.view(-1, group_size)) if grid.bits < 8 else None
        levels = grid.fitted(weight, inner_product, WIDE_SHARES)
        order = torch.arange(len(squares), device=weight.device)
        if self.by_activation:
            order = squares.argsort(descending=True, stable=True)
        inverse = inverse_factor(hessian[order][:, order], self.damping)
        integers = _round_in_order(weight[:, order], inverse, levels, (order // group_size).tolist(), grid)
        return Rounded(integers[:, order.argsort()], levels)


def _round_in_order(
    weight: Tensor, inverse: Tensor, levels: Levels, group_of: list[int], grid: Grid
) -> Tensor:
    """
    Args:
        weight: [out, in], is overwritten.
        inverse: [in, in], see `inverse_factor`.
        group_of: the group of each input.

    Returns:
        [out, in] int8
    """
    integers = torch.empty_like(weight, dtype=torch.int8)
    scales, zeros = levels.scale.float(), levels.zero
    num_inputs = weight.shape[1]
    for first in range(0, num_inputs, _BLOCK):
        last = min(first + _BLOCK, num_inputs)
        errors = torch.empty_like(weight[:, first:last])
        for i in range(first, last):
            scale, zero = scales[:, group_of[i]], zeros[:, group_of[i]]
            nearest = (torch.round(weight[:, i] / scale) + zero).clamp_(grid.lowest, grid.highest)
            integers[:, i] = nearest
            error = (weight[:, i] - (nearest - zero) * scale) / inverse[i, i]
            weight[:, i:last] -= torch.outer(error, inverse[i, i:last])
            errors[:, i - first] = error
        weight[:, last:] -= errors @ inverse[first:last, last:]
    return integers


def inverse_factor(hessian: Tensor, damping: float) -> Tensor:
    """The upper triangular U with U^T U = H^-1, for the damped Hessian H.

    Rounding errors can leave a Hessian without a Cholesky factor; then more damping is tried.
    """
    mean = hessian.diagonal().mean()
    mean = torch.where(mean > 0, mean, 1.0)
    while True:
        damped = hessian + damping * mean * torch.eye(len(hessian), device=hessian.device)
        lower, fault = torch.linalg.cholesky_ex(damped)
        if not fault:
            upper: Tensor
            upper, fault = torch.linalg.cholesky_ex(torch.cholesky_inverse(lower), upper=True)
            if not fault:
                return upper
        assert damping < _MOST_DAMPING, (
            "a Hessian must be finite and symmetric, and its diagonal not negative"
        )
        damping *= 10
