"""Measures work in a device's queue, without waiting for it."""

from __future__ import annotations

import time

import torch


class DeviceClock:
    """Runs from its making until it is stopped: on a GPU as its queue goes, on a CPU as time does."""

    def __init__(self, device: torch.device) -> None:
        self._events: list[torch.cuda.Event] = []
        if device.type == "cuda":
            self._events = [torch.cuda.Event(enable_timing=True) for _ in range(2)]  # type: ignore[no-untyped-call]
            self._events[0].record()
        self._started_s, self._host_s = time.perf_counter(), 0.0

    def stop(self) -> None:
        self._host_s = time.perf_counter() - self._started_s
        if self._events:
            self._events[1].record()

    def seconds(self) -> float:
        """Seconds of the work; called when the device has done it."""
        if not self._events:
            return self._host_s
        return float(self._events[0].elapsed_time(self._events[1])) / 1000
