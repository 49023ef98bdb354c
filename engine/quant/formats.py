"""The formats of weights that kernels take: the tensors of a linear map, and their meaning."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import torch
from torch import Tensor

NamedTensors = Mapping[str, Tensor]
"""The tensors of one linear map by the last part of their names: "weight", "scale", ..."""


ELEMENTS_AT_A_TIME = 1 << 18
"""Of a weight that is unpacked, repacked or rounded, which takes temporaries several times as large."""


def by_rows(make: Callable[[slice], NamedTensors], num_rows: int, row_size: int) -> dict[str, Tensor]:
    """Tensors [num_rows, ...] that are made some rows at a time."""
    made: dict[str, Tensor] = {}
    step = max(1, ELEMENTS_AT_A_TIME // row_size)
    for rows in (slice(start, start + step) for start in range(0, num_rows, step)):
        for name, some in make(rows).items():
            if name not in made:
                made[name] = some.new_empty(num_rows, *some.shape[1:])
            made[name][rows] = some
    return made


class Format(Protocol):
    """The weight of a linear map as named tensors. Two formats are equal if the same kernel reads both."""

    @property
    def name(self) -> str:
        """The name that an operator knows: "int4", say."""

    def shapes(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        """The names and shapes of the tensors."""

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        """Returns a copy of the linear map whose output features are all the parts', one after another."""

    def unpack(self, tensors: NamedTensors) -> Tensor:
        """The weight [out, in] in a floating-point type."""

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        """Returns the bytes of a packed weight; `dtype` is the type of weights in floating point."""


class Rounding(Format, Protocol):
    """A format that weights in floating point can be rounded to."""

    def quantize(self, weight: Tensor) -> NamedTensors:
        """The tensors of a float weight [out, in]; all machines get the same ones."""


class Dense:
    """The weight itself, [out, in], in a floating-point type."""

    name = "dense"

    def shapes(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "weight", (out_features, in_features)

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        return {"weight": torch.cat([part["weight"] for part in parts])}

    def unpack(self, tensors: NamedTensors) -> Tensor:
        return tensors["weight"]

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:
        return out_features * in_features * dtype.itemsize


DENSE = Dense()
