"""Tiers: the engine's one door to all that keeps KV, and states, outside of the device's memory.

The step thread tells it which blocks and slots are about to be overwritten and which were found, has it copy them
before a step is launched, and has it take in what has arrived before a step is planned. Writing and reading happen in
threads.
"""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable, Mapping
from collections.abc import Sequence as ListLike
from dataclasses import dataclass, field
from itertools import islice

from penstock.engine.planning.device import PageCarrier
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.outside import STATE
from penstock.engine.planning.prefix_index import prompt_hashes
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.request_queue import StepSeconds
from penstock.engine.planning.state_records import Snapshot
from penstock.engine.tiers.block_file import BlockKey
from penstock.engine.tiers.chain import BlockReader, BlockWriter, TierChain
from penstock.engine.tiers.fetching import Fetcher
from penstock.engine.tiers.giving import Giver
from penstock.engine.tiers.peer import PeerTier
from penstock.engine.tiers.saving import Saver, StateSaver
from penstock.engine.tiers.tier import Tier, TierStats

STAGED_BYTES = 256 << 20
"""The most bytes that wait to be written: of blocks, and as many of states."""
AHEAD_BYTES = 8 << 20
"""The most that were read and wait to be taken in: few, so that reading takes no core from running streams at once."""
_STOP_S = 3.0
"""So long a server that stops goes on writing what is in no tier yet."""
_LAST_BLOCKS = 16
"""The blocks that are copied at a time then, with one state."""


@dataclass(frozen=True, slots=True, kw_only=True)
class TiersUse:
    """The use of all tiers; counts that only grow, but for what is in them."""

    tiers: Mapping[str, TierStats] = field(default_factory=dict)
    num_fetched_blocks: int = 0
    """Blocks, and states, that were brought back to the device."""
    num_lost_blocks: int = 0
    """Blocks, and states, that were overwritten while too many others waited to be written."""
    seconds_saved: float = 0.0
    """The time that computing what was brought back would have taken, less the time that it took."""


