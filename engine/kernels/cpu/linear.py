"""Linear layers in the layout of the native kernels."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from penstock.engine.errors import CheckpointError
from penstock.engine.kernels.cpu import structs
from penstock.engine.kernels.cpu.library import (
    DTYPES,
    Team,
    check,
    created,
    float32,
    freed_with,
    pointer,
)
from penstock.engine.kernels.cpu.structs import FactorSource, LinearSource
from penstock.engine.quant.codebook import Codebook
from penstock.engine.quant.float8 import BLOCK, Float8
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.integers import Factors, Inputs, Integers
from penstock.engine.quant.storages.gguf import TYPES, BlockRows, StoredBlocks

NATIVE_FORMATS = (Integers, Float8, Codebook)
"""The formats that have a layout of their own."""

_INTEGER_TYPES = {8: 3, 4: 4, 5: 7, 6: 8, 2: 9, 3: 10}
"""The storage types of the kernels for integers, by their bits."""
_FLOAT8_TYPE, _PLACES_TYPE, _INTEGER_PLACES_TYPE = 5, 6, 11

_ROUNDINGS = (Inputs.ROW, Inputs.GROUPS, Inputs.FINE)
"""By the number that the kernels have for them."""

BLOCK_TYPES = tuple(TYPES)
"""ggml's types by the number that the kernels have for them; blocks.h has the same order."""

ACTIVATIONS = (torch.float32, torch.bfloat16, torch.int8)
"""By the number that the kernels have for them."""


@dataclass(frozen=True, slots=True)
class _Layout:
    """The tensors of a weight, and how the kernels read them."""

    type: int
    """The storage type of the kernels."""
    tensors: NamedTensors
    group_size: int
    """Inputs that share a scale; all of them where there is one or none."""
    span: int = 1
    """Groups that share a unit."""
    inputs: Inputs = Inputs.ROW
    rotation: int = 0


def _layout(tensors: NamedTensors, format: Integers | Float8 | Codebook) -> _Layout:
    in_features = tensors["weight"].shape[1]
    match format:
        case Integers():
            format.check(in_features)
            type = _INTEGER_TYPES[format.bits]
            if format.group_size == in_features:  # few scales, which no kernel reads in fewer bits
                few = format.with_float32(tensors)
                return _Layout(type, few, in_features, 1, format.inputs, format.rotation)
            if format.table:
                type, tensors = _INTEGER_PLACES_TYPE, {**tensors, "table": torch.tensor(format.table).float()}
            span = format.groups_per_unit
            return _Layout(type, tensors, format.group_size, span, format.inputs, format.rotation)
        case Float8():
            scale = format.row_scales(tensors)
            group_size = in_features if scale.shape[1] == 1 else BLOCK
            return _Layout(_FLOAT8_TYPE, {**tensors, "scale": scale}, group_size)
        case Codebook():
            return _Layout(_PLACES_TYPE, {**tensors, "table": torch.tensor(format.table)}, format.group_size)


def _block_rows(part: BlockRows, format: Integers, kept: list[Tensor]) -> structs.BlockRows:
    """Returns the rows of a part of a weight in a format; memory that must stay in place joins `kept`."""
    rows = part.rows if part.rows.stride(1) == 1 else part.rows.contiguous()
    order = None if part.order is None else part.order.int().contiguous()
    kept += [rows] if order is None else [rows, order]
    return structs.BlockRows(
        rows=rows.data_ptr(),
        row_bytes=rows.stride(0),
        type=BLOCK_TYPES.index(part.blocks.name),
        num_rows=len(rows),
        raised=max(format.lowest - part.blocks.groups.lowest, 0),
        order=pointer(order),
    )


def _factors(values: Tensor | None, units: Tensor | None = None) -> FactorSource:
    """Scales or offsets; the tensors must stay where they are."""
    types = [0 if tensor is None else DTYPES[tensor.dtype] for tensor in (values, units)]
    return FactorSource(pointer(values), pointer(units), *types)


