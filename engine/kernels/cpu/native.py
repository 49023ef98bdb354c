"""The native kernels of the CPU, under one name."""

from penstock.engine.kernels.cpu.build import NativeUnavailable
from penstock.engine.kernels.cpu.experts import NativeRoute, NativeRunExperts
from penstock.engine.kernels.cpu.inputs import NativeGather
from penstock.engine.kernels.cpu.latents import NativeLatentMaps
from penstock.engine.kernels.cpu.library import BLOCK_SIZE, MAX_ROW, NativeLibrary, Team, load_library
from penstock.engine.kernels.cpu.linear import NATIVE_FORMATS, NativeLinear
from penstock.engine.kernels.cpu.sampling import NativeChoose, NativeMostLikely

__all__ = [
    "BLOCK_SIZE",
    "MAX_ROW",
    "NATIVE_FORMATS",
    "NativeChoose",
    "NativeGather",
    "NativeLatentMaps",
    "NativeLibrary",
    "NativeLinear",
    "NativeMostLikely",
    "NativeRoute",
    "NativeRunExperts",
    "NativeUnavailable",
    "Team",
    "load_library",
]
