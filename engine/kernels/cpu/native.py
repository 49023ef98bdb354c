"""The native kernels of the CPU, under one name."""

from engine.kernels.cpu.build import NativeUnavailable
from engine.kernels.cpu.decoder import BLOCK_SIZE, NativeDecoder, NativeLayer
from engine.kernels.cpu.drafts import NativeDraft
from engine.kernels.cpu.inputs import NativeGather
from engine.kernels.cpu.library import NativeLibrary, Team, available_cores, load_library
from engine.kernels.cpu.linear import PACKED, PackedLinear
from engine.kernels.cpu.sampling import NativeChoose

__all__ = [
    "BLOCK_SIZE",
    "PACKED",
    "NativeChoose",
    "NativeDecoder",
    "NativeDraft",
    "NativeGather",
    "NativeLayer",
    "NativeLibrary",
    "NativeUnavailable",
    "PackedLinear",
    "Team",
    "available_cores",
    "load_library",
]
