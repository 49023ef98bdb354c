"""Turns errors of the device into planning's own."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch

from penstock.engine.execution.seats import Seats
from penstock.engine.planning.device import DeviceError, OutOfMemory
from penstock.engine.planning.step import StepPlan


@contextmanager
def told(plan: StepPlan, seats: Seats, device: torch.device) -> Iterator[None]:
    """Raises the errors of a plan in planning's terms; the state of its sequences is sent to the device again.

    Raises:
        OutOfMemory: in place of the errors by which the device says so.
        DeviceError: the device is lost.
    """
    try:
        yield
    except Exception as error:
        seats.distrust(plan)
        if _is_out_of_memory(error):
            _give_back_cached(device)
            raise OutOfMemory(str(error)) from error
        if isinstance(error, torch.AcceleratorError):
            raise DeviceError(str(error)) from error
        raise


def _is_out_of_memory(error: Exception) -> bool:
    """Returns whether CUDA, a native kernel or torch's CPU allocator (which has no error of its own) lacked memory."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or "DefaultCPUAllocator" in str(error)


def _give_back_cached(device: torch.device) -> None:
    """Frees memory that torch keeps for itself, in pieces that nothing fitted into."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)  # and pinned buffers, however often the step is launched again
        torch.cuda.empty_cache()
