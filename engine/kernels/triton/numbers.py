"""Numbers of 4 and 8 bits as floats, and floats as numbers of 8 bits; cards without instructions for them do it, too.

Conversions from integers are slow, so that integers become floats of 16 bits by their bits: added to a `unit`, which is
2^10 or 2^7, they have 7 bits of the significand. The bits of e4m3 below its sign are a wider float's, whose exponents
begin 2^8 or 2^120 lower.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def of_4_bits(integers: tl.tensor, lowest: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """Integers from 0 to 15, plus `lowest`."""
    if dtype == tl.float32:
        numbers = integers.to(dtype) + lowest
    else:
        unit: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300
        numbers = (unit | integers.to(tl.int16)).to(dtype, bitcast=True)
        numbers += lowest - (1024.0 if dtype == tl.float16 else 128.0)
    return numbers


@triton.jit
def of_e2m1(codes: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Returns twice the numbers of e2m1, whose bits are all that a code has: integers from -12 to 12."""
    if dtype == tl.float32:
        bits = (codes.to(tl.int32) & 8) << 28 | (codes.to(tl.int32) & 7) << 22
        numbers = bits.to(dtype, bitcast=True) * 1.7014118346046923e38
    elif dtype == tl.float16:
        bits = (codes.to(tl.int16) & 8) << 12 | (codes.to(tl.int16) & 7) << 9
        numbers = bits.to(dtype, bitcast=True) * 32768.0
    else:
        bits = (codes.to(tl.int16) & 8) << 12 | (codes.to(tl.int16) & 7) << 6
        numbers = bits.to(dtype, bitcast=True) * 1.7014118346046923e38
    return numbers


@triton.jit
def of_int8(packed: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Integers from -128 to 127, which stay as they are if `dtype` is int8."""
    if dtype == tl.int8 or dtype == tl.float32:
        numbers = packed.to(dtype)
    else:
        # The sign bit stands for -128, and for 128 when added to the unit.
        unit: tl.constexpr = 0x6400 if dtype == tl.float16 else 0x4300
        wide = packed.to(tl.int16)
        numbers = (unit | (wide & 0x7F)).to(dtype, bitcast=True)
        numbers -= (unit | (wide & 0x80)).to(dtype, bitcast=True)
    return numbers


@triton.jit
def of_e4m3(packed: tl.tensor, dtype: tl.constexpr) -> tl.tensor:
    """Returns the numbers of e4m3, given as uint8; NaN becomes 480 or -480."""
    # Widened with its sign, a byte needs no more than a shift: the sign is there, and its copies are masked.
    if dtype == tl.float16:
        bits = (packed.to(tl.int8, bitcast=True).to(tl.int16) << 7) & -0x4080
        numbers = bits.to(tl.float16, bitcast=True) * 256.0
    else:
        bits = (packed.to(tl.int8, bitcast=True).to(tl.int32) << 20) & -0x78100000
        numbers = (bits.to(tl.float32, bitcast=True) * 1.329227995784916e36).to(dtype)
    return numbers


@triton.jit
def rounded_to(x: tl.tensor, LARGEST: tl.constexpr, dtype: tl.constexpr) -> tl.tensor:
    """x in float32, rounded half to even, at most LARGEST either way: integers if `dtype` is int8, or bits of e4m3."""
    magnitude = tl.minimum(tl.abs(x), LARGEST)
    if dtype == tl.int8:
        rounded = _nearest_integer(magnitude).to(tl.int32)
        rounded = tl.where(x < 0, -rounded, rounded)
    else:
        rounded = _bits_of_e4m3(magnitude) | (x.to(tl.int32, bitcast=True) >> 24 & 0x80)
    return rounded.to(dtype)


@triton.jit
def _nearest_integer(x: tl.tensor) -> tl.tensor:
    """x from 0 up to 2^22, rounded half to even: at 2^23 a float has no room for fractions."""
    return (x + 8388608.0) - 8388608.0


@triton.jit
def _bits_of_e4m3(x: tl.tensor) -> tl.tensor:
    """x from 0 up to 448 in float32, rounded half to even; below 2^-6, numbers are multiples of 2^-9."""
    bits = x.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    return tl.where(x < 0.015625, _nearest_integer(x * 512.0).to(tl.int32), normal)


@triton.jit
def rotated(x: tl.tensor, ROWS: tl.constexpr, SIZE: tl.constexpr, ROTATION: tl.constexpr) -> tl.tensor:
    """ROWS x SIZE numbers in float32 as [ROWS, SIZE], whose blocks are rotated as in `quant.rotation`."""
    x = x.reshape(ROWS, SIZE)
    if ROTATION > 1:
        x *= _signs(SIZE, ROTATION)
    return _transformed(x, ROWS, SIZE, ROTATION)


@triton.jit
def rotated_back(x: tl.tensor, ROWS: tl.constexpr, SIZE: tl.constexpr, ROTATION: tl.constexpr) -> tl.tensor:
    """The inverse of `rotated` times ROTATION, as in `quant.rotation`."""
    return _transformed(x.reshape(ROWS, SIZE), ROWS, SIZE, ROTATION) * _signs(SIZE, ROTATION)


@triton.jit
def _signs(SIZE: tl.constexpr, ROTATION: tl.constexpr) -> tl.tensor:
    i = tl.arange(0, SIZE)[None, :] % ROTATION
    both = i & i >> 1
    return 1.0 - 2.0 * ((both ^ both >> 2 ^ both >> 4) & 1).to(tl.float32)


@triton.jit
def _transformed(x: tl.tensor, ROWS: tl.constexpr, SIZE: tl.constexpr, ROTATION: tl.constexpr) -> tl.tensor:
    for step in tl.static_range(1, 8):
        if ROTATION >> step > 0:  # a constexpr for half a block could not be assigned anew
            a, b = (
                x.reshape(ROWS * SIZE // (2 * (ROTATION >> step)), 2, ROTATION >> step)
                .permute(0, 2, 1)
                .split()
            )
            x = tl.join(a + b, a - b).permute(0, 2, 1).reshape(ROWS, SIZE)
    return x
