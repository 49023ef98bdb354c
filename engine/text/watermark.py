"""Watermarks: tokens that are chosen more often than chance has it, which only the holder of a key can see.

A key divides the vocabulary anew after each token: a token id is green after the token before it if a hash of the key
and both ids says so, which it does for a share gamma of the vocabulary. The logits of green tokens get delta more
before anything else looks at them (`sampling.marks`); a text that has more green tokens than chance explains was made
with the key. The hash is an integer hash: it is the same on every device, and it needs no list of random numbers.
Kirchenbauer, Geiping, Wen, Katz, Miers and Goldstein, "A Watermark for Large Language Models", ICML 2023.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b
from itertools import pairwise
from math import erfc, sqrt

from penstock.engine.hashing import hash_of, split_mix

GAMMA, DELTA = 0.5, 2.0
"""Text Generation Inference's values."""
MIN_SECRET_BYTES = 16


@dataclass(frozen=True, slots=True, kw_only=True)
class Watermark:
    """The key and the strength of a watermark."""

    key: int = field(repr=False)
    """64 bits."""
    gamma: float = GAMMA
    """The share of the vocabulary that is green, between 0 and 1."""
    delta: float = DELTA
    """What the logits of green tokens get more; a text is read with any."""

    @classmethod
    def of_secret(cls, secret: bytes, gamma: float = GAMMA, delta: float = DELTA) -> Watermark:
        """Makes the watermark of a secret, whose spaces and line ends at both ends do not count.

        Raises:
            ValueError: the secret is shorter than MIN_SECRET_BYTES.
        """
        secret = secret.strip()
        if len(secret) < MIN_SECRET_BYTES:
            raise ValueError(f"the key must have at least {MIN_SECRET_BYTES} bytes, not {len(secret)}")
        digest = blake2b(secret, digest_size=8, person=b"penstock-mark").digest()
        return cls(key=int.from_bytes(digest, "little"), gamma=gamma, delta=delta)

    @property
    def bound(self) -> int:
        """The hash below which a token is green, of 32 bits as well."""
        return min(round(self.gamma * (1 << 32)), (1 << 32) - 1)

    def is_green(self, previous: int, token_id: int) -> bool:
        return hash_of(split_mix(self.key, previous), token_id) < self.bound


@dataclass(frozen=True, slots=True, kw_only=True)
class Evidence:
    """How many tokens of a text are green."""

    num_scored: int
    """Distinct pairs of a token and the one before it. What a text repeats says nothing new of it."""
    num_green: int
    gamma: float

    @property
    def z(self) -> float:
        """The standard deviations by which green tokens are more than chance has them; needs a pair."""
        expected = self.gamma * self.num_scored
        return (self.num_green - expected) / sqrt(expected * (1 - self.gamma))

    @property
    def p_value(self) -> float:
        """The probability of as large a z without the watermark, by the normal distribution."""
        return erfc(self.z / sqrt(2)) / 2


def evidence(token_ids: Sequence[int], watermark: Watermark) -> Evidence:
    """Counts the green tokens of a text; its first token has none before it, and is not counted."""
    pairs = set(pairwise(token_ids))
    num_green = sum(watermark.is_green(*pair) for pair in pairs)
    return Evidence(num_scored=len(pairs), num_green=num_green, gamma=watermark.gamma)
