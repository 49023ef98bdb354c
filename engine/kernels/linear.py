"""Linear maps as devices run them. Each owns its format: how it is packed, how it multiplies, how many bytes it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.quant.formats import Format, NamedTensors
from engine.quant.integers import Integers

_EXACT_INPUTS = 1024
"""So many products of 8-bit integers have a sum below 2^24, so that float32 adds them in any order without rounding."""


Linear = Callable[[Tensor], Tensor]
"""A packed linear map: [..., in] -> [..., out]."""


class LinearPacker(Protocol):
    """Packs a weight, given as the named tensors of a format, and a bias [out] or None; it may keep these tensors.

    With `gated`, the rows are those of gates, then those of ups. A packer whose kernels compute silu(gate) * up in one
    may pack them as one map; the others give both, one after the other, for `glu`.
    """

    def __call__(
        self, tensors: NamedTensors, format: Format, bias: Tensor | None, *, gated: bool = False
    ) -> Linear: ...


class DenseLinear:
    """x [..., in] -> x @ weight.T + bias [..., out], by torch.

    Attributes:
        weight: [out, in]
        bias: [out] or None
    """

    def __init__(self, weight: Tensor, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)


def chained(linear: Linear, then: Callable[[Tensor], Tensor]) -> Linear:
    """A linear map whose outputs go through a function of whole rows, such as a cap, or a sum over ranks."""
    return lambda x: then(linear(x))


class IntegerLinear:
    """x [..., in] -> x @ weight.T + bias [..., out] for a weight of integers, by torch.

    This is the specification of the product, which every kernel gives bit for bit. x is quantized row by row (see
    `quantize_rows`). Group after group, two exact sums of integers, each rounded to float32 once, join an output by
    fused multiply-adds: those of x * weight times the scale of the group, then those of x times its offset. At the end,
    the output is multiplied by the scale of the row.
    """

    def __init__(self, tensors: NamedTensors, format: Integers, bias: Tensor | None) -> None:
        self._tensors = tensors
        self._format = format
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        integers, row_scale = quantize_rows(x)
        if self._format.is_permuted:
            integers = integers[..., self._tensors["permutation"].long()]
        format, tensors = self._format, self._tensors
        weight, scale, offset = format.grouped(tensors), format.scale(tensors), format.offset(tensors)
        product = x.new_zeros((*x.shape[:-1], scale.shape[0]))
        for index, group in enumerate(torch.split(integers, self._format.group_size, dim=-1)):
            product = fused_multiply_add(_exact_product(group, weight[:, index]), scale[:, index], product)
            if offset is not None:
                total = group.double().sum(-1, keepdim=True).float()
                product = fused_multiply_add(total, offset[:, index], product)
        product = product * row_scale
        return product if self._bias is None else product + self._bias


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each row of x [..., in] to integers from -127 to 127, half to even.

    A row whose largest magnitude is so small (or 0, or NaN) that 127 / it is not finite becomes zeros.

    Returns:
        The integers as float32, and the scale [..., 1] of each row, which is its largest magnitude / 127.
    """
    largest = x.abs().amax(-1, keepdim=True)
    most = torch.full_like(
        largest, 127
    )  # torch multiplies by the inverse of a plain number, which is rounded, too
    factor = most / largest
    integers = (x * factor).round_().clamp_(-127, 127).nan_to_num_(nan=0.0)
    return integers.masked_fill_(~(factor < torch.inf), 0.0), largest / most


def fused_multiply_add(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """a * b + c of float32 tensors, rounded once.

    a * b is exact in float64. The sum is rounded to odd there: where it is not exact, to the neighbour whose last bit
    is 1, which no later rounding to float32 mistakes for a tie. (Boldo and Melquiond, Emulation of a FMA and correctly
    rounded sums: proved algorithms using rounding to odd, 2008; the error of a sum is Knuth's TwoSum.)
    """
    product, term = a.double() * b.double(), c.double()
    total = product + term
    added = total - product
    error = (product - (total - added)) + (term - added)
    bits = total.view(torch.int64)
    outwards = (error > 0) == (total > 0)
    to_odd = torch.where(outwards, 1, -1) * ((error.abs() > 0) & (bits & 1 == 0))
    odd: Tensor = (bits + to_odd).view(torch.float64)
    return odd.float()


def _exact_product(x: Tensor, weight: Tensor) -> Tensor:
    """x @ weight.T of integers: the exact sums, rounded to float32 once."""
    if x.shape[-1] <= _EXACT_INPUTS:
        return x @ weight.T
    parts = zip(
        torch.split(x, _EXACT_INPUTS, dim=-1), torch.split(weight, _EXACT_INPUTS, dim=-1), strict=True
    )
    return torch.stack([(part @ rows.T).double() for part, rows in parts]).sum(0).float()
