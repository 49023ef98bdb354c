"""Weights as places in a table of numbers: NF4, and floats of 4 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.quant.formats import NamedTensors

_ELEMENTS_AT_A_TIME = 1 << 20
"""Tables are looked up for so many weights at a time, because the places need four times the memory for that."""


@dataclass(frozen=True, slots=True)
class Codebook:
    """A weight of places in a table; each group of `group_size` inputs of a row has a scale of its own.

    The weight stands for table[place] * scale. Its tensors are:
        weight: [out, in] uint8 from 0 to 15
        scale: [out, in / group_size] float32
    """

    name: str
    table: tuple[float, ...]
    """16 numbers, each of which is a float32."""
    group_size: int

    def shapes(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "weight", (out_features, in_features)
        yield "scale", (out_features, in_features // self.group_size)

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def unpack(self, tensors: NamedTensors) -> Tensor:
        """The weight [out, in] that the places stand for, in float32."""
        places, scale = tensors["weight"], tensors["scale"]
        table = torch.tensor(self.table, device=places.device)
        weight = torch.empty(places.shape, device=places.device)
        rows = max(1, _ELEMENTS_AT_A_TIME // places.shape[1])
        for start in range(0, len(weight), rows):
            some = slice(start, start + rows)
            numbers = torch.unflatten(table[places[some].int()], 1, (-1, self.group_size))
            weight[some] = (numbers * scale[some].unsqueeze(-1)).flatten(1)
        return weight

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        """The bytes of the tensors."""
        return out_features * (in_features + 4 * (in_features // self.group_size))
