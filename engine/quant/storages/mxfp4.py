"""Floats of 4 bits in groups of 32 with a power of two as their scale, as gpt-oss stores the weights of its experts.

(Open Compute Project, Microscaling Formats Specification, 2023: MXFP4.)
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from penstock.engine.fields import Fields
from penstock.engine.quant.formats import NamedTensors, by_rows
from penstock.engine.quant.integers import Factors, Integers
from penstock.engine.quant.storage import PLAIN, BadTensor, Storages, StoredTensor
from penstock.engine.quant.storages.names import excluded
from penstock.engine.quant.storages.packing import check_groups, unpack_nibbles

GROUP = 32
"""The inputs of a row that share a scale."""

DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12)
"""The doubles of floats with two bits of exponent and one of mantissa, in the order of their bits."""

MXFP4 = Integers(8, GROUP, factors=Factors.HALF, table=DOUBLED)
"""The format of MXFP4 at load: a weight is one of DOUBLED times half of its scale."""

NO_SCALE = 255
"""The NaN of E8M0, whose other bytes stand for 2^(byte - 127)."""


def half_scales(exponents: Tensor) -> Tensor:
    """The halves of scales in E8M0, as bfloat16, in which 2^-128 and 2^-127 are denormal. NO_SCALE stays not finite."""
    e = exponents.short()
    bits = torch.where(e < 2, 32 << e, torch.where(e == NO_SCALE, NO_SCALE, e - 1) << 7)
    return bits.short().view(torch.bfloat16)


class StoredMxfp4:
    """blocks: [out, in / 32, 16] bytes, two floats in each, the lower bits first; scales: [out, in / 32] in E8M0."""

    name = "MXFP4"

    def format(self, out_features: int, in_features: int) -> Integers:  # noqa: ARG002
        check_groups(GROUP, in_features)
        return MXFP4

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        num_groups = in_features // GROUP
        yield StoredTensor("blocks", (out_features, num_groups, GROUP // 2), ("U8",))
        yield StoredTensor("scales", (out_features, num_groups), ("U8",))

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        blocks, scales = tensors["blocks"], tensors["scales"]
        if bool((scales == NO_SCALE).any()):
            raise BadTensor("scales", "has values that are not finite")
        table = torch.tensor(DOUBLED, dtype=torch.int8)

        def look_up(rows: slice) -> NamedTensors:
            return {"weight": table[unpack_nibbles(blocks[rows].flatten(1)).int()]}

        weight = by_rows(look_up, len(blocks), blocks.shape[1] * GROUP)
        return {**weight, "scale": half_scales(scales)}


def mxfp4_storages(fields: Fields) -> Storages:
    """Returns the storages of `quant_method` mxfp4: experts', except for `modules_to_not_convert`.

    Raises:
        CheckpointError: names the field that is malformed.
    """
    storage, is_excluded = StoredMxfp4(), excluded(fields, "modules_to_not_convert")
    return lambda name: storage if ".experts." in name and not is_excluded(name) else PLAIN
