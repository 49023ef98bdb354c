"""The choice of a replica: where a request is forecast to have its first token soonest.

One unit for everything: the forecast counts the prompt tokens that the replica does not hold, what waits before them
and the wait for KV and a seat, all in seconds; there are no weights. Within 5 %, the longest hit decides; if nobody
holds anything, the replica that has gone longest without such a request. What is chosen is reserved at once, until
the replica's own load counts it, so that a burst does not herd; its blocks are expected there, so that the next turn
finds them. A hot prefix spreads by itself: once its home is later than a cold prefill elsewhere, the request goes
elsewhere, and that is a home then, too. If everybody would be late, the request is refused here, with the least
Retry-After.

A replica that takes KV from others may be chosen together with a source: the one that holds the longest prefix. Its
forecast is then that of a replica that holds it, and the time that the blocks take at the rate that it measured.

The choice is a function of what was pushed, what was sent, the request and the time: the same calls give the same
choices. Only a few candidates are forecast: for each of the longest hits, and of the rest, those with the least load.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from itertools import islice
from random import Random

from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from penstock.priority.routing.index import DEFAULT_MAX_BLOCKS, BlockIndex
from penstock.priority.routing.order import CLOSE, LoadOrder
from penstock.priority.routing.replica import LoadReservation, Replica
from penstock.priority.routing.state import Change, Role, Snapshot, StateError
from penstock.priority.verdict import Refusal

STALE_S = 1.0
"""The silence after which a replica is passed over."""
LEASE_S = 10.0
"""The time after its forecast at which a reservation that nobody ended is given up."""
LONG_PROMPT = 512
"""A replica for the tokens after the prompt computes up to so many prompt tokens itself: it takes them beside its
decodes, and sooner than they would come from elsewhere."""
_SHORT_PROMPT = 64
_LENGTHS = 3
"""The number of different lengths of hits that are considered."""
_FEW = 2
"""The number of replicas that are forecast for each length, and of the rest."""


@dataclass(frozen=True, slots=True, kw_only=True)
class RouteQuery:
    """The facts of a request that the choice goes by."""

    lane: Lane
    tried: Lane | None = None
    """A more urgent lane that takes it instead, where a replica is forecast to keep that lane's promise."""
    ttft_s: float | None = None
    """The seconds to the first token that are promised to it; None for those of its lane."""
    tenant: str
    num_prompt: int
    hashes: Sequence[bytes] = ()
    """The hashes of the prompt's full blocks, by `prefix_index.extend_hashes` with the tenant's salt."""
    waited_s: float = 0.0
    """Seconds since the request came in."""
    source: str | None = None
    """The replica that has just computed the prompt, whose KV is to be taken from it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """The replica that a request goes to."""

    replica: str
    ticket: int
    """The name of the reservation, which is sent along, so that the replica can say when it counts the request."""
    forecast_s: float
    """Seconds to the request's first token."""
    num_cached: int
    """Prompt tokens that the replica is taken to hold."""
    num_pulled: int = 0
    """Prompt tokens after those whose KV it is to take from `source`."""
    source: str | None = None
    """The replica to take them from."""


@dataclass(frozen=True, slots=True)
class _Candidate:
    replica: Replica
    num_cached: int
    forecast_s: float
    num_pulled: int = 0
    source: Replica | None = None

    @property
    def num_given(self) -> int:
        """Prompt tokens that it need not compute."""
        return self.num_cached + self.num_pulled


class OutOfStep(StateError):
    """A change does not follow the one before: the stream has to be opened again for a new snapshot."""


