"""Checkpoints with floats of 8 bits: quant_method `fp8`, and the same storage by other methods."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from penstock.engine.fields import Fields
from penstock.engine.quant.float8 import BLOCK, FLOAT8, Float8, Scaling
from penstock.engine.quant.formats import NamedTensors
from penstock.engine.quant.storage import FLOATS, BadTensor, Storages, StoredTensor
from penstock.engine.quant.storages.names import all_but, excluded
from penstock.engine.quant.storages.packing import finite

_NOT_A_NUMBER = 0x7F
"""The bits of e4m3's NaN without its sign."""


@dataclass(frozen=True, slots=True)
class StoredFloat8:
    """Floats of 8 bits, e4m3: the weight is number * scale.

    weight: [out, in]
    scale: [1], [out, 1] or [ceil(out / BLOCK), ceil(in / BLOCK)], as the scaling says
    """

    scaling: Scaling
    weight: str = "weight"
    scale: str = "weight_scale"

    @property
    def name(self) -> str:
        return f"FP8, a scale for each {self.scaling.value}"

    def format(self, out_features: int, in_features: int) -> Float8:  # noqa: ARG002
        return Float8(self.scaling)

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        shapes = dict(Float8(self.scaling).shapes(out_features, in_features))
        yield StoredTensor(self.weight, (out_features, in_features), ("F8_E4M3",))
        yield StoredTensor(self.scale, shapes["scale"], FLOATS, loose=True)

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        weight, scale = tensors[self.weight], finite(tensors, self.scale)
        if bool(((weight.view(torch.uint8) & _NOT_A_NUMBER) == _NOT_A_NUMBER).any()):
            raise BadTensor(self.weight, "has values that are not finite")
        shapes = dict(Float8(self.scaling).shapes(*weight.shape))
        assert weight.dtype == FLOAT8
        return {"weight": weight, "scale": scale.reshape(shapes["scale"])}


def check_block(fields: Fields, name: str) -> None:
    """Checks that the entry is the size of the blocks that share a scale.

    Raises:
        CheckpointError: it is another size.
    """
    block = fields.integers(name)
    if block != (BLOCK, BLOCK):
        raise fields.error(f"{name} {list(block)} is not supported; only [{BLOCK}, {BLOCK}] is")


def float8_storages(fields: Fields) -> Storages:
    """The storages of `quant_method` fp8: blocks as DeepSeek and Qwen have them, or a scale for a whole weight.

    Activations are scaled row by row as they come, so that scales stored for them are not read.

    Raises:
        CheckpointError: naming the field that is malformed or not supported.
    """
    has_blocks = fields.integers("weight_block_size") != ()
    if has_blocks:
        check_block(fields, "weight_block_size")
    is_excluded = excluded(fields, "modules_to_not_convert", "ignored_layers")
    scaling = Scaling.BLOCK if has_blocks else Scaling.TENSOR
    # transformers, which writes weight_block_size in any case, calls every scale weight_scale_inv; AutoFP8 does not.
    scale = "weight_scale_inv" if "weight_block_size" in fields else "weight_scale"
    return all_but(StoredFloat8(scaling, scale=scale), is_excluded)
