"""The storage of quantized weights in the cache of `--quantize`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.engine.quant.codebook import Codebook
from penstock.engine.quant.float8 import Float8
from penstock.engine.quant.formats import NamedTensors, Rounding
from penstock.engine.quant.integers import Factors, Integers
from penstock.engine.quant.storage import StoredTensor
from penstock.engine.quant.storages.packing import Codes


@dataclass(frozen=True, slots=True)
class KeptTensors:
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
        wide = "F8_E4M3" if isinstance(self.quantized, Float8) else "I8"
        types = {"weight": wide, "permutation": "I32"}
        factors = "F32"
        if isinstance(self.quantized, Integers) and self.quantized.factors is Factors.HALF:
            factors = "BF16"
        for suffix, shape in self.quantized.shapes(out_features, in_features):
            if suffix == "weight" and (codes := self._codes) is not None:
                yield StoredTensor(suffix, codes.shape(out_features, in_features), (codes.word,))
            else:
                yield StoredTensor(suffix, shape, (types.get(suffix, factors),))

    def store(self, tensors: NamedTensors) -> NamedTensors:
        """The tensors of the format as they are stored."""
        codes = self._codes
        return tensors if codes is None else {**tensors, "weight": codes.pack(tensors["weight"])}

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        if (codes := self._codes) is None:
            return tensors
        rows, columns = codes.size(tuple(tensors["weight"].shape))
        weight = codes.unpack(tensors["weight"], rows, columns)
        if isinstance(self.quantized, Integers):
            weight = weight.view(torch.int8)
        return {**tensors, "weight": weight.sub_(codes.bias)}

    @property
    def _codes(self) -> Codes | None:
        """The way that numbers of 4 bits are stored; None where weights have a byte each."""
        match self.quantized:
            case Codebook():
                return Codes("weight", 4, "U8")
            case Integers(bits=4):
                return Codes("weight", 4, "U8", bias=-self.quantized.lowest)
        return None
