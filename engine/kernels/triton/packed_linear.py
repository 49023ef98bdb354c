"""Linear maps with packed weights: x stays in 16 bits, or is quantized row by row where that is exact or faster."""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
import triton
from torch import Tensor

from penstock.engine.kernels.packed import UNIT, Code, PackedWeight, permuted
from penstock.engine.kernels.triton.boundaries import ROUND_KEY, unpack_key
from penstock.engine.kernels.triton.packed_kernels import (
    add_parts_kernel,
    packed_linear_kernel,
    unpack_kernel,
)
from penstock.engine.kernels.triton.row_kernels import quantize_rows_kernel, rotate_rows_kernel
from penstock.engine.kernels.triton.tiles import (
    NEVER,
    ROW_CLASSES,
    Card,
    ProductTiling,
    num_parts,
    step_inputs,
)
from penstock.engine.quant.float8 import FLOAT8, LARGEST

MIN_UNPACKED_ROWS = ROW_CLASSES[-1] + 1
"""From so many rows on, it is quicker to unpack the weights and to multiply in 16 bits than to unpack them by tiles;
cards on which that was measured have boundaries of their own."""
SCRATCH_BYTES = 64 << 20
"""Of unpacked weights at a time: about what a large card's second-level cache holds."""
MIN_SCALED_ROWS = 65
"""From so many rows on, x is rounded to 8 bits where the card multiplies e4m3: fewer wait for the weights only."""
UNPACK_BLOCK, ADD_BLOCK, ROUND_BLOCK = 2048, 512, 4096
ONE_WARP = 128
"""A row of so many numbers, as blocks have, is rounded by one warp."""
ONE_GROUP = 1 << 30
"""Stands for the size of a group that has all inputs, however many."""


