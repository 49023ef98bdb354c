"""The process groups of the ranks. Nothing else imports torch.distributed, so that one process alone does without."""

from __future__ import annotations

import os
import sys
from collections import deque
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_TIMEOUT = timedelta(minutes=10)
"""The time that a rank waits for the others in one sum: Triton may have to compile kernels on one of them."""


@dataclass(frozen=True, slots=True)
class Grid:
    """The processes that run a model, and how they talk."""

    num_ranks: int
    """Of each stage."""
    num_stages: int = 1
    on_cuda: bool = False
    """Whether they exchange tensors on GPUs, too: over NCCL there, and over gloo on the CPU."""

    @property
    def size(self) -> int:
        return self.num_stages * self.num_ranks

    @property
    def chooser(self) -> int:
        """The first process of the last stage, which brings the results of steps; 0 if there is one stage."""
        return self.size - self.num_ranks


class Group:
    """Some processes of this machine, seen from one of them: `kernels.ranks.Ranks`.

    Args:
        members: the processes, by their ranks among all; None stands for all of them.
    """

    def __init__(self, members: list[int] | None = None) -> None:
        self._first = 0 if members is None else members[0]
        self._group = None if members is None else dist.new_group(members, timeout=_TIMEOUT)
        self.rank, self.size = dist.get_rank() - self._first, dist.get_world_size(self._group)

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x, group=self._group)
        return x

    def gather(self, x: Tensor) -> Tensor:
        num_rows, width = x.shape
        found = x.new_empty(self.size * num_rows, width)
        dist.all_gather_single(found, x.contiguous(), group=self._group)
        return found.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def copy_first(self, x: Tensor) -> None:
        dist.broadcast(x, self._first, group=self._group)

    def least(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN, group=self._group)
        return int(found)


class Processes:
    """All processes of this machine that run a model: `kernels.ranks.World`.

    Args:
        meeting: a file that does not exist yet, in a folder of rank 0's, by which they find each other.
    """

    def __init__(self, rank: int, grid: Grid, meeting: Path) -> None:
        self.rank, self.size, self.num_stages = rank, grid.size, grid.num_stages
        self.stage = rank // grid.num_ranks
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # no other machine may reach gloo's sockets
        if grid.on_cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if grid.on_cuda else "gloo",
            init_method=meeting.as_uri(),
            rank=rank,
            world_size=grid.size,
            timeout=_TIMEOUT,
        )
        self._all = Group()
        self.ranks = self._own_ranks(grid.num_ranks)
        self._num_ranks = grid.num_ranks
        self._sent: deque[tuple[dist.Work, Tensor]] = deque()
        """The tensors that were sent last, which stay where they are until the other side has them."""

    def least(self, number: int) -> int:
        return self._all.least(number)

    def receive(self, hidden: Tensor) -> None:
        dist.recv(hidden, self.rank - self._num_ranks)

    def send(self, hidden: Tensor) -> None:
        if len(self._sent) == self.num_stages:  # as many steps are in flight: the one before has come back
            work, _ = self._sent.popleft()
            work.wait()
        sent = dist.isend(hidden, self.rank + self._num_ranks)
        assert sent is not None
        self._sent.append((sent, hidden))

    def abort(self) -> None:
        """Ends all waits for other processes, on the device too; called by another thread, when one of them is gone."""
        distributed_c10d._abort_process_group()

    def close(self) -> None:
        dist.destroy_process_group()

    def _own_ranks(self, num_ranks: int) -> Group | None:
        """The group of this process's stage. Every process makes those of all stages, in the same order."""
        if num_ranks == 1:
            return None
        if self.num_stages == 1:
            return self._all
        groups = [Group(list(range(first, first + num_ranks))) for first in range(0, self.size, num_ranks)]
        return groups[self.stage]
