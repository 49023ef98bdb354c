"""What it takes to read a block and what it takes to compute it; by these, a prefix is read, or only a part of it."""

from __future__ import annotations

from collections.abc import Callable
from collections.abc import Sequence as ListLike
from itertools import accumulate, pairwise

from penstock.engine.planning.keeping import num_attended
from penstock.engine.planning.outside import STATE
from penstock.engine.planning.request_queue import StepSeconds

_FOLLOWING = 0.2
_FORGOTTEN_S = 60.0
"""A rate that was measured so long ago is not believed any more: the next read measures it again."""
_MOST_POINTS = 32
"""The parts of a prompt whose blocks are told apart by the time that they take."""


class ReadRate:
    """The time that reads from a tier take for each byte: an average in which the last reads count most.

    For one writer at a time; any thread may read it.
    """

    def __init__(self) -> None:
        self._seconds_per_byte = 0.0
        self._measured_s = -_FORGOTTEN_S

    def note(self, num_bytes: int, seconds: float, now: float) -> None:
        each = seconds / max(1, num_bytes)
        if now - self._measured_s >= _FORGOTTEN_S:
            self._seconds_per_byte = each
        self._seconds_per_byte += _FOLLOWING * (each - self._seconds_per_byte)
        self._measured_s = now

    def seconds(self, num_bytes: int, now: float) -> float:
        """Returns the expected time of a read; 0 if too little is known to advise against it."""
        return 0.0 if now - self._measured_s >= _FORGOTTEN_S else num_bytes * self._seconds_per_byte


def compute_seconds(step_seconds: StepSeconds, block_size: int, first: int, end: int) -> list[float]:
    """Returns the time that it takes to compute each block from `first` to before `end` of a prompt.

    It is what the block adds to a step that computes the prompt up to there; 0 for all while too little was measured.
    Of a long prompt, neighbouring blocks count as equal: so the work is the same for all.
    """

    def whole(depth: int) -> float:
        length = block_size * depth
        return step_seconds(length, 0, length, num_attended(0, length))

    stride = -(-(end - first) // _MOST_POINTS)
    depths = [*range(first, end, stride), end]
    seconds: list[float] = []
    for (start, stop), (before, after) in zip(pairwise(depths), pairwise(map(whole, depths)), strict=True):
        seconds += [max(0.0, after - before) / (stop - start)] * (stop - start)
    return seconds


class Reads:
    """A part of a chain that is worth reading."""

    def __init__(self, end: int, places: list[tuple[int, int]], read_s: float, compute_s: float) -> None:
        self.end = end
        """Blocks of the chain that can be found when all is read."""
        self.places = places
        """The depth and the table of each block that is to be read; last the state, if it is to be read as well."""
        self.read_s = read_s
        self.compute_s = compute_s
        """The time that computing these tokens takes; 0 if that is not known."""

    @property
    def has_state(self) -> bool:
        """Whether the state is to be read."""
        return bool(self.places) and self.places[-1][1] == STATE


def choose_reads(
    num_known: int,
    num_blocks: int,
    num_seen: ListLike[int],
    is_here: Callable[[int, int], bool],
    read_seconds: Callable[[int, int], float | None],
    compute: Callable[[int, int], list[float]],
    *,
    needs_state: bool = False,
) -> Reads | None:
    """Chooses how much of a chain to read: as far as reading, all in all, is ahead of computing by most.

    Args:
        num_known: the blocks of it that can be found already, together with a state if one is needed.
        num_blocks: the blocks of the chain.
        num_seen: by table, how many of the last blocks are needed; 0 for all.
        is_here: says whether the block of a depth and a table is in the device's memory, or the state after a block.
        read_seconds: the time that reading it takes; None if it is in no tier.
        compute: see `compute_seconds`, of which the first two arguments are given.
        needs_state: whether what is read is of use only up to a block after which there is a state.

    Returns:
        None if nothing is worth reading.
    """
    first = max(0, num_known - max(num_seen))
    costs: list[list[float | None]] = [[] for _ in num_seen]
    """By table, from `first` on: the time to read a block, 0 if it is here, None if it is nowhere."""

    def cost_of(depth: int, table: int) -> float | None:
        return 0.0 if is_here(depth, table) else read_seconds(depth, table)

    for depth in range(first, num_blocks):
        column = [cost_of(depth, table) for table in range(len(num_seen))]
        if depth >= num_known and any(
            cost is None and not seen for cost, seen in zip(column, num_seen, strict=True)
        ):
            break
        for table, cost in enumerate(column):
            costs[table].append(cost)
    most = first + len(costs[0])
    if most <= num_known:
        return None
    computed = list(accumulate(compute(num_known, most), initial=0.0))
    sums = [list(accumulate((cost or 0.0 for cost in column), initial=0.0)) for column in costs]
    gaps = [list(accumulate((cost is None for cost in column), initial=0)) for column in costs]
    best, least, seconds, is_known = num_known, 0.0, 0.0, computed[-1] > 0
    for end in range(num_known + 1, most + 1):
        starts = [max(0, end - seen - first) if seen else num_known - first for seen in num_seen]
        last = end - first
        if any(gap[last] > gap[start] for gap, start in zip(gaps, starts, strict=True)):
            continue
        state_s = cost_of(end - 1, STATE) if needs_state else 0.0
        if state_s is None:
            continue
        read_s = sum(total[last] - total[start] for total, start in zip(sums, starts, strict=True)) + state_s
        balance = read_s - computed[end - num_known] if is_known else -float(end)
        if balance < least:
            best, least, seconds = end, balance, read_s
    if best == num_known:
        return None
    needed = [
        (depth, table)
        for depth in range(first, best)
        for table, seen in enumerate(num_seen)
        if depth >= (best - seen if seen else num_known)
    ]
    if needs_state:
        needed.append((best - 1, STATE))
    places = [place for place in needed if not is_here(*place)]
    return Reads(best, places, seconds, computed[best - num_known])
