"""Watermarks of running sequences, in plain torch: green tokens get more before any implementation chooses.

The bits that make a token green are those of `text.watermark`: the row's key is output `previous` of the SplitMix64
generator with the watermark's key as its state, and a token's hash under it is the noise's (see `noise.py`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.sampling.noise import hashes, noise_keys
from penstock.engine.text.watermark import Watermark

_HASHES_AT_ONCE = 1 << 22
"""Their intermediate values, 8 bytes each, are no part of the memory that is planned."""


class Marks:
    """The watermarks of the sequences in all seats, on the device."""

    def __init__(self, num_seats: int, device: torch.device) -> None:
        self._keys, self._bounds = torch.zeros(2, num_seats, dtype=torch.int64, device=device)
        self._deltas = torch.zeros(num_seats, device=device)
        self._seats: set[int] = set()
        """The seats whose sequences have a watermark."""

    def assign(self, seat: int, watermark: Watermark | None) -> bool:
        """Takes the watermark of the sequence that gets a seat, if it has one; says whether it has."""
        if watermark is None:
            if seat in self._seats:
                self._seats.remove(seat)
                self._deltas[seat] = 0
            return False
        key = watermark.key
        self._keys[seat] = key - (1 << 64) if key >> 63 else key
        self._bounds[seat], self._deltas[seat] = watermark.bound, watermark.delta
        self._seats.add(seat)
        return True

    def marked(self, logits: Tensor, seats: Tensor, previous: Tensor) -> Tensor:
        """Returns [R, vocab] float32: the logits, with delta added to those of each row's green tokens.

        Args:
            logits: [R, vocab]; they are not changed.
            seats: [R] int32, -1 for padding.
            previous: [R] int32, the token before the one that a row chooses.
        """
        values, num_rows = logits.to(torch.float32, copy=True), max(1, _HASHES_AT_ONCE // logits.shape[1])
        places = seats.clamp(min=0).long()
        keys = noise_keys(self._keys[places], previous)
        bounds, deltas = self._bounds[places, None], self._deltas[places, None]
        for first in range(0, len(seats), num_rows):
            rows = slice(first, first + num_rows)
            is_green = hashes(keys[rows], logits.shape[1]) < bounds[rows]
            values[rows] += torch.where(is_green, deltas[rows], 0.0)
        return values
