"""The grid of numbers that a quantized weight may have, and how a weight is rounded to it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SHARES = (1.0, 0.95, 0.9, 0.85, 0.8)
"""The shares of a group's range that its integers may span where all inputs are weighed alike."""

WIDE_SHARES = tuple(1 - i / 20 for i in range(9))
"""From 1 to 0.6: where inputs are weighed by their activations, it can pay to clip more."""

_WEIGHTS_AT_A_TIME = 1 << 22
"""Ranges are searched for so many weights at a time, which bounds the temporaries."""


@dataclass(frozen=True, slots=True)
class Levels:
    """The numbers that the integers of each group stand for: (integer - zero) * scale."""

    scale: Tensor
    """[out, groups] in the type of scales."""
    zero: Tensor
    """[out, groups] whole numbers as float32; all are 0 on a symmetric grid."""


@dataclass(frozen=True, slots=True)
class Rounded:
    """A weight on a grid."""

    integers: Tensor
    """[out, in] int8"""
    levels: Levels

    def weight(self) -> Tensor:
        """[out, in] float32: the numbers that the integers stand for."""
        scale, zero = self.levels.scale.float(), self.levels.zero
        groups = torch.unflatten(self.integers.float(), 1, (scale.shape[1], -1))
        return ((groups - zero.unsqueeze(-1)) * scale.unsqueeze(-1)).flatten(1)


@dataclass(frozen=True, slots=True)
class Grid:
    """Integers of `bits` bits with a scale for every `group_size` inputs of a row.

    Integers of 8 bits leave out -128, so that they reach as far below 0 as above.
    """

    bits: int
    group_size: int | None
    """None is a whole row."""
    symmetric: bool
    """The integer 0 stands for 0; else each group says which one does."""
    scale_dtype: torch.dtype

    @property
    def lowest(self) -> int:
        return -127 if self.bits == 8 else -(1 << (self.bits - 1))

    @property
    def highest(self) -> int:
        return (1 << (self.bits - 1)) - 1

    def group_size_of(self, in_features: int) -> int:
        return self.group_size or in_features

    def spanning(self, groups: Tensor, share: float = 1.0) -> Levels:
        """The levels [...] that span a share of the range of each group [..., n], which includes 0."""
        low, high = groups.amin(-1).clamp(max=0) * share, groups.amax(-1).clamp(min=0) * share
        if self.symmetric:
            scale = self._as_scale(torch.maximum(-low, high) * 2 / (self.highest - self.lowest))
            return Levels(scale, torch.zeros_like(low))
        scale = self._as_scale((high - low) / (self.highest - self.lowest))
        zero = torch.round(self.lowest - low / scale.float()).clamp_(self.lowest, self.highest)
        return Levels(scale, zero)

    def fitted(
        self, weight: Tensor, hessian: Tensor | None = None, shares: Sequence[float] = SHARES
    ) -> Levels:
        """Returns the levels with the smallest error, among ones that span several shares of each group's range.

        For steps d = integer - zero, the best scale is <w, d> / <d, d>, and a scale s leaves the error
        <w, w> - 2 s <w, d> + s^2 <d, d>. Integers of 8 bits span the whole range: clipping does not pay.

        Args:
            weight: [out, in] float32
            hessian: [groups, n, n], the inner product of errors: E[x x^T] of the n inputs x of each group makes them
                errors of the outputs. None weighs all inputs alike.
        """
        rows = max(1, _WEIGHTS_AT_A_TIME // weight.shape[1])
        shares = shares if self.bits < 8 else (1.0,)
        parts = [self._fitted(part, hessian, shares) for part in torch.split(weight, rows)]
        return Levels(torch.cat([part.scale for part in parts]), torch.cat([part.zero for part in parts]))

    def _fitted(self, weight: Tensor, hessian: Tensor | None, shares: Sequence[float]) -> Levels:
        groups = self._grouped(weight).transpose(0, 1).contiguous()  # [groups, out, n], as `hessian` has them
        best = self.spanning(groups)
        least = torch.full_like(best.zero, torch.inf)
        for share in shares:
            tried = self.spanning(groups, share)
            steps = self._integers(groups, tried) - tried.zero.unsqueeze(-1)
            turned = steps if hessian is None else steps @ hessian
            along, square = (groups * turned).sum(-1), (steps * turned).sum(-1)
            scale = self._as_scale(torch.where(square > 0, along / square, tried.scale.float()))
            error = scale.float() * (scale.float() * square - 2 * along)
            is_better = error < least
            least = torch.where(is_better, error, least)
            best = Levels(
                torch.where(is_better, scale, best.scale), torch.where(is_better, tried.zero, best.zero)
            )
        return Levels(best.scale.T.contiguous(), best.zero.T.contiguous())

    def nearest(self, weight: Tensor, levels: Levels | None = None) -> Rounded:
        """Rounds a weight [out, in] to the nearest of these levels, or of levels that span the range of each group."""
        groups = self._grouped(weight)
        levels = levels or self.spanning(groups)
        return Rounded(self._integers(groups, levels).flatten(1).to(torch.int8), levels)

    def _grouped(self, weight: Tensor) -> Tensor:
        return torch.unflatten(weight, 1, (-1, self.group_size_of(weight.shape[1])))

    def _integers(self, groups: Tensor, levels: Levels) -> Tensor:
        """The nearest integers, as float32; groups [..., n] and levels [...]."""
        integers = torch.round(groups / levels.scale.float().unsqueeze(-1)) + levels.zero.unsqueeze(-1)
        return integers.clamp_(self.lowest, self.highest)

    def _as_scale(self, scale: Tensor) -> Tensor:
        """Rounded to the type of scales, greater than 0 and finite."""
        kind = torch.finfo(self.scale_dtype)
        return scale.clamp(kind.smallest_normal * kind.eps, kind.max).to(self.scale_dtype)


Method = Callable[[Tensor, Tensor, Grid], Rounded]
"""Rounds a weight [out, in] float32, given the Hessian E[x x^T] [in, in] of the linear map's inputs x, to a grid."""


def round_to_nearest(weight: Tensor, hessian: Tensor, grid: Grid) -> Rounded:  # noqa: ARG001
    """Rounds every weight to the nearest level, without regard to its inputs."""
    return grid.nearest(weight, grid.fitted(weight))


def group_blocks(hessian: Tensor, group_size: int) -> Tensor:
    """The blocks [groups, n, n] on the diagonal of a Hessian [in, in]."""
    groups = hessian.shape[0] // group_size
    return hessian.view(groups, group_size, groups, group_size).diagonal(dim1=0, dim2=2).permute(2, 0, 1)
