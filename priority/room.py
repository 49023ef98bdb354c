"""Room: how long prompts wait until KV and seats are free."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from typing import NamedTuple

MAX_ENDINGS = 32
"""Endings that are told apart; those that are close to each other are one."""
MOST_AHEAD = 48
"""Requests before one that are looked at one by one; if there are more, what these wait says how long the others do."""


class Need(NamedTuple):
    """What is needed of the machine, by one request or by all that go before it."""

    work: float
    """Prompt tokens to compute, those included that attending to others takes as long as."""
    num_kv: float
    num_seats: float
    spare: float = 0.0
    """Tokens of KV that have to be left free where it starts."""


Ending = tuple[float, float, float]
"""An expected end: how many steps from now, and what is free then of the KV (in tokens) and the seats held now."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Held:
    """What the running sequences hold, and when they are expected to give it back."""

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
        """Returns how many steps can compute no prompt, for want of room, until the own one is computed.

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
    """Returns at most MAX_ENDINGS that stand for these, the soonest first."""
    ordered = sorted(endings)
    each = -(-len(ordered) // MAX_ENDINGS)
    return [
        (group[len(group) // 2][0], sum(e[1] for e in group), sum(e[2] for e in group))
        for group in (ordered[i : i + each] for i in range(0, len(ordered), each or 1))
    ]
