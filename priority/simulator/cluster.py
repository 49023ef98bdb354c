"""Several simulated servers behind the router that serves: the same choice, on pushes that arrive late.

Each replica is the server of `run`, with its own queue, scheduler and clock. It pushes as a real one does: what
changed, at most so often, and the router has it a delay later. A request that a replica refuses goes to the next best
one, once.

Disaggregated, some replicas compute prompts and the others the tokens after the first. The KV of a prompt goes from
one to the other over the sender's link, one after another; the stream waits for it after its first token.

Replicas may have a tier, which takes the blocks that they evict, and may take blocks from one another where the router
says so. A request whose KV comes from there waits for it before it enters the queue, and nothing is read that would be
computed sooner.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from heapq import heappop, heappush
from math import inf, nextafter

from penstock.engine.planning.keeping import num_attended
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.prefix_events import Dropped, PrefixLog, Stored
from penstock.engine.planning.prefix_index import block_hash, chain_start, extend_hashes
from penstock.engine.planning.request import Request, Sequence
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from penstock.priority.queue import LaneQueue
from penstock.priority.routing.router import (
    LeastRouter,
    Placement,
    RandomRouter,
    RoundRobinRouter,
    RouteQuery,
    Router,
)
from penstock.priority.routing.state import Change, Load, Snapshot
from penstock.priority.simulator.result import BLOCK_SIZE, Result, Served, request_of, urgency_of
from penstock.priority.simulator.run import Machine, SimulatedServer, Tally, make_queue
from penstock.priority.simulator.tier import SimulatedTier
from penstock.priority.simulator.trace import BLOCK_TOKENS, Arrival
from penstock.priority.verdict import Refusal

ROUTERS = ("prefix", "least", "random", "round-robin", "disaggregated")
_TOKEN = 1
_LEAST_STEP_S = 1e-3
_CALM = 8
"""While all streams of a replica just go on, it pushes so many times less often: there is little to say."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Wires:
    """The network between machines."""

    push_every_s: float = 0.05
    """A replica pushes at most so often."""
    push_delay_s: float = 0.03
    """Until the router has it."""
    transfer_gbps: float = 100.0
    """The rate of a replica's link, for KV, in gigabits per second."""
    kv_bytes: int = 131_072
    """The bytes of a token's KV, here of 32 layers of 8 heads of 128 in 16 bits."""
    pulls: bool = False
    """Replicas take KV from one another over these links."""
    tier_tokens: int = 0
    """The tokens whose KV a replica's tier has room for."""
    tier_gbps: float = 160.0
    """The rate at which a replica reads its tier, in gigabits per second."""

    def transfer_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes * 8 / (self.transfer_gbps * 1e9)

    def read_s(self, num_tokens: int) -> float:
        return num_tokens * self.kv_bytes * 8 / (self.tier_gbps * 1e9)


