"""The native kernels of the CPU, under one name."""

from engine.kernels.cpu.build import NativeUnavailable
from engine.kernels.cpu.decoder import BLOCK_SIZE, MAX_ROW, NativeDecoder
from engine.kernels.cpu.drafts import NativeDraft
from engine.kernels.cpu.experts import NativeExperts, NativeRoute, NativeRunExperts, packed_experts
from engine.kernels.cpu.inputs import NativeGather
from engine.kernels.cpu.library import NativeLibrary, Team, load_library
from engine.kernels.cpu.linear import PACKED, PackedLinear
from engine.kernels.cpu.program import NativeHeads, NativeOp
from engine.kernels.cpu.sampling import NativeChoose, NativeMostLikely
from engine.kernels.cpu.states import NativeMixer
from engine.kernels.cpu.steps import NativeStep, NativeSteps

__all__ = [
    "BLOCK_SIZE",
    "MAX_ROW",
    "PACKED",
    "NativeChoose",
    "NativeDecoder",
    "NativeDraft",
    "NativeExperts",
    "NativeGather",
    "NativeHeads",
    "NativeLibrary",
    "NativeMixer",
    "NativeMostLikely",
    "NativeOp",
    "NativeRoute",
    "NativeRunExperts",
    "NativeStep",
    "NativeSteps",
    "NativeUnavailable",
    "PackedLinear",
    "Team",
    "load_library",
    "packed_experts",
]
