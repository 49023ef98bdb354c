"""The formats in which a checkpoint stores a linear map: which tensors it has, and what they stand for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

NamedTensors = Mapping[str, Tensor]
"""The tensors of one linear map by the last part of their names: "weight", "bias", ..."""


class Format(Protocol):
    """One way to store the weight of a linear map in named tensors."""

    def shapes(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of the tensors that the weight is stored in."""

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        """A copy of the linear map whose output features are those of all the parts, one after another."""

    def unpack(self, tensors: NamedTensors) -> Tensor:
        """The weight [out, in] in a floating-point type."""


class Dense:
    """The weight itself, [out, in], in a floating-point type."""

    def shapes(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "weight", (out_features, in_features)

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        return {"weight": torch.cat([part["weight"] for part in parts])}

    def unpack(self, tensors: NamedTensors) -> Tensor:
        return tensors["weight"]


DENSE = Dense()
