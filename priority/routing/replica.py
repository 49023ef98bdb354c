"""A replica as a router sees it: its last pushed load, and the requests sent to it since.

Its forecast is that of `priority.admission`, by the same outlook. What admission adds from the rates at which tenants
send is left out: a router itself decides what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from penstock.engine.planning.keeping import num_attended
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.outlook import Outlook
from penstock.priority.pacing import PromptPace, StepPlanner, Streams
from penstock.priority.room import MOST_AHEAD, Need
from penstock.priority.routing.state import LaneWork, Load, Role, Snapshot, StateError
from penstock.priority.steptime import EXPERTS, NAMES, StepTimeModel

_NOMINAL = dict(zip(NAMES, (0.01, 1e-4, 1e-4, 0.0, 0.0), strict=True))
"""Step time of a replica that has measured too little: as for a small GPU, so that it gets work and learns."""


@dataclass(slots=True)
class LoadReservation:
    """A request that was sent, from the choice to its end."""

    replica: Replica
    lane: Lane
    tenant: str
    work: int
    """Prompt tokens to compute, those included that attending to others takes as long as."""
    expected: Sequence[bytes]
    """Hashes of the blocks that it will make resident there."""
    is_counted: bool = False
    """The replica's own load has it."""


class _Line:
    """A lane of a replica: the pushed work, and the work sent since."""

    __slots__ = ("num_tokens", "num_waiting", "queued", "weight", "work")

    def __init__(self, work: LaneWork, weight: int) -> None:
        self.work = work
        self.weight = weight
        self.queued = dict(work.queued)
        self.num_waiting = work.num_waiting
        self.num_tokens = sum(self.queued.values())

    @property
    def num_work(self) -> int:
        """Prompt tokens that wait, or that those that run still have to compute."""
        return self.num_tokens + self.work.num_prefill_left

    def add(self, reservation: LoadReservation, sign: int) -> None:
        tenant, num_tokens = reservation.tenant, sign * reservation.work
        self.queued[tenant] = self.queued.get(tenant, 0) + num_tokens
        self.num_tokens += num_tokens
        self.num_waiting += sign


