"""Tensor parallelism in the kernels' terms: what ranks do together, and linear maps of which each has a part.

A decoder is split as Megatron-LM splits it (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism", 2019): of the maps into attention and into the feed-forward part each rank has some
outputs, of those out of them some inputs, so that a layer needs two sums over the ranks. Embedding and output head are
split by their vocabulary.
"""

from __future__ import annotations

from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor

from engine.kernels.linear import Linear


class Ranks(Protocol):
    """The processes that run a model together, seen from one of them.

    All of them call the same methods in the same order, with tensors of the same shape and type. A CUDA graph can hold
    those that take tensors on a GPU.
    """

    @property
    def rank(self) -> int:
        """This one, from 0 on."""

    @property
    def size(self) -> int:
        """How many there are."""

    def sum(self, x: Tensor) -> Tensor:
        """The sum of what all ranks have, the same to the bit on each; `x` may be overwritten."""

    def gather(self, x: Tensor) -> Tensor:
        """[R, n] on each rank -> [R, size * n], rank 0's columns first."""

    def copy_first(self, x: Tensor) -> None:
        """Overwrites `x` with what rank 0 has."""

    def least(self, number: int) -> int:
        """The least number of any rank; the host waits for it."""


class SummedLinear:
    """A linear map of which each rank has some inputs: the outputs are summed."""

    def __init__(self, part: Linear, ranks: Ranks) -> None:
        self._part = part
        self._ranks = ranks

    @property
    def num_bytes(self) -> int:
        return self._part.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.sum(self._part(x))


class GatheredLinear:
    """A linear map of which each rank has some outputs: all of them are put together on every rank.

    Args:
        num_outputs: of all ranks together; what the last ranks have beyond that is padding.
    """

    def __init__(self, part: Linear, ranks: Ranks, num_outputs: int) -> None:
        self._part = part
        self._ranks = ranks
        self._num_outputs = num_outputs

    @property
    def num_bytes(self) -> int:
        return self._part.num_bytes

    def __call__(self, x: Tensor) -> Tensor:
        return self._ranks.gather(self._part(x))[:, : self._num_outputs].contiguous()


def embed(token_ids: Tensor, rows: Tensor, ranks: Ranks | None) -> Tensor:
    """The rows [T, hidden] of an embedding for tokens [T]; each rank has as many of its rows, in order."""
    if ranks is None:
        return F.embedding(token_ids, rows)
    places = token_ids - ranks.rank * rows.shape[0]
    is_elsewhere = (places < 0) | (places >= rows.shape[0])
    found = F.embedding(places.clamp(0, rows.shape[0] - 1), rows)
    return ranks.sum(torch.where(is_elsewhere[:, None], 0, found))
