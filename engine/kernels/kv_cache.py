"""The tensors of the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from engine.quant.float8 import FLOAT8, LARGEST

_PAGE = 4096

QUANTIZED = {"int8": torch.int8, "fp8": FLOAT8}
"""The types of a quantized cache by name: a float32 scale belongs to each head of each token."""
LARGEST_NUMBER = {torch.int8: 127.0, FLOAT8: LARGEST}
"""By type of a quantized cache, what the largest magnitude of a head becomes."""
SCALE_BYTES = 4
"""Bytes of a scale, which is float32."""


def is_quantized(dtype: torch.dtype) -> bool:
    """Whether a cache of this type has scales."""
    return dtype in LARGEST_NUMBER


def numbers_and_scales(layer_kv: Tensor) -> tuple[Tensor, Tensor | None]:
    """What kernels are given of one layer's cache: its elements, and the same memory as float32 if it is quantized.

    The bits of e4m3 are uint8, for older cards know no such type. Blocks have multiples of 4 bytes.
    """
    if not is_quantized(layer_kv.dtype):
        return layer_kv, None
    numbers = layer_kv if layer_kv.dtype == torch.int8 else layer_kv.view(torch.uint8)
    return numbers, layer_kv.view(torch.float32)


class HasKV(Protocol):
    """Whatever knows how many keys and values a token has: a model's configuration."""

    @property
    def num_layers(self) -> int: ...
    @property
    def num_kv_heads(self) -> int: ...
    @property
    def head_dim(self) -> int: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class KVShape:
    """How the cache of a model is cut."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    block_size: int
    """Tokens per block."""

    @classmethod
    def of(cls, model: HasKV, block_size: int) -> KVShape:
        return cls(
            num_layers=model.num_layers,
            num_kv_heads=model.num_kv_heads,
            head_dim=model.head_dim,
            block_size=block_size,
        )

    @property
    def block_elements(self) -> int:
        """Elements of one layer's keys (or values) in one block."""
        return self.num_kv_heads * self.block_size * self.head_dim

    def stored_elements(self, dtype: torch.dtype) -> int:
        """Elements of a cache of type `dtype` that one layer's keys (or values) take in one block.

        If it is quantized, the block ends with a float32 scale for each head of each token.
        """
        if not is_quantized(dtype):
            return self.block_elements
        return self.block_elements + self.num_kv_heads * self.block_size * SCALE_BYTES

    def block_bytes(self, dtype: torch.dtype) -> int:
        """Bytes of one block: keys and values of all layers."""
        return self.num_layers * 2 * self.stored_elements(dtype) * dtype.itemsize


class KVCache:
    """Keys and values of `num_blocks` blocks, all layers.

    `data` is [num_layers, 2, num_blocks, num_kv_heads * block_size * head_dim]. What is inside a block is the business
    of the kernels that write and read it; the reference has [num_kv_heads, block_size, head_dim]. Block 0 belongs to
    nobody: unused entries of block tables point to it, and what is written there is never read.

    If the type is quantized, int8 or e4m3, the numbers of a block are followed by the bytes of float32 scales
    [num_kv_heads, block_size]: an element is its number times the scale of its token and head.
    """

    def __init__(self, shape: KVShape, num_blocks: int, dtype: torch.dtype, device: torch.device) -> None:
        self.shape = shape
        self.num_blocks = num_blocks
        self.block_size = shape.block_size
        self.data = _zeros((shape.num_layers, 2, num_blocks, shape.stored_elements(dtype)), dtype, device)

    def layer(self, index: int) -> Tensor:
        """[2, num_blocks, stored elements of a block], keys first."""
        return self.data[index]

    def copy_blocks(self, sources: Tensor, targets: Tensor) -> None:
        """Copies blocks [N] in all layers, as if all at once; the targets are distinct."""
        data = (
            self.data.view(torch.int8) if is_quantized(self.data.dtype) else self.data
        )  # torch moves no e4m3
        data[:, :, targets.long()] = data[:, :, sources.long()]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they start at a page, and take memory and time only where they are touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = torch.from_numpy(np.zeros(num_bytes + _PAGE, np.uint8))
    start = -pages.data_ptr() % _PAGE
    return pages[start : start + num_bytes].view(dtype).view(shape)
