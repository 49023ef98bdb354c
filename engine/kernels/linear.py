"""Linear maps as devices run them. Each owns its format: how it is packed, how it multiplies, how many bytes it has."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.quant.formats import Format, NamedTensors
from penstock.engine.quant.integers import Inputs, Integers
from penstock.engine.quant.rotation import rotated

_REST_STEPS = 254
"""The steps of the rest that a group's integers lack, in one step of their scale: half of them lie on either side."""

_EXACT_INPUTS = 1024
"""So many products of 8-bit integers have a sum below 2^24, so that float32 adds them in any order without rounding."""


Linear = Callable[[Tensor], Tensor]
"""A packed linear map: [..., in] -> [..., out]."""


class LinearPacker(Protocol):
    """Packs a weight, given as the named tensors of a format, and a bias [out] or None; it may keep these tensors.

    With `gated`, the rows are gates, then ups. A packer whose kernels compute silu(gate) * up in one may pack them as
    one map; the others give both, one after the other, for `glu`.
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

    This is the specification of the product, which every kernel gives bit for bit. x is rounded as `round_inputs` says.
    Group after group, two exact sums of integers, each rounded to float32 once and multiplied by the scale that x has
    there, join an output by fused multiply-adds: the sum of x * weight times the scale of the group, then the sum of x
    times its offset. A scale that a whole row of x has multiplies the output at the end instead.
    """

    def __init__(self, tensors: NamedTensors, format: Integers, bias: Tensor | None) -> None:
        self._tensors = tensors
        self._format = format
        self._bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        if self._format.rotation:
            x = rotated(x.float(), self._format.rotation)
        if self._format.is_permuted:
            x = x[..., self._tensors["permutation"].long()]
        first, *rest = (self._product(part, scale) for part, scale in round_inputs(x, self._format))
        product = sum(rest, first)
        return product if self._bias is None else product + self._bias

    def _product(self, integers: Tensor, input_scale: Tensor) -> Tensor:
        """The outputs for integers [..., in] that have a scale [..., groups], or for each row [..., 1]."""
        format, tensors = self._format, self._tensors
        weight, scale, offset = format.grouped(tensors), format.scale(tensors), format.offset(tensors)
        is_row = format.inputs is Inputs.ROW
        product = input_scale.new_zeros((*integers.shape[:-1], scale.shape[0]))
        for index, group in enumerate(torch.split(integers, format.group_size, dim=-1)):
            by = input_scale.new_ones(()) if is_row else input_scale[..., index, None]
            found = _exact_product(group, weight[:, index]) * by
            product = fused_multiply_add(found, scale[:, index], product)
            if offset is not None:
                total = group.double().sum(-1, keepdim=True).float() * by
                product = fused_multiply_add(total, offset[:, index], product)
        return product * input_scale if is_row else product


def round_inputs(x: Tensor, format: Integers) -> list[tuple[Tensor, Tensor]]:
    """The integers of 8 bits [..., in] that x becomes, as float32, with their scales; of a fine format two of them.

    Returns:
        Pairs of integers and scales [..., groups], or [..., 1] where rows have one; the sum of their products is x,
        nearly.
    """
    if format.inputs is Inputs.ROW:
        return [quantize_rows(x)]
    groups = torch.unflatten(x, -1, (-1, format.group_size))
    integers, scale = quantize_rows(groups)
    parts = [(integers.flatten(-2), scale.squeeze(-1))]
    if format.inputs is Inputs.FINE:
        steps = scale.new_full((), _REST_STEPS)
        rest = ((groups * _factor(groups) - integers) * steps).round_().nan_to_num_(nan=0.0)
        rest.masked_fill_(~(_factor(groups) < torch.inf), 0.0)
        parts.append((rest.flatten(-2), (scale / steps).squeeze(-1)))
    return parts


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Rounds each row of x [..., in] to integers from -127 to 127, half to even.

    A row whose largest magnitude is so small (or 0, or NaN) that 127 / it is not finite becomes zeros.

    Returns:
        The integers as float32, and the scale [..., 1] of each row, which is its largest magnitude / 127.
    """
    factor = _factor(x)
    integers = (x * factor).round_().clamp_(-127, 127).nan_to_num_(nan=0.0)
    return integers.masked_fill_(~(factor < torch.inf), 0.0), _largest(x) / _most(x)


def _factor(x: Tensor) -> Tensor:
    return _most(x) / _largest(x)


def _largest(x: Tensor) -> Tensor:
    return x.abs().amax(-1, keepdim=True)


def _most(x: Tensor) -> Tensor:
    """127 as a tensor: torch multiplies by the inverse of a plain number, which is rounded, too."""
    return x.new_full((), 127.0)


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
