"""Graphs: work that was captured once and is replayed, for a ladder of step shapes.

Launching the kernels of a small step one by one takes the host longer than the device needs to run them. A graph
replays them all at once, on the same memory every time, so that a step is padded to the next shape that there is a
graph for. A step that no graph covers is launched kernel by kernel.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from typing import Protocol

import torch

from penstock.engine.execution.memory import CAPTURED_TOKENS, read_card
from penstock.engine.execution.seats import StepShape
from penstock.engine.execution.share import agreed
from penstock.engine.kernels.ranks import Ranks

log = logging.getLogger("penstock.engine")

_HOST_BOUND = 0.8
"""A step of more than CAPTURED_TOKENS tokens has a graph if launching it takes this part of its time, or more."""
_MOST_PADDING = 1.25
"""The tokens that such a step is padded to, relative to its own: there the device's time grows with them."""
_STEP = 8
_SMALLEST_MIXED = 16


class Graph(Protocol):
    """A captured piece of work."""

    def replay(self) -> None:
        """Puts the work on the device's queue."""


class Device(Protocol):
    """A device, as far as capturing needs it."""

    def record(self, work: Callable[[], None]) -> Graph:
        """Captures the device's part of `work`, which the device does not run. All graphs share one pool of memory."""

    def synchronize(self) -> None:
        """Waits until everything asked so far is done."""

    def waits_for_host(self, work: Callable[[], None]) -> bool:
        """Does the work, and returns whether launching it took most of the time."""

    def num_bytes_in_use(self) -> int:
        """Returns the bytes of the device's memory that are in use, by any process."""


class CudaDevice:
    """A CUDA device, as far as capturing needs it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool = torch.cuda.graph_pool_handle()

    def record(self, work: Callable[[], None]) -> Graph:
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.current_stream(self._device)
        try:
            with torch.cuda.graph(graph, pool=self._pool):
                work()
        except Exception:
            # Of a capture that the driver gave up, torch keeps the stream, and never opens the pool again.
            torch.cuda.set_stream(stream)
            self._pool = torch.cuda.graph_pool_handle()
            raise
        return graph

    def synchronize(self) -> None:
        torch.cuda.synchronize(self._device)

    def waits_for_host(self, work: Callable[[], None]) -> bool:
        started_s = time.perf_counter()
        work()
        launched_s = time.perf_counter() - started_s
        self.synchronize()
        return launched_s >= _HOST_BOUND * (time.perf_counter() - started_s)

    def num_bytes_in_use(self) -> int:
        torch.cuda.empty_cache()  # the memory that eager steps used and graphs do not
        return read_card(self._device).used


class Ladder:
    """One piece of work, and graphs of it by the shape of the step.

    Args:
        work: does the work for a step of that shape, on memory that stays where it is, which it reads and writes.
        shapes: the shapes that graphs are captured for.
    """

    def __init__(self, work: Callable[[StepShape], None], shapes: Sequence[StepShape]) -> None:
        self.shapes = sorted(set(shapes), key=lambda s: (s.num_tokens, s.num_sequences, s.max_query_len))
        """The smallest first."""
        self.graphs: dict[StepShape, Graph] = {}
        self._captured: list[StepShape] = []
        """The shapes that have a graph, the smallest first."""
        self._work = work

    def covering(self, shape: StepShape) -> StepShape | None:
        """The smallest shape with a graph that such a step can be padded to; None if there is none, or no near one."""
        found = next((captured for captured in self._captured if captured.covers(shape)), None)
        if found is None or not _is_large(found):
            return found
        return found if found.num_tokens <= _MOST_PADDING * shape.num_tokens else None

    def run(self, shape: StepShape) -> None:
        """Does the work, by the graph of just this shape if there is one."""
        graph = self.graphs.get(shape)
        if graph is None:
            self._work(shape)
        else:
            graph.replay()

    def capture(self, device: Device, shape: StepShape, ranks: Ranks | None = None) -> bool:
        """Captures the work for a shape if every rank can; else all of them run such steps without.

        The work runs twice, the first time for compilation and allocation on first use. Large steps are captured only
        where the device would wait for their launches.

        Returns:
            False if a rank has no memory for the graph: larger ones will find none, either.

        Raises:
            Exception: the first run failed, and other ranks, which are in the midst of it, wait for this one.
        """
        graph, outcome, reason = None, _Outcome.CAPTURED, "another rank could not capture it"
        has_run = False
        try:
            self._work(shape)
            device.synchronize()
            if _is_large(shape):
                waits = device.waits_for_host(lambda: self._work(shape))
                if not agreed(int(waits), ranks):
                    return True
            has_run = True
            graph = device.record(lambda: self._work(shape))
        except Exception as error:  # without the graph, for any reason, the step still runs
            if ranks is not None and not has_run:
                raise
            is_full = isinstance(error, torch.OutOfMemoryError)
            outcome = _Outcome.NO_MEMORY if is_full else _Outcome.FAILED
            reason = str(error).partition("\n")[0] or type(error).__name__
        of_all = agreed(outcome, ranks)
        if of_all == _Outcome.FAILED:
            log.warning("no CUDA graph for %s, these steps run without: %s", shape, reason)
        elif of_all == _Outcome.CAPTURED and graph is not None:
            self.graphs[shape] = graph
            self._captured = [known for known in self.shapes if known in self.graphs]
        return of_all != _Outcome.NO_MEMORY


def _is_large(shape: StepShape) -> bool:
    """Whether the device may be busy with a step of prompts for longer than the host takes to launch it."""
    return shape.num_tokens > CAPTURED_TOKENS and not shape.verifies


class _Outcome(IntEnum):
    """The outcome of an attempt to capture a graph; the least of all ranks' outcomes holds for all of them."""

    NO_MEMORY = 0
    FAILED = 1
    CAPTURED = 2


