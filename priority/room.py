"""Room: how long prompts wait until KV and seats are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

MAX_ENDINGS = 32
"""The number of endings kept apart; close ones are merged."""
MOST_AHEAD = 48
"""The requests ahead that are examined one by one; the wait of further ones is extrapolated."""


class Need(NamedTuple):
    """The resources that one request needs, or all that go before it."""

    work: float
    """Prompt tokens to compute, with the cost of attending expressed in tokens."""
    num_kv: float
    num_seats: float
    spare: float = 0.0
    """Tokens of KV that must stay free when it starts."""


Ending = tuple[float, float, float]
"""An expected end: the number of steps from now, and the KV tokens and seats that it frees."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """The KV and seats of running sequences, and when they are expected to be freed."""

    num_running: int
    num_kv: int
    """Tokens of KV, those that several hold counted once."""
    endings: Sequence[Ending] = ()
    """The soonest first."""
    growth: float = 0.0
    """Tokens of KV that each takes in a step."""
    life_steps: float = 0.0
    """Steps that a sequence which starts now is expected to run after its prompt."""

    def idle_steps(self, free: Need, running: float, ahead: Sequence[Need], own: Need) -> float:
        """Returns the steps in which lack of room keeps all prompts waiting, until the own prompt is computed.

        Those ahead start in turn, each when there is room for it, and give it back when they have run.

        Args:
            free: KV and seats that are free now, and the prompt tokens of a step.
            running: work of the prompts that run.
        """
        # Of each ending also the sequences that grow until then; those of requests to come have grown already.
        endings = [(*ending, ending[2]) for ending in self.endings]
        free_kv, free_seats, num_growing = free.num_kv, free.num_seats, float(self.num_running)
        now, busy = 0.0, running / free.work
        for unit in [*ahead, own]:
            while endings and (
                unit.num_kv + unit.spare > free_kv - num_growing * self.growth * now
                or unit.num_seats > free_seats
            ):
                num_steps, num_kv, num_seats, num_grown = heappop(endings)
                now = max(now, num_steps)
                free_kv, free_seats, num_growing = (
                    free_kv + num_kv, free_seats + num_seats, num_growing - num_grown,
                )  # fmt: skip
            free_kv, free_seats = free_kv - unit.num_kv, free_seats - unit.num_seats
            busy = max(busy, now) + unit.work / free.work
            heappush(endings, (busy + self.life_steps, unit.num_kv, unit.num_seats, 0.0))
        total = running + sum([need.work for need in ahead]) + own.work
        return max(0.0, busy - total / free.work)


def grouped(endings: Sequence[Ending]) -> list[Ending]:
    """Merges endings into at most MAX_ENDINGS, the soonest first."""
    ordered = sorted(endings)
    each = -(-len(ordered) // MAX_ENDINGS)
    return [
        (group[len(group) // 2][0], sum(e[1] for e in group), sum(e[2] for e in group))
        for group in (ordered[i : i + each] for i in range(0, len(ordered), each or 1))
    ]
