"""The tiers of a server, one behind the other, and the threads that write to them and read from them."""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable
from collections.abc import Sequence as ListLike
from queue import Empty, SimpleQueue
from typing import NamedTuple

from penstock.engine.planning.device import Payload, Staged
from penstock.engine.tiers.block_file import BlockKey
from penstock.engine.tiers.rates import ReadRate
from penstock.engine.tiers.tier import Tier

log = logging.getLogger("penstock.engine")

_LOOK_OVER_S = 10.0
"""The writer looks so often at what others did to a tier."""


class TierChain:
    """Tiers, the nearest first: a block is read from the first that has it, and then the ones before keep it, too.

    Whatever it says of blocks is true of states as well. A block without bytes, which is one of a model without
    attention, is kept nowhere and read at once.
    """

    def __init__(
        self, tiers: ListLike[Tier], clock: Callable[[], float], *, blocks_are_empty: bool = False
    ) -> None:
        self.tiers = tiers
        self._blocks_are_empty = blocks_are_empty
        self._clock = clock
        self._rates = [tier.read_rate or ReadRate() for tier in tiers]
        self._keeps_any = any(tier.keeps for tier in tiers)

    def keeps(self, key: BlockKey) -> bool:
        """Returns whether a block need not be written again."""
        if not self._keeps_any or self._is_empty(key):
            return True
        return any(tier.keeps and tier.has(key) for tier in self.tiers)

    def read_seconds(self, key: BlockKey, num_bytes: int, now: float) -> float | None:
        """Returns the expected time of reading a block; None if no tier has it. For any thread."""
        if self._is_empty(key):
            return 0.0
        for tier, rate in zip(self.tiers, self._rates, strict=True):
            if tier.has(key):
                return rate.seconds(num_bytes, now)
        return None

    def is_far(self, key: BlockKey) -> bool:
        """Returns whether a block would be read from a tier that others fill, who may be busy."""
        return next((not tier.keeps for tier in self.tiers if tier.has(key)), False)

    def read(self, key: BlockKey) -> Payload | None:
        if self._is_empty(key):
            return b""
        for number, (tier, rate) in enumerate(zip(self.tiers, self._rates, strict=True)):
            if not tier.has(key):
                continue
            started = self._clock()
            payload = tier.read(key)
            if payload is not None:
                now = self._clock()
                if tier.read_rate is None:
                    rate.note(len(payload), now - started, now)
                for nearer in self.tiers[:number]:
                    nearer.write(key, payload)
                return payload
        return None

    def write(self, key: BlockKey, payload: Payload) -> None:
        for tier in self.tiers:
            if tier.keeps:
                tier.write(key, payload)

    def forget(self, key: BlockKey) -> None:
        for tier in self.tiers:
            tier.forget(key)

    def look_over(self) -> None:
        for tier in self.tiers:
            tier.look_over()

    def close(self) -> None:
        for tier in self.tiers:
            tier.close()

    def _is_empty(self, key: BlockKey) -> bool:
        return self._blocks_are_empty and not key.is_state


class Batch(NamedTuple):
    """Blocks on their way to the tiers."""

    keys: list[BlockKey]
    staged: Staged


