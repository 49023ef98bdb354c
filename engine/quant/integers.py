"""Weights as small integers: how a float weight is rounded to them, and what they stand for."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from engine.errors import CheckpointError
from engine.quant.formats import NamedTensors

_Floats = npt.NDArray[np.float32]

_DEFAULT_SIZES = (64, 32)
"""The group sizes for 4 bits where nobody asks; the first that divides the inputs is taken."""

_LAYERS_OF_8_BITS = 1
"""So many layers at the start have 8 bits where 4 are asked for: all later layers read what they write."""

_SHRINKS = (1.0, 0.95, 0.9, 0.85, 0.8)
"""The shares of a group's range that the 4-bit integers may span; what lies outside is clipped."""

_SMALLEST = np.float32(1e-30)
"""Stands in for a range of 0, so that nothing is divided by 0."""

_ELEMENTS_AT_A_TIME = 1 << 16
"""Rounding works on so many weights at a time, because its temporaries then stay in the cache."""


@dataclass(frozen=True, slots=True)
class Integers:
    """A weight of integers with `bits` bits; each group of `group_size` inputs of a row has a scale of its own.

    The weight stands for (integer - zero) * scale. Its tensors are:
        weight: [out, in], one integer per byte. 8 bits: int8 from -127 to 127. 4 bits: uint8 from 0 to 15.
        scale: [out, in / group_size] float32
        zero: [out, in / group_size] uint8 from 0 to 15. Only a weight of 4 bits has it; with 8 bits, zero is 0.
    """

    bits: int
    group_size: int

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @property
    def has_zeros(self) -> bool:
        return self.bits == 4

    def shapes(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...]]]:
        num_groups = in_features // self.group_size
        yield "weight", (out_features, in_features)
        yield "scale", (out_features, num_groups)
        if self.has_zeros:
            yield "zero", (out_features, num_groups)

    def join(self, parts: Sequence[NamedTensors]) -> NamedTensors:
        return {name: torch.cat([part[name] for part in parts]) for name in parts[0]}

    def unpack(self, tensors: NamedTensors) -> Tensor:
        """The weight [out, in] that the integers stand for, in float32."""
        grouped = self.centred(tensors) * tensors["scale"].unsqueeze(-1)
        return grouped.flatten(1)

    def centred(self, tensors: NamedTensors) -> Tensor:
        """integer - zero, [out, groups, group_size] in float32."""
        grouped = torch.unflatten(tensors["weight"], 1, (-1, self.group_size)).float()
        return grouped - tensors["zero"].unsqueeze(-1) if self.has_zeros else grouped

    def num_bytes(self, out_features: int, in_features: int, dtype: torch.dtype = torch.float32) -> int:  # noqa: ARG002
        """The bytes of a packed weight: the integers, a float32 for each group, and a byte for each zero."""
        num_groups = out_features * (in_features // self.group_size)
        return out_features * in_features * self.bits // 8 + num_groups * (5 if self.has_zeros else 4)

    def quantize(self, weight: Tensor) -> NamedTensors:
        """The tensors of a float weight [out, in], whose inputs the group size divides.

        Every operation on the way rounds as IEEE 754 says, one by one and in a fixed order, so that all machines get
        the same integers. The threads run numpy: they have no use for torch's own, which wait for each other.
        """
        round_groups = _round_4_bits if self.bits == 4 else _round_8_bits
        groups = weight.detach().float().numpy().reshape(weight.shape[0], -1, self.group_size)
        rows_at_a_time = max(1, _ELEMENTS_AT_A_TIME // weight.shape[1])
        starts = range(0, len(groups), rows_at_a_time)
        with ThreadPoolExecutor(os.cpu_count()) as pool:
            chunks = list(
                pool.map(lambda start: round_groups(groups[start : start + rows_at_a_time]), starts)
            )
        return {
            name: torch.from_numpy(np.concatenate([chunk[name] for chunk in chunks])) for name in chunks[0]
        }


@dataclass(frozen=True, slots=True)
class Quantization:
    """How the linear maps of a model are quantized when it is loaded.

    The output head and the first layer have 8 bits in any case: rounding them shows most in the logits.
    """

    bits: int
    group_size: int | None = None
    """None stands for a default: a whole row for 8 bits, and a size that divides the row for 4 bits."""

    @property
    def name(self) -> str:
        return f"int{self.bits}"

    @classmethod
    def of(cls, name: str, group_size: int | None = None) -> Quantization:
        """The quantization of an option: "int8" or "int4"."""
        return cls({"int8": 8, "int4": 4}[name], group_size)

    def layer_format(self, layer: int, in_features: int) -> Integers:
        """The format of a linear map of a layer.

        Raises:
            CheckpointError: no group size that is allowed divides the inputs.
        """
        if self.bits == 4 and layer < _LAYERS_OF_8_BITS:
            return self.head_format(in_features)
        default = (in_features,) if self.bits == 8 else _DEFAULT_SIZES
        allowed = default if self.group_size is None else (self.group_size,)
        group_size = next((size for size in allowed if in_features % size == 0), None)
        if group_size is None:
            tried = " or ".join(str(size) for size in sorted(allowed))
            raise CheckpointError(
                f"--quantize int{self.bits}: groups of {tried} do not divide a linear map's {in_features} inputs"
            )
        return Integers(self.bits, group_size)

    def head_format(self, in_features: int) -> Integers:
        """The format of the output head."""
        return Integers(8, in_features)


def _round_8_bits(groups: _Floats) -> dict[str, np.ndarray]:
    """Rounds [rows, groups, group_size] to the nearest multiples of a 127th of each group's largest magnitude."""
    scale = np.maximum(np.abs(groups).max(-1, keepdims=True) / np.float32(127), _SMALLEST)
    integers = np.clip(np.rint(groups / scale), -127, 127)
    return {"weight": integers.astype(np.int8).reshape(len(groups), -1), "scale": scale[..., 0]}


def _round_4_bits(groups: _Floats) -> dict[str, np.ndarray]:
    """Rounds [rows, groups, group_size] to 16 steps that span each group's range, or a share of it, and 0.

    Of several shares, a group takes the one with the smallest squared error. For given steps d = integer - zero, the
    best scale is <w, d> / <d, d>, and it leaves the error <w, w> - <w, d>^2 / <d, d>.
    """
    rows = len(groups)
    columns = np.ascontiguousarray(
        groups.reshape(-1, groups.shape[-1]).T
    )  # a column is a group: long inner loops
    low = np.minimum(columns.min(0), 0)
    span = np.maximum(np.maximum(columns.max(0), 0) - low, _SMALLEST)
    zero = np.rint(low * np.float32(-15) / span)
    most, factor, scale = np.full_like(span, -1), np.zeros_like(span), np.zeros_like(span)
    for shrink in _SHRINKS:
        tried = np.float32(15 / shrink) / span
        steps = _steps(columns, tried, zero)
        product = _sum_of_rows(columns * steps)
        fitted = product / np.maximum(_sum_of_rows(steps * steps), 1)
        is_better = product * fitted > most
        most = np.where(is_better, product * fitted, most)
        factor = np.where(is_better, tried, factor)
        scale = np.where(is_better, fitted, scale)
    integers = (_steps(columns, factor, zero) + zero).astype(np.uint8)
    return {
        "weight": np.ascontiguousarray(integers.T).reshape(rows, -1),
        "scale": scale.reshape(rows, -1),
        "zero": zero.astype(np.uint8).reshape(rows, -1),
    }


def _steps(columns: _Floats, factor: _Floats, zero: _Floats) -> _Floats:
    steps = columns * factor
    np.rint(steps, out=steps)
    np.maximum(steps, -zero, out=steps)
    np.minimum(steps, 15 - zero, out=steps)
    return steps


def _sum_of_rows(x: _Floats) -> _Floats:
    """The sum of rows, a power of 2 of them, halves added to halves: sum() has an order of its own choice."""
    while len(x) > 1:
        x = x[: len(x) // 2] + x[len(x) // 2 :]
    total: _Floats = x[0]
    return total
