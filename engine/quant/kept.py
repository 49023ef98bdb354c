"""Integers as the cache of quantized weights stores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.quant.formats import NamedTensors
from engine.quant.integers import Integers
from engine.quant.storage import StoredTensor
from engine.quant.storages.packing import unpack_nibbles

_DTYPES = {"weight": "I8", "permutation": "I32"}
"""The types of the tensors that a weight of integers may have, but for float32."""


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
        for suffix, shape, dtype in self.stored(out_features, in_features):
            yield StoredTensor(suffix, shape, (dtype,))

    def stored(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(suffix, shape, type as safetensors names it) of what `store` makes."""
        for suffix, shape in self.integers.shapes(out_features, in_features):
            if suffix == "weight" and self.integers.bits == 4:
                yield suffix, (out_features, in_features // 2), "U8"
            else:
                yield suffix, shape, _DTYPES.get(suffix, "F32")

    def store(self, tensors: NamedTensors) -> NamedTensors:
        """The tensors of the format as they are stored."""
        if self.integers.bits == 8:
            return tensors
        halves = (tensors["weight"] - self.integers.lowest).view(torch.uint8)
        return {**tensors, "weight": halves[:, ::2] | halves[:, 1::2] << 4}

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        if self.integers.bits == 8:
            return tensors
        halves = unpack_nibbles(tensors["weight"]).view(torch.int8)
        return {**tensors, "weight": halves.add_(self.integers.lowest)}