class BlockWriter:
    """Writes blocks behind the steps, in a thread of its own."""

    def __init__(
        self,
        chain: TierChain,
        block_bytes: int,
        most_bytes: int,
        clock: Callable[[], float],
        state_bytes: int = 0,
    ) -> None:
        """`most_bytes` bounds the blocks that wait to be written, and the states as well."""
        self._chain, self._clock = chain, clock
        self._most = [max(1, most_bytes // max(1, size)) for size in (block_bytes, state_bytes)]
        self.batches: SimpleQueue[Batch | None] = SimpleQueue()
        self._waiting: tuple[set[BlockKey], set[BlockKey]] = set(), set()
        """Blocks, and states."""
        self._written = threading.Event()
        self._looked_s = clock()
        self._thread = threading.Thread(target=self._run, name="penstock-kv-writer", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def room(self, *, of_states: bool) -> int:
        """Returns how many blocks, or states, may be put."""
        return self._most[of_states] - len(self._waiting[of_states])

    def has(self, key: BlockKey) -> bool:
        """Returns whether a block waits to be written."""
        return key in self._waiting[key.is_state]

    def put(self, keys: list[BlockKey], staged: Staged) -> None:
        for key in keys:
            self._waiting[key.is_state].add(key)
        self.batches.put(Batch(keys, staged))

    def forget(self, key: BlockKey) -> None:
        """Keeps a block from being written, and drops it where it is."""
        self._waiting[key.is_state].discard(key)
        self._chain.forget(key)

    def wait_for_room(self, timeout_s: float, *, of_states: bool) -> None:
        """Waits until something was written, or so long."""
        self._written.clear()
        if not self.room(of_states=of_states):
            self._written.wait(timeout_s)

    def close(self, timeout_s: float) -> bool:
        """Ends when all is written, or when so much time has passed; returns whether the thread has ended."""
        self.batches.put(None)
        if self._thread.ident is not None:
            self._thread.join(timeout_s)
        if self._thread.is_alive():
            num_lost = sum(map(len, self._waiting))
            log.warning("%d KV blocks or states were not written in time, and are lost", num_lost)
            for waiting in self._waiting:
                waiting.clear()
        return not self._thread.is_alive()

    def _run(self) -> None:
        while True:
            try:
                batch = self.batches.get(timeout=_LOOK_OVER_S)
            except Empty:
                batch = Batch([], _NOTHING)
            if batch is None:
                return
            self.write(batch)
            if self._clock() - self._looked_s >= _LOOK_OVER_S:
                self._chain.look_over()
                self._looked_s = self._clock()

    def write(self, batch: Batch) -> None:
        try:
            for key, payload in zip(batch.keys, batch.staged.wait(), strict=True):
                waiting = self._waiting[key.is_state]
                if key not in waiting:
                    continue
                self._chain.write(key, payload)
                if key not in waiting:  # it was distrusted meanwhile
                    self._chain.forget(key)
                waiting.discard(key)
                self._written.set()
        except Exception:
            log.exception("writing KV blocks failed; they are lost, and computed again")
        for waiting in self._waiting:
            waiting.difference_update(batch.keys)
        self._written.set()


class Read(NamedTuple):
    """A block that is to be read."""

    key: BlockKey
    owner: object
    place: int
    is_wanted: Callable[[], bool]


class BlockReader:
    """Reads blocks while requests wait, in threads of its own; they arrive in any order.

    Far blocks have their own threads, so that nobody waits for another server who needs nothing of it.
    """

    def __init__(
        self,
        chain: TierChain,
        block_bytes: int,
        most_bytes: int,
        wake: Callable[[], None],
        num_threads: int = 2,
    ) -> None:
        """
        Args:
            most_bytes: bounds the blocks that have been read and not taken; whoever asks for states bounds these.
            wake: is called when something has arrived.
            num_threads: for far blocks, and as many for others.
        """
        self._chain, self._wake = chain, wake
        self.arrivals: deque[tuple[Read, Payload | None]] = deque()
        """Payloads, None for a block that could not be read. Whoever takes one calls `note_taken`."""
        self.reads: SimpleQueue[Read | None] = SimpleQueue()
        self._far_reads: SimpleQueue[Read | None] = SimpleQueue()
        self._room = threading.Semaphore(max(2 * num_threads, most_bytes // max(1, block_bytes)))
        self._threads = [
            threading.Thread(target=self._run, args=(reads,), name=f"penstock-kv-{name}-{i}", daemon=True)
            for name, reads in (("reader", self.reads), ("puller", self._far_reads))
            for i in range(num_threads)
        ]
        self._is_closed = False

    def start(self) -> None:
        for thread in self._threads:
            thread.start()

    def ask(self, read: Read) -> None:
        (self._far_reads if self._chain.is_far(read.key) else self.reads).put(read)

    def note_taken(self, read: Read) -> None:
        if not read.key.is_state:
            self._room.release()

    def close(self, timeout_s: float) -> None:
        """Ends when each thread has read what it is reading, or when so much time has passed."""
        self._is_closed = True
        for _ in self._threads:
            self.reads.put(None)
            self._far_reads.put(None)
            self._room.release()
        for thread in self._threads:
            if thread.ident is not None:
                thread.join(timeout_s / len(self._threads))

    def _run(self, reads: SimpleQueue[Read | None]) -> None:
        while (read := reads.get()) is not None and not self._is_closed:
            if not read.key.is_state:
                self._room.acquire()
            self.read(read)
            self._wake()

    def read(self, read: Read) -> None:
        payload = None
        try:
            if read.is_wanted() and not self._is_closed:
                payload = self._chain.read(read.key)
        except Exception:
            log.exception("reading a KV block failed; it is computed")
        self.arrivals.append((read, payload))


class _Nothing:
    def wait(self) -> list[Payload]:
        return []


_NOTHING = _Nothing()