def simulate_cluster(
    arrivals: list[Arrival],
    machine: Machine,
    router: str,
    num_replicas: int,
    *,
    wires: Wires = Wires(),
    num_prefill: int | None = None,
    lanes: Mapping[Lane, LanePolicy] = DEFAULT_POLICIES,
    seed: int = 0,
    progress: Callable[[int], None] = lambda _: None,
) -> Result:
    """Runs a trace to the end of its last request. Deterministic.

    Args:
        router: one of ROUTERS.
        num_prefill: with `disaggregated`, replicas that compute prompts; half of them, if not given.
        seed: of `random`.
    """
    result = Result(router, [Served(arrival) for arrival in arrivals], 0.0)
    site, tally, hashes = _Site(_Clock(), machine, wires, lanes, result), Tally(progress), _Hashes()
    front: _Pool | _Disaggregated
    if router == "disaggregated":
        front = _disaggregated(site, num_prefill or max(1, num_replicas // 2), num_replicas, tally)
    else:
        front = _Pool(site, _router(router, seed), num_replicas)
        front.on_end = lambda *_: tally.add()
    for number, served in enumerate(result.served):
        site.clock.run(served.arrival.at_s)
        request = request_of(number, served.arrival)
        with tally.refusing(served):
            front.send(served, request, hashes.of(request, served.arrival), served.arrival.at_s)
    site.clock.run(inf)
    result.duration_s = site.clock.now
    return result


def _router(name: str, seed: int) -> Router:
    if name == "random":
        return RandomRouter(seed=seed, stale_s=inf)
    kinds = {"prefix": Router, "least": LeastRouter, "round-robin": RoundRobinRouter}
    return kinds[name](stale_s=inf)


class _Clock:
    """Events in order of their time in seconds; simultaneous ones in the order in which they were added."""

    def __init__(self) -> None:
        self.now = 0.0
        self._num_told = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []

    def at(self, at_s: float, what: Callable[[], None]) -> None:
        self._num_told += 1
        heappush(self._events, (at_s, self._num_told, what))

    def run(self, until_s: float) -> None:
        while self._events and self._events[0][0] <= until_s:
            at_s, _, what = heappop(self._events)
            self.now = max(self.now, at_s)
            what()


@dataclass(frozen=True, slots=True)
class _Site:
    """The surroundings that all replicas share."""

    clock: _Clock
    machine: Machine
    wires: Wires
    lanes: Mapping[Lane, LanePolicy]
    result: Result


@dataclass(frozen=True, slots=True)
class _Sent:
    """A request on its way to a replica."""

    served: Served
    request: Request
    hashes: list[bytes]
    """Of all full blocks of its prompt."""


class _Pool:
    """Equal replicas behind one router."""

    def __init__(
        self, site: _Site, router: Router, num_replicas: int, *, by_step: bool = False, adopts: bool = False
    ) -> None:
        """
        Args:
            by_step: its servers' clocks never run ahead of the cluster's by more than a step, so that what follows
                from the end of a request comes at its time.
            adopts: the KV of its prompts comes from elsewhere.
        """
        self.site = site
        self.router = router
        self.by_step = by_step
        self.on_end: Callable[[_Replica, str, Served], None] = lambda *_: None
        self.adopts = adopts
        self._replicas = {}
        for name in (f"replica-{number}" for number in range(num_replicas)):
            self._replicas[name] = _Replica(name, self)
            router.on_snapshot(self._replicas[name].snapshot(), 0.0)

    def send(self, served: Served, request: Request, hashes: list[bytes], now: float) -> None:
        """To the replica of choice, and if that refuses to the next best.

        Raises:
            Refusal: nobody takes it.
        """
        self._place(_Sent(served, request, hashes), now, {})

    def _place(self, sent: _Sent, now: float, refusals: dict[str, Refusal]) -> None:
        """Raises Refusal."""
        served = sent.served
        urgency = urgency_of(served.arrival)
        ask = RouteQuery(
            lane=urgency.lane,
            tried=urgency.tried,
            tenant=served.arrival.tenant,
            num_prompt=served.arrival.num_prompt,
            hashes=sent.hashes,
            waited_s=max(0.0, now - served.arrival.at_s),
        )
        while len(refusals) < 2:
            found = self.router.choose(ask, now, refusals)
            if isinstance(found, Refusal):
                raise [found, *refusals.values()][-1]
            source = None if found.source is None else self._replicas[found.source]
            there_s, num_there = self._replicas[found.replica].fetch(sent, source, now)
            if there_s > now:
                self._place_later(sent, found, there_s, num_there, refusals)
                return
            try:
                self._offer(sent, found, now, num_there)
                return
            except Refusal as refusal:
                refusals[found.replica] = refusal
        raise refusals.popitem()[1]

    def _place_later(
        self, sent: _Sent, found: Placement, there_s: float, num_there: int, refusals: dict[str, Refusal]
    ) -> None:
        """Offers a request when the KV of its first tokens has come; if it is refused, it may go elsewhere."""

        def offer() -> None:
            try:
                try:
                    self._offer(sent, found, there_s, num_there)
                except Refusal as refusal:
                    self._place(sent, there_s, refusals | {found.replica: refusal})
            except Refusal as refusal:
                sent.served.refuse(refusal)
                self.on_end(self._replicas[found.replica], sent.request.request_id, sent.served)

        self.site.clock.at(there_s, offer)

    def _offer(self, sent: _Sent, found: Placement, now: float, num_there: int) -> None:
        """Raises Refusal."""
        try:
            self._replicas[found.replica].offer(sent, found.ticket, now, num_there)
        except Refusal:
            self.router.note_done(found.ticket)
            raise


class _Replica:
    """A server, and the state that it pushes."""

    def __init__(self, name: str, pool: _Pool) -> None:
        site = pool.site
        self.name = name
        self.link_free_s = 0.0
        """The time at which it has sent all its KV."""
        self._pool = pool
        self._clock = site.clock
        self._log = PrefixLog()
        self._tier = SimulatedTier(0 if pool.adopts else site.wires.tier_tokens // BLOCK_SIZE)
        self._read_s = 0.0
        """The time at which its tier has been read."""
        self._changed: dict[bytes, bool] = {}
        """Whether blocks that came or went since the last push are on the device or in the tier."""
        self._queue = make_queue("penstock", site.machine, site.lanes, {})
        assert isinstance(self._queue, LaneQueue)
        self._server = SimulatedServer(
            site.machine, self._queue, site.lanes, site.result, self._note_end, log=self._log
        )
        self._number = 0
        self._tickets: dict[str, int] = {}
        self._counted: list[int] = []
        self._over: list[int] = []
        self._push_s = inf
        """The time of its next push."""
        self._is_stepping = False

    def snapshot(self) -> Snapshot:
        machine = self._server.machine
        return Snapshot(
            replica=self.name,
            epoch="first",
            model="simulated",
            block_size=BLOCK_SIZE,
            num_kv_tokens=machine.num_kv_tokens,
            max_batch_tokens=machine.max_batch_tokens,
            max_num_seqs=machine.max_num_seqs,
            policies=self._pool.site.lanes,
            load=self._load(),
        )

    def fetch(self, sent: _Sent, source: _Replica | None, now: float) -> tuple[float, int]:
        """Begins to read the KV of a prompt's first tokens from the tier, and what is behind them from another replica.

        Returns:
            The time at which it has come, and the number of tokens whose KV is there then. If nothing is read that is
            now, and the tokens whose KV comes along with the request.
        """
        if self._pool.adopts:
            return now, len(sent.request.prompt_token_ids)
        wires, there_s = self._pool.site.wires, now
        num_held = self.num_on_device(sent, now)
        num_read = self.num_held(sent, now) - num_held
        if num_read and self._is_sooner(
            max(now, self._read_s) + wires.read_s(num_read) - now, num_held, num_read
        ):
            there_s = self._read_s = max(now, self._read_s) + wires.read_s(num_read)
            for known in sent.hashes[num_held // BLOCK_SIZE : (num_held + num_read) // BLOCK_SIZE]:
                self._tier.touch(known)
            num_held += num_read
            self._pool.site.result.num_read += num_read
        num_pulled = 0 if source is None else source.num_held(sent, now) - num_held
        if source is not None and num_pulled > 0:
            source.link_free_s = max(now, source.link_free_s) + wires.transfer_s(num_pulled)
            there_s = max(there_s, source.link_free_s)
            num_held += num_pulled
            self._pool.site.result.num_pulled += num_pulled
        return (there_s, num_held) if there_s > now else (now, 0)

    def _is_sooner(self, seconds: float, num_before: int, num_tokens: int) -> bool:
        """Whether so many seconds are less than a step needs for these tokens of a prompt."""
        attended = num_attended(num_before, num_before + num_tokens)
        model = self._server.model
        return seconds < model.seconds(num_tokens, 0, 0, attended) - model.seconds(0, 0, 0)

    def num_on_device(self, sent: _Sent, now: float) -> int:
        """Returns how many of a prompt's first tokens have their KV on the device, the last one never included."""
        self._server.advance(now)
        most = (sent.served.arrival.num_prompt - 1) // BLOCK_SIZE
        return len(self._server.memory.index.blocks_of(sent.hashes[:most])) * BLOCK_SIZE

    def num_held(self, sent: _Sent, now: float) -> int:
        """Returns how many of them have it on the device or in the tier."""
        number = self.num_on_device(sent, now) // BLOCK_SIZE
        self._note_changes()
        most = (sent.served.arrival.num_prompt - 1) // BLOCK_SIZE
        while number < most and self._holds(sent.hashes[number]):
            number += 1
        return number * BLOCK_SIZE

    def _holds(self, known: bytes) -> bool:
        return known in self._tier or self._server.memory.index.block_of(known) is not None

    def offer(self, sent: _Sent, ticket: int, now: float, num_there: int) -> None:
        """The request comes, and with it the KV of so many of its tokens; raises Refusal."""
        server, served, num_prompt = self._server, sent.served, sent.served.arrival.num_prompt
        server.advance(now)
        if num_there:
            _adopt(server, sent.request, num_there)
        request = replace(sent.request, block_hashes=tuple(sent.hashes[: (num_prompt - 1) // BLOCK_SIZE]))
        self._tickets[request.request_id] = ticket
        try:
            server.offer(served, request, at_s=now)
        except Refusal:
            del self._tickets[request.request_id]
            raise
        self._counted.append(ticket)
        self._push_at(now + self._pool.site.wires.push_every_s)
        if self._pool.by_step and not self._is_stepping:
            self._is_stepping = True
            self._clock.at(now, self._step)

    def _note_end(self, request_id: str, served: Served) -> None:
        self._over.append(self._tickets.pop(request_id))
        self._pool.on_end(self, request_id, served)

    def _step(self) -> None:
        """One step, and the next when its time comes, until there is nothing to do."""
        server, clock = self._server, self._clock
        server.advance(nextafter(max(server.now, clock.now), inf))
        self._is_stepping = bool(server.open)
        if self._is_stepping:
            clock.at(max(server.now, clock.now + _LEAST_STEP_S), self._step)

    def _push_at(self, at_s: float) -> None:
        if at_s < self._push_s:
            self._push_s = at_s
            self._clock.at(at_s, lambda: self._push(at_s))

    def _push(self, at_s: float) -> None:
        """Says what changed, and again later, until there is nothing to say."""
        if at_s != self._push_s:
            return  # it pushed sooner
        self._push_s = inf
        server, clock, wires = self._server, self._clock, self._pool.site.wires
        server.advance(clock.now)
        stored, removed = self._take_changes()
        if server.open or self._counted or self._over or stored or removed:
            # The server's clock stands at the end of a step.
            pushed_s = max(server.now, clock.now)
            self._tell(stored, removed, pushed_s + wires.push_delay_s)
            calm = _CALM if server.is_calm else 1
            self._push_at(max(pushed_s, clock.now + calm * wires.push_every_s))

    def _note_changes(self) -> None:
        """Lets the tier take what was evicted."""
        index = self._server.memory.index
        for event in self._log.drain():
            if isinstance(event, Stored):
                self._changed[event.hash] = True
            elif isinstance(event, Dropped):
                gone = self._tier.put(event.hash)
                if gone is not None and index.block_of(gone) is None:
                    self._changed[gone] = False

    def _take_changes(self) -> tuple[list[bytes], list[bytes]]:
        """Returns the blocks that came and that went; one that did both is in that which it did last."""
        self._note_changes()
        changed, self._changed = self._changed, {}
        stored = [known for known, is_there in changed.items() if is_there]
        return stored, [known for known, is_there in changed.items() if not is_there]

    def _tell(self, stored: list[bytes], removed: list[bytes], at_s: float) -> None:
        """Sends the router a change that it has at that time."""
        self._number += 1
        change = Change(
            epoch="first",
            number=self._number,
            load=self._load(),
            stored=stored,
            removed=removed,
            counted=self._counted,
        )
        over, self._counted, self._over = self._over, [], []
        self._clock.at(at_s, lambda: self._arrive(change, over))

    def _arrive(self, change: Change, over: list[int]) -> None:
        router = self._pool.router
        router.on_change(self.name, change, self._clock.now)
        for ticket in over:
            router.note_done(ticket)

    def _load(self) -> Load:
        assert isinstance(self._queue, LaneQueue)
        num_free, wires = self._server.memory.pool.num_free, self._pool.site.wires
        load = self._queue.load(self._server.now, num_free_kv=num_free * BLOCK_SIZE)
        return replace(load, pull_rate=1 / wires.transfer_s(1)) if wires.pulls else load


class _Disaggregated:
    """Prompts at some replicas, the tokens after the first at others."""

    def __init__(self, site: _Site, first: _Pool, then: _Pool, tally: Tally) -> None:
        self._site = site
        self._first = first
        self._then = then
        self._tally = tally
        self._open: dict[str, tuple[Served, Request, list[bytes]]] = {}
        first.on_end = self._note_first
        then.on_end = self._note_rest

    def send(self, served: Served, request: Request, hashes: list[bytes], now: float) -> None:
        """Raises Refusal."""
        leg = Served(replace(served.arrival, num_output=1))
        self._open[request.request_id] = served, request, hashes
        try:
            self._first.send(leg, replace(request, sampling=SamplingParams(max_tokens=1)), hashes, now)
        except Refusal:
            del self._open[request.request_id]
            raise

    def _note_first(self, replica: _Replica, request_id: str, leg: Served) -> None:
        served = self._open[request_id][0]
        served.predicted_s, served.num_cached = leg.predicted_s, leg.num_cached
        _append(served, leg)
        if leg.refused is not None or served.arrival.num_output == 1:
            self._end(request_id)
            return
        assert leg.finished_s is not None
        started_s = max(leg.finished_s, replica.link_free_s)
        there_s = replica.link_free_s = started_s + self._site.wires.transfer_s(served.arrival.num_prompt)
        self._site.clock.at(there_s, lambda: self._hand_over(request_id, there_s))

    def _hand_over(self, request_id: str, now: float) -> None:
        """The KV of the prompt has come; the first token goes with it."""
        served, request, hashes = self._open[request_id]
        num_left = served.arrival.num_output - 1
        leg = Served(
            replace(served.arrival, at_s=now, num_prompt=served.arrival.num_prompt + 1, num_output=num_left)
        )
        rest = replace(
            request,
            prompt_token_ids=(*request.prompt_token_ids, _TOKEN),
            sampling=SamplingParams(max_tokens=num_left),
            arrival_s=now,
        )
        try:
            self._then.send(leg, rest, hashes, now)
        except Refusal as refusal:
            served.refuse(refusal)
            self._end(request_id)

    def _note_rest(self, _: _Replica, request_id: str, leg: Served) -> None:
        _append(self._open[request_id][0], leg)
        self._end(request_id)

    def _end(self, request_id: str) -> None:
        del self._open[request_id]
        self._tally.add()


def _disaggregated(site: _Site, num_first: int, num_replicas: int, tally: Tally) -> _Disaggregated:
    """Returns a front of which so many replicas compute prompts; for the tokens after the first none is promised."""
    lanes = {lane: replace(policy, ttft_s=inf) for lane, policy in site.lanes.items()}
    first = _Pool(site, Router(stale_s=inf), num_first, by_step=True)
    router, num_then = LeastRouter(stale_s=inf), num_replicas - num_first
    then = _Pool(replace(site, lanes=lanes), router, num_then, adopts=True)
    return _Disaggregated(site, first, then, tally)


class _Hashes:
    """The hash chains of prompts; what the trace says is shared is hashed once."""

    def __init__(self) -> None:
        self._of: dict[tuple[bytes, int], list[bytes]] = {}

    def of(self, request: Request, arrival: Arrival) -> list[bytes]:
        hashes: list[bytes] = []
        parent = chain_start(request.salt)
        for one in arrival.hash_ids[: arrival.num_prompt // BLOCK_TOKENS]:
            known = self._of.get((parent, one))
            if known is None:
                known = self._of[parent, one] = _hashed(parent, one)
            hashes += known
            parent = known[-1]
        tokens = request.prompt_token_ids
        extend_hashes(hashes, tokens, len(tokens) // BLOCK_SIZE, BLOCK_SIZE, request.salt)
        return hashes


def _hashed(parent: bytes, block: int) -> list[bytes]:
    hashes = []
    for _ in range(BLOCK_TOKENS // BLOCK_SIZE):
        parent = block_hash(parent, [block] * BLOCK_SIZE)
        hashes.append(parent)
    return hashes


def _adopt(server: SimulatedServer, request: Request, num_tokens: int) -> None:
    """Makes the KV of a prompt's first tokens resident, which comes from elsewhere, if there is room for it."""
    memory, sequence = (
        server.memory,
        Sequence(replace(request, prompt_token_ids=request.prompt_token_ids[:num_tokens])),
    )
    if memory.num_free_needed(sequence) <= memory.pool.num_free:
        memory.start(sequence)
        memory.commit(sequence, num_tokens)
        memory.release(sequence)


def _append(served: Served, leg: Served) -> None:
    """The outcome of a part of a request, appended to the earlier parts."""
    if leg.first_token_s is not None:
        if served.first_token_s is None:
            served.first_token_s = leg.first_token_s
        else:
            gap_s = leg.first_token_s - served.last_token_s
            served.longest_gap_s = max(served.longest_gap_s, gap_s, leg.longest_gap_s)
        served.last_token_s = leg.last_token_s
    served.num_tokens += leg.num_tokens
    served.num_preemptions += leg.num_preemptions
    served.refused, served.retry_after_s = leg.refused, leg.retry_after_s
    served.finished_s = leg.finished_s if served.num_tokens == served.arrival.num_output else None