class Replica:
    """The picture of one replica; its owner is the router."""

    def __init__(self, snapshot: Snapshot, slot: int, now: float) -> None:
        self.name = snapshot.replica
        self.epoch = snapshot.epoch
        self.slot = slot
        self.bit = 1 << slot
        self.number = 0
        """Of the last change."""
        self.pushed_s = now
        self.last_cold = 0
        """Which of the router's requests without a hit it had last."""
        self.open: dict[int, LoadReservation] = {}
        """What was sent to it and is not over, by ticket."""
        self.load = snapshot.load
        self._snapshot = snapshot
        self._planner = StepPlanner(snapshot.policies, StepTimeModel())
        self._lines: list[_Line] = []
        self._paces: dict[Lane, PromptPace] = {}
        self._outlooks: dict[Lane, Outlook] = {}
        """Kept as reservations come and go, until the load changes."""
        self.take(snapshot.load)

    @property
    def policies(self) -> Mapping[Lane, LanePolicy]:
        return self._snapshot.policies

    @property
    def block_size(self) -> int:
        return self._snapshot.block_size

    @property
    def role(self) -> Role:
        return self._snapshot.role

    def check_alike(self, snapshot: Snapshot) -> None:
        """Raises StateError if another replica could not take this one's place."""
        for name in ("model", "block_size"):
            own, other = getattr(self._snapshot, name), getattr(snapshot, name)
            if own != other:
                raise StateError(
                    f"{name} is {own!r} at replica {self.name} and {other!r} at {snapshot.replica}"
                )

    @property
    def num_requests(self) -> int:
        """Requests that wait or run there, those sent included."""
        return sum(line.num_waiting + line.work.num_running for line in self._lines)

    @property
    def is_measured(self) -> bool:
        """Whether its step time is known, so that its forecasts may be held against a promise."""
        return any(self.load.coefficients)

    def take(self, load: Load) -> None:
        """Takes a newer load, and adds the work sent that it does not include yet."""
        self.load = load
        self._planner.model = _model(load) if self.is_measured else StepTimeModel(_NOMINAL, learns=False)
        self._paces.clear()
        self._outlooks.clear()
        self._num_free_seats = self._snapshot.max_num_seqs - load.held.num_running
        self._lines = [_Line(load.lanes[lane], self.policies[lane].weight) for lane in Lane]
        for reservation in self.open.values():
            if not reservation.is_counted:
                self._lines[reservation.lane].add(reservation, 1)

    def reserve(self, ticket: int, reservation: LoadReservation) -> None:
        self.open[ticket] = reservation
        self._add(reservation, 1)

    def count(self, ticket: int) -> None:
        """From now on its own load has the request of this ticket."""
        reservation = self.open.get(ticket)
        if reservation is not None and not reservation.is_counted:
            reservation.is_counted = True
            self._add(reservation, -1)

    def release(self, ticket: int) -> None:
        """The request of this ticket is over."""
        self.count(ticket)
        self.open.pop(ticket, None)

    def forecast_s(self, lane: Lane, tenant: str | None, num_uncached: int, num_prompt: int) -> float:
        """Returns the seconds to the first token of a request that would be sent now; of a new tenant for None."""
        outlook, line = self._outlooks.get(lane) or self._look(lane), self._lines[lane]
        own = self.work(num_uncached, num_prompt)
        mine = own if tenant is None else line.queued.get(tenant, 0) + own
        work = outlook.work(mine, [(num, mine) for other, num in line.queued.items() if other != tenant])
        wait_s = outlook.seconds_for(work)
        num_waiting = sum(line.num_waiting for line in self._lines[: lane + 1])
        # What waits is held to need as much KV as it is work, and to be alike.
        each = (work - own) / max(1, num_waiting)
        ahead = [Need(each, each, 1)] * min(MOST_AHEAD, num_waiting)
        room = self.load.num_free_kv, self._num_free_seats
        wait_s += outlook.idle_s(*room, ahead, Need(own, num_prompt, 1), num_waiting)
        # Of the step that runs, half is left on average.
        return self.load.step_s / 2 + wait_s

    def work(self, num_uncached: int, num_prompt: int) -> float:
        """Returns the work of a prompt of which so much is to be computed, in prompt tokens."""
        attended = num_attended(max(0, num_prompt - num_uncached), num_prompt)
        return num_uncached + self._planner.model.attended_each * attended

    def margin_s(
        self, lane: Lane, forecast_s: float, waited_s: float, work: float, ttft_s: float | None = None
    ) -> float:
        """By how much the first token is expected before the promise is broken; below 0: it would be late.

        `ttft_s` is what is promised to the request, if not what its lane promises.
        """
        if not self.is_measured:
            return 0.0
        seconds = waited_s + forecast_s * self.load.lanes[lane].factor
        margin_s = (ttft_s or self.policies[lane].ttft_s) - seconds
        if margin_s >= 0 or ttft_s is not None:
            return margin_s
        return self._planner.allowed_s(lane, work, self._snapshot.max_batch_tokens) - seconds

    def _add(self, reservation: LoadReservation, sign: int) -> None:
        self._lines[reservation.lane].add(reservation, sign)
        for lane, outlook in list(self._outlooks.items()):
            if lane < reservation.lane:
                del self._outlooks[lane]
            elif lane > reservation.lane:
                outlook.urgent += sign * reservation.work

    def _pace(self, lane: Lane) -> PromptPace:
        pace = self._paces.get(lane)
        if pace is None:
            load = self.load
            decodes = {other: work.num_running for other, work in load.lanes.items() if work.num_running}
            num_context = int(load.context_each * sum(decodes.values()))
            lively = {other for other, work in load.lanes.items() if work.is_lively} | {lane}
            streams = Streams(decodes, num_context)
            pace = self._paces[lane] = self._planner.pace(streams, lively, self._snapshot.max_batch_tokens)
        return pace

    def _look(self, lane: Lane) -> Outlook:
        own = self._lines[lane]
        urgent, upper, lower = self._lines[:lane], self._lines[: lane + 1], self._lines[lane + 1 :]
        outlook = self._outlooks[lane] = Outlook(
            pace=self._pace(lane),
            urgent=sum([line.num_tokens for line in urgent]),
            running=sum([line.work.num_prefill_left for line in upper]),
            lower=[(line.num_work, line.weight / own.weight, 0.0) for line in lower if line.num_work],
            held=self.load.held,
            num_yielding=sum([line.work.num_running for line in lower]),
        )
        return outlook


def _model(load: Load) -> StepTimeModel:
    coefficients = dict(zip(NAMES, load.coefficients, strict=True)) | {EXPERTS: load.experts_s}
    return StepTimeModel(coefficients, learns=False, chosen_share=min(1.0, load.chosen_share))
