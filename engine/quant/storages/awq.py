"""AWQ checkpoints of AutoAWQ in the order that its `gemm` kernels read.

(Lin et al., AWQ: Activation-aware Weight Quantization for LLM Compression and Acceleration, 2024.)
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from engine.fields import Fields
from engine.quant.formats import NamedTensors
from engine.quant.integers import Integers
from engine.quant.storage import Storages, StoredTensor
from engine.quant.storages.names import LM_HEAD, all_but, excluded
from engine.quant.storages.packing import (
    check_words,
    finite_as_stored,
    group_size,
    integer_among,
    integers_format,
    text_among,
    to_integers,
    unpack_words,
)

_BITS = 4
_NIBBLES = (0, 4, 1, 5, 2, 6, 3, 7)
"""The nibble of a word that holds each of eight outputs side by side, the lowest bits being nibble 0."""


@dataclass(frozen=True, slots=True)
class Awq:
    """Integers of 4 bits in 32-bit words that hold outputs side by side: the weight is (q - zero) * scale.

    qweight: [in, out / 8]
    qzeros: [groups, out / 8]
    scales: [groups, out]
    """

    group_size: int | None

    @property
    def name(self) -> str:
        return "AWQ, 4 bits"

    def format(self, out_features: int, in_features: int) -> Integers:
        check_words(_BITS, out_features, "outputs")
        return integers_format(_BITS, self.group_size, in_features, has_zeros=True)

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        num_groups = in_features // self.format(out_features, in_features).group_size
        yield StoredTensor("qweight", (in_features, out_features // 8), ("I32",))
        yield StoredTensor("qzeros", (num_groups, out_features // 8), ("I32",))
        yield StoredTensor("scales", (num_groups, out_features))

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        codes, zeros = _in_order(tensors["qweight"]), _in_order(tensors["qzeros"])
        scale = finite_as_stored(tensors, "scales").T
        return to_integers(self.format(*codes.shape), codes, scale, zeros)


def awq_storages(fields: Fields) -> Storages:
    """The storages of `quant_method` awq: all linear maps of layers but those in `modules_to_not_convert`.

    Raises:
        CheckpointError: naming the field that is malformed or not supported.
    """
    integer_among(fields, "bits", _BITS, default=_BITS)
    text_among(fields, "version" if fields.has("version") else "format", "gemm", default="gemm")
    is_excluded = excluded(fields, "modules_to_not_convert")
    return all_but(Awq(group_size(fields, 128)), lambda name: name == LM_HEAD or is_excluded(name))


def _in_order(words: Tensor) -> Tensor:
    """Words [n, out / 8] as integers [out, n]."""
    nibbles = torch.unflatten(unpack_words(words, _BITS), 1, (-1, 8))
    return nibbles.index_select(2, torch.tensor(_NIBBLES)).flatten(1).T.contiguous()
