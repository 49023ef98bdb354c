"""Tensor parallelism in the kernels' terms: the collectives of ranks with parts of linear maps and of the embedding.

A decoder is split as Megatron-LM splits it (Shoeybi et al., "Megatron-LM: Training Multi-Billion Parameter Language
Models Using Model Parallelism", 2019): each rank has some outputs of the maps into attention and into the feed-forward
part, and some inputs of the maps out, so that a layer needs two sums over the ranks. Embedding and output head are
split by their vocabulary. Where the layers are cut into stages, each stage has such ranks (`World`).

Ranks that only share out experts have all else whole, and each has sequences of its own. Where experts come, their rows
are gathered, and summed over the ranks afterwards.
"""

from __future__ import annotations

from collections.abc import Sequence as ListLike
from typing import Protocol

import torch
import torch.nn.functional as F
from torch import Tensor


class Ranks(Protocol):
    """The processes that have a part of each layer, seen from one of them.

    All of them call the same methods in the same order, with tensors of the same shape and type. A CUDA graph can hold
    calls that take tensors on a GPU.
    """

    @property
    def rank(self) -> int:
        """This one, from 0 on."""

    @property
    def size(self) -> int:
        """The number of ranks."""

    def sum(self, x: Tensor) -> Tensor:
        """Returns the sum of all ranks' tensors, the same to the bit on each; `x` may be overwritten."""

    def gather(self, x: Tensor) -> Tensor:
        """[R, n] on each rank -> [R, size * n], rank 0's columns first."""

    def copy_first(self, x: Tensor) -> None:
        """Overwrites `x` with rank 0's tensor."""

    def least(self, number: int) -> int:
        """The least number of any rank; the host waits for it."""


class World(Protocol):
    """All processes that run a model, seen from one of them: stages, one after another, of as many ranks each.

    The ranks of the first stage come first. A rank hands hidden states to the one that has its place in the next stage.
    """

    @property
    def rank(self) -> int:
        """This one, from 0 on."""

    @property
    def size(self) -> int:
        """The number of processes."""

    @property
    def stage(self) -> int:
        """The stage of this one, from 0 on."""

    @property
    def num_stages(self) -> int: ...

    @property
    def ranks(self) -> Ranks | None:
        """The ranks of this one's stage; None if it is alone there."""

    def least(self, number: int) -> int:
        """The least number of any process; the host waits for it."""

    def receive(self, hidden: Tensor) -> None:
        """Fills a tensor with the one that the stage before sent; on a CPU, it waits for that."""

    def send(self, hidden: Tensor) -> None:
        """Sends a tensor, which nobody writes any more, to the next stage; it does not wait until that has it."""


def gather_rows(x: Tensor, counts: ListLike[int], ranks: Ranks) -> Tensor:
    """Returns the rows of all ranks, rank 0's first, [sum of counts, n], of those that each has, [counts[rank], n]."""
    most, width = max(counts), x.shape[1]
    columns = torch.unflatten(ranks.gather(F.pad(x, (0, 0, 0, most - len(x)))), 1, (ranks.size, width))
    return torch.cat([columns[:count, rank] for rank, count in enumerate(counts)])


def embed(token_ids: Tensor, rows: Tensor, ranks: Ranks | None) -> Tensor:
    """The rows [T, hidden] of an embedding for tokens [T]; each rank has as many of its rows, in order."""
    if ranks is None:
        return F.embedding(token_ids, rows)
    places = token_ids - ranks.rank * rows.shape[0]
    is_elsewhere = (places < 0) | (places >= rows.shape[0])
    found = F.embedding(places.clamp(0, rows.shape[0] - 1), rows)
    return ranks.sum(torch.where(is_elsewhere[:, None], 0, found))
