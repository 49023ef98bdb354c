"""Steps that were recorded once and are replayed: a ladder of batch sizes, each a graph.

Launching the kernels of a small step one by one takes the host longer than the device needs to run them. A graph
replays them all at once, on the same memory every time, so that a batch is padded to the next size that there is one
for. Steps in which prompts are computed, and those larger than the ladder, run without.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

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

    def __str__(self) -> str:
        return f"{self.num_sequences} x {self.query_len}"


@dataclass(frozen=True, slots=True)
class Recorded:
    graph: Graph
    num_bytes: int
    """Of device memory that it took, beyond what the larger ones had taken."""


class Ladder:
    """Graphs by the shape of the step.

    Args:
        most_sequences: of a step that is to have a graph.
        query_lens: tokens of each sequence in such a step: 1, and one more than the drafts that are verified.
    """

    def __init__(self, most_sequences: int, query_lens: tuple[int, ...] = (1,)) -> None:
        self.sizes = ladder_sizes(most_sequences)
        self.query_lens = query_lens
        self.recorded: dict[Rung, Recorded] = {}

    @property
    def num_bytes(self) -> int:
        return sum(recorded.num_bytes for recorded in self.recorded.values())

    def record(
        self, device: Device, work: Callable[[Rung], None], progress: Callable[[int, int], None]
    ) -> None:
        """Records all rungs, the largest first, so that the smaller ones fit into the memory that it took.

        Args:
            work: a step of that shape, on memory that stays where it is; called twice for each rung, the first time to
                compile and allocate what is made on first use.
            progress: is told rungs done and rungs in all.
        """
        rungs = [Rung(size, query_len) for query_len in self.query_lens for size in self.sizes]
        rungs.sort(key=lambda rung: (rung.num_sequences * rung.query_len, rung.num_sequences), reverse=True)
        for number, rung in enumerate(rungs, 1):
            try:
                self.recorded[rung] = _record(device, work, rung)
            except Exception as error:  # whatever is wrong with a graph, the step runs without
                reason = str(error).partition("\n")[0] or type(error).__name__
                log.warning("no CUDA graph for %s tokens, these steps run without: %s", rung, reason)
            progress(number, len(rungs))

    def padded(self, num_sequences: int, query_len: int = 1) -> int:
        """How many sequences the graph has that such a step can be padded to; `num_sequences` if there is none."""
        rung = self._rung(num_sequences, query_len)
        return num_sequences if rung is None else rung.num_sequences

    def find(self, num_sequences: int, query_len: int = 1) -> Graph | None:
        """The smallest graph that holds such a step; None if it has to run without."""
        rung = self._rung(num_sequences, query_len)
        return None if rung is None else self.recorded[rung].graph

    def _rung(self, num_sequences: int, query_len: int) -> Rung | None:
        size = next((size for size in self.sizes if size >= num_sequences), None)
        rung = None if size is None else Rung(size, query_len)
        return rung if rung in self.recorded else None


def _record(device: Device, work: Callable[[Rung], None], rung: Rung) -> Recorded:
    work(rung)
    device.synchronize()
    before = device.num_bytes_in_use()
    graph = device.record(lambda: work(rung))
    return Recorded(graph, max(0, device.num_bytes_in_use() - before))
