"""What comes back from the tiers: the blocks, and the state, that a request needs, read while it waits.

A fetch marks the hashes of its blocks in the prefix index as pending, as a sequence does that computes them. So whoever
needs them waits, and goes on with what has come when the fetch is over. It is over when all has come, when a block
could not be read (then what lies before it still comes), or when it has taken as long as computing would have.

Where layers have a state, a chain is of use only up to a block after which there is one. It is read together with the
blocks, and is written to a slot when all of these have come; if one of them does not, nothing of the chain is used.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.engine.planning.device import DeviceError, PageCarrier, Payload
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.outside import STATE, Content
from penstock.engine.planning.request import NO_LIMIT
from penstock.engine.planning.request_queue import StepSeconds
from penstock.engine.tiers.block_file import BlockKey
from penstock.engine.tiers.chain import BlockReader, Read, TierChain
from penstock.engine.tiers.rates import ReadRate, Reads, choose_reads, compute_seconds

log = logging.getLogger("penstock.engine")

LEAST_PATIENCE_S = 2.0
"""A fetch may take so long, even if computing takes less."""
_LANDED_SHARE = 0.1
"""The part of the time from turn to turn for which blocks are written to the device's memory: running streams go on."""
_LEAST_LANDED_BYTES, _MOST_LANDED_BYTES = 1 << 20, 32 << 20
"""What is written in one turn in any case, and at most; one block at least."""


@dataclass(eq=False, slots=True)
class _Fetch:
    """Blocks of a chain that are on their way, and perhaps the state after the last of them."""

    hashes: list[bytes]
    """The chain, up to the last block that is fetched."""
    token_ids: list[int]
    salt: bytes
    num_known: int
    reads: Reads
    is_divisible: bool
    """Whether the first of its blocks are of use without the others: no table has a window, and no layer a state."""
    begun_s: float
    state: Payload | None = None
    """The state, when it has come."""
    open: dict[int, tuple[int, int]] = field(default_factory=dict)
    """The depth and the table of each block that has not come, by its number in the fetch."""
    num_landed: int = 0
    is_over: bool = False

    def content(self, place: tuple[int, int]) -> Content:
        return Content(self.hashes, self.token_ids, self.salt, *place)

    def is_wanted(self, number: int) -> bool:
        return not self.is_over and number in self.open

    def give_up(self, place: tuple[int, int]) -> None:
        """Gives up a block, and with it all behind it; if a part of the chain is of no use, all of it."""
        depth = place[0] if self.is_divisible else 0
        self.state = None
        self.open = {number: other for number, other in self.open.items() if other[0] < depth}


