"""The states that are kept beside the blocks of a pool: in which slots, for whom, and how they are found again.

What is found of a prompt is a snapshot: the state after some of its tokens, and the blocks with the keys and values of
these. It is found at any token, not only where a block ends.

A snapshot holds its slot, but no blocks: these are free, and when one of them is overwritten, the snapshot is gone.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from collections.abc import Sequence as ListLike
from itertools import chain
from math import inf
from typing import NamedTuple

from penstock.engine.planning.block_tables import BlockTables
from penstock.engine.planning.prefix_events import PrefixLog
from penstock.engine.planning.prefix_index import chain_start
from penstock.engine.planning.request import FinishReason, Sequence
from penstock.engine.planning.state_slots import Snapshots, StateSlots, most_running
from penstock.engine.planning.states import SequenceState, Snapshot, StateUse


class FoundPrefix(list[int]):
    """The table entries of the full blocks of a cached prefix after which there is a state."""

    def __init__(self, num_known: int = 0) -> None:
        super().__init__()
        self.snapshot: Snapshot | None = None
        self.num_tokens = 0
        self.partial: ListLike[int] = ()
        """The entries of the block that the prefix ends in, if it does not end with a block."""
        self.num_known = num_known
        """The full blocks that are cached, whether there is a state after them or not."""


class _Ended(NamedTuple):
    """A state that a sequence left while steps that write it were in flight."""

    number: int
    """The last of these steps."""
    snapshot: Snapshot
    sequence: Sequence
    first: int
    """The first of its full blocks that no step had confirmed."""
    entries: list[int]
    """The table entries of these blocks."""


class KeptStates(BlockTables):
    """Block tables, and the snapshots of states after the tokens whose keys and values they hold."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_states: int,
        num_pending: int = 0,
        prefix_cache: bool = True,
        windows: ListLike[int] = (0,),
        log: PrefixLog | None = None,
    ) -> None:
        """See `BlockTables`.

        Args:
            num_states: state slots, slot 0 included.
            num_pending: the pending rows that a slot has room for.
        """
        super().__init__(num_blocks, block_size, prefix_cache=prefix_cache, windows=windows, log=log)
        self.slots = StateSlots(num_states)
        self.snapshots = Snapshots(block_size, self._forget)
        self._num_pending = num_pending
        self._copies: list[tuple[int, int]] = []
        """Block copies for sequences that started, to be made by the next step."""
        self._read: dict[int, list[int]] = {}
        """By step in flight: the slots that it reads and that its sequences have left. Every entry is a reference."""
        self._ended: deque[_Ended] = deque()

    @property
    def max_running(self) -> int:
        return most_running(self.slots.num_slots)

    @property
    def state_use(self) -> StateUse:
        """What becomes of state slots, for any thread: the numbers are of one moment, give or take a step."""
        slots, snapshots = self.slots, list(self.snapshots)
        num_alone = sum(1 for snapshot in snapshots if slots.ref_counts[snapshot.slot] == 1)
        num_held = max(0, slots.num_slots - 1 - slots.num_free - num_alone)
        return StateUse(slots.num_slots - 1, num_held, len(snapshots))

    # Finding

    def find_prefix(self, sequence: Sequence) -> FoundPrefix:
        """Returns the longest cached prefix after which there is a state."""
        if not self.prefix_cache:
            return FoundPrefix()
        most, num_tables = sequence.num_reusable, self.num_tables
        self._extend_hashes(sequence, most // self.block_size)
        hashes = sequence.block_hashes[: most // self.block_size]
        known = self.index.match(hashes, self._num_seen)
        found = FoundPrefix(len(known) // num_tables)
        if not len(self.snapshots):
            return found

        def entries(depth: int) -> list[int]:
            if self._has_windows:
                return self.index.match(hashes[:depth], self._num_seen)
            return known[: depth * num_tables]

        keys = [chain_start(sequence.request.salt), *hashes[: found.num_known]]
        snapshot, found.num_tokens = self.snapshots.find(
            keys, sequence.token_ids, most, lambda depth: len(entries(depth)) == depth * num_tables
        )
        if snapshot is not None:
            found.snapshot, depth = snapshot, snapshot.base // self.block_size
            num_full = (found.num_tokens // self.block_size - depth) * num_tables
            found += [*entries(depth), *snapshot.blocks[:num_full]]
            if found.num_tokens % self.block_size:
                found.partial = snapshot.blocks[num_full : num_full + num_tables]
        return found

    def find_cached(self, hashes: ListLike[bytes], token_ids: ListLike[int] = ()) -> tuple[int, int]:
        """Returns how many first tokens of a prompt are cached with a state after them, and how many are in use.

        It reads single entries only, so that another thread may call it.
        """
        num_known, num_in_use = super().find_cached(hashes)
        keys = [b"", *hashes[: num_known // self.block_size]]
        _, num_cached = self.snapshots.find(keys, token_ids, len(token_ids) - 1)
        return num_cached, min(num_in_use, num_cached)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """See `BlockTables.check`; state slots are compared, too."""
        everybody = list(sequences)
        super().check(everybody)
        states = (sequence.state for sequence in everybody if sequence.state is not None)
        self.slots.check(
            filter(None, chain(chain.from_iterable(map(_held_by, states)), self._other_holders()))
        )

    def _other_holders(self) -> Iterator[int]:
        yield from (snapshot.slot for snapshot in self.snapshots)
        yield from (ended.snapshot.slot for ended in self._ended)
        yield from chain.from_iterable(self._read.values())

    # Slots

    def _slot(self, worth: float = inf) -> int:
        """A slot that is held once: a free one, or that of a snapshot that is worth less; 0 if there is none."""
        if not self.slots.num_free:
            least = self.snapshots.least(self.slots.ref_counts)
            if least is None or self.snapshots.value(least) >= worth:
                return 0
            self.snapshots.drop(least)
        return self.slots.allocate()

    def _take_over(self, slot: int) -> bool:
        """Drops the snapshots of a slot if they are all that shares it with a sequence."""
        snapshots = self.snapshots.of_slot(slot)
        if not slot or self.slots.ref_counts[slot] - len(snapshots) != 1:
            return False
        for snapshot in snapshots:
            self.snapshots.drop(snapshot)
        return True

    # Snapshots

    def _snapshot(self, sequence: Sequence, state: SequenceState, base: int, end: int) -> Snapshot:
        """A snapshot without a slot, of a state and pending rows up to `end`."""
        first, num_tables = base // self.block_size, self.num_tables
        key = b""
        if self.prefix_cache:
            self._extend_hashes(sequence, end // self.block_size)
            key = sequence.block_hashes[first - 1] if first else chain_start(sequence.request.salt)
        return Snapshot(
            slot=0,
            base=base,
            key=key,
            tail=sequence.token_ids[first * self.block_size : end],
            blocks=sequence.block_table[first * num_tables : self.blocks_for(end) * num_tables],
            end=end,
            parent=state.last,
        )

    def _is_worth_keeping(self, sequence: Sequence, state: SequenceState) -> bool:
        """Whether the state of a sequence that leaves is known, and may be asked for again."""
        return (
            self.prefix_cache
            and not (state.is_torn or state.is_lost)
            and sequence.finish_reason is not FinishReason.FAILED
            and sequence.request.beams is None
            and state.started_at < sequence.num_computed <= len(sequence.token_ids)
        )

    def _keep_end(self, sequence: Sequence, state: SequenceState) -> None:
        """Makes a snapshot of the state of a sequence that leaves; it is found when steps in flight have come back."""
        snapshot = self._snapshot(sequence, state, state.at, sequence.num_computed)
        snapshot.slot = state.slot
        self.slots.hold(state.slot)
        if not self._in_flight:
            self._keep(snapshot)
            return
        first = sequence.num_committed // self.block_size
        entries = sequence.block_table[
            first * self.num_tables : snapshot.end // self.block_size * self.num_tables
        ]
        self._ended.append(_Ended(self._num_steps, snapshot, sequence, first, entries))

    def _land(self, ended: _Ended, *, has_failed: bool) -> None:
        """The steps have come back that wrote a state and the blocks before it."""
        _, snapshot, sequence, first, entries = ended
        if has_failed:
            self._withdraw(snapshot)
            return
        for number in range(len(entries) // self.num_tables):
            blocks = entries[number * self.num_tables : (number + 1) * self.num_tables]
            self._note_full(sequence, first + number, blocks)
        self._keep(snapshot)

    def _keep(self, snapshot: Snapshot) -> None:
        """Lets a snapshot be found, whose blocks are."""
        is_there = snapshot.base < self.block_size or self.index.block_of(snapshot.key) is not None
        if not self.prefix_cache or not is_there or not self.snapshots.add(snapshot):
            self._withdraw(snapshot)
            return
        for block in filter(None, snapshot.blocks):
            self.findable[block] = 1

    def _withdraw(self, snapshot: Snapshot) -> None:
        """Gives up a snapshot that nobody could find yet."""
        snapshot.is_gone = True
        self.slots.release(snapshot.slot)

    def _forget(self, snapshot: Snapshot) -> None:
        """A snapshot is found no more: blocks that nobody else finds are the next to be overwritten."""
        self.slots.release(snapshot.slot)
        for block in filter(None, snapshot.blocks):
            if not (self.index.knows_block(block) or self.snapshots.needs(block)):
                self.findable[block] = 0
                self.pool.forget(block)

    def _drop(self, block: int) -> None:
        key = self.index.hash_of(block)
        super()._drop(block)
        if key is not None:
            self.snapshots.drop_after(key)
        self.snapshots.drop_with(block)


def _held_by(state: SequenceState) -> Iterator[int]:
    yield from (state.slot, state.next)
    yield from (snapshot.slot for snapshot in state.promised)
    if state.fork is not None:
        yield state.fork[0]
