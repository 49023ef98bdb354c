"""The machine's limits: how fast it reads memory, and how fast each instruction multiplies and adds."""

from __future__ import annotations

import math
from dataclasses import dataclass

from penstock.app.bench.arithmetic import Arithmetic
from penstock.app.bench.workloads import Workload

FLOAT_INSTRUCTIONS = ("fma8", "fma16")
BFLOAT_INSTRUCTIONS = ("pairs_bf16", "tile_bf16")
INT8_INSTRUCTIONS = ("bytes8", "vnni", "tile_int8")
LABELS = {
    "fma8": "float32 FMA, 8 wide",
    "fma16": "float32 FMA, 16 wide",
    "pairs_bf16": "AVX-512 BF16",
    "vnni": "VNNI, int8",
    "tile_bf16": "AMX tiles, bfloat16",
    "tile_int8": "AMX tiles, int8",
    "bytes8": "AVX2, int8",
}


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The rates of all cores together."""

    memory_gb_per_s: float
    """Reading what no cache holds."""
    peaks: dict[str, float]
    """Billions of operations a second of each instruction, from registers or the first cache; 0 where there is none."""

    def or_better(self, other: Ceilings) -> Ceilings:
        """The higher of two measurements of each rate: other processes only ever make one lower."""
        peaks = {name: max(peak, other.peaks[name]) for name, peak in self.peaks.items()}
        return Ceilings(max(self.memory_gb_per_s, other.memory_gb_per_s), peaks)

    def products_per_s(self, factor_bytes: int) -> float:
        """Operations a second of the fastest instruction that multiplies numbers of this size as they are."""
        names = list(FLOAT_INSTRUCTIONS)
        if factor_bytes <= 2:
            names += BFLOAT_INSTRUCTIONS
        if factor_bytes <= 1:
            names += INT8_INSTRUCTIONS
        return 1e9 * max((self.peaks[name] for name in names if name in self.peaks), default=math.nan)

    def floor_s(self, flop: float, num_bytes: float, factor_bytes: int) -> float:
        """The least seconds in which so much can be computed and read, if both overlap entirely."""
        return max(flop / self.products_per_s(factor_bytes), num_bytes / (self.memory_gb_per_s * 1e9))


_LEAST_FLOAT = 1.9
"""Bytes a weight of a checkpoint that is not quantized, less what rounding hides."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """Bytes of the numbers that a server keeps and multiplies."""

    weight: float
    """Scales of quantized weights are not reckoned with."""
    kv: float
    """A number of the KV cache."""
    factor: int
    """The number that a weight is multiplied as: 4 for float32."""

    @classmethod
    def of(
        cls, dtype: str, quantize: str | None = None, kv_dtype: str | None = None, stored: float = 2.0
    ) -> Sizes:
        """The sizes of `penstock serve` with these options, for a checkpoint with so many bytes a weight.

        Weights of fewer bytes than a bfloat16 has are quantized already, and may be multiplied as integers.
        """
        weight = 4 if dtype == "float32" else 2
        kv = {"float32": 4, "float16": 2, "bfloat16": 2, "int8": 1, "fp8": 1, "int4": 0.5}.get(
            kv_dtype or "auto", weight
        )
        if quantize is None:
            is_quantized = stored < _LEAST_FLOAT
            return cls(stored if is_quantized else weight, kv, 1 if is_quantized else weight)
        factor = 1 if quantize in ("int8", "int4") else 2
        return cls(0.5 if quantize in ("int4", "nf4") else 1.0, kv, factor)


def most_tokens_per_s(workload: Workload, arithmetic: Arithmetic, sizes: Sizes, ceilings: Ceilings) -> float:
    """Output tokens a second that no server can exceed on this machine.

    The streams go in step, weights and KV cache are read once a step, and a prefix that is shared is computed once.
    Attention's arithmetic and what runs beside the streams count as nothing.
    """
    steps = workload.rounds * (workload.output_tokens - 1)
    prompts = workload.streams * workload.rounds * workload.prompt_tokens + workload.shared_tokens
    outputs = workload.streams * workload.rounds * workload.output_tokens
    context = workload.shared_tokens + workload.prompt_tokens + workload.output_tokens / 2
    weights = arithmetic.per_output_token / 2 * sizes.weight
    kv = workload.streams * context * arithmetic.kv * sizes.kv
    flop = arithmetic.total(prompts, outputs) - workload.streams * workload.rounds * arithmetic.body
    return outputs / ceilings.floor_s(flop, steps * (weights + kv), sizes.factor)


def measure(threads: int) -> Ceilings:
    """Runs the measuring loops of the native kernels; nothing is known where there are no native kernels."""
    # Not above: the figures are read where torch is not needed.
    from penstock.app.measures import INSTRUCTIONS, measure_memory, measure_peak
    from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library

    try:
        team = load_library(lambda _: None).start_team(threads)
    except NativeUnavailable:
        return Ceilings(math.nan, {})
    return Ceilings(measure_memory(team), {name: measure_peak(team, name) for name in INSTRUCTIONS})
