"""A replica as a router sees it: the load that it pushed last, and what was sent to it since.

Its forecast is that of `priority.admission`, by the same pace of prompts beside decodes and the same wait for room.
What admission adds from the rates at which tenants send is left out: a router itself decides what comes next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from priority.admission import Admission, Pace
from priority.lanes import Lane
from priority.routing.state import LaneWork, Load, Snapshot, StateError
from priority.steptime import NAMES, StepTimeModel
from priority.yielding import MAX_VICTIMS

_NOMINAL = (0.01, 1e-4, 1e-4, 0.0)
"""Step time of a replica that has measured too little: as for a small GPU, so that it gets work and learns."""


@dataclass(slots=True)
class Reservation:
    """A request that was sent, from the choice to its end."""

    replica: Replica
    lane: Lane
    tenant: str
    num_uncached: int
    expected: Sequence[bytes]
    """Hashes of the blocks that it will make resident there."""
    is_counted: bool = False
    """The replica's own load has it."""


class _Line:
    """A lane of a replica: what was pushed, and what was sent since."""

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

    def add(self, reservation: Reservation, sign: int) -> None:
        tenant, num_tokens = reservation.tenant, sign * reservation.num_uncached
        self.queued[tenant] = self.queued.get(tenant, 0) + num_tokens
        self.num_tokens += num_tokens
        self.num_waiting += sign


@dataclass(slots=True, kw_only=True)
class _Sight:
    """What a new request of a lane sees, whatever its prompt and its tenant."""

    pace: Pace
    queued: Mapping[str, int]
    """In the lane, by tenant."""
    num_urgent: int
    """Tokens that wait in more urgent lanes."""
    num_running: int
    """Prompt tokens of those that run and that it does not go before."""
    lower: Sequence[tuple[int, float]]
    """Of less urgent lanes that have any: tokens, and the lane's share for each token of this one."""
    num_seats: int
    """For those that wait before it, and for itself."""
    num_yielding: int
    """Requests that run in less urgent lanes."""


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
        self.open: dict[int, Reservation] = {}
        """What was sent to it and is not over, by ticket."""
        self.load = snapshot.load
        self._snapshot = snapshot
        self._admission = Admission(snapshot.policies, StepTimeModel(dict.fromkeys(NAMES, 0.0), learns=False))
        self._lines: list[_Line] = []
        self._paces: dict[Lane, Pace] = {}
        self._sights: dict[Lane, _Sight] = {}
        """Kept as reservations come and go, until the load changes."""
        self.take(snapshot.load)

    @property
    def block_size(self) -> int:
        return self._snapshot.block_size

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
        """A newer load; what was sent and is not in it yet is put on top of it again."""
        self.load = load
        self._admission.model.coefficients = list(load.coefficients if self.is_measured else _NOMINAL)
        self._paces.clear()
        self._sights.clear()
        self._num_free_seats = self._snapshot.max_num_seqs - load.held.num_running
        policies = self._snapshot.policies
        self._lines = [_Line(load.lanes[lane], policies[lane].weight) for lane in Lane]
        for reservation in self.open.values():
            if not reservation.is_counted:
                self._lines[reservation.lane].add(reservation, 1)

    def reserve(self, ticket: int, reservation: Reservation) -> None:
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
        """Seconds to the first token of a request that would be sent now; of a new tenant for None."""
        sight = self._sights.get(lane) or self._look(lane)
        mine = num_uncached if tenant is None else sight.queued.get(tenant, 0) + num_uncached
        ahead = float(sight.num_urgent + mine)
        for other, num_tokens in sight.queued.items():
            if other != tenant:
                ahead += num_tokens if num_tokens < mine else mine
        for num_tokens, ratio in sight.lower:
            ahead += min(num_tokens, ratio * mine)
        wait_s = sight.pace.seconds_for(sight.num_running + ahead, is_filled=bool(sight.lower))
        missing_kv = ahead + num_prompt - self.load.num_free_kv
        missing_seats = sight.num_seats - self._num_free_seats
        if missing_kv > 0 or missing_seats > 0:
            num_victims = min(MAX_VICTIMS * sight.num_seats, sight.num_yielding)
            wait_s += self.load.held.wait_s(missing_kv, missing_seats, num_victims)
        # Of the step that runs, half is left on average.
        return self.load.step_s / 2 + wait_s

    def margin_s(self, lane: Lane, forecast_s: float, waited_s: float, num_uncached: int) -> float:
        """By how much the first token is expected before the lane's promise is broken; below 0: it would be late."""
        if not self.is_measured:
            return 0.0
        seconds = waited_s + forecast_s * self.load.lanes[lane].factor
        margin_s = self._snapshot.policies[lane].ttft_s - seconds
        if margin_s >= 0:
            return margin_s
        return self._admission.allowed_s(lane, num_uncached, self._snapshot.max_batch_tokens) - seconds

    def _add(self, reservation: Reservation, sign: int) -> None:
        self._lines[reservation.lane].add(reservation, sign)
        for lane, sight in list(self._sights.items()):
            if lane < reservation.lane:
                del self._sights[lane]
            else:
                sight.num_seats += sign
                if lane > reservation.lane:
                    sight.num_urgent += sign * reservation.num_uncached

    def _pace(self, lane: Lane) -> Pace:
        pace = self._paces.get(lane)
        if pace is None:
            decodes = {other: work.num_running for other, work in self.load.lanes.items() if work.num_running}
            num_context = int(self.load.context_each * sum(decodes.values()))
            lively = {other for other, work in self.load.lanes.items() if work.is_lively} | {lane}
            pace = self._admission.pace(decodes, num_context, lively, self._snapshot.max_batch_tokens)
            self._paces[lane] = pace
        return pace

    def _look(self, lane: Lane) -> _Sight:
        own = self._lines[lane]
        urgent, upper, lower = self._lines[:lane], self._lines[: lane + 1], self._lines[lane + 1 :]
        sight = self._sights[lane] = _Sight(
            pace=self._pace(lane),
            queued=own.queued,
            num_urgent=sum([line.num_tokens for line in urgent]),
            num_running=sum([line.work.num_prefill_left for line in upper]),
            lower=[(line.num_work, line.weight / own.weight) for line in lower if line.num_work],
            num_seats=sum([line.num_waiting for line in upper]) + 1,
            num_yielding=sum([line.work.num_running for line in lower]),
        )
        return sight