class Fetcher:
    """Begins fetches, and takes what they bring into the device's memory. For the step thread."""

    def __init__(
        self,
        chain: TierChain,
        reader: BlockReader,
        carrier: PageCarrier,
        state_carrier: PageCarrier | None,
        step_seconds: StepSeconds,
        clock: Callable[[], float],
        most_bytes: int,
    ) -> None:
        """`most_bytes` bounds the states that are on their way."""
        self._chain, self._reader, self._carrier = chain, reader, carrier
        self._state_carrier = state_carrier
        state_bytes = 0 if state_carrier is None else state_carrier.num_bytes
        self._most_states = max(1, most_bytes // max(1, state_bytes))
        self._step_seconds, self._clock = step_seconds, clock
        self._write_rate = ReadRate()
        self._landed_s = clock()
        self._fetches: dict[_Fetch, None] = {}
        self.seconds_saved = 0.0
        """The time that computing what was fetched would have taken, less the time that the fetches took."""
        self.num_blocks = 0
        """Blocks that were brought back, and states."""

    @property
    def is_idle(self) -> bool:
        return not self._fetches and not self._reader.arrivals

    def brings(self, memory: SequenceMemory, block_hash: bytes) -> bool:
        """Returns whether a block is on its way already."""
        return memory.index.owner_of(block_hash, NO_LIMIT) in self._fetches

    def choose(self, memory: SequenceMemory, hashes: list[bytes], num_known: int) -> Reads | None:
        """Chooses what to read of a chain of which the first blocks are known; for any thread.

        What another server has is read even if computing it took less time: whoever said where it is has weighed that,
        or wants this server to compute other things. The time that it takes is part of `Reads.read_s`.
        """
        now, index, chain = self._clock(), memory.index, self._chain

        def is_here(depth: int, table: int) -> bool:
            has_state = memory.snapshots.has_state
            return has_state(hashes[depth]) if table == STATE else index.has(hashes[depth], table)

        def read_seconds(depth: int, table: int) -> float | None:
            return chain.read_seconds(BlockKey(hashes[depth], table), self._num_bytes(table), now)

        def cost(depth: int, table: int) -> float | None:
            return 0.0 if chain.is_far(BlockKey(hashes[depth], table)) else read_seconds(depth, table)

        reads = choose_reads(
            num_known,
            len(hashes),
            index.num_seen,
            is_here,
            cost,
            lambda first, end: compute_seconds(self._step_seconds, memory.block_size, first, end),
            needs_state=memory.states is not None,
        )
        if reads is not None:
            far = (place for place in reads.places if chain.is_far(BlockKey(hashes[place[0]], place[1])))
            reads.read_s += sum(read_seconds(*place) or 0.0 for place in far)
        return reads

    def begin(
        self,
        memory: SequenceMemory,
        hashes: list[bytes],
        token_ids: list[int],
        salt: bytes,
        num_known: int,
    ) -> None:
        """Begins to fetch what follows the known blocks of a chain, up to where others compute or fetch already."""
        index, end = memory.index, num_known
        while end < len(hashes) and not index.is_pending(hashes[end], NO_LIMIT):
            end += 1
        room = memory.pool.num_free - sum(len(fetch.open) for fetch in self._fetches)
        reads = self.choose(memory, hashes[:end], num_known)
        if reads is None or len(reads.places) > room:
            return
        if reads.has_state and sum(f.reads.has_state for f in self._fetches) >= self._most_states:
            return
        is_divisible = memory.states is None and not max(index.num_seen)
        fetch = _Fetch(hashes[: reads.end], token_ids, salt, num_known, reads, is_divisible, self._clock())
        fetch.open.update(enumerate(reads.places))
        self._fetches[fetch] = None
        memory.refresh(fetch.hashes)
        for block_hash in hashes[num_known : reads.end]:
            index.begin(block_hash, fetch)
        for number, (depth, table) in enumerate(reads.places):
            key = BlockKey(hashes[depth], table)
            self._reader.ask(Read(key, fetch, number, partial(fetch.is_wanted, number)))
        if not reads.places:
            self._end(memory, fetch)

    def land(self, memory: SequenceMemory, save: Callable[[], None]) -> bool:
        """Takes what has arrived, and ends fetches that are done or late.

        Args:
            save: is called before blocks or slots are overwritten that were free.

        Returns:
            Whether more has arrived than one turn takes.
        """
        now = self._clock()
        if arrived := self._take_arrivals(self._most_landed(now)):
            self._write(memory, arrived, save)
            begun_s, now = now, self._clock()
            self._write_rate.note(len(arrived) * self._carrier.num_bytes, now - begun_s, now)
        self._landed_s = now
        for fetch in list(self._fetches):
            patience_s = max(LEAST_PATIENCE_S, fetch.reads.compute_s)
            if not fetch.open and fetch.state is not None:
                self._write_state(memory, fetch, fetch.state, save)
            if not fetch.open or now - fetch.begun_s > patience_s:
                self._end(memory, fetch)
        return bool(self._reader.arrivals)

    def start_afresh(self) -> None:
        """Gives up all fetches: their memory is gone."""
        for fetch in self._fetches:
            fetch.is_over = True
        self._fetches = {}

    def _most_landed(self, now: float) -> int:
        """How many blocks may be written in this turn."""
        num_bytes = max(1, self._carrier.num_bytes)
        each_s = self._write_rate.seconds(num_bytes, now)
        in_time = int(_LANDED_SHARE * (now - self._landed_s) / each_s) if each_s else 0
        least, most = _LEAST_LANDED_BYTES // num_bytes, _MOST_LANDED_BYTES // num_bytes
        return max(1, least, min(most, in_time))

    def _take_arrivals(self, most: int) -> list[tuple[_Fetch, tuple[int, int], Payload]]:
        """Takes the payloads that are wanted, those of the first blocks of their chains foremost."""
        arrived: list[tuple[_Fetch, tuple[int, int], Payload]] = []
        while self._reader.arrivals and len(arrived) < most:
            read, payload = self._reader.arrivals.popleft()
            self._reader.note_taken(read)
            fetch = read.owner
            assert isinstance(fetch, _Fetch)
            if not fetch.is_wanted(read.place):
                continue
            place = fetch.open[read.place]
            num_bytes = self._num_bytes(place[1])
            if payload is not None and len(payload) != num_bytes:
                log.error("a KV block or a state has %d bytes, not %d", len(payload), num_bytes)
                payload = None
            if payload is None:
                fetch.give_up(place)
                continue
            del fetch.open[read.place]
            if place[1] == STATE:
                fetch.state = payload
            else:
                arrived.append((fetch, place, payload))
        return sorted(arrived, key=lambda one: one[1])

    def _write(
        self,
        memory: SequenceMemory,
        arrived: list[tuple[_Fetch, tuple[int, int], Payload]],
        save: Callable[[], None],
    ) -> None:
        blocks = memory.take(len(arrived))
        for fetch, place, _ in arrived[len(blocks) :]:
            fetch.give_up(place)
        arrived = arrived[: len(blocks)]
        save()
        contents: list[Content] = []
        try:
            self._carrier.copy_in(blocks, [payload for *_, payload in arrived])
            contents = [fetch.content(place) for fetch, place, _ in arrived]
        except DeviceError:
            raise
        except Exception as error:
            log.warning("%d KV blocks could not be brought back, and are computed: %s", len(blocks), error)
            for fetch, place, _ in arrived:
                fetch.give_up(place)
        finally:
            memory.bring_back(blocks, contents)
        for fetch, _, _ in arrived if contents else ():
            fetch.num_landed += 1
            self.num_blocks += 1

    def _write_state(
        self, memory: SequenceMemory, fetch: _Fetch, state: Payload, save: Callable[[], None]
    ) -> None:
        num_fetched = (fetch.reads.end - fetch.num_known) * memory.block_size
        if not (slot := memory.take_slot(num_fetched)):
            return
        save()
        content: Content | None = None
        try:
            assert self._state_carrier is not None
            self._state_carrier.copy_in([slot], [state])
            content = fetch.content((fetch.reads.end - 1, STATE))
        except DeviceError:
            raise
        except Exception as error:
            log.warning("a state could not be brought back, and is computed: %s", error)
        finally:
            memory.bring_back_state(slot, content, num_fetched)
        if content is not None:
            fetch.num_landed += 1
            self.num_blocks += 1

    def _num_bytes(self, table: int) -> int:
        carrier = self._state_carrier if table == STATE else self._carrier
        return 0 if carrier is None else carrier.num_bytes

    def _end(self, memory: SequenceMemory, fetch: _Fetch) -> None:
        fetch.is_over = True
        del self._fetches[fetch]
        for block_hash in fetch.hashes[fetch.num_known :]:
            memory.index.end(block_hash, fetch)
        num_wanted = len(fetch.reads.places)
        share = fetch.num_landed / max(1, num_wanted)
        if memory.states is not None and fetch.num_landed < num_wanted:
            share = 0.0
        took_s = self._clock() - fetch.begun_s
        self.seconds_saved += max(0.0, share * fetch.reads.compute_s - took_s)
