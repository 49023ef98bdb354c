"""Quantized weights as a GPU keeps them: one layout, into which every format is brought when it is loaded."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from enum import Enum

import torch
import torch.nn.functional as F
from torch import Tensor

from penstock.engine.quant.float8 import BLOCK, Float8
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Inputs, Integers
from penstock.engine.quant.rotation import rotated
from penstock.engine.quant.storages.mxfp4 import DOUBLED

UNIT = 32
"""Inputs are padded to a multiple of so many."""
_HALF = UNIT // 2
_PLACES = [DOUBLED.index(integer) if integer in DOUBLED else 0 for integer in (*range(128), *range(-128, 0))]
"""Of integers of 8 bits, by their bits, in the table of floats of 4 bits."""
NARROW = (torch.float16, torch.bfloat16)
"""Types of scales and offsets."""
OUTPUTS_AT_A_TIME = 2048
"""So many rows of weights are unpacked at a time by torch, which makes several copies of them in float32."""


class Code(Enum):
    """The encoding of a weight's numbers."""

    INT4 = "int4"
    """Integers from -8 to 7. They are stored as UINT4, with 8 added."""
    UINT4 = "uint4"
    """Integers from 0 to 15. The 16 bytes of a unit have its first 16 numbers in their low halves, then the others."""
    INT8 = "int8"
    """Integers from -128 to 127."""
    FLOAT4 = "float4"
    """The bits of e2m1, which stand for twice that number: integers from -12 to 12, as in `mxfp4.DOUBLED`."""
    FLOAT8 = "float8"
    """The bits of e4m3. Kernels read them as integers, for older cards know no such type."""

    @property
    def bits(self) -> int:
        return 4 if self in (Code.INT4, Code.UINT4, Code.FLOAT4) else 8


@dataclass(frozen=True, slots=True, kw_only=True)
class PackedWeight:
    """A weight [out, in] that stands for (number - zero) * scale + offset.

    Scales, zeros and offsets of neighbouring rows lie side by side, as a kernel reads them. They have the narrowest
    type that holds them all without rounding.
    """

    code: Code
    codes: Tensor
    """[out, padded in * bits / 8] uint8, or int8 for Code.INT8; numbers that pad are 0"""
    scale: Tensor
    """[groups, out] float16, bfloat16 or float32"""
    zero: Tensor | None
    """[groups, out] int8; None stands for 0"""
    offset: Tensor | None
    """[groups, out] float16, bfloat16 or float32; None stands for 0, and it is None where there is a zero"""
    in_features: int
    group_size: int
    """Inputs that share a scale; the last group may have fewer."""
    permutation: Tensor | None
    """[in]: input i is multiplied with x[permutation[i]]; None if the inputs have the order of x."""
    rotation: int = 0
    """The weight is multiplied with x whose blocks of so many inputs are rotated; 0 stands for x as it is."""
    rounds_inputs: bool = False
    """Whether x is rounded to 8 bits row by row, as the format says; or else it stays in 16 bits."""

    @property
    def out_features(self) -> int:
        return self.codes.shape[0]

    @property
    def padded_features(self) -> int:
        """The number of inputs, padding included."""
        return self.codes.shape[1] * 8 // self.code.bits

    @property
    def is_per_row(self) -> bool:
        """Nothing but one scale belongs to a row, which can wait until its products are summed."""
        return self.group_size >= self.in_features and self.zero is None and self.offset is None

    @property
    def num_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self._tensors().values())

    def outputs(self, start: int, end: int) -> PackedWeight:
        """The rows from `start` up to `end`, which share the memory of this weight."""

        def some(of_groups: Tensor | None) -> Tensor | None:
            return None if of_groups is None else of_groups[:, start:end]

        return replace(
            self,
            codes=self.codes[start:end],
            scale=self.scale[:, start:end],
            zero=some(self.zero),
            offset=some(self.offset),
        )

    def unpack(self, dtype: torch.dtype) -> Tensor:
        """The weight [out, in] in the order of its own inputs, rotated if they are; float32 that is rounded once.

        Kernels must agree with it bit for bit.
        """
        groups = torch.arange(self.in_features, device=self.codes.device) // self.group_size

        def spread(of_groups: Tensor) -> Tensor:
            return of_groups.float()[groups].T

        weight = self._numbers()[:, : self.in_features]
        if self.zero is not None:
            weight = weight - spread(self.zero)
        weight = weight * spread(self.scale)
        if self.offset is not None:
            weight = weight + spread(self.offset)
        return weight.to(dtype)

    def _numbers(self) -> Tensor:
        match self.code:
            case Code.INT4 | Code.UINT4:
                return unpack_nibbles(self.codes).float() - 8 * (self.code is Code.INT4)
            case Code.FLOAT4:
                table = torch.tensor(DOUBLED, dtype=torch.float32, device=self.codes.device)
                return table[unpack_nibbles(self.codes).int()]
            case Code.INT8:
                return self.codes.float()
            case Code.FLOAT8:
                return self.codes.view(torch.float8_e4m3fn).float()

    def _tensors(self) -> dict[str, Tensor]:
        named = {field.name: getattr(self, field.name) for field in fields(self)}
        return {name: value for name, value in named.items() if isinstance(value, Tensor)}


