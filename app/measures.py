"""The measuring loops of the native kernels, which say what the machine can do."""

from __future__ import annotations

from ctypes import c_void_p

import torch
from torch import Tensor

from penstock.engine.kernels.cpu.library import Team
from penstock.engine.kernels.cpu.linear import NATIVE_FORMATS, NativeLinear
from penstock.engine.quant.formats import Rounding

_WALKED_BYTES = 64e6
"""More than the caches hold."""
_READ_BYTES, _PIECE_BYTES = 512 << 20, 16 << 20
"""In all, several times what the last-level cache of a large server holds; at once, about a millisecond's reading."""

INSTRUCTIONS = ("fma8", "fma16", "pairs_bf16", "vnni", "tile_bf16", "tile_int8", "bytes8")
"""Instructions that multiply and add; measure.h has the same order.

fma8, fma16: 8 or 16 float32; pairs_bf16: 32 bfloat16; vnni: 64 or 32 int8 into int32; tile_bf16, tile_int8: AMX;
bytes8: the four of AVX2 that take 32 int8 into int32, as the kernels use them.
"""


def measure_linear(
    team: Team,
    in_features: int,
    out_features: int,
    rows: int,
    kept: torch.dtype | Rounding,
    repeats: int = 10,
) -> float:
    """GFLOP/s of the bare product [rows, in] x [in, out], the weights coming from memory; the best of `repeats`.

    Args:
        kept: what the weight is kept in.
    """
    weight = torch.full((out_features, in_features), 0.01)
    first = _packed(team, weight, kept)
    copies = max(1, int(_WALKED_BYTES / first.num_bytes))
    linears = [first, *(_packed(team, weight, kept) for _ in range(copies - 1))]
    handles = (c_void_p * copies)(*[linear.handle for linear in linears])
    seconds = team.library.call("penstock_measure_products", team.handle, handles, copies, rows, repeats)
    return float(2.0 * rows * in_features * out_features / seconds / 1e9)


def _packed(team: Team, weight: Tensor, kept: torch.dtype | Rounding) -> NativeLinear:
    if isinstance(kept, torch.dtype):
        return NativeLinear(team, weight, None, kept)
    assert isinstance(kept, NATIVE_FORMATS)
    return NativeLinear.of(team, kept.quantize(weight), kept, None)


def measure_peak(team: Team, instruction: str) -> float:
    """Billions of operations a second of one of INSTRUCTIONS, from registers or the first cache; 0 if there is none."""
    number = INSTRUCTIONS.index(instruction)
    return float(team.library.call("penstock_measure_peak", team.handle, number))


def measure_memory(team: Team, rounds: int = 10) -> float:
    """GB/s at which the team reads memory that no cache holds: the best of short pieces, each read once a round."""
    pieces = torch.ones(_READ_BYTES // _PIECE_BYTES, _PIECE_BYTES >> 18, 1 << 16)
    seconds = min(measure_reading(team, piece, 1) for _ in range(rounds) for piece in pieces)
    return _PIECE_BYTES / seconds / 1e9


def measure_reading(team: Team, rows: Tensor, repeats: int = 50) -> float:
    """Seconds in which the team reads all rows of float32 numbers once; the best of `repeats`."""
    num_rows, n = rows.shape
    call = team.library.call
    return float(call("penstock_measure_reading", team.handle, rows.data_ptr(), n, num_rows, repeats))
