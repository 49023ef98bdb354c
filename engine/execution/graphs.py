"""Work that was recorded once and is replayed: a ladder of batch sizes, each a graph.

Launching the kernels of a small step one by one takes the host longer than the device needs to run them. A graph
replays them all at once, on the same memory every time, so that a batch is padded to the next size that there is one
for. What is larger than the ladder, or could not be recorded, is launched as it is.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

log = logging.getLogger("penstock.engine")

_STEP = 8


def ladder_sizes(most: int) -> tuple[int, ...]:
    """1, 2, 4, then every multiple of 8, up to `most`, which is always one of them."""
    sizes = {size for size in (1, 2, 4, *range(_STEP, most, _STEP)) if size < most}
    return (*sorted(sizes), most)


class Graph(Protocol):
    """A recorded piece of work."""

    def replay(self) -> None:
        """Puts it on the device's queue."""


class Device(Protocol):
    """What recording needs of a device."""

    def record(self, work: Callable[[], None]) -> Graph:
        """Runs `work` without effect and remembers what it asked of the device. All graphs share one pool of memory."""

    def synchronize(self) -> None:
        """Waits until everything asked so far is done."""

    def num_bytes_in_use(self) -> int:
        """Of the device's memory, whoever uses it."""


@dataclass(frozen=True, slots=True)
class Rung:
    """A size of the ladder: that many sequences with `query_len` tokens each."""

    num_sequences: int
    query_len: int

    @property
    def num_tokens(self) -> int:
        return self.num_sequences * self.query_len

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.query_len}"


@dataclass(frozen=True, slots=True)
class Recorded:
    graph: Graph
    num_bytes: int
    """Of device memory that it took, beyond what those before had taken."""


class Ladder:
    """One piece of work, and graphs of it by the shape of the step.

    Args:
        work: for a step of that shape, on memory that stays where it is, which it reads and writes.
        most_sequences: of a step that is to have a graph.
        query_lens: tokens of each sequence in such a step: 1, and one more than the drafts that are verified.
    """

    def __init__(
        self, work: Callable[[Rung], None], most_sequences: int, query_lens: tuple[int, ...] = (1,)
    ) -> None:
        self.sizes = ladder_sizes(most_sequences)
        self.recorded: dict[Rung, Recorded] = {}
        self._work = work
        rungs = [Rung(size, query_len) for query_len in query_lens for size in self.sizes]
        self.rungs = sorted(rungs, key=lambda r: (r.num_tokens, r.num_sequences), reverse=True)
        """The largest first."""

    @property
    def num_bytes(self) -> int:
        return sum(recorded.num_bytes for recorded in self.recorded.values())

    def record(self, device: Device, rung: Rung) -> None:
        """The work runs twice, the first time to compile and allocate what is made on first use.

        Raises:
            torch.OutOfMemoryError: larger ones will find no memory, either.
        """
        try:
            self.recorded[rung] = self._record(device, rung)
        except torch.OutOfMemoryError:
            raise
        except Exception as error:  # whatever is wrong with a graph, the step runs without
            reason = str(error).partition("\n")[0] or type(error).__name__
            log.warning("no CUDA graph for %s tokens, these steps run without: %s", rung, reason)

    def padded(self, num_sequences: int, query_len: int = 1) -> int:
        """How many sequences the graph has that such a step can be padded to; `num_sequences` if there is none."""
        size = next((size for size in self.sizes if size >= num_sequences), num_sequences)
        return size if Rung(size, query_len) in self.recorded else num_sequences

    def run(self, rung: Rung) -> None:
        """Does the work, by the graph of just this shape if there is one."""
        recorded = self.recorded.get(rung)
        if recorded is None:
            self._work(rung)
        else:
            recorded.graph.replay()

    def _record(self, device: Device, rung: Rung) -> Recorded:
        self._work(rung)
        device.synchronize()
        before = device.num_bytes_in_use()
        graph = device.record(lambda: self._work(rung))
        return Recorded(graph, max(0, device.num_bytes_in_use() - before))


def record_all(ladders: Sequence[Ladder], device: Device, progress: Callable[[int, int], None]) -> None:
    """Records all rungs of all ladders, in each the largest first, so that the smaller ones fit into its memory.

    Where memory runs out, the next that is tried is half as large.

    Args:
        progress: is told rungs done and rungs in all.
    """
    rungs = [(ladder, rung) for ladder in ladders for rung in ladder.rungs]
    most = largest = max(rung.num_tokens for _, rung in rungs)
    for number, (ladder, rung) in enumerate(rungs, 1):
        if rung.num_tokens <= most and not _fits(ladder, device, rung):
            device.num_bytes_in_use()  # gives back what the attempt had taken
            most = rung.num_tokens // 2
        progress(number, len(rungs))
    if most < largest:
        log.warning(
            "the device has no memory for CUDA graphs of more than %d tokens: such steps run without, and slower; "
            "a lower --gpu-memory-utilization leaves room for them",
            most,
        )


def _fits(ladder: Ladder, device: Device, rung: Rung) -> bool:
    try:
        ladder.record(device, rung)
    except torch.OutOfMemoryError:
        return False
    return True
