"""An order of replicas by load, so that the least loaded of any set are found without looking at all."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from math import floor, log

CLOSE = 1.05
"""The factor within which forecasts are taken as equal."""


class LoadOrder:
    """Slots of replicas in buckets by their forecast for a short request; a set of replicas is an integer of bits."""

    def __init__(self) -> None:
        self._buckets: dict[int, int] = {}
        """The bits of the replicas in each bucket that has any."""
        self._ascending: list[int] = []
        """The buckets that have any, in ascending order."""
        self._bucket_of: dict[int, int] = {}

    def put(self, bit: int, forecast_s: float) -> None:
        bucket = floor(log(max(forecast_s, 1e-9)) / log(CLOSE))
        if self._bucket_of.get(bit) != bucket:
            self.drop(bit)
            self._bucket_of[bit] = bucket
            if bucket not in self._buckets:
                insort(self._ascending, bucket)
            self._buckets[bucket] = self._buckets.get(bucket, 0) | bit

    def drop(self, bit: int) -> None:
        bucket = self._bucket_of.pop(bit, None)
        if bucket is not None:
            self._buckets[bucket] &= ~bit
            if not self._buckets[bucket]:
                del self._buckets[bucket]
                del self._ascending[bisect_left(self._ascending, bucket)]

    def least(self, among: int, later: int) -> Iterator[int]:
        """Yields the slots of `among`, the least loaded first; in a bucket, those of `later` come last."""
        for bucket in self._ascending:
            some = self._buckets[bucket] & among
            if some:
                yield from slots(some & ~later)
                yield from slots(some & later)
                among &= ~some
                if not among:
                    return


def slots(bits: int) -> Iterator[int]:
    while bits:
        low = bits & -bits
        yield low.bit_length() - 1
        bits ^= low
