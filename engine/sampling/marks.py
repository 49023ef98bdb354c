"""Watermarks of running sequences, in plain torch: green tokens get more before any implementation chooses.

The bits that make a token green are those of `text.watermark`: a row's key is output `previous` of the SplitMix64
generator with the watermark's key as its state, and a token's hash is `hashing.hash_of` under it. Hashes are computed
in 32 bits, which is several times as fast as in the 64 of `noise.hashes`: their products wrap around.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.hashing import HASH_1, HASH_2
from penstock.engine.sampling.noise import noise_keys
from penstock.engine.text.watermark import Watermark

_HALF = 1 << 31
_AT_ONCE = {"cpu": 1 << 18}
"""Hashes whose intermediate values stay in a CPU's cache."""
_AT_ONCE_ELSEWHERE = 1 << 23
"""Their memory is no part of what is planned."""


class Marks:
    """The watermarks of the sequences in all seats, on the device."""

    def __init__(self, num_seats: int, device: torch.device) -> None:
        self._keys = torch.zeros(num_seats, dtype=torch.int64, device=device)
        self._bounds = torch.zeros(num_seats, dtype=torch.int32, device=device)
        """2^31 less than the bounds, as hashes are where they are compared."""
        self._deltas = torch.zeros(num_seats, device=device)
        self._seats: set[int] = set()
        """The seats whose sequences have a watermark."""
        self._at_once = _AT_ONCE.get(device.type, _AT_ONCE_ELSEWHERE)

    def assign(self, seat: int, watermark: Watermark | None) -> bool:
        """Takes the watermark of the sequence that gets a seat, if it has one; says whether it has."""
        if watermark is None:
            if seat in self._seats:
                self._seats.remove(seat)
                self._deltas[seat] = 0
            return False
        key = watermark.key
        self._keys[seat] = key - (1 << 64) if key >> 63 else key
        self._bounds[seat], self._deltas[seat] = watermark.bound - _HALF, watermark.delta
        self._seats.add(seat)
        return True

    def marked(self, logits: Tensor, seats: Tensor, previous: Tensor) -> Tensor:
        """Returns [R, vocab] float32: the logits, with delta added to those of each row's green tokens.

        Args:
            logits: [R, vocab]; they are not changed.
            seats: [R] int32, -1 for padding.
            previous: [R] int32, the token before the one that a row chooses.
        """
        values, places = logits.to(torch.float32, copy=True), seats.clamp(min=0).long()
        token_ids = torch.arange(logits.shape[1], dtype=torch.int32, device=logits.device)
        halves = noise_keys(self._keys[places], previous).view(torch.int32).view(-1, 2)
        bounds, deltas = self._bounds[places, None], self._deltas[places, None]
        rows = torch.arange(len(seats), device=logits.device)
        if not rows.is_cuda:  # where it takes no waiting to know which have one
            rows = rows[deltas[:, 0] > 0]
        for some in torch.split(rows, max(1, self._at_once // logits.shape[1])):
            hashes = token_ids ^ halves[some, :1]  # the low half first, wherever torch runs
            _finalize(hashes)
            hashes ^= halves[some, 1:]
            _finalize(hashes)
            hashes ^= -_HALF
            values.index_add_(0, some, torch.where(hashes < bounds[some], deltas[some], 0.0))
        return values


def _finalize(values: Tensor) -> None:
    """MurmurHash3's finalizer, in place, of int32 that stand for unsigned numbers."""
    _mix(values, 16)
    values *= HASH_1 - (1 << 32)
    _mix(values, 13)
    values *= HASH_2 - (1 << 32)
    _mix(values, 16)


def _mix(values: Tensor, bits: int) -> None:
    """Does values ^= values >> bits, in place, with zeros brought in."""
    shifted = values >> bits
    shifted &= (1 << (32 - bits)) - 1
    values ^= shifted