class Tiers:
    """See above; also what `SequenceMemory` tells of its blocks: see `planning.outside.Outside`."""

    def __init__(
        self,
        tiers: ListLike[Tier],
        carrier: PageCarrier,
        step_seconds: StepSeconds,
        wake: Callable[[], None],
        *,
        staged_bytes: int = STAGED_BYTES,
        clock: Callable[[], float] = time.monotonic,
        peers: PeerTier | None = None,
        digest: bytes = b"",
        state_carrier: PageCarrier | None = None,
    ) -> None:
        """
        Args:
            tiers: the nearest first.
            carrier, state_carrier: see `RunnerFacts`.
            wake: is called when a block has arrived, from any thread.
            staged_bytes: bounds the memory for blocks on their way, in each direction, and that for states; see
                `AHEAD_BYTES`.
            peers: the last of the tiers, if it is other servers, which then are given blocks as well.
            digest: of all blocks; see `opening.digest`.
        """
        self.peers, self.digest = peers, digest
        self._clock = clock
        self.chain = TierChain(tiers, clock, blocks_are_empty=not carrier.num_bytes)
        state_bytes = 0 if state_carrier is None else state_carrier.num_bytes
        self.writer = BlockWriter(self.chain, carrier.num_bytes, staged_bytes, clock, state_bytes)
        ahead_bytes = min(staged_bytes, AHEAD_BYTES)
        self.reader = BlockReader(self.chain, carrier.num_bytes, ahead_bytes, wake)
        self._saver = Saver(self.chain, self.writer, carrier)
        self._savers: list[Saver] = [self._saver]
        if state_carrier is not None:
            self._savers.append(StateSaver(self.chain, self.writer, state_carrier))
        self._fetcher = Fetcher(
            self.chain, self.reader, carrier, state_carrier, step_seconds, clock, staged_bytes
        )
        self.giver = Giver(self.chain, carrier, wake)
        self._carrier = carrier
        self._memory: SequenceMemory
        self._expected: deque[Request] = deque()

    def start(self) -> None:
        """Starts the threads."""
        self.writer.start()
        self.reader.start()
        if self.peers is not None:
            self.giver.start()

    def attach(self, memory: SequenceMemory) -> None:
        """Serves this memory from now on; what was on its way for another is given up."""
        for saver in self._savers:
            saver.start_afresh()
        self._fetcher.start_afresh()
        self._memory = memory
        memory.keep_outside(self)

    # What the memory says

    def note_reused(self, block: int, block_hash: bytes, table: int) -> None:
        self._savers[table == STATE].note_reused(block, BlockKey(block_hash, table))

    def note_found(self, hashes: list[bytes], entries: list[int], snapshot: Snapshot | None) -> None:
        self._saver.note_found(hashes, entries, range(self._memory.num_tables))
        if snapshot is not None and not snapshot.is_gone:
            self._savers[-1].note_found([snapshot.kept_as], [snapshot.slot], [STATE])

    def forget(self, block_hash: bytes, table: int) -> None:
        self._savers[table == STATE].forget(BlockKey(block_hash, table))

    def fetch(self, sequence: Sequence, hashes: list[bytes], num_known: int) -> None:
        asked = sequence.num_preemptions, num_known
        if num_known < len(hashes) and asked > sequence.fetch_asked:
            if self._memory.states is not None and self._fetcher.brings(self._memory, hashes[num_known]):
                return  # when that has come, there may still be a state that this sequence alone has use for
            sequence.fetch_asked = asked
            most = sequence.num_reusable // self._memory.block_size
            self._fetcher.begin(
                self._memory, hashes[:most], sequence.token_ids, sequence.request.salt, num_known
            )

    # The step thread

    def save(self) -> None:
        """Copies what is to be kept. Called before anything is launched that may overwrite it."""
        for saver in self._savers:
            saver.save(self._memory)

    def turn(self) -> bool:
        """Takes in what has arrived, and begins to fetch for requests that came. Called before a step is planned.

        Returns:
            Whether there is more of it already.
        """
        while self._expected:
            self._fetch_for(self._expected.popleft())
        is_asked = self.giver.turn(self._memory)
        return self._fetcher.land(self._memory, self.save) or is_asked

    def _fetch_for(self, request: Request) -> None:
        memory = self._memory
        hashes = list(request.block_hashes) or list(
            prompt_hashes(request.prompt_token_ids, memory.block_size, request.salt)
        )
        if hashes and not request.reads_prompt:
            tokens = list(request.prompt_token_ids)
            if memory.states is None:
                num_known = len(memory.index.match(hashes)) // memory.num_tables
            else:
                num_known = memory.find_cached(hashes, tokens)[0] // memory.block_size
            self._fetcher.begin(memory, hashes, tokens, request.salt, num_known)

    def finish(self) -> None:
        """Copies what can be found and is in no tier, for a few seconds, and ends."""
        until_s = self._clock() + _STOP_S
        self.save()
        left = deque((saver, saver.unsaved(self._memory)) for saver in self._savers)
        while left and (left_s := until_s - self._clock()) > 0:
            saver, unsaved = left[0]
            most = 1 if saver.of_states else _LAST_BLOCKS
            if not saver.room:
                self.writer.wait_for_room(left_s, of_states=saver.of_states)
            elif chosen := dict(islice(unsaved, min(saver.room, most))):
                saver.copy(chosen)
                left.rotate()
            else:
                left.popleft()
        self.close(max(0.0, until_s - self._clock()))

    def close(self, timeout_s: float = 0.0) -> None:
        """Ends the threads, the writer's when it has written what was copied, or when that took too long."""
        until_s = self._clock() + timeout_s
        self.giver.close()
        self.reader.close(timeout_s)
        if self.writer.close(max(0.0, until_s - self._clock())):
            self.chain.close()

    # Any thread

    def expect(self, requests: ListLike[Request]) -> None:
        """Has the next turn begin to fetch what these requests need, which wait in the queue."""
        self._expected.extend(requests)

    def expect_from(self, source: str, hashes: ListLike[bytes], *, is_busy: bool = False) -> None:
        """Notes that another server has a chain of blocks; `is_busy` if it is still computing their prompt."""
        if self.peers is not None:
            keys = [BlockKey(each, table) for each in hashes for table in range(self._memory.num_tables)]
            missing = [key for key in keys if not self._memory.index.has(*key)]
            self.peers.expect(source, missing, is_busy=is_busy)

    @property
    def pull_rate(self) -> float:
        """The tokens a second whose KV comes from other servers; 0 if there are none."""
        if self.peers is None:
            return 0.0
        return self.peers.rate / (self._carrier.num_bytes * self._memory.num_tables) * self._memory.block_size

    def tokens_gained(self, hashes: ListLike[bytes], num_known: int) -> int:
        """Returns the tokens of a prompt after its known blocks that are worth reading, less what reading them costs.

        That cost is counted in tokens that could be computed meanwhile.
        """
        reads = self._fetcher.choose(self._memory, list(hashes), num_known)
        if reads is None:
            return 0
        num_tokens = (reads.end - num_known) * self._memory.block_size
        cost = reads.read_s / reads.compute_s if reads.compute_s else 0.0
        return int(num_tokens * max(0.0, 1.0 - cost))

    @property
    def use(self) -> TiersUse:
        return TiersUse(
            tiers={tier.name: tier.stats() for tier in self.chain.tiers},
            num_fetched_blocks=self._fetcher.num_blocks,
            num_lost_blocks=sum(saver.num_lost for saver in self._savers),
            seconds_saved=self._fetcher.seconds_saved,
        )
