"""What a new request of a lane has before it: the arithmetic that a server and a router in front of it share."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from penstock.priority.pacing import PromptPace
from penstock.priority.room import Held, Need
from penstock.priority.yielding import MAX_VICTIMS


@dataclass(slots=True, kw_only=True)
class Outlook:
    """What a new request of a lane meets, whatever its prompt and its tenant. Work is in prompt tokens."""

    pace: PromptPace
    running: float
    """Work of the prompts that run and that it does not go before."""
    urgent: float
    """Work that waits in more urgent lanes."""
    lower: Sequence[tuple[float, float, float]]
    """Of less urgent lanes that have any: the work, the lane's share for each token of this one, and what is its due
    before."""
    held: Held
    num_yielding: int
    """Running sequences that may give way to it."""

    def work(self, own: float, others: Iterable[tuple[float, float]]) -> float:
        """Returns the work until its first token, its own included, and that of its tenant.

        Args:
            own: its own, and what waits of its tenant.
            others: of each other tenant, what waits, and what is its due before that.
        """
        lane = own
        for waiting, due in others:
            lane += waiting if waiting < due else due
        total = self.urgent + lane
        for waiting, ratio, lead in self.lower:
            due = ratio * lane + lead
            if due > 0:
                total += waiting if waiting < due else due
        return total

    def seconds_for(self, work: float) -> float:
        """Returns the time that this work takes, with the prompts that run before it."""
        return self.pace.seconds_for(self.running + work, is_filled=bool(self.lower))

    def idle_s(
        self, free_kv: float, free_seats: float, ahead: Sequence[Need], own: Need, num_ahead: float = 0.0
    ) -> float:
        """Returns the time in which no prompt can be computed for want of room.

        Args:
            ahead: the requests that go before, in turn.
            num_ahead: how many they are, if `ahead` has only some that are like the others.
        """
        times = max(1.0, num_ahead / max(1, len(ahead)))
        missing_kv = times * sum([need.num_kv for need in ahead]) + own.num_kv + own.spare - free_kv
        missing_seats = times * sum([need.num_seats for need in ahead]) + own.num_seats - free_seats
        if missing_kv <= 0 and missing_seats <= 0:
            return 0.0
        held = self.held
        if num_victims := min(MAX_VICTIMS * (len(ahead) + 1), self.num_yielding):
            free_kv += num_victims * held.num_kv / max(1, held.num_running)
            free_seats += num_victims
        free = Need(self.pace.num_prefill, free_kv, free_seats)
        return times * self.pace.fixed_s * held.idle_steps(free, self.running, ahead, own)
