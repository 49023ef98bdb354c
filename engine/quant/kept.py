"""Quantized weights as the cache of what `--quantize` made stores them."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from engine.quant.codebook import Codebook
from engine.quant.float8 import Float8
from engine.quant.formats import NamedTensors, Rounding
from engine.quant.integers import Integers
from engine.quant.storage import StoredTensor
from engine.quant.storages.packing import unpack_nibbles


@dataclass(frozen=True, slots=True)
class Kept:
    """The tensors of a format as they are, except that two numbers of 4 bits share a byte.

    The low half of byte j of a row has number 2j, the high half number 2j + 1, both less the least that there is.
    """

    quantized: Rounding

    @property
    def name(self) -> str:
        return f"{self.quantized.name} from the cache"

    def format(self, out_features: int, in_features: int) -> Rounding:  # noqa: ARG002
        return self.quantized

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        for suffix, shape, dtype in self.stored(out_features, in_features):
            yield StoredTensor(suffix, shape, (dtype,))

    def stored(self, out_features: int, in_features: int) -> Iterator[tuple[str, tuple[int, ...], str]]:
        """(suffix, shape, type as safetensors names it) of what `store` makes."""
        types = {"weight": self._type, "permutation": "I32"}
        for suffix, shape in self.quantized.shapes(out_features, in_features):
            if suffix == "weight" and self._lowest is not None:
                yield suffix, (out_features, in_features // 2), "U8"
            else:
                yield suffix, shape, types.get(suffix, "F32")

    def store(self, tensors: NamedTensors) -> NamedTensors:
        """The tensors of the format as they are stored."""
        if self._lowest is None:
            return tensors
        halves = (tensors["weight"] - self._lowest).view(torch.uint8)
        return {**tensors, "weight": halves[:, ::2] | halves[:, 1::2] << 4}

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        if self._lowest is None:
            return tensors
        halves = unpack_nibbles(tensors["weight"])
        if isinstance(self.quantized, Integers):
            halves = halves.view(torch.int8)
        return {**tensors, "weight": halves.add_(self._lowest)}

    @property
    def _type(self) -> str:
        """The type of weights that have a byte each."""
        return "F8_E4M3" if isinstance(self.quantized, Float8) else "I8"

    @property
    def _lowest(self) -> int | None:
        """The least number of 4 bits; None where weights have a byte each."""
        match self.quantized:
            case Codebook():
                return 0
            case Integers(bits=4):
                return self.quantized.lowest
        return None