class Router:
    """Keeps what the replicas push, and chooses by it. Times are in seconds, by one clock that never goes back."""

    def __init__(self, *, stale_s: float = STALE_S, max_blocks: int = DEFAULT_MAX_BLOCKS) -> None:
        """`max_blocks` bounds the index of prefixes: some 100 bytes each, and more for what several hold."""
        self.index = BlockIndex(max_blocks)
        self.replicas: dict[str, Replica] = {}
        self._stale_s = stale_s
        self._slots: list[Replica | None] = []
        self._fresh: OrderedDict[str, Replica] = OrderedDict()
        """The replicas that are not suspect, with the oldest last push first."""
        self._usable = 0
        """Bits of the replicas that are fresh and not draining."""
        self._prefill = 0
        """Bits of the replicas that are for prompts alone."""
        self._had_cold = 0
        """Bits of the replicas that had a request without a hit in this round."""
        self._num_cold = 0
        self._orders: dict[Lane, LoadOrder] = {}
        """The replicas by load, for each lane that was asked for."""
        self._tickets: dict[int, LoadReservation] = {}
        self._num_tickets = 0
        self._leases: list[tuple[float, int]] = []
        """A heap of (end, ticket)."""
        self._gone = _Gone()

    # What replicas push

    def on_snapshot(self, snapshot: Snapshot, now: float) -> None:
        """Takes the first message of a stream; whatever was known of this replica is forgotten.

        Raises:
            StateError: the replica serves another model, or in other blocks, than the others.
        """
        self.on_gone(snapshot.replica)
        for other in self.replicas.values():
            other.check_alike(snapshot)
        slot = self._free_slot()
        replica = Replica(snapshot, slot, now)
        self._slots[slot] = self.replicas[replica.name] = replica
        self.index.add(snapshot.blocks, replica.bit)
        if replica.role is Role.PREFILL:
            self._prefill |= replica.bit
        self._note_alive(replica, now)
        self._rank(replica)

    def on_change(self, name: str, change: Change, now: float) -> None:
        """Takes the next message of a stream.

        Raises:
            OutOfStep: one is missing, or the replica is not known; it has been forgotten.
        """
        replica = self.replicas.get(name)
        if replica is None or change.epoch != replica.epoch or change.number != replica.number + 1:
            self.on_gone(name)
            raise OutOfStep(f"change {change.number} of replica {name} does not follow the message before it")
        replica.number = change.number
        for ticket in change.counted:
            replica.count(ticket)
        if change.load is not None:
            replica.take(change.load)
        self.index.remove(change.removed, replica.bit)
        self.index.add(change.stored, replica.bit)
        self._note_alive(replica, now)
        if change.load is not None or change.counted:
            self._rank(replica)
        self._gone.sweep(self.index)

    def on_gone(self, name: str) -> None:
        """Forgets a replica whose stream broke, and releases its reservations."""
        replica = self.replicas.pop(name, None)
        if replica is None:
            return
        for ticket in list(replica.open):
            self.note_done(ticket)
        self._fresh.pop(name, None)
        self._usable &= ~replica.bit
        self._prefill &= ~replica.bit
        for order in self._orders.values():
            order.drop(replica.bit)
        self._slots[replica.slot] = None
        self._gone.add(replica.bit)

    # What is asked

    def choose(self, ask: RouteQuery, now: float, excluded: Iterable[str] = ()) -> Placement | Refusal:
        """Chooses a replica and reserves the request's place there.

        Args:
            excluded: replicas that just refused this request, or died with it.

        Returns:
            A Refusal (to be raised) if there is no replica, or the first token would be later everywhere than its
            lane promises.
        """
        usable = self._usable_but(excluded, now)
        if not usable:
            return Refusal("no_replica", "no replica is ready", 0.0)
        usable = usable & ~self._prefill or usable  # if all are for prompts, they serve the rest as well
        if ask.tried is not None:
            first = replace(ask, lane=ask.tried)
            if not isinstance(found := self._pick(first, usable), Refusal):
                return self._reserve(first, found, now)
        found = self._pick(ask, usable)
        return found if isinstance(found, Refusal) else self._reserve(ask, found, now)

    def choose_prefill(self, ask: RouteQuery, now: float, excluded: Iterable[str] = ()) -> Placement | None:
        """Chooses a replica that computes a long prompt for another one, and reserves its place there.

        Returns:
            None if the replica that serves the request is to compute the prompt itself: little of it is new there,
            there is no replica for prompts alone, or none of them would be in time.
        """
        usable = self._usable_but(excluded, now)
        first, then = usable & self._prefill, usable & ~self._prefill
        if not first or not then:
            return None
        if ask.tried is not None:
            ask = replace(ask, lane=ask.tried)
        itself = self._pick(ask, then)
        if isinstance(itself, _Candidate) and ask.num_prompt - itself.num_given <= LONG_PROMPT:
            return None
        found = self._pick(ask, first)
        return None if isinstance(found, Refusal) else self._reserve(ask, found, now)

    def num_held(self, name: str, hashes: Sequence[bytes]) -> int:
        """Returns how many first blocks of a chain a replica has said that it holds."""
        replica = self.replicas.get(name)
        found = [] if replica is None else self.index.match(hashes, replica.bit, 1, is_there=True)
        return found[0][0] if found else 0

    def _usable_but(self, excluded: Iterable[str], now: float) -> int:
        """Bits of the replicas that may be chosen."""
        self._expire(now)
        usable = self._usable
        for name in self.replicas.keys() & set(excluded):
            usable &= ~self.replicas[name].bit
        return usable

    def note_done(self, ticket: int) -> None:
        """Ends the reservation of a request that ended, was refused or failed; it may be called late, or twice."""
        reservation = self._tickets.pop(ticket, None)
        if reservation is not None:
            was_counted = reservation.is_counted
            reservation.replica.release(ticket)
            self.index.expect_no_longer(reservation.expected, reservation.replica.bit)
            if not was_counted:
                self._rank(reservation.replica)

    @property
    def policies(self) -> Mapping[Lane, LanePolicy]:
        """The policies of the replicas' lanes, which are the same at all of them."""
        return next((replica.policies for replica in self.replicas.values()), DEFAULT_POLICIES)

    @property
    def num_reserved(self) -> int:
        """The number of requests that were sent and are not known to be over."""
        return len(self._tickets)

    # The choice

    def _pick(self, ask: RouteQuery, usable: int) -> _Candidate | Refusal:
        candidates = self._candidates(ask, usable)
        margins_s = [self._margin_s(ask, one) for one in candidates]
        in_time = [one for one, margin_s in zip(candidates, margins_s, strict=True) if margin_s >= 0]
        if not in_time:
            late_s = -max(margins_s)
            message = (
                f"the first token would come {late_s:.2f} s later than the {ask.lane.label} lane promises"
            )
            return Refusal("promise_out_of_reach", message, late_s)
        close_s = CLOSE * min(one.forecast_s for one in in_time)
        close = [one for one in in_time if one.forecast_s <= close_s]
        if any(one.num_cached for one in close):
            return max(close, key=lambda one: (one.num_cached, -one.forecast_s, -one.replica.slot))
        return min(close, key=lambda one: (one.replica.last_cold, one.replica.slot))

    def _margin_s(self, ask: RouteQuery, one: _Candidate) -> float:
        work = one.replica.work(ask.num_prompt - one.num_given, ask.num_prompt)
        return one.replica.margin_s(ask.lane, one.forecast_s, ask.waited_s, work, ask.ttft_s)

    def _candidates(self, ask: RouteQuery, usable: int) -> list[_Candidate]:
        candidates, others = [], usable
        for num_blocks, holders in self.index.match(ask.hashes, usable, _LENGTHS):
            others &= ~holders
            candidates += self._least(ask, holders, num_blocks)
        return self._with_sources(ask, candidates + self._least(ask, others, 0), usable)

    def _with_sources(self, ask: RouteQuery, candidates: list[_Candidate], usable: int) -> list[_Candidate]:
        """Lets candidates that take KV from others take it from the one that holds most, where that is sooner."""
        if not any(one.replica.load.pull_rate for one in candidates):
            return candidates
        told = self.replicas.get(ask.source or "")
        if told is not None and told.bit & self._usable:
            return [self._with_source(ask, one, told, ask.num_prompt - 1) for one in candidates]
        for num_blocks, holders in self.index.match(ask.hashes, usable, 1, is_there=True):
            source = self._slots[next(self._orders[ask.lane].least(holders, 0))]
            assert source is not None
            num_held = min(num_blocks * source.block_size, ask.num_prompt - 1)
            return [self._with_source(ask, one, source, num_held) for one in candidates]
        return candidates

    def _with_source(self, ask: RouteQuery, one: _Candidate, source: Replica, num_held: int) -> _Candidate:
        rate, num_pulled = one.replica.load.pull_rate, num_held - one.num_cached
        if rate <= 0 or num_pulled <= 0:
            return one
        forecast_s = one.replica.forecast_s(ask.lane, ask.tenant, ask.num_prompt - num_held, ask.num_prompt)
        forecast_s += num_pulled / rate
        # A source has work with it, too: for next to no gain, nobody is asked.
        if source.name != ask.source and CLOSE * forecast_s >= one.forecast_s:
            return one
        return _Candidate(one.replica, one.num_cached, forecast_s, num_pulled, source)

    def _least(self, ask: RouteQuery, among: int, num_blocks: int) -> list[_Candidate]:
        """Returns the few replicas with the least load among some that all hold the same number of blocks."""
        order = self._orders.get(ask.lane) or self._new_order(ask.lane)
        found = []
        for slot in islice(order.least(among, self._had_cold), _FEW):
            replica = self._slots[slot]
            assert replica is not None
            # The last token is computed in any case.
            num_cached = min(num_blocks * replica.block_size, ask.num_prompt - 1)
            num_uncached = ask.num_prompt - num_cached
            forecast_s = replica.forecast_s(ask.lane, ask.tenant, num_uncached, ask.num_prompt)
            found.append(_Candidate(replica, num_cached, forecast_s))
        return found

    def _reserve(self, ask: RouteQuery, found: _Candidate, now: float) -> Placement:
        replica = found.replica
        self._num_tickets += 1
        ticket = self._num_tickets
        expected = ask.hashes[found.num_cached // replica.block_size :]
        work = int(replica.work(ask.num_prompt - found.num_given, ask.num_prompt))
        reservation = LoadReservation(replica, ask.lane, ask.tenant, work, expected)
        self._tickets[ticket] = reservation
        heappush(self._leases, (now + found.forecast_s + LEASE_S, ticket))
        self.index.expect(expected, replica.bit)
        replica.reserve(ticket, reservation)
        if not found.num_given:
            self._note_cold(replica)
        self._rank(replica)
        return Placement(
            replica=replica.name,
            ticket=ticket,
            forecast_s=found.forecast_s,
            num_cached=found.num_cached,
            num_pulled=found.num_pulled,
            source=None if found.source is None else found.source.name,
        )

    def _note_cold(self, replica: Replica) -> None:
        self._num_cold += 1
        replica.last_cold = self._num_cold
        self._had_cold |= replica.bit
        if not self._usable & ~self._had_cold:
            self._had_cold = replica.bit

    # Keeping track

    def _expire(self, now: float) -> None:
        """Gives up leases that ran out, and passes over replicas that fell silent."""
        while self._leases and self._leases[0][0] <= now:
            self.note_done(heappop(self._leases)[1])
        while self._fresh:
            name, replica = next(iter(self._fresh.items()))
            if now - replica.pushed_s <= self._stale_s:
                break
            del self._fresh[name]
            self._usable &= ~replica.bit

    def _note_alive(self, replica: Replica, now: float) -> None:
        replica.pushed_s = now
        self._fresh[replica.name] = replica
        self._fresh.move_to_end(replica.name)
        if replica.load.is_draining:
            self._usable &= ~replica.bit
        else:
            self._usable |= replica.bit

    def _rank(self, replica: Replica) -> None:
        for lane, order in self._orders.items():
            order.put(replica.bit, replica.forecast_s(lane, None, _SHORT_PROMPT, _SHORT_PROMPT))

    def _new_order(self, lane: Lane) -> LoadOrder:
        order = self._orders[lane] = LoadOrder()
        for replica in self.replicas.values():
            order.put(replica.bit, replica.forecast_s(lane, None, _SHORT_PROMPT, _SHORT_PROMPT))
        return order

    def _among(self, bits: int) -> list[Replica]:
        return [replica for replica in self._slots if replica is not None and replica.bit & bits]

    def _free_slot(self) -> int:
        for slot, replica in enumerate(self._slots):
            if replica is None and not self._gone.bits >> slot & 1:
                return slot
        self._slots.append(None)
        return len(self._slots) - 1


class _Gone:
    """Bits of replicas that are gone and may still be in the index, which is swept of them part by part."""

    def __init__(self) -> None:
        self._swept = 0
        """Bits that the current sweep takes out."""
        self._next = 0
        """Bits that came too late for the current sweep."""
        self._part = 0

    @property
    def bits(self) -> int:
        return self._swept | self._next

    def add(self, bit: int) -> None:
        self._next |= bit

    def sweep(self, index: BlockIndex) -> None:
        """Sweeps one part of the index."""
        if not self._swept:
            self._swept, self._next, self._part = self._next, 0, 0
        if self._swept:
            index.sweep(self._part, self._swept)
            self._part += 1
            if self._part == index.num_parts:
                self._swept = 0


class RandomRouter(Router):
    """A router to compare with, which chooses at random."""

    def __init__(self, *, seed: int = 0, stale_s: float = STALE_S) -> None:
        super().__init__(stale_s=stale_s)
        self._random = Random(seed)

    def _pick(self, ask: RouteQuery, usable: int) -> _Candidate | Refusal:  # noqa: ARG002
        return _Candidate(self._random.choice(self._among(usable)), 0, 0.0)


class LeastRouter(Router):
    """A router to compare with, which chooses the replica with the fewest requests."""

    def _pick(self, ask: RouteQuery, usable: int) -> _Candidate | Refusal:  # noqa: ARG002
        return _Candidate(min(self._among(usable), key=lambda one: (one.num_requests, one.last_cold)), 0, 0.0)


class RoundRobinRouter(Router):
    """A router to compare with, which chooses one replica after another."""

    def _pick(self, ask: RouteQuery, usable: int) -> _Candidate | Refusal:  # noqa: ARG002
        return _Candidate(min(self._among(usable), key=lambda one: one.last_cold), 0, 0.0)