def capture_all(
    ladders: Sequence[Ladder],
    device: Device,
    progress: Callable[[int, int], None],
    ranks: Ranks | None = None,
) -> tuple[int, int]:
    """Captures all shapes of all ladders, in each the largest first, so that the smaller ones fit into its memory.

    Where memory runs out, the next shape tried is half as large. All ranks end with graphs of the same shapes: a graph
    holds the collectives of the ranks, and padded sums on one of them would meet others on the next.

    Args:
        progress: is called with the graphs done and the graphs in all.
        ranks: the ranks that capture the same ladders at the same time; None if this process is alone.

    Returns:
        The number of graphs, and the bytes of device memory that they took.
    """
    work = [(ladder, shape) for ladder in ladders for shape in reversed(ladder.shapes)]
    before = device.num_bytes_in_use()
    most = largest = max(shape.num_tokens for _, shape in work)
    for number, (ladder, shape) in enumerate(work, 1):
        if shape.num_tokens <= most and not ladder.capture(device, shape, ranks):
            device.num_bytes_in_use()  # gives back the attempt's memory
            most = shape.num_tokens // 2
        progress(number, len(work))
    if most < largest:
        log.warning(
            "the device has no memory for CUDA graphs of more than %d tokens: such steps run without, and slower; "
            "a lower --gpu-memory-utilization leaves room for them",
            most,
        )
    num_graphs = sum(len(ladder.graphs) for ladder in ladders)
    return num_graphs, max(0, device.num_bytes_in_use() - before)


def decode_shapes(most: int) -> list[StepShape]:
    """1, 2, 4, then every multiple of 8 sequences, up to `most`, which is always one of them."""
    sizes = {size for size in (1, 2, 4, *range(_STEP, most, _STEP)) if size < most} | {most}
    return [_decode(size, most) for size in sizes]


def mixed_shapes(most: int, max_sequences: int) -> list[StepShape]:
    """Steps with prompts in them, of up to `most` tokens of as many sequences as there may be.

    Their sizes are 16, 24, 32, 48, 64, ... tokens, and beyond CAPTURED_TOKENS the eighths between powers of two.
    """
    powers = [1 << i for i in range(_SMALLEST_MIXED.bit_length() - 1, most.bit_length())]
    sizes = {most} | {
        size
        for power in powers
        for size in range(power, 2 * power, power // (2 if power < CAPTURED_TOKENS else 8))
        if size < most
    }
    return [_mixed(size, min(size, max_sequences), size, max_sequences) for size in sizes]


def verifying_shapes(max_rows: int, max_sequences: int, max_query_len: int) -> list[StepShape]:
    """Steps with drafts and without prompts: powers of two of sequences with 2, 3, 5, 9, ... tokens each at most.

    Every token may be sampled, and no shape has more of them than `max_rows`.
    """
    lengths = {min(1 + (1 << i), max_query_len) for i in range(max_query_len.bit_length())}
    sizes = {_rows(size, max_sequences) for size in range(1, max_sequences + 1)}
    return [
        StepShape(size * length, size, length, False, _rows(size * length, max_rows), verifies=True)
        for length in {*lengths, max_query_len} - {1}
        for size in sizes
        if size * length <= max_rows
    ]


def choice_shapes(passes: Iterable[StepShape]) -> list[StepShape]:
    """Returns the shapes in which the tokens of these passes are chosen: their rows alone matter."""
    return [StepShape(rows, rows, 1, True, rows) for rows in {shape.num_rows for shape in passes}]


def _decode(num_sequences: int, most: int) -> StepShape:
    return StepShape(num_sequences, num_sequences, 1, True, _rows(num_sequences, most))


def _mixed(num_tokens: int, num_sequences: int, max_query_len: int, most: int) -> StepShape:
    return StepShape(num_tokens, num_sequences, max_query_len, False, _rows(num_sequences, most))


def _rows(num_tokens: int, most: int) -> int:
    """The rows of the graph that chooses so many tokens: powers of two up to `most`, which is always one of them."""
    return min(1 << (num_tokens - 1).bit_length(), most)
