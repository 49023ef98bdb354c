"""Linear maps as devices run them. Each owns its format: how it is packed, how it multiplies, how many bytes it has."""

from __future__ import annotations

from typing import Protocol

import torch.nn.functional as F
from torch import Tensor

from engine.quant.formats import Format, NamedTensors


class Linear(Protocol):
    """A packed linear map: [..., in] -> [..., out]."""

    @property
    def num_bytes(self) -> int:
        """The memory that the weight takes."""

    def __call__(self, x: Tensor, /) -> Tensor: ...


class LinearPacker(Protocol):
    """Packs a weight, given as the named tensors of a format, and a bias [out] or None; it may keep these tensors.

    With `gated`, the rows are those of gates, then those of ups. A packer whose kernels compute silu(gate) * up in one
    may pack them as one map; the others give both, one after the other, for `silu_mul`.
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

    @property
    def num_bytes(self) -> int:
        return self.weight.nbytes

    def __call__(self, x: Tensor) -> Tensor:
        return F.linear(x, self.weight, self.bias)