def _factor_types(
    parts: Sequence[BlockRows], format: Integers, *, is_row: bool
) -> tuple[FactorSource, FactorSource]:
    """The types of scales and offsets that the joined tensors of blocks have, see `_layout`."""
    halves = {part.blocks.half for part in parts}
    half = halves.pop() if len(halves) == 1 else torch.float32
    exact = half if all(part.blocks.groups.has_offset for part in parts) else torch.float32
    match Factors.FLOAT32 if is_row else format.factors:
        case Factors.COUNTS:
            types = (torch.int8, half), (torch.int8, exact)
        case Factors.HALF:
            types = (half, torch.float32), (exact, torch.float32)
        case _:
            types = (torch.float32, torch.float32), (torch.float32, torch.float32)
    scales, offsets = (FactorSource(type=DTYPES[own], unit_type=DTYPES[unit]) for own, unit in types)
    return scales, offsets


class NativeLinear:
    """A linear layer in the layout of the kernels; the tensors it was made from can be freed.

    An output of a floating-point weight is one chain of fused multiply-adds in float32, so that it does not depend on
    the other rows or on the number of threads, bit for bit. `of` describes the outputs of the other formats.

    Args:
        weight: [rows, in]; it is rounded to `dtype`, float32, float16 or bfloat16.
        bias: [rows], or None.
        gated: the first half of the rows are gates and the second ups; the rows / 2 outputs are silu(gate) * up.
    """

    def __init__(
        self, team: Team, weight: Tensor, bias: Tensor | None, dtype: torch.dtype, gated: bool = False
    ) -> None:
        tensors = {"weight": weight.detach().to("cpu", dtype)}
        self._pack(team, _Layout(DTYPES[dtype], tensors, weight.shape[1]), bias, gated)

    @classmethod
    def of(
        cls,
        team: Team,
        tensors: NamedTensors,
        format: Integers | Float8 | Codebook,
        bias: Tensor | None,
        gated: bool = False,
        *,
        is_exact: bool = False,
    ) -> NativeLinear:
        """The layer of a weight in one of NATIVE_FORMATS, given as the tensors of its format.

        An output of a weight of integers equals `IntegerLinear`'s. An output of e4m3, or of places in a table, equals
        that of a layer in bfloat16, where the kernels have products of bfloat16 and it need not be exact, or else in
        float32, of the unpacked weight, bit for bit. If every row in e4m3 has one scale, the output is that of a layer
        of the numbers, times the scale.

        Raises:
            CheckpointError: the kernels have no such groups of integers.
        """
        linear = cls.__new__(cls)
        if isinstance(tensors, StoredBlocks):
            assert isinstance(format, Integers)
            linear._read(team, tensors.parts, format, bias, gated)
        else:
            linear._pack(team, _layout(tensors, format), bias, gated, is_exact)
        return linear

    def cap(self, scale: float, softcap: float) -> None:
        """Multiplies every later output by `scale`; with a softcap c, an output x becomes c tanh(x / c).

        A decoder's program says the scales of its own products.
        """
        self._team.library.call("penstock_linear_cap", self.handle, scale, softcap)

    @property
    def activation_dtype(self) -> torch.dtype:
        """The type that activations are rounded to before they are multiplied: float32, bfloat16 or int8."""
        return ACTIVATIONS[self._team.library.call("penstock_linear_form", self.handle)]

    @property
    def num_bytes(self) -> int:
        """Bytes of the packed weights, padding included."""
        return int(self._team.library.call("penstock_linear_bytes", self.handle))

    def __call__(self, x: Tensor) -> Tensor:
        """Multiplies the rows of x, float32 [M, in], by the layer: float32 [M, out]."""
        if x.dtype != torch.float32 or x.dim() != 2 or x.shape[1] != self.in_features:
            raise ValueError(f"float32 [M, {self.in_features}] expected, not {x.dtype} {tuple(x.shape)}")
        x = x.contiguous()
        num_rows = x.shape[0]
        out = self._team.empty(num_rows, self.out_features)
        check(
            self._apply(
                self._team.handle, self.handle, x.data_ptr(), self.in_features, num_rows, out.data_ptr()
            )
        )
        return out

    def dense(self) -> Tensor:
        """The weights as they are stored, [rows, in], in float32."""
        out = torch.empty((self.num_rows, self.in_features))
        self._team.library.call("penstock_linear_unpack", self._team.handle, self.handle, out.data_ptr())
        return out

    def _pack(
        self, team: Team, layout: _Layout, bias: Tensor | None, gated: bool, is_exact: bool = False
    ) -> None:
        kept = {name: tensor.contiguous() for name, tensor in layout.tensors.items()}
        num_rows, in_features = kept["weight"].shape
        biases = self._describe(team, num_rows, in_features, bias, gated)
        self.is_permuted = "permutation" in kept
        source = LinearSource(
            type=layout.type,
            rows=self.num_rows,
            k=self.in_features,
            gated=gated,
            group=layout.group_size,
            span=layout.span,
            is_exact=is_exact,
            rounding=_ROUNDINGS.index(layout.inputs),
            rotation=layout.rotation,
            weight=kept["weight"].data_ptr(),
            scales=_factors(kept.get("scale"), kept.get("scale_unit")),
            offsets=_factors(kept.get("offset", kept.get("zero")), kept.get("offset_unit")),
            permutation=pointer(kept.get("permutation")),
            bias=pointer(biases),
            table=pointer(kept.get("table")),
        )
        self._keep(team.library.call("penstock_linear_new", team.handle, ctypes.byref(source)))

    def _read(
        self, team: Team, parts: Sequence[BlockRows], format: Integers, bias: Tensor | None, gated: bool
    ) -> None:
        """Packs the blocks of a file's rows as they lie there, with the same result as `_pack` of their tensors.

        Raises:
            CheckpointError: scales or offsets are not finite, or the kernels have no such groups.
        """
        kept: list[Tensor] = []
        rows = (structs.BlockRows * len(parts))(*(_block_rows(part, format, kept) for part in parts))
        in_features = parts[0].in_features
        assert all(part.in_features == in_features for part in parts)
        format.check(in_features)
        biases = self._describe(team, sum(part.num_rows for part in rows), in_features, bias, gated)
        is_row = format.group_size == in_features
        table = torch.tensor(format.table).float() if format.table and not is_row else None
        scales, offsets = _factor_types(parts, format, is_row=is_row)
        source = LinearSource(
            type=_INTEGER_TYPES[format.bits] if table is None else _INTEGER_PLACES_TYPE,
            rows=self.num_rows,
            k=in_features,
            gated=gated,
            group=format.group_size,
            span=1 if is_row else format.groups_per_unit,
            rounding=_ROUNDINGS.index(format.inputs),
            scales=scales,
            offsets=offsets,
            bias=pointer(biases),
            table=pointer(table),
        )
        of_blocks = structs.BlocksSource(
            ctypes.addressof(source), format.has_offset, len(parts), ctypes.addressof(rows)
        )
        handle = team.library.call("penstock_linear_of_blocks", team.handle, ctypes.byref(of_blocks))
        for part, read in zip(parts, rows, strict=True):
            if read.fault:
                fault = "scales" if read.fault & 1 else "offsets"
                raise CheckpointError(f"{part.name} has {fault} that are not finite")
        self._keep(handle)

    def _describe(
        self, team: Team, num_rows: int, in_features: int, bias: Tensor | None, gated: bool
    ) -> Tensor | None:
        """Sets the fields that are known before packing, and returns the bias as the kernels read it."""
        self.num_rows, self.in_features = num_rows, in_features
        if gated and self.num_rows % 2:
            raise ValueError(f"gates and ups must be equally many, not {self.num_rows} together")
        if bias is not None and bias.shape != (self.num_rows,):
            raise ValueError(f"a bias of shape {tuple(bias.shape)} for {self.num_rows} outputs")
        self.out_features = self.num_rows // 2 if gated else self.num_rows
        self.gated, self.is_permuted = gated, False
        self._team = team
        self._apply = team.library.function("penstock_linear_apply")
        return None if bias is None else float32(bias)

    def _keep(self, handle: int | None) -> None:
        self.handle = created(handle)
        freed_with(self, self._team.library, "penstock_linear_free", self.handle)
