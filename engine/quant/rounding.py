"""The rounding of groups of weights to integers: the specification, which native code matches bit for bit.

Every operation rounds as IEEE 754 says, one by one and in a fixed order, so that all machines get the same integers.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from penstock.engine.quant.rotation import rotated

Floats = npt.NDArray[np.float32]
Doubles = npt.NDArray[np.float64]
RoundGroups = Callable[[Floats, int, Floats | None, int], dict[str, np.ndarray]]
"""Rounds groups of weights to integers of some bits: see `round_groups`."""

SHARES = (1.0, 0.93, 0.86, 0.79, 0.72, 0.65)
"""The shares of a group's range that its integers span before they are fitted."""
FITS = 3
"""So many times a group's scale and offset are fitted to its integers, and these to them."""
SMALLEST = np.float32(1e-30)
"""Stands in for a scale of 0, so that nothing is divided by 0."""

_MOST_IMPORTANT = 4096
"""The highest importance of a column, where most have 1."""


def round_groups(
    groups: Floats, bits: int, importance: Floats | None, rotation: int = 0
) -> dict[str, np.ndarray]:
    """Rounds [rows, groups, group_size] to 8 bits without offsets, or to fewer with them.

    Args:
        importance: [groups, group_size] the weight of a squared error, with fewer than 8 bits.
        rotation: the size of the blocks in which groups of 8 bits are rotated before (see `rotation.py`), or 0.

    Returns:
        weight: [rows, groups * group_size] int8
        scale: [rows, groups] float32; with fewer than 8 bits, the bits of a bfloat16
        offset: likewise, with fewer than 8 bits
    """
    if importance is None:
        if rotation:
            groups = (rotated(torch.from_numpy(groups), rotation) / rotation).numpy()
        return _to_largest(groups)
    return _with_offsets(groups, np.float32((1 << bits) - 1), importance)


def column_units(peaks: Floats) -> Floats:
    """Powers of 2 that make integers of 12 bits of the columns of a weight, given their largest magnitudes."""
    _, exponents = np.frexp(np.maximum(peaks, SMALLEST))
    units: Floats = np.ldexp(np.float32(1), 12 - exponents)
    return units


def column_squares(weight: Floats, units: Floats) -> Doubles:
    """The sums of the squares of columns, rounded to integers: exact, in any order of the rows."""
    steps = np.rint(weight * units)
    squares: Doubles = (steps * steps).sum(0, dtype=np.float64)
    return squares / np.square(units, dtype=np.float64)


def importance(squares: Doubles) -> Floats:
    """Returns the weight of an error in each column: the smaller a column's weights are than most columns', the higher.

    Models shrink the weights of inputs that are always large, the outlier channels', and errors of these weights are
    multiplied with the same inputs.

    Args:
        squares: see `column_squares`; the squares of all rows.
    """
    middle = max(np.partition(squares, len(squares) // 2)[len(squares) // 2], float(SMALLEST))
    counted = np.maximum(middle / np.maximum(squares, middle / _MOST_IMPORTANT), 1)
    narrow: Floats = counted.astype(np.float32)
    return narrow


def _to_largest(groups: Floats) -> dict[str, np.ndarray]:
    """Rounds to the nearest multiples of a 127th of each group's largest magnitude."""
    scale = np.maximum(np.abs(groups).max(-1, keepdims=True) / np.float32(127), SMALLEST)
    integers = np.rint(np.clip(groups / scale, -127, 127))
    return {"weight": integers.astype(np.int8).reshape(len(groups), -1), "scale": scale[..., 0]}


def _with_offsets(groups: Floats, top: np.float32, importance: Floats) -> dict[str, np.ndarray]:
    """Rounds to integers from 0 to `top`, with the scale and the offset of each group that leave the smallest error.

    For given integers these are a least-squares fit, and for a given fit the nearest integers are the best. Repeating
    both ends in an optimum that depends on where it begins: the best of several is taken.
    """
    rows, n = len(groups), groups.shape[-1]
    columns = np.ascontiguousarray(groups.reshape(-1, n).T)  # a column is a group: long inner loops
    low, high = columns.min(0), columns.max(0)
    middle, half = (low + high) * np.float32(0.5), (high - low) * np.float32(0.5)
    centered = columns - middle
    weighted = np.tile(importance.T, rows)
    sums = _sum(weighted), _sum(centered * weighted)
    most, best_scale, best_offset = np.full_like(half, -1), np.zeros_like(half), np.zeros_like(half)
    for share in map(np.float32, SHARES):
        scale, offset = half * (2 * share / top), half * -share
        for _ in range(FITS):
            scale, offset, explained = _fit(centered, weighted, sums, _nearest(centered, scale, offset, top))
        is_better = explained > most
        most = np.where(is_better, explained, most)
        best_scale = np.where(is_better, scale, best_scale)
        best_offset = np.where(is_better, offset, best_offset)
    zero = np.float32(0)  # makes 0 of -0
    kept_scale, kept_offset = _bfloat16(best_scale + zero), _bfloat16(best_offset + middle + zero)
    integers = _nearest(columns, _float32(kept_scale), _float32(kept_offset), top).astype(np.int8)
    return {
        "weight": np.ascontiguousarray(integers.T).reshape(rows, -1),
        "scale": kept_scale.reshape(rows, -1),
        "offset": kept_offset.reshape(rows, -1),
    }


def _nearest(x: Floats, scale: Floats, offset: Floats, top: np.float32) -> Floats:
    """The integers for which integer * scale + offset is nearest to x."""
    steps = x - offset
    steps *= np.float32(1) / np.maximum(scale, SMALLEST)
    np.clip(steps, 0, top, out=steps)
    np.rint(steps, out=steps)
    return steps


def _fit(
    x: Floats, importance: Floats, sums: tuple[Floats, Floats], integers: Floats
) -> tuple[Floats, Floats, Floats]:
    """Returns the scales and offsets that fit integers to x best, and the part of its sum of squares that they explain.

    Args:
        x: [n, groups]
        sums: of the importance, and of x times it.
    """
    counted, (weight, total) = integers * importance, sums
    d, squares, products = _sum(counted), _sum(counted * integers), _sum(counted * x)
    determinant = weight * squares - d * d
    scale: Floats = np.zeros_like(weight)
    np.divide(weight * products - d * total, determinant, out=scale, where=determinant > 0)
    offset = np.divide(total - scale * d, weight, dtype=np.float32)
    return scale, offset, offset * total + scale * products


def _sum(x: Floats) -> Floats:
    """The sum of rows, one after another: sum() has an order of its own choice."""
    total = np.zeros(x.shape[1], np.float32)
    for row in x:
        total += row
    return total


def _bfloat16(x: Floats) -> npt.NDArray[np.uint16]:
    """The bits of finite numbers, rounded half to even."""
    bits = x.view(np.uint32)
    return ((bits + 0x7FFF + (bits >> 16 & 1)) >> 16).astype(np.uint16)


def _float32(bits: npt.NDArray[np.uint16]) -> Floats:
    return (bits.astype(np.uint32) << 16).view(np.float32)
