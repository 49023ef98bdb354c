"""The native kernels of the CPU, under one name."""

from penstock.engine.kernels.cpu.build import NativeUnavailable
from penstock.engine.kernels.cpu.decoder import BLOCK_SIZE, MAX_ROW, NativeDecoder
from penstock.engine.kernels.cpu.drafts import NativeDraft
from penstock.engine.kernels.cpu.experts import NativeExperts, NativeRoute, NativeRunExperts, packed_experts
from penstock.engine.kernels.cpu.inputs import NativeGather
from penstock.engine.kernels.cpu.library import NativeLibrary, Team, load_library
from penstock.engine.kernels.cpu.linear import PACKED, PackedLinear
from penstock.engine.kernels.cpu.program import NativeHeads, NativeOp
from penstock.engine.kernels.cpu.sampling import NativeChoose, NativeMostLikely
from penstock.engine.kernels.cpu.states import NativeMixer
from penstock.engine.kernels.cpu.steps import NativeStep, NativeSteps

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
