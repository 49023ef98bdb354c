"""Counter-based random numbers: the noise of every token of every position, without state.

The noise key of output token t of choice i is output t of a SplitMix64 generator whose state is output i of the
SplitMix64 generator seeded with the request's seed (Steele, Lea and Flood, "Fast splittable pseudorandom number
generators", OOPSLA 2014). Any output of SplitMix64 can be computed without the earlier ones, so nothing is stored that
a preemption, a fork or another batch could change.

The noise of token id v is a hash of v under the two halves of that key: Appleby's 32-bit finalizer of MurmurHash3,
once for each half. Two models that draw with the same key see the same noise at the same token id, so that similar
distributions mostly choose the same token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from penstock.engine.hashing import GAMMA, HASH_1, HASH_2, MIX_1, MIX_2


def noise_keys(states: Tensor, numbers: Tensor) -> Tensor:
    """[R] int64: output `numbers[r]` of the SplitMix64 generator with state `states[r]`; int64 stands for uint64."""
    mixed = states + (numbers.long() + 1) * _signed(GAMMA)
    mixed = (mixed ^ _shifted(mixed, 30)) * _signed(MIX_1)
    mixed = (mixed ^ _shifted(mixed, 27)) * _signed(MIX_2)
    return mixed ^ _shifted(mixed, 31)


def hashes(keys: Tensor, num_tokens: int, first: int = 0) -> Tensor:
    """[R, num_tokens] int64 in [0, 2^32): the random bits of token ids from `first` on under each row's key [R]."""
    token_ids = torch.arange(first, first + num_tokens, device=keys.device)
    low, high = (keys & 0xFFFFFFFF)[:, None], _shifted(keys, 32)[:, None]
    return _finalized(_finalized(token_ids ^ low) ^ high)


def gumbel(bits: Tensor) -> Tensor:
    """Standard Gumbel noise (float32) of 32 random bits each: -log(E) with E = -log(1 - u), u = (bits + 1/2) / 2^32.

    E is computed to float32's precision where it is small, which is where a token wins: u itself if 1 - u rounds to 1,
    else log(y) * u / (y - 1) with y = 1 - u (Kahan's log1p); above u = 1/2 from 1 - u, which is exact in the bits. The
    noise lies in [-3.14, 22.88].
    """
    is_low = bits < 1 << 31
    u = (torch.where(is_low, bits, 0xFFFFFFFF - bits).float() + 0.5) * 2.0**-32
    y = torch.where(is_low, 1.0 - u, u)
    log = y.log()
    corrected = torch.where(y == 1.0, u, log * (u / (y - 1.0)))
    return -torch.where(is_low, corrected, -log).log()


def _finalized(values: Tensor) -> Tensor:
    """A bijection of 32-bit numbers, kept in int64."""
    mixed = values ^ (values >> 16)
    mixed = (mixed * HASH_1) & 0xFFFFFFFF
    mixed = mixed ^ (mixed >> 13)
    mixed = (mixed * HASH_2) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)


def _shifted(values: Tensor, bits: int) -> Tensor:
    """A shift to the right that brings in zeros."""
    return (values >> bits) & ((1 << (64 - bits)) - 1)


def _signed(constant: int) -> int:
    return constant - (1 << 64)
