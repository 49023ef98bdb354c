"""The tensors of the KV cache."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

_PAGE = 4096

SCALE_BYTES = 4
"""Bytes of a scale, which is float32."""


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

        In int8, the block ends with a float32 scale for each head of each token.
        """
        if dtype != torch.int8:
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

    In int8, the integers of a block are followed by the bytes of float32 scales [num_kv_heads, block_size]: an element
    is its integer times the scale of its token and head.
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
        self.data[:, :, targets.long()] = self.data[:, :, sources.long()]


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> Tensor:
    """Zeros; on a CPU they start at a page, and take memory and time only where they are touched."""
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    num_bytes = math.prod(shape) * dtype.itemsize
    pages = torch.from_numpy(np.zeros(num_bytes + _PAGE, np.uint8))
    start = -pages.data_ptr() % _PAGE
    return pages[start : start + num_bytes].view(dtype).view(shape)