class TritonLinear:
    """x [..., in] -> x @ weight.T + bias [..., out], in the type of x.

    Up to a number of rows, numbers and x are multiplied exactly and added in float32, and the sums of groups or rows
    are multiplied by their scales; weights that have offsets, or groups that UNIT does not divide, are unpacked and
    rounded to the type of x first. From there on all weights are unpacked, in slices, and torch multiplies.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None, card: Card) -> None:
        self.weight = weight
        self._bias = bias
        self._card = card
        self._min_unpacked = card.boundary(unpack_key(weight.code), MIN_UNPACKED_ROWS)

    @property
    def kind(self) -> Hashable:
        """Maps of one kind run the same kernels."""
        weight = self.weight
        factors = weight.zero is None, *factor_types(weight)
        return type(self), weight.code, scales_of(weight), group_size_of(weight), factors

    def __call__(self, x: Tensor) -> Tensor:
        rows = permuted(x.reshape(-1, self.weight.in_features), self.weight).contiguous()
        return self._product(rows).view(*x.shape[:-1], self.weight.out_features)

    def _product(self, rows: Tensor) -> Tensor:
        """The outputs for rows [M, in], which have the order of the weight's inputs."""
        return self.unpacked(rows) if len(rows) >= self._min_unpacked else self.tiled(rows)

    def tiled(self, rows: Tensor) -> Tensor:
        """The outputs for these rows, by tiles of packed weights."""
        return multiply(rows, self.weight, None, self._bias, rows.dtype, self._card)

    def unpacked(self, rows: Tensor) -> Tensor:
        """The outputs for these rows, with unpacked weights."""
        weight, bias = self.weight, self._bias
        num_outputs = weight.out_features
        at_a_time = max(1, SCRATCH_BYTES // (weight.in_features * rows.itemsize))
        if at_a_time >= num_outputs:
            return F.linear(rows, unpack(weight, 0, num_outputs, rows.dtype), bias)
        out = rows.new_empty((len(rows), num_outputs))
        for start in range(0, num_outputs, at_a_time):
            end = min(start + at_a_time, num_outputs)
            part = unpack(weight, start, end, rows.dtype).T
            if bias is None:
                torch.mm(rows, part, out=out[:, start:end])
            else:
                torch.addmm(bias[start:end], rows, part, out=out[:, start:end])
        return out


class RoundedLinear(TritonLinear):
    """The map that `kernels.linear.IntegerLinear` specifies, bit for bit but for the type of the result.

    For integers of 8 bits with one scale a row: x is rotated, if the weight is, and quantized row by row; all sums are
    exact.
    """

    @property
    def kind(self) -> Hashable:
        return super().kind, self.weight.rotation

    def _product(self, rows: Tensor) -> Tensor:
        integers, row_scale = quantize_rows(rows, torch.int8, self.weight.rotation)
        return multiply(integers, self.weight, row_scale, self._bias, rows.dtype, self._card)


class ScaledLinear(TritonLinear):
    """A TritonLinear of e4m3 whose products of many rows are torch's, of x that is rounded to e4m3 row by row.

    The weight has one scale a row, and `can_scale`.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None, card: Card) -> None:
        super().__init__(weight, bias, card)
        self._scale = weight.scale.float()

    def _product(self, rows: Tensor) -> Tensor:
        if len(rows) < MIN_SCALED_ROWS:
            return super()._product(rows)
        numbers, row_scale = quantize_rows(rows, FLOAT8)
        weight = self.weight.codes.view(FLOAT8)
        product = scaled_product(numbers, row_scale, weight, self._scale, rows.dtype)
        return product if self._bias is None else product.add_(self._bias)


class BlockLinear(TritonLinear):
    """A TritonLinear of e4m3 in blocks, whose products of many rows are of x that is rounded to e4m3 block by block.

    So DeepSeek's models were trained (DeepSeek-V3 technical report, section 3.3). Sums of a block are float32's before
    they are scaled. The weight has blocks: see `has_blocks`.
    """

    def __init__(self, weight: PackedWeight, bias: Tensor | None, card: Card) -> None:
        super().__init__(weight, bias, card)
        self._min_rounded = card.boundary(ROUND_KEY, NEVER)

    def _product(self, rows: Tensor) -> Tensor:
        return self.rounded(rows) if len(rows) >= self._min_rounded else super()._product(rows)

    def rounded(self, rows: Tensor) -> Tensor:
        """The outputs for these rows, rounded to e4m3."""
        numbers, scales = quantize_rows(rows.view(-1, self.weight.group_size), FLOAT8)
        return multiply(numbers.view_as(rows), self.weight, scales, self._bias, rows.dtype, self._card)


@dataclass(frozen=True, slots=True)
class LinearChooser:
    """Chooses the linear map for a packed weight on one card."""

    card: Card
    scales_float8: bool
    """The card multiplies e4m3: see `multiplies_float8`."""

    def __call__(self, weight: PackedWeight, bias: Tensor | None) -> TritonLinear:
        if weight.is_per_row and weight.code is Code.INT8 and weight.rounds_inputs:
            return RoundedLinear(weight, bias, self.card)
        if weight.is_per_row and weight.code is Code.FLOAT8 and self.scales_float8 and can_scale(weight):
            return ScaledLinear(weight, bias, self.card)
        if self.scales_float8 and has_blocks(weight):
            return BlockLinear(weight, bias, self.card)
        return TritonLinear(weight, bias, self.card)


def can_scale(weight: PackedWeight) -> bool:
    """Returns whether cuBLAS takes the shape: it wants multiples of 16."""
    return weight.padded_features == weight.in_features and weight.out_features % 16 == 0


def has_blocks(weight: PackedWeight) -> bool:
    """Returns whether whole groups of a weight of e4m3 can be multiplied with rounded x."""
    size = weight.group_size
    is_whole = weight.in_features % size == 0 and size % UNIT == 0 and size & (size - 1) == 0
    return weight.code is Code.FLOAT8 and not weight.is_per_row and weight.permutation is None and is_whole


def multiplies_float8(device: torch.device, dtype: torch.dtype) -> bool:
    """Returns whether torch multiplies e4m3 with scales for rows and columns on this device, and gives this type.

    Raises:
        torch.AcceleratorError: the device is lost.
    """
    if device.type != "cuda" or torch.cuda.get_device_capability(device) < (8, 9):
        return False
    numbers, scale = torch.zeros(32, 32, device=device), torch.ones(32, 1, device=device)
    try:
        scaled_product(numbers.to(FLOAT8), scale[:, 0], numbers.to(FLOAT8), scale.T, dtype)
    except torch.AcceleratorError:
        raise
    except RuntimeError:  # also C++'s ValueError and NotImplementedError
        return False
    return True


def scaled_product(x: Tensor, row_scale: Tensor, weight: Tensor, scale: Tensor, dtype: torch.dtype) -> Tensor:
    """(x * row_scale) @ (weight * scale).T of x [M, in] and weight [out, in] in e4m3, scales [M] and [1, out]."""
    return torch._scaled_mm(
        x, weight.T, scale_a=row_scale.unsqueeze(1), scale_b=scale, out_dtype=dtype, use_fast_accum=True
    )


def multiply(
    x: Tensor,
    weight: PackedWeight,
    row_scale: Tensor | None,
    bias: Tensor | None,
    dtype: torch.dtype,
    card: Card,
) -> Tensor:
    """x [M, in] @ weight.T * row_scale [M, 1] + bias [out], by tiles of packed weights; sums of int8 are exact.

    Result and workspace are all that is allocated.

    Args:
        row_scale: [M] float32, or [M * groups] for x in e4m3; None for x that is not rounded.
    """
    num_rows, num_outputs = len(x), weight.out_features
    out = x.new_empty((num_rows, num_outputs), dtype=dtype)
    if not num_rows:
        return out
    scales = "blocks" if x.dtype == FLOAT8 else scales_of(weight)
    most_rows = next((most for most in ROW_CLASSES if num_rows <= most), ROW_CLASSES[-1])
    tiling = in_stages(card.tiling(weight.code, x.dtype, most_rows), weight)
    step = step_inputs(weight, tiling, in_groups=scales in ("groups", "blocks"))
    num_steps = weight.padded_features // step
    parts, steps_per_part = num_parts(num_outputs, num_steps, tiling, card.chip)
    sums = out
    if parts > 1:
        sums = out.new_empty(
            (parts, *out.shape), dtype=torch.int32 if x.dtype == torch.int8 else torch.float32
        )
    grid = (triton.cdiv(num_rows, tiling.block_m), triton.cdiv(num_outputs, tiling.block_n), parts)
    packed_linear_kernel[grid](
        sums,
        x,
        weight.codes,
        weight.scale,
        weight.zero,
        weight.offset,
        row_scale,
        bias,
        num_rows,
        num_steps,
        steps_per_part,
        num_outputs,
        weight.in_features,
        weight.codes.stride(0),
        CODE=weight.code.value,
        SCALES=scales,
        GROUP_SIZE=group_size_of(weight),
        BLOCK_K=step,
        IS_PART=parts > 1,
        **tiling.options,
        enable_fp_fusion=False,
    )
    if parts > 1:
        add_parts_kernel[num_rows, triton.cdiv(num_outputs, ADD_BLOCK)](
            out,
            sums,
            weight.scale if scales == "rows" else None,
            None if scales == "blocks" else row_scale,
            bias,
            num_rows,
            parts,
            num_outputs,
            BLOCK=ADD_BLOCK,
            num_warps=4,
            enable_fp_fusion=False,
        )
    return out


def unpack(weight: PackedWeight, start: int, end: int, dtype: torch.dtype) -> Tensor:
    """Equals `PackedWeight.unpack`, for outputs from `start` up to `end`: [end - start, in]."""
    out = weight.codes.new_empty((end - start, weight.in_features), dtype=dtype)
    unpack_kernel[triton.cdiv(weight.in_features, UNPACK_BLOCK), end - start](
        out,
        weight.codes,
        weight.scale,
        weight.zero,
        weight.offset,
        start,
        weight.out_features,
        weight.in_features,
        weight.codes.stride(0),
        CODE=weight.code.value,
        GROUP_SIZE=group_size_of(weight),
        BLOCK_K=UNPACK_BLOCK,
        num_warps=4,
        enable_fp_fusion=False,
    )
    return out


def rotate_rows(x: Tensor, rotation: int) -> Tensor:
    """x [..., in] with its blocks of so many inputs rotated in float32, as `quant.rotation.rotated` does."""
    x = x.contiguous()
    out = torch.empty_like(x)
    if num_rows := x.numel() // x.shape[-1]:
        rotate_rows_kernel[(num_rows,)](
            x,
            out,
            SIZE=x.shape[-1],
            BLOCK=min(triton.next_power_of_2(x.shape[-1]), ROUND_BLOCK),
            ROTATION=rotation,
            num_warps=8,
            enable_fp_fusion=False,
        )
    return out


def quantize_rows(x: Tensor, dtype: torch.dtype, rotation: int = 0) -> tuple[Tensor, Tensor]:
    """Rounds each row of x [M, in] to int8, as `kernels.linear.quantize_rows` does, or to e4m3.

    Args:
        rotation: the inputs of a block that is rotated first, or 0.

    Returns:
        The numbers [M, in], and the scale [M] of each row: its largest magnitude over 127, or over the largest of e4m3.
    """
    is_int8 = dtype == torch.int8
    numbers = torch.empty_like(x, dtype=torch.int8 if is_int8 else torch.uint8)
    row_scale = x.new_empty(len(x), dtype=torch.float32)
    if len(x):
        quantize_rows_kernel[(len(x),)](
            x,
            numbers,
            row_scale,
            SIZE=x.shape[1],
            BLOCK=min(triton.next_power_of_2(x.shape[1]), ROUND_BLOCK),
            LARGEST=127.0 if is_int8 else LARGEST,
            ROTATION=rotation,
            num_warps=1 if x.shape[1] <= ONE_WARP else 8,
            enable_fp_fusion=False,
        )
    return numbers.view(dtype), row_scale


def scales_of(weight: PackedWeight) -> str:
    """Returns the SCALES of `packed_linear_kernel`."""
    if weight.is_per_row:
        return "rows"
    if weight.code is Code.FLOAT4 and weight.group_size == UNIT and weight.offset is None:
        return "units"  # few bits: the products with scales are exact, except beyond float16's range
    in_groups = weight.offset is None and (weight.group_size % UNIT == 0 or weight.scale.shape[0] == 1)
    return "groups" if in_groups else "weights"


def in_stages(tiling: ProductTiling, weight: PackedWeight) -> ProductTiling:
    """The tiling, with a single stage if every weight is multiplied or added to by a float32 of its own.

    Triton would keep these of all stages in shared memory, which has no room for them.
    """
    is_wide = scales_of(weight) == "weights" and torch.float32 in factor_types(weight)
    return replace(tiling, num_stages=1) if is_wide else tiling


def factor_types(weight: PackedWeight) -> tuple[torch.dtype | None, ...]:
    return weight.scale.dtype, None if weight.offset is None else weight.offset.dtype


def group_size_of(weight: PackedWeight) -> int:
    return ONE_GROUP if weight.scale.shape[0] == 1 else weight.group_size