class UnpackedLinear:
    """x [..., in] -> x @ weight.T + bias [..., out], by torch; whenever weights are needed, they are unpacked.

    Attributes:
        weight: packed, on its device.
        bias: [out] in the type of x, or None.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None) -> None:
        self.weight = weight
        self.bias = bias

    def __call__(self, x: Tensor) -> Tensor:
        weight = self.weight
        x = rotated(x.float(), weight.rotation).to(x.dtype) if weight.rotation else permuted(x, weight)
        out = x.new_empty((*x.shape[:-1], weight.out_features))
        for start in range(0, weight.out_features, OUTPUTS_AT_A_TIME):
            end = start + OUTPUTS_AT_A_TIME
            bias = None if self.bias is None else self.bias[start:end]
            out[..., start:end] = F.linear(x, weight.outputs(start, end).unpack(x.dtype), bias)
        return out


PACKED_FORMATS = (Integers, Float8)
"""The formats that have a layout of their own on a GPU."""


def pack(tensors: NamedTensors, format: Integers | Float8, device: torch.device) -> PackedWeight:
    """Packs the tensors of a format on a device."""
    tensors = {name: tensor.to(device) for name, tensor in tensors.items()}
    weight, zero, offset = tensors["weight"], None, None
    if isinstance(format, Integers):
        scale, offset, group_size = format.scale(tensors), format.offset(tensors), format.group_size
        code = _code(format)
        zero = None if offset is None else _zeros(scale, offset)
    else:
        scale, code = format.row_scales(tensors), Code.FLOAT8
        weight, group_size = weight.view(torch.uint8), weight.shape[1] if scale.shape[1] == 1 else BLOCK
    return PackedWeight(
        code=code,
        codes=padded(weight) if code.bits == 8 else pack_nibbles(_nibbles(weight, code)),
        # Scales of floats of 4 bits multiply weights in the type of x, which is bfloat16 where such weights come from.
        scale=narrowest(scale, NARROW[::-1] if code is Code.FLOAT4 else NARROW).T.contiguous(),
        zero=None if zero is None else zero.T.contiguous(),
        offset=None if zero is not None or offset is None else narrowest(offset).T.contiguous(),
        in_features=weight.shape[1],
        group_size=group_size,
        permutation=tensors.get("permutation"),
        rotation=format.rotation if isinstance(format, Integers) else 0,
        rounds_inputs=isinstance(format, Integers) and format.inputs is Inputs.ROW,
    )


def _code(format: Integers) -> Code:
    if format.table == DOUBLED:
        return Code.FLOAT4
    return Code.INT8 if format.bits > 4 else Code.UINT4 if format.has_offset else Code.INT4


def _nibbles(integers: Tensor, code: Code) -> Tensor:
    """Integers of a weight as numbers from 0 to 15."""
    if code is not Code.FLOAT4:
        return integers + 8 * (code is Code.INT4)
    places = torch.tensor(_PLACES, dtype=torch.uint8, device=integers.device)
    return places[integers.to(torch.uint8).int()]


def permuted(x: Tensor, weight: PackedWeight) -> Tensor:
    """x [..., in] in the order of the weight's inputs."""
    return x if weight.permutation is None else x.index_select(-1, weight.permutation)


def _zeros(scale: Tensor, offset: Tensor) -> Tensor | None:
    """The zeros for which -zero * scale is the offset, if all are integers of 8 bits, or else None."""
    zero = (-offset / torch.where(scale == 0, 1.0, scale)).round()
    is_exact = (zero.abs() <= 127) & (-zero * scale == offset)
    return zero.to(torch.int8) if bool(is_exact.all()) else None


def narrowest(floats: Tensor, narrow_dtypes: Sequence[torch.dtype] = NARROW) -> Tensor:
    """Floats in the first of the narrow types that holds them all without rounding, or as they are."""
    narrow = (floats.to(dtype) for dtype in narrow_dtypes)
    return next((each for each in narrow if torch.equal(each.float(), floats)), floats)


def padded(codes: Tensor) -> Tensor:
    return F.pad(codes, (0, -codes.shape[1] % UNIT)).contiguous()


def pack_nibbles(integers: Tensor) -> Tensor:
    """[out, in] -> [out, padded in / 2]"""
    units = padded(integers.to(torch.uint8)).view(len(integers), -1, 2, _HALF)
    return (units[:, :, 0] | units[:, :, 1] << 4).flatten(1)


def unpack_nibbles(codes: Tensor) -> Tensor:
    """[out, bytes] -> [out, padded in]: the inverse of `pack_nibbles`."""
    halves = torch.stack((codes & 15, codes >> 4), 1)
    return halves.view(len(halves), 2, -1, _HALF).transpose(1, 2).flatten(1)
