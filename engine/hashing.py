"""Hashes of integers in plain Python; `sampling.noise` has the same for tensors."""

from __future__ import annotations

_MASK = (1 << 64) - 1
GAMMA = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
HASH_1, HASH_2 = 0x85EBCA6B, 0xC2B2AE35


def split_mix(seed: int, number: int) -> int:
    """Output `number` (from 0) of the SplitMix64 generator seeded with `seed` modulo 2^64."""
    mixed = (seed + (number + 1) * GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * MIX_1) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * MIX_2) & _MASK
    return mixed ^ (mixed >> 31)


def hash_of(key: int, token_id: int) -> int:
    """The 32 bits of a token id under a key of 64 bits: MurmurHash3's finalizer once for each half of the key."""
    return _finalized(_finalized(token_id ^ (key & 0xFFFFFFFF)) ^ (key >> 32))


def _finalized(mixed: int) -> int:
    mixed = ((mixed ^ (mixed >> 16)) * HASH_1) & 0xFFFFFFFF
    mixed = ((mixed ^ (mixed >> 13)) * HASH_2) & 0xFFFFFFFF
    return mixed ^ (mixed >> 16)
