"""The storage of weights in GGUF files: rows of ggml's blocks, each of which has its own scales.

The layouts of the blocks are ggml's (ggml/src/ggml-common.h, and ggml-quants.c for the numbers that they stand for).
The scales and offsets here are the numbers that ggml's own dequantisation multiplies, so that unpacking them gives the
same numbers to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from penstock.engine.fields import Fields
from penstock.engine.quant.formats import NamedTensors, by_rows
from penstock.engine.quant.integers import Factors, Integers
from penstock.engine.quant.stacks import stack_of
from penstock.engine.quant.storage import PLAIN, BadTensor, Storage, Storages, StoredTensor
from penstock.engine.quant.storages.mxfp4 import DOUBLED, MXFP4, half_scales

_QUARTERS = (0, 2, 4, 6)

_IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""ggml's kvalues_iq4nl."""

Unpack = Callable[[Tensor], NamedTensors]
"""Takes blocks apart, [n, bytes of a block] uint8: the tensors of rows that are a block each. A byte may be uint8."""


@dataclass(frozen=True, slots=True)
class Blocks:
    """One of ggml's types: the weights of `block` inputs of a row share `num_bytes` bytes.

    Its one tensor is the weight, whose bytes come as [out, bytes of a row] uint8.
    """

    name: str
    block: int
    num_bytes: int
    groups: Integers
    """The format that a block becomes."""
    unpack: Unpack

    @property
    def half(self) -> torch.dtype:
        """The type of the scales, or of their units, in 16 bits."""
        return torch.bfloat16 if self.name == "MXFP4" else torch.float16

    def format(self, out_features: int, in_features: int) -> Integers:  # noqa: ARG002
        return self.groups

    def tensors(self, out_features: int, in_features: int) -> Iterator[StoredTensor]:
        yield StoredTensor("weight", (out_features, in_features), (self.name,))

    def repack(self, tensors: NamedTensors) -> NamedTensors:
        rows = tensors["weight"]
        out_features, in_features = len(rows), rows.shape[1] // self.num_bytes * self.block
        packed = by_rows(lambda some: self._unpacked(rows[some]), out_features, in_features)
        for name, tensor in packed.items():
            if tensor.is_floating_point() and not tensor.isfinite().all():
                raise BadTensor("weight", f"has {name.partition('_')[0]}s that are not finite")
        return packed

    def _unpacked(self, rows: Tensor) -> NamedTensors:
        tensors = self.unpack(rows.reshape(-1, self.num_bytes))
        signed = {
            name: part.view(torch.int8) if part.dtype == torch.uint8 else part
            for name, part in tensors.items()
        }
        return {name: part.reshape(len(rows), -1) for name, part in signed.items()}


@dataclass(frozen=True, slots=True)
class BlockRows:
    """The weight of one tensor of a file, as it lies there."""

    name: str
    """The file and the tensor, for messages."""
    blocks: Blocks
    rows: Tensor
    """[out, bytes of a row] uint8"""
    order: Tensor | None = None
    """The row of each output; None if they are in order."""

    @property
    def in_features(self) -> int:
        return self.rows.shape[1] // self.blocks.num_bytes * self.blocks.block


class StoredBlocks(Mapping[str, Tensor]):
    """The tensors of a linear map, for kernels that can read it from the blocks of its parts, one after another.

    The blocks stand for the same numbers as the tensors, which are made when one is asked for.
    """

    def __init__(self, parts: Sequence[BlockRows], repack: Callable[[], NamedTensors]) -> None:
        self.parts = parts
        self._repack = repack

    def __getitem__(self, name: str) -> Tensor:
        return self._tensors[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)

    @cached_property
    def _tensors(self) -> NamedTensors:
        return self._repack()


def gguf_storages(quantization: Fields) -> Storages:
    """The storages of a GGUF file, whose entry `types` has the types of its quantized linear maps.

    Raises:
        CheckpointError: a type is not supported.
    """
    types = quantization.nested("types")
    for type in set(types.string_values()):
        if type not in TYPES:
            raise quantization.error(
                f"weights of type {type} are not supported; supported are {', '.join(TYPES)}"
            )

    def storage_of(name: str) -> Storage:
        # The experts of a layer are one tensor, or one by one.
        found = next((types.text(one) for one in (name, stack_of(name)) if types.has(one)), None)
        return PLAIN if found is None else TYPES[found]

    return storage_of


