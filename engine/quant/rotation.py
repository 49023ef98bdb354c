"""Rotations of the inputs of linear maps, which spread outliers of a few channels over many.

A block x of n inputs becomes H D x. H is a Hadamard matrix, whose entries are 1 and -1, and H H = n; D changes signs.
The weight of a map that reads H D x has H D w / n for each of its rows w, and the products stay the same. (Ashkboos et
al., QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs, 2024.)

The signs are a bent function's: H spreads even inputs that are all alike over all outputs. (Rothaus, On "Bent"
Functions, 1976.)
"""

from __future__ import annotations

import torch
from torch import Tensor

_LARGEST = 128
"""Inputs of a block: larger ones gain nothing, and take longer."""


def block_size(in_features: int) -> int:
    """The inputs of a block that rotates rows of so many: the largest power of 2 that divides them, at most 128."""
    return min(_LARGEST, in_features & -in_features)


def rotated(x: Tensor, block: int) -> Tensor:
    """H D x for each block of the rows of x [..., in]."""
    return _transformed(x * _signs(x, block), block)


def rotated_back(x: Tensor, block: int) -> Tensor:
    """Returns D H x for each block of the rows of x [..., in]: the inverse of the rotation, times the block size."""
    return _transformed(x, block) * _signs(x, block)


def _transformed(x: Tensor, block: int) -> Tensor:
    """Returns H x. Sums and differences of halves come first, then of quarters, ...: the order of all kernels."""
    half = block // 2
    while half:
        pairs = torch.unflatten(x, -1, (-1, 2, half))
        a, b = pairs[..., 0, :], pairs[..., 1, :]
        x = torch.stack((a + b, a - b), -2).flatten(-3)
        half //= 2
    return x


def _signs(x: Tensor, block: int) -> Tensor:
    """[in] in the type of x; input i of a block has the parity of its bits 0 and 1, 2 and 3, 4 and 5, multiplied."""
    i = torch.arange(x.shape[-1], device=x.device) % block
    both = i & i >> 1
    return 1 - 2 * ((both ^ both >> 2 ^ both >> 4) & 1).to(x.dtype)
