"""What comes back from the tiers: the blocks that a request needs, read while it waits.

A fetch marks the hashes of its blocks in the prefix index as pending, as a sequence does that computes them. So whoever
needs them waits, and goes on with what has come when the fetch is over. It is over when all has come, when a block
could not be read (then what lies before it still comes), or when it has taken as long as computing would have.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial

from penstock.engine.planning.device import BlockCarrier, DeviceError, Payload
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.outside import Content
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
    """Blocks of a chain that are on their way."""

    hashes: list[bytes]
    """The chain, up to the last block that is fetched."""
    token_ids: list[int]
    salt: bytes
    num_known: int
    reads: Reads
    is_divisible: bool
    """Whether the first of its blocks are of use without the others: no table has a window."""
    begun_s: float
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
        self.open = {number: other for number, other in self.open.items() if other[0] < depth}


class Fetcher:
    """Begins fetches, and takes what they bring into the device's memory. For the step thread."""

    def __init__(
        self,
        chain: TierChain,
        reader: BlockReader,
        carrier: BlockCarrier,
        step_seconds: StepSeconds,
        clock: Callable[[], float],
    ) -> None:
        self._chain, self._reader, self._carrier = chain, reader, carrier
        self._step_seconds, self._clock = step_seconds, clock
        self._write_rate = ReadRate()
        self._landed_s = clock()
        self._fetches: dict[_Fetch, None] = {}
        self.seconds_saved = 0.0
        """The time that computing what was fetched would have taken, less the time that the fetches took."""
        self.num_blocks = 0
        """Blocks that were brought back."""

    @property
    def is_idle(self) -> bool:
        return not self._fetches and not self._reader.arrivals

    def choose(self, memory: SequenceMemory, hashes: list[bytes], num_known: int) -> Reads | None:
        """Chooses what to read of a chain of which the first blocks are known; for any thread.

        What another server has is read even if computing it took less time: whoever said where it is has weighed that,
        or wants this server to compute other things. The time that it takes is part of `Reads.read_s`.
        """
        now, num_bytes, index, chain = self._clock(), self._carrier.num_bytes, memory.index, self._chain

        def cost(depth: int, table: int) -> float | None:
            key = BlockKey(hashes[depth], table)
            return 0.0 if chain.is_far(key) else chain.read_seconds(key, num_bytes, now)

        reads = choose_reads(
            num_known,
            len(hashes),
            index.num_seen,
            lambda depth, table: index.has(hashes[depth], table),
            cost,
            lambda first, end: compute_seconds(self._step_seconds, memory.block_size, first, end),
        )
        if reads is not None:
            keys = (BlockKey(hashes[depth], table) for depth, table in reads.places)
            far = filter(chain.is_far, keys)
            reads.read_s += sum(chain.read_seconds(key, num_bytes, now) or 0.0 for key in far)
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
        fetch = _Fetch(
            hashes[: reads.end], token_ids, salt, num_known, reads, not max(index.num_seen), self._clock()
        )
        fetch.open.update(enumerate(reads.places))
        self._fetches[fetch] = None
        memory.refresh(hashes[:num_known])
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
            save: is called before blocks are overwritten that were free.

        Returns:
            Whether more has arrived than one turn takes.
        """
        begun_s = self._clock()
        arrived = self._take_arrivals(self._most_landed(begun_s))
        if arrived:
            self._write(memory, arrived, save)
        now = self._landed_s = self._clock()
        if arrived:
            self._write_rate.note(len(arrived) * self._carrier.num_bytes, now - begun_s, now)
        for fetch in list(self._fetches):
            patience_s = max(LEAST_PATIENCE_S, fetch.reads.compute_s)
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
            self._reader.note_taken()
            fetch = read.owner
            assert isinstance(fetch, _Fetch)
            if not fetch.is_wanted(read.place):
                continue
            if payload is not None and len(payload) != self._carrier.num_bytes:
                log.error("a KV block has %d bytes, not %d", len(payload), self._carrier.num_bytes)
                payload = None
            place = fetch.open[read.place]
            if payload is None:
                fetch.give_up(place)
            else:
                del fetch.open[read.place]
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

    def _end(self, memory: SequenceMemory, fetch: _Fetch) -> None:
        fetch.is_over = True
        del self._fetches[fetch]
        for block_hash in fetch.hashes[fetch.num_known :]:
            memory.index.end(block_hash, fetch)
        share = fetch.num_landed / max(1, len(fetch.reads.places))
        took_s = self._clock() - fetch.begun_s
        self.seconds_saved += max(0.0, share * fetch.reads.compute_s - took_s)
