"""Rotates rows of x, and rounds them to 8 bits, before they are multiplied."""

from __future__ import annotations

import triton
import triton.language as tl

from penstock.engine.kernels.triton.numbers import rotated, rounded_to


@triton.jit
def quantize_rows_kernel(
    x: tl.tensor,
    numbers: tl.tensor,
    row_scale: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    LARGEST: tl.constexpr,
    ROTATION: tl.constexpr,
) -> None:
    """Rotates one row, if it is to be; scales it so that its largest magnitude becomes LARGEST, and rounds it.

    The result is int8, or the bits of e4m3. The input of the rounding has the bits of `kernels.linear.quantize_rows`.
    """
    row = tl.program_id(0).to(tl.int64)
    first = x + row * SIZE
    magnitudes, nans = tl.zeros([BLOCK], tl.float32), tl.zeros([BLOCK], tl.int32)
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = _values(first + columns, columns < SIZE, BLOCK, ROTATION)
        magnitudes = tl.maximum(magnitudes, tl.abs(values))
        nans = tl.maximum(nans, (values != values).to(tl.int32))
    largest = tl.where(tl.max(nans) > 0, float("nan"), tl.max(magnitudes))
    most = tl.full([], LARGEST, tl.float32)
    factor = tl.div_rn(most, largest)
    tl.store(row_scale + row, tl.div_rn(largest, most))
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        scaled = _values(first + columns, columns < SIZE, BLOCK, ROTATION) * factor
        scaled = tl.where(scaled == scaled, tl.where(factor < float("inf"), scaled, 0.0), 0.0)
        rounded = rounded_to(scaled, LARGEST, numbers.dtype.element_ty)
        tl.store(numbers + row * SIZE + columns, rounded, mask=columns < SIZE)


@triton.jit
def rotate_rows_kernel(
    x: tl.tensor,
    out: tl.tensor,
    SIZE: tl.constexpr,
    BLOCK: tl.constexpr,
    ROTATION: tl.constexpr,
) -> None:
    """Rotates one row, and rounds it to the type of `out`."""
    row = tl.program_id(0).to(tl.int64)
    for start in range(0, SIZE, BLOCK):
        columns = start + tl.arange(0, BLOCK)
        values = _values(x + row * SIZE + columns, columns < SIZE, BLOCK, ROTATION)
        tl.store(out + row * SIZE + columns, values.to(out.dtype.element_ty), mask=columns < SIZE)


@triton.jit
def _values(place: tl.tensor, mask: tl.tensor, SIZE: tl.constexpr, ROTATION: tl.constexpr) -> tl.tensor:
    """SIZE numbers in float32, rotated by blocks of ROTATION."""
    values = tl.load(place, mask=mask, other=0.0).to(tl.float32)
    return rotated(values, 1, SIZE, ROTATION).reshape(SIZE)
