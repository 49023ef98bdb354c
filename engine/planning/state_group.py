"""The group of layers with a state: each sequence has a slot for all of its states.

A step reads a sequence's state from its slot and writes it there, too, unless others have the slot as well; then it
writes to another one. While a step has not come back, nobody writes what it reads.

Snapshots are taken where they will be asked for:

    one token before the end of a prompt      for the same prompt, and by its pending rows, for one that leaves it a
                                              few tokens before its end, as a conversation's next turn does
    where a sequence ends, or gives way       its own slot becomes the snapshot
    where a prompt leaves a chain of others   at the last block that they share, if no snapshot is near
    at the last block that a prompt fills     where states are kept outside, which are found where a block ends

Whoever finds one shares its slot until its next step, and its blocks; a block that is not full is copied.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from itertools import chain
from math import inf
from typing import NamedTuple

from penstock.engine.planning.blocks import BlockPool
from penstock.engine.planning.prefix_index import PRIVATE, chain_start, extend_chain
from penstock.engine.planning.request import FinishReason, Sequence
from penstock.engine.planning.snapshots import Snapshots
from penstock.engine.planning.state_records import ChunkState, Prefix, Save, SequenceState, Snapshot, StateUse
from penstock.engine.planning.step import Chunk, StepPlan
from penstock.engine.planning.windows import Windows


def most_running(num_slots: int) -> int:
    """The sequences that may run at a time with so many slots, slot 0 included: a quarter is left to snapshots."""
    usable = num_slots - 1
    return max(1, usable - max(1, usable // 4))


class LeftState(NamedTuple):
    """A state that a sequence left while steps that write it were in flight."""

    number: int
    """The last of these steps."""
    snapshot: Snapshot
    sequence: Sequence
    first: int
    """The first of its full blocks that no step had confirmed."""
    entries: list[int]
    """The table entries of these blocks."""


class StateGroup:
    """The states of sequences: their slots, and the snapshots that are taken of them."""

    def __init__(
        self,
        slots: BlockPool,
        snapshots: Snapshots,
        windows: Windows,
        num_pending: int,
        *,
        prefix_cache: bool,
    ) -> None:
        """`num_pending` are the pending rows that a slot has room for."""
        self.slots, self.snapshots = slots, snapshots
        self._block_size, self._num_tables = windows.block_size, windows.num_tables
        self._num_pending, self._prefix_cache = num_pending, prefix_cache
        self._left: deque[LeftState] = deque()
        self.are_kept_outside = False
        """Whether states that follow from full blocks are kept outside of the device's memory."""

    @property
    def use(self) -> StateUse:
        """The use of state slots, for any thread; the numbers may be a step apart."""
        num_slots = self.slots.num_blocks - 1
        num_held = max(0, num_slots - self.slots.num_free - self.snapshots.num_alone)
        return StateUse(num_slots, num_held, len(self.snapshots))

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Compares the references to slots with what sequences, snapshots and steps in flight hold."""
        states = (sequence.state for sequence in sequences if sequence.state is not None)
        kept = chain(self.snapshots, (left.snapshot for left in self._left))
        self.slots.check([chain.from_iterable(map(_held_by, states)), (each.slot for each in kept)])

    # Sequences

    def start(self, sequence: Sequence, prefix: Prefix, junction: int) -> None:
        """Takes the slot of the snapshot that was found.

        Args:
            junction: the tokens that the sequence shares with others; one who comes after it may leave it there.
        """
        snapshot, num_tokens = prefix.snapshot, prefix.num_tokens
        state = sequence.state = SequenceState(started_at=num_tokens, last=snapshot)
        self.snapshots.note_request(snapshot)
        if junction - num_tokens >= self._block_size:
            state.junctions.append(junction)
        if (filled := self._filled(sequence)) > num_tokens:
            state.junctions.append(filled)
        if snapshot is not None:
            state.slot, state.at = snapshot.slot, snapshot.base
            self.slots.hold(snapshot.slot)

    def will_leave(self, owner: Sequence, follower: Sequence, at: int) -> bool:
        """Whether a running sequence is still to leave a state that the follower finds; it is asked for one if need be.

        Args:
            at: the tokens of the full blocks that the two share.
        """
        state, last = owner.state, owner.num_prompt_tokens - 1
        if state is None or state.at > at:  # a chunk in the step that is being planned can still leave one
            return False
        if owner.token_ids[at:last] != follower.token_ids[at:last] and at not in state.junctions:
            state.junctions.append(at)
        return True

    def has_target(self, sequence: Sequence) -> bool:
        """Returns whether the next step of a sequence has a slot to write: its own, or one reserved now."""
        state = sequence.state
        assert state is not None
        if state.next:
            return True
        is_alone = self.slots.ref_counts[state.slot] == 1
        if is_alone and not (_forks(sequence) and sequence.num_computed == sequence.num_prompt_tokens - 1):
            return True
        state.next = self.allocate()
        return bool(state.next) or is_alone or self.snapshots.leave(state.slot)

    def allocate(self, worth: float = inf) -> int:
        """Returns a free slot, or that of a snapshot that is worth less; it is held once now. 0 if there is none."""
        has_one = self.slots.num_free or self.snapshots.make_way(worth)
        return self.slots.allocate() if has_one else 0

    def fork(self, parent: Sequence, child: Sequence, num_shared: int) -> bool:
        """Lets the child share the state after so many tokens; False if nobody kept it."""
        state = parent.state
        assert state is not None
        slot, at = state.slot, state.at
        if parent.num_computed != num_shared:
            if state.fork is None or num_shared != parent.num_prompt_tokens - 1:
                return False
            slot, at = state.fork
        self.slots.hold(slot)
        child.state = SequenceState(slot, at, started_at=num_shared, last=state.last)
        return True

    def commit(self, sequence: Sequence, num_committed: int) -> None:
        """Lets the snapshots be found that were taken up to there."""
        state = sequence.state
        if state is not None:
            state.is_torn = False
            while state.promised and state.promised[0].end <= num_committed:
                self.snapshots.add(state.promised.pop(0))

    def release(self, sequence: Sequence, last_step: int) -> None:
        """Gives all slots of a sequence back. Its state becomes a snapshot, if it is whole and may be needed again.

        Args:
            last_step: the last step in flight, before which the snapshot is not found and no slot is free; 0 if there
                is none.
        """
        state = sequence.state
        if state is None:
            return
        if (
            self._is_findable(sequence, sequence.num_computed)
            and not state.is_torn
            and sequence.finish_reason is not FinishReason.FAILED
            and sequence.request.beams is None
            and state.started_at < sequence.num_computed <= len(sequence.token_ids)
        ):
            self._keep_end(sequence, state, last_step)
        for snapshot in state.promised:
            self.snapshots.withdraw(snapshot, last_step)
        self._end_forks(state, last_step)
        self.slots.give_back([state.slot, state.next], last_step)
        sequence.state = None

    def _keep_end(self, sequence: Sequence, state: SequenceState, last_step: int) -> None:
        snapshot = self._snapshot(sequence, state, state.at, sequence.num_computed)
        snapshot.slot = state.slot
        self.slots.hold(state.slot)
        if not last_step:
            self.snapshots.add(snapshot)
            return
        first, end = sequence.num_committed // self._block_size, snapshot.end // self._block_size
        entries = sequence.block_table[first * self._num_tables : end * self._num_tables]
        self._left.append(LeftState(last_step, snapshot, sequence, first, entries))

    # Steps

    def assign(self, plan: StepPlan) -> None:
        """Tells the chunks of a step that begins their slots, and which snapshots to take."""
        for chunk in plan.chunks:
            state = chunk.sequence.state
            assert state is not None
            chunk.state = ChunkState(state.slot, state.next or state.slot, chunk.start - state.at)
            if chunk.start < chunk.sequence.num_prompt_tokens:
                self._plan_saves(chunk, chunk.state, state)
            elif state.fork is not None and chunk.sequence.num_output_tokens:
                self._end_forks(state)
            if state.next:
                self.slots.give_back([state.slot], plan.number)
                state.slot, state.next = state.next, 0
            state.at = chunk.start + chunk.num_tokens - len(chunk.drafts)

    def take_back(self, plan: StepPlan) -> list[Sequence]:
        """Takes back what `assign` did to a step that the device had no room for, and that may have begun.

        Returns:
            The sequences whose states were written where they were read, so that nobody knows what they are.
        """
        lost: list[Sequence] = []
        for chunk in plan.chunks:
            assignment, state = chunk.state, chunk.sequence.state
            assert assignment is not None
            assert state is not None
            chunk.state = None
            slots = {save.slot for save in assignment.saves}
            for snapshot in [s for s in state.promised if s.slot in slots]:
                state.promised.remove(snapshot)
                self.snapshots.withdraw(snapshot)
            if chunk.start < chunk.sequence.num_prompt_tokens:
                self._end_forks(state)
            state.at = chunk.start - assignment.replayed
            if assignment.target == assignment.source:
                state.is_torn = True
                lost.append(chunk.sequence)
            else:
                # The reference that a step in flight had is the sequence's again.
                self.slots.take_back([assignment.source], plan.number)
                state.slot, state.next = assignment.source, assignment.target
        return lost

    def end_step(self, number: int, oldest: float, *, has_failed: bool) -> Iterator[LeftState]:
        """Frees what the steps before `oldest` read; returns the states that are written now, for the caller to keep.

        A step that failed leaves none.
        """
        self.slots.land(oldest)
        while self._left and (has_failed or self._left[0].number <= number):
            left = self._left.popleft()
            if has_failed:
                self.snapshots.withdraw(left.snapshot)
            else:
                yield left

    def _plan_saves(self, chunk: Chunk, assignment: ChunkState, state: SequenceState) -> None:
        """Plans the snapshots of a chunk that begins within a prompt."""
        start, last = chunk.start, chunk.sequence.num_prompt_tokens - 1
        end = start + chunk.num_tokens - len(chunk.drafts)
        base = max(start, last - self._num_pending) if start < last <= end else end + 1
        if base <= (filled := self._filled(chunk.sequence)) <= end:
            base = filled  # its pending rows reach the prompt's end from there, too
        for at in sorted({*state.junctions}):
            if start <= at < base:
                self._save(chunk, assignment, state, at, end)
        state.junctions = [at for at in state.junctions if at > end]
        forks = last < end and _forks(chunk.sequence)
        slot = 0
        if base <= end:
            slot = self._save(chunk, assignment, state, base, end, is_needed=forks)
        elif state.next:  # what the chunk reads stays as it is
            slot, base = state.slot, state.at
        if forks and slot:
            self.slots.hold(slot)
            state.fork = slot, base

    def _save(
        self,
        chunk: Chunk,
        assignment: ChunkState,
        state: SequenceState,
        base: int,
        end: int,
        *,
        is_needed: bool = False,
    ) -> int:
        """Plans a snapshot of the state of the first `base` tokens; returns its slot, 0 if there is none for it."""
        num_pending = min(self._num_pending, end - base)
        if not (self._is_findable(chunk.sequence, base + num_pending) or is_needed):
            return 0
        snapshot = self._snapshot(chunk.sequence, state, base, base + num_pending)
        snapshot.slot = self.allocate(inf if is_needed else snapshot.gain)
        if snapshot.slot:
            assignment.saves = [*assignment.saves, Save(base - chunk.start, snapshot.slot, num_pending)]
            state.promised.append(snapshot)
            state.last = snapshot
        return snapshot.slot

    def _snapshot(self, sequence: Sequence, state: SequenceState, base: int, end: int) -> Snapshot:
        """A snapshot without a slot, of a state and pending rows up to `end`."""
        size, num_tables, salt = self._block_size, self._num_tables, sequence.request.salt
        first, key = base // size, b""
        if self._is_findable(sequence, end):
            hashes = extend_chain(sequence, end // size, size)
            key = hashes[first - 1] if first else chain_start(salt)
        return Snapshot(
            slot=0,
            base=base,
            key=key,
            tail=sequence.token_ids[first * size : end],
            blocks=sequence.block_table[first * num_tables : -(-end // size) * num_tables],
            end=end,
            parent=state.last,
            kept_as=key if first and base == first * size and not salt.endswith(PRIVATE) else b"",
        )

    def _filled(self, sequence: Sequence) -> int:
        """The tokens of the last block that a prompt fills before its last token, if a state is to be kept there."""
        if not self.are_kept_outside or sequence.request.salt.endswith(PRIVATE):
            return 0
        return (sequence.num_prompt_tokens - 1) // self._block_size * self._block_size

    def _is_findable(self, sequence: Sequence, end: int) -> bool:
        """Whether others may find what a sequence leaves up to there."""
        return self._prefix_cache and end <= sequence.num_findable and not sequence.num_dropped

    def _end_forks(self, state: SequenceState, last_step: int = 0) -> None:
        if state.fork is not None:
            self.slots.give_back([state.fork[0]], last_step)
            state.fork = None


def _held_by(state: SequenceState) -> Iterator[int]:
    yield from (state.slot, state.next)
    yield from (snapshot.slot for snapshot in state.promised)
    if state.fork is not None:
        yield state.fork[0]


def _forks(sequence: Sequence) -> bool:
    """Returns whether other choices will fork from it once its prompt is computed."""
    request = sequence.request
    is_plain = request.beams is None and not request.branches
    return request.n > 1 and not sequence.index and is_plain and not sequence.num_output_tokens
