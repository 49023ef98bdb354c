"""The native kernels of the CPU, under one name."""

from penstock.engine.kernels.cpu.build import NativeUnavailable
from penstock.engine.kernels.cpu.experts import NativeRoute, NativeRunExperts
from penstock.engine.kernels.cpu.inputs import NativeGather
from penstock.engine.kernels.cpu.library import BLOCK_SIZE, MAX_ROW, NativeLibrary, Team, load_library
from penstock.engine.kernels.cpu.linear import PACKED, PackedLinear
from penstock.engine.kernels.cpu.sampling import NativeChoose, NativeMostLikely

__all__ = [
    "BLOCK_SIZE",
    "MAX_ROW",
    "PACKED",
    "NativeChoose",
    "NativeGather",
    "NativeLibrary",
    "NativeMostLikely",
    "NativeRoute",
    "NativeRunExperts",
    "NativeUnavailable",
    "PackedLinear",
    "Team",
    "load_library",
]
