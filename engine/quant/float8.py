"""Weights as floats of 8 bits (e4m3): their rounding from float weights, and their meaning."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from enum import Enum

import torch
from torch import Tensor

from penstock.engine.quant.formats import NamedTensors

FLOAT8 = torch.float8_e4m3fn
LARGEST = 448.0
"""The largest finite number of e4m3, which has no infinity (Micikevicius et al., FP8 Formats, 2022)."""
BLOCK = 128
"""Rows, and inputs, of a block that has a scale of its own."""

_SMALLEST = 1e-30
"""Stands in for a largest magnitude of 0, so that nothing is divided by 0."""


class Scaling(Enum):
    """Which weights share a scale."""

    TENSOR = "tensor"
    ROW = "row"
    BLOCK = "block"
    """BLOCK rows x BLOCK inputs; the last ones may be smaller."""


@dataclass(frozen=True, slots=True)
class Float8:
    """A weight of numbers in e4m3. It stands for number * scale; its tensors are:

    weight: [out, in] float8_e4m3fn
    scale: float32, [1, 1], [out, 1] or [ceil(out / BLOCK), ceil(in / BLOCK)], as the scaling says. Once parts were
        joined it is [out, 1] or [out, ceil(in / BLOCK)].
    """

    scaling: Scaling = Scaling.ROW

    @property
    def name(self) -> str:
        return "fp8"

    def shapes(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        yield "weight", (out_features, in_features)
        match self.scaling:
            case Scaling.TENSOR:
                yield "scale", (1, 1)
            case Scaling.ROW:
                yield "scale", (out_features, 1)
            case Scaling.BLOCK:
                yield "scale", (-(-out_features // BLOCK), -(-in_features // BLOCK))

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        """Returns a copy, with scales for every row: one part's scales are not the next one's."""
        return {
            "weight": torch.cat([part["weight"].view(torch.uint8) for part in parts]).view(FLOAT8),
            "scale": torch.cat([self.row_scales(part) for part in parts]),
        }

    def row_scales(self, tensors: NamedTensors) -> Tensor:
        """The scales of every row: [out, 1], or [out, ceil(in / BLOCK)]."""
        scale, num_rows = tensors["scale"], tensors["weight"].shape[0]
        if scale.shape[0] == num_rows:
            return scale
        rows = torch.arange(num_rows, device=scale.device)
        return scale[rows // BLOCK if self.scaling is Scaling.BLOCK else rows * 0]

    def unpack(self, tensors: NamedTensors) -> Tensor:
        """The weight [out, in] that the numbers stand for, in float32."""
        weight = tensors["weight"].float()
        scale = self.row_scales(tensors)
        if scale.shape[1] > 1:
            scale = scale.repeat_interleave(BLOCK, 1)[:, : weight.shape[1]]
        return weight * scale

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype | None = None) -> int:  # noqa: ARG002
        """The bytes of a packed weight: a byte for each number, and a float32 for each scale of a row."""
        scales = -(-in_features // BLOCK) if self.scaling is Scaling.BLOCK else 1
        return out_features * (in_features + 4 * scales)

    def quantize(self, weight: Tensor) -> NamedTensors:
        """The tensors of a float weight [out, in]; each scale lets the largest of its weights become LARGEST."""
        out_features, in_features = weight.shape
        (_, shape) = dict(self.shapes(out_features, in_features)).popitem()
        tall, wide = (-(-size // num) for size, num in zip(weight.shape, shape, strict=True))
        if self.scaling is Scaling.BLOCK:
            tall = wide = BLOCK
        padding = (0, shape[1] * wide - in_features, 0, shape[0] * tall - out_features)
        blocks = torch.nn.functional.pad(weight.detach().float(), padding).view(
            shape[0], tall, shape[1], wide
        )
        largest = blocks.abs().amax((1, 3), keepdim=True).clamp_(min=_SMALLEST)
        # By a plain number, CUDA's torch would multiply by its inverse.
        scale = largest / torch.full_like(largest, LARGEST)
        numbers = (blocks / scale).clamp_(-LARGEST, LARGEST).flatten(2).flatten(0, 1)
        return {
            "weight": numbers[:out_features, :in_features].to(FLOAT8),
            "scale": scale.view(shape),
        }
