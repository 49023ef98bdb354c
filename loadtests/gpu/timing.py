"""Measures the time of work on a device, without the host's part."""

from __future__ import annotations

import statistics
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass

import torch

from loadtests.gpu.figures import emit_skip, say

_REPEATS = 7
_BATCH_S = 0.02
"""Calls are timed in batches of about so long."""


def seconds(device: torch.device, run: Callable[[], object]) -> float:
    """One call's share of a batch of calls: the median of some batches.

    On CUDA a batch is one graph if `run` can be captured, so that the device never waits for the host; else calls are
    launched one after another.
    """
    run()
    if device.type != "cuda":
        return _on_host(run)
    torch.cuda.synchronize(device)
    once_s = _elapsed(run)
    num_calls = max(1, min(200, int(_BATCH_S / max(once_s, 1e-6))))
    batch = _batch(run, num_calls)
    batch()
    return statistics.median(_elapsed(batch) for _ in range(_REPEATS)) / num_calls


def _on_host(run: Callable[[], object]) -> float:
    times_s = []
    for _ in range(_REPEATS):
        started_s = time.perf_counter()
        run()
        times_s.append(time.perf_counter() - started_s)
    return statistics.median(times_s)


def _batch(run: Callable[[], object], num_calls: int) -> Callable[[], object]:
    def calls() -> None:
        for _ in range(num_calls):
            run()

    graph = torch.cuda.CUDAGraph()
    try:
        with torch.cuda.graph(graph):
            calls()
    except RuntimeError:  # something in it waits for the device
        torch.cuda.synchronize()
        return calls
    return graph.replay


def _elapsed(run: Callable[[], object]) -> float:
    start, end = event(), event()
    start.record()
    run()
    end.record()
    end.synchronize()
    return float(start.elapsed_time(end)) / 1000


def event() -> torch.cuda.Event:
    """One that knows when it was."""
    return torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]


@dataclass(frozen=True, slots=True)
class Ceilings:
    """The limits of a device."""

    bytes_per_s: float
    """Read and written by a copy."""
    flop_per_s: float
    """The rate of a product of large matrices in 16 bits."""

    @classmethod
    def measured(cls, size: int, copied_bytes: int, dtype: torch.dtype, device: torch.device) -> Ceilings:
        left, right = torch.randn(2, size, size, device=device).to(dtype)
        flop_per_s = 2 * size**3 / seconds(device, lambda: left @ right)
        source = torch.zeros(copied_bytes, dtype=torch.uint8, device=device)
        target = torch.empty_like(source)
        return cls(2 * source.nbytes / seconds(device, lambda: target.copy_(source)), flop_per_s)


def measure_each(part: str, what: str, measures: Mapping[str, Callable[[], None]]) -> int:
    """Takes the measures of a part by name; its exit status: 1 if one failed, of what is measured there.

    Raises:
        torch.AcceleratorError: the device serves this process no more.
    """
    status = 0
    for name, measure in measures.items():
        say(f"{part}: {name}")
        try:
            measure()
        except torch.AcceleratorError:
            raise
        except Exception as error:  # whatever a kernel does wrong, the others are measured
            traceback.print_exc()
            emit_skip(f"{what}, {name}", f"{type(error).__name__}: {error}")
            status = 1
    return status
