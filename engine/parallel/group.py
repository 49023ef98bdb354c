"""The process group of the ranks. Nothing else imports torch.distributed, so that one process alone does without."""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed import distributed_c10d

_LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"
_TIMEOUT = timedelta(minutes=10)
"""The time that a rank waits for the others in one sum: Triton may have to compile kernels on one of them."""


class Group:
    """The ranks of this machine, seen from one of them: `kernels.ranks.Ranks` over NCCL on GPUs, and gloo on a CPU.

    Args:
        meeting: a file that does not exist yet, in a folder of rank 0's, by which the ranks find each other.
        on_cuda: whether they exchange tensors on GPUs, too.
    """

    def __init__(self, rank: int, size: int, meeting: Path, *, on_cuda: bool) -> None:
        self.rank, self.size = rank, size
        os.environ.setdefault("GLOO_SOCKET_IFNAME", _LOOPBACK)  # no other machine may reach gloo's sockets
        if on_cuda:
            torch.cuda.set_device(rank)
        dist.init_process_group(
            "cpu:gloo,cuda:nccl" if on_cuda else "gloo",
            init_method=meeting.as_uri(),
            rank=rank,
            world_size=size,
            timeout=_TIMEOUT,
        )

    def sum(self, x: Tensor) -> Tensor:
        dist.all_reduce(x)
        return x

    def gather(self, x: Tensor) -> Tensor:
        num_rows, width = x.shape
        found = x.new_empty(self.size * num_rows, width)
        dist.all_gather_single(found, x.contiguous())
        return found.view(self.size, num_rows, width).transpose(0, 1).reshape(num_rows, -1)

    def copy_first(self, x: Tensor) -> None:
        dist.broadcast(x, 0)

    def least(self, number: int) -> int:
        found = torch.tensor(number)
        dist.all_reduce(found, dist.ReduceOp.MIN)
        return int(found)

    def abort(self) -> None:
        """Ends all waits for the other ranks, on the device too; called by another thread, when one of them is gone."""
        distributed_c10d._abort_process_group()

    def close(self) -> None:
        dist.destroy_process_group()
