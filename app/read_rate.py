"""How fast a device reads its own memory, which bounds the tokens of a single stream."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress

import torch

from penstock.app.measures import measure_memory
from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library

_CPU_BYTES, _GPU_BYTES = 1 << 28, 1 << 31
"""More than caches hold."""
_NUM_READS = 5


def read_rate(device: str, *, has_native: bool, clock: Callable[[], float] = time.perf_counter) -> float:
    """Measures the bytes a second of "cpu" or "cuda": as native kernels read, or by sums over a large tensor."""
    if device == "cpu" and has_native:
        with suppress(NativeUnavailable):
            return 1e9 * measure_memory(load_library(lambda _: None).start_team())
    num_bytes = _GPU_BYTES if device == "cuda" else _CPU_BYTES
    numbers = torch.ones(num_bytes // 4, device=device)
    best_s = min(_read_s(numbers, clock) for _ in range(_NUM_READS))
    return num_bytes / max(best_s, 1e-9)


def _read_s(numbers: torch.Tensor, clock: Callable[[], float]) -> float:
    started = clock()
    numbers.sum().item()  # which waits for the device
    return clock() - started