def _q8_0(blocks: Tensor) -> NamedTensors:
    return {"weight": blocks[:, 2:], "scale": _half(blocks, 0).float()}


def _q4_0(blocks: Tensor) -> NamedTensors:
    return {"weight": _nibbles(blocks[:, 2:], 16).view(torch.int8) - 8, "scale": _half(blocks, 0)}


def _q4_1(blocks: Tensor) -> NamedTensors:
    return {"weight": _nibbles(blocks[:, 4:], 16), "scale": _half(blocks, 0), "offset": _half(blocks, 2)}


def _q5_0(blocks: Tensor) -> NamedTensors:
    integers = _nibbles(blocks[:, 6:], 16) | _fifth_bits(blocks[:, 2:6])
    return {"weight": integers.view(torch.int8) - 16, "scale": _half(blocks, 0)}


def _q5_1(blocks: Tensor) -> NamedTensors:
    integers = _nibbles(blocks[:, 8:], 16) | _fifth_bits(blocks[:, 4:8])
    return {"weight": integers, "scale": _half(blocks, 0), "offset": _half(blocks, 2)}


def _q2_k(blocks: Tensor) -> NamedTensors:
    """16 scales, whose upper halves are minima, 2 x 32 bytes of weights, d and dmin."""
    return {
        "weight": _quarters(blocks[:, 16:80]),
        "scale": blocks[:, :16] & 15,
        "scale_unit": _half(blocks, 80),
        "offset": blocks[:, :16] >> 4,
        "offset_unit": -_half(blocks, 82),
    }


def _q3_k(blocks: Tensor) -> NamedTensors:
    """32 bytes of third bits, as the fifth ones of Q5_K, 2 x 32 bytes of lower two bits, 12 bytes of scales, and d.

    The scales have 6 bits: 8 bytes of lower halves, and 4 bytes of upper two bits.
    """
    integers = _quarters(blocks[:, 32:96]) | (_high_bits(blocks[:, :32]) << 2)
    upper = _shifted(blocks[:, 104:108], _QUARTERS) & 3
    scales = _nibbles(blocks[:, 96:104], 8) | (upper << 4).flatten(1)
    return {
        "weight": integers.view(torch.int8) - 4,
        "scale": scales.view(torch.int8) - 32,
        "scale_unit": _half(blocks, 108),
    }


def _q4_k(blocks: Tensor) -> NamedTensors:
    """d, dmin, 12 bytes of scales and minima; 4 x 32 bytes of two groups of 32 each."""
    return {"weight": _nibbles(blocks[:, 16:], 32), **_scales_and_minima(blocks)}


def _q5_k(blocks: Tensor) -> NamedTensors:
    """As Q4_K, with 32 bytes of fifth bits before the others: bit i of byte j belongs to weight j of group i."""
    integers = _nibbles(blocks[:, 48:], 32) | (_high_bits(blocks[:, 16:48]) << 4)
    return {"weight": integers, **_scales_and_minima(blocks)}


def _q6_k(blocks: Tensor) -> NamedTensors:
    """2 x 64 bytes of lower halves, 2 x 32 bytes of upper two bits, 16 scales in 8 bits, and d."""
    integers = _nibbles(blocks[:, :128], 64) | (_quarters(blocks[:, 128:192]) << 4)
    return {
        "weight": integers.view(torch.int8) - 32,
        "scale": blocks[:, 192:208].view(torch.int8),
        "scale_unit": _half(blocks, 208),
    }


def _iq4_nl(blocks: Tensor) -> NamedTensors:
    return {"weight": _looked_up(_IQ4, blocks[:, 2:]), "scale": _half(blocks, 0)}


def _iq4_xs(blocks: Tensor) -> NamedTensors:
    """d, 2 bytes of the upper two bits of 8 scales, 4 bytes of their lower halves, 8 x 16 bytes of weights."""
    upper = _shifted(blocks[:, 2:4].unsqueeze(-1), _QUARTERS) & 3
    scales = _nibbles(blocks[:, 4:8], 1) | (upper << 4).flatten(1)
    return {
        "weight": _looked_up(_IQ4, blocks[:, 8:]),
        "scale": scales.view(torch.int8) - 32,
        "scale_unit": _half(blocks, 0),
    }


def _mxfp4(blocks: Tensor) -> NamedTensors:
    """A scale in E8M0, and 16 bytes of weights."""
    return {"weight": _looked_up(DOUBLED, blocks[:, 1:]), "scale": half_scales(blocks[:, :1])}


