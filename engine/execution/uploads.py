"""Small arrays on their way from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

_ALIGNMENT = 4
"""The words between aligned places, 16 bytes: kernels are compiled anew for pointers that are aligned otherwise."""


def send_apart(parts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """Sends int32 arrays in one piece, in which each is aligned; returns each on the device.

    The host does not wait: torch keeps the pinned memory until the device has read it. On a CPU nothing is copied.
    """
    sizes = [len(part) for part in parts]
    starts = part_starts(sizes)
    array = np.zeros(starts[-1], np.int32)
    for start, part in zip(starts, parts, strict=False):
        array[start : start + len(part)] = part
    words = torch.from_numpy(array)
    if device.type == "cuda":
        words = words.pin_memory()
    return cut(words.to(device, non_blocking=True), sizes)


def cut(words: Tensor, sizes: Sequence[int]) -> list[Tensor]:
    """Aligned parts of these sizes that lie one after another in `words`."""
    return [words[start : start + size] for start, size in zip(part_starts(sizes), sizes, strict=False)]


def part_starts(sizes: Sequence[int]) -> list[int]:
    """The words at which aligned parts of these sizes start one after another, and the word at which they end."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts
