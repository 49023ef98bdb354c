"""Small arrays on their way from the host to the device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

I32 = NDArray[np.int32]

_NUM_BUFFERS = 4
"""More than there are steps in flight; a launch that found no room waits for the device before it is tried again."""
_ALIGNMENT = 4
"""In words, 16 bytes: kernels are compiled anew for pointers that are aligned otherwise."""


class Uploader:
    """Sends int32 arrays by way of pinned memory, without waiting for the device. Buffers grow with what is sent."""

    def __init__(self, device: torch.device, num_words: int) -> None:
        self._device = device
        self._buffers = [_pinned(num_words) for _ in range(_NUM_BUFFERS if device.type == "cuda" else 0)]
        self._turn = 0

    def send_parts(self, parts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The arrays on the device, sent in one piece, each aligned."""
        return _parts_of(self.send(_words_of(parts)), parts)

    def send(self, words: I32) -> Tensor:
        """The words on the device; called at most once for each step. On a CPU they are not copied."""
        if not self._buffers:
            return torch.from_numpy(words).to(self._device)
        self._turn = (self._turn + 1) % len(self._buffers)
        if len(words) > len(self._buffers[self._turn]):
            self._buffers[self._turn] = _pinned(1 << (len(words) - 1).bit_length())
        buffer = self._buffers[self._turn][: len(words)]
        buffer.copy_(torch.from_numpy(words))
        return buffer.to(self._device, non_blocking=True)


def send_apart(parts: Sequence[Sequence[int]], device: torch.device) -> list[Tensor]:
    """As `Uploader.send_parts`, any number of times in a step: torch keeps the pinned memory until it was read."""
    words = torch.from_numpy(_words_of(parts))
    if device.type == "cuda":
        words = words.pin_memory()
    return _parts_of(words.to(device, non_blocking=True), parts)


def part_starts(sizes: Sequence[int]) -> list[int]:
    """Where aligned parts of these sizes start if they lie one after another, and where the last one ends."""
    starts = [0]
    for size in sizes:
        starts.append(starts[-1] + -(-size // _ALIGNMENT) * _ALIGNMENT)
    return starts


def _words_of(parts: Sequence[Sequence[int]]) -> I32:
    """The arrays in one piece, each aligned."""
    starts = part_starts([len(part) for part in parts])
    words = np.zeros(starts[-1], np.int32)
    for start, part in zip(starts, parts, strict=False):
        words[start : start + len(part)] = part
    return words


def _parts_of(words: Tensor, parts: Sequence[Sequence[int]]) -> list[Tensor]:
    """The arrays that `_words_of` put together."""
    starts = part_starts([len(part) for part in parts])
    return [words[start : start + len(part)] for start, part in zip(starts, parts, strict=False)]


def _pinned(num_words: int) -> Tensor:
    return torch.empty(num_words, dtype=torch.int32, pin_memory=True)