def _scales_and_minima(blocks: Tensor) -> NamedTensors:
    """The scales and the offsets, each [n, 8], of blocks of type Q4_K or Q5_K, and their units.

    A scale is d * s and an offset -(dmin * m), with s and m of 6 bits: s of the first four groups, m of the first
    four, and the lower four bits of both of the last four, whose upper two bits are at the top of the former.
    """
    first, least, mixed = blocks[:, 4:8], blocks[:, 8:12], blocks[:, 12:16]
    return {
        "scale": torch.cat([first & 63, (mixed & 15) | (first >> 6 << 4)], 1),
        "scale_unit": _half(blocks, 0),
        "offset": torch.cat([least & 63, (mixed >> 4) | (least >> 6 << 4)], 1),
        "offset_unit": -_half(blocks, 2),
    }


def _half(blocks: Tensor, start: int) -> Tensor:
    """The float16 number in two bytes of each block: [n, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16)


def _nibbles(packed: Tensor, width: int) -> Tensor:
    """The lower halves of each `width` bytes, then the upper ones: [n, bytes] to [n, 2 * bytes]."""
    runs = torch.unflatten(packed, 1, (-1, width))
    return torch.stack([runs & 15, runs >> 4], 2).flatten(1)


def _looked_up(table: tuple[int, ...], packed: Tensor) -> Tensor:
    """The numbers of the table in whose places 16 bytes at a time have their halves."""
    return torch.tensor(table, dtype=torch.int8)[_nibbles(packed, 16).int()]


def _quarters(packed: Tensor) -> Tensor:
    """The lowest two bits of each 32 bytes, then the next: [n, bytes] to [n, 4 * bytes]."""
    return _shifted(torch.unflatten(packed, 1, (-1, 32)), _QUARTERS).flatten(1) & 3


def _high_bits(packed: Tensor) -> Tensor:
    """The lowest bits of all bytes, then the next: [n, bytes] to [n, 8 * bytes]."""
    return _shifted(packed, range(8)).flatten(1) & 1


def _fifth_bits(packed: Tensor) -> Tensor:
    """32 bits in 4 bytes, [n, 4], each as the 16 of its weight: [n, 32]."""
    return _high_bits(packed.reshape(-1, 1)).view(-1, 32) << 4


def _shifted(packed: Tensor, shifts: range | tuple[int, ...]) -> Tensor:
    """[..., b] to [..., shifts, b]."""
    return torch.stack([packed >> shift for shift in shifts], -2)


TYPES = {
    blocks.name: blocks
    for blocks in (
        # With scales in float32 it takes 1.06 times as much as in the file, and a row is multiplied faster.
        Blocks("Q8_0", 32, 34, Integers(8, 32), _q8_0),
        Blocks("Q4_0", 32, 18, Integers(4, 32, factors=Factors.HALF), _q4_0),
        Blocks("Q4_1", 32, 20, Integers(4, 32, has_offset=True, factors=Factors.HALF), _q4_1),
        Blocks("Q5_0", 32, 22, Integers(5, 32, factors=Factors.HALF), _q5_0),
        Blocks("Q5_1", 32, 24, Integers(5, 32, has_offset=True, factors=Factors.HALF), _q5_1),
        Blocks("Q2_K", 256, 84, Integers(2, 16, has_offset=True, factors=Factors.COUNTS), _q2_k),
        Blocks("Q3_K", 256, 110, Integers(3, 16, factors=Factors.COUNTS), _q3_k),
        Blocks("Q4_K", 256, 144, Integers(4, 32, has_offset=True, factors=Factors.COUNTS), _q4_k),
        Blocks("Q5_K", 256, 176, Integers(5, 32, has_offset=True, factors=Factors.COUNTS), _q5_k),
        Blocks("Q6_K", 256, 210, Integers(6, 16, factors=Factors.COUNTS), _q6_k),
        Blocks("IQ4_NL", 32, 18, Integers(8, 32, factors=Factors.HALF, table=_IQ4), _iq4_nl),
        Blocks("IQ4_XS", 256, 136, Integers(8, 32, factors=Factors.COUNTS, table=_IQ4), _iq4_xs),
        Blocks("MXFP4", 32, 17, MXFP4, _mxfp4),
    )
}
"""By ggml's names."""
