"""Weights as places in a table of numbers: NF4, and floats of 4 bits."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.quant.formats import NamedTensors, by_rows

NF4 = (
    -1.0,
    -0.6961928009986877,
    -0.5250730514526367,
    -0.39491748809814453,
    -0.28444138169288635,
    -0.18477343022823334,
    -0.09105003625154495,
    0.0,
    0.07958029955625534,
    0.16093020141124725,
    0.24611230194568634,
    0.33791524171829224,
    0.44070982933044434,
    0.5626170039176941,
    0.7229568362236023,
    1.0,
)
"""The quantiles of a normal distribution, as float32 (Dettmers et al., QLoRA: Efficient Finetuning of Quantized LLMs,
2023)."""

UNIT = 8
"""The kernels take groups of a multiple of so many inputs, or a whole row."""

_SMALLEST = 1e-30
"""Stands in for a largest magnitude of 0, so that nothing is divided by 0."""


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

        def look_up(rows: slice) -> NamedTensors:
            numbers = torch.unflatten(table[places[rows].int()], 1, (-1, self.group_size))
            return {"weight": (numbers * scale[rows].unsqueeze(-1)).flatten(1)}

        return by_rows(look_up, *places.shape)["weight"]

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype) -> int:  # noqa: ARG002
        """The bytes of a packed weight: half a byte for each place, and a float32 for each scale."""
        return out_features * (-(-in_features // 2) + 4 * (in_features // self.group_size))

    def quantize(self, weight: Tensor) -> NamedTensors:
        """The tensors of a float weight [out, in], whose inputs the group size divides.

        The largest magnitude of a group becomes the largest number of the table, and every weight the nearest.
        """
        numbers, order = torch.tensor(self.table).sort()
        middles = (numbers[1:] + numbers[:-1]) / 2
        groups = torch.unflatten(weight.detach().float(), 1, (-1, self.group_size))
        scale = groups.abs().amax(-1).clamp_(min=_SMALLEST) / numbers.abs().max()
        places = order.to(torch.uint8)[torch.bucketize(groups / scale.unsqueeze(-1), middles)]
        return {"weight": places.flatten(1), "scale": scale}
