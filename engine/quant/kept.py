"""Integers as the cache of quantized weights stores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.quant.formats import NamedTensors
from engine.quant.integers import Integers
from engine.quant.storage import StoredTensor

_DTYPES = ("I8", "U8", "I32", "F32")
"""The types of all tensors that a weight of integers may have."""


@dataclass(frozen=True, slots=True)
class Kept:
    """The tensors of a format of integers as they are, except that two integers of 4 bits share a byte.

    The low half of byte j of a row has integer 2j, the high half integer 2j + 1, both less `Integers.lowest`.
    """

    integers: Integers

    @property
    def name(self) -> str:
        return f"{self.integers.name} from the cache"

    def format(self, out_features: int, in_features: int) -> Integers:  # noqa: ARG002
        return self.integers

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        for suffix, shape in self.integers.shapes(out_features, in_features):
            halves = suffix == "weight" and self.integers.bits == 4
            yield StoredTensor(suffix, (out_features, in_features // 2) if halves else shape, _DTYPES)

    def store(self, tensors: NamedTensors) -> NamedTensors:
        """The tensors of the format as they are stored."""
        if self.integers.bits == 8:
            return tensors
        halves = (tensors["weight"] - self.integers.lowest).view(torch.uint8)
        return {**tensors, "weight": halves[:, ::2] | halves[:, 1::2] << 4}

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        if self.integers.bits == 8:
            return tensors
        # The low byte of a pair is the first: memory is little-endian, as it is in safetensors.
        pairs = tensors["weight"].short()
        halves = pairs.bitwise_or_(pairs << 4).bitwise_and_(0x0F0F).view(torch.int8)
        return {**tensors, "weight": halves.add_(self.integers.lowest)}
