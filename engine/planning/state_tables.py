"""Block tables of a model that has layers with a state: each sequence has a state slot beside its blocks.

A step reads a sequence's state from its slot and writes it there, too, unless others have the slot as well; then it
writes to another one. While a step has not come back, nobody writes what it reads.

Snapshots are taken where they will be asked for:

    one token before the end of a prompt      for the same prompt, and by its pending rows, for one that leaves it a
                                              few tokens before its end, as a conversation's next turn does
    where a sequence ends, or gives way       its own slot becomes the snapshot
    where a prompt leaves a chain of others   at the last block that they share, if no snapshot is near

Whoever finds one shares its slot until its next step, and its blocks; a block that is not full is copied.
"""

from __future__ import annotations

from math import inf

from penstock.engine.planning.kept_states import FoundPrefix, KeptStates
from penstock.engine.planning.request import NO_LIMIT, Sequence
from penstock.engine.planning.states import ChunkState, Save, SequenceState
from penstock.engine.planning.step import Chunk, Plan


class StateTables(KeptStates):
    """Block tables whose sequences have state slots."""

    def awaited_hash(self, sequence: Sequence, prefix: list[int]) -> bytes:
        """Returns the hash of the last block that the sequence shares with one that computes it, if it is worth waiting
        for, else b"".

        That one is asked for a snapshot there. It is worth waiting for if it is as urgent, and if the snapshot that is
        found already is not near.
        """
        assert isinstance(prefix, FoundPrefix)
        lane = sequence.request.lane
        num_shared = self._num_shared(sequence, prefix, lane)
        at = num_shared * self.block_size
        if at - prefix.num_tokens < self.block_size:
            return b""
        awaited = sequence.block_hashes[num_shared - 1]
        owner = self.index.owner_of(awaited)
        if not isinstance(owner, Sequence) or not self.index.is_pending(awaited, lane):
            return b""
        return awaited if self._will_pass(owner, sequence, at) else b""

    def _num_shared(self, sequence: Sequence, prefix: FoundPrefix, lane: int) -> int:
        """The first blocks of a sequence that are cached, or that sequences at least as urgent compute."""
        hashes, number = sequence.block_hashes, prefix.num_known
        while number < len(hashes) and self.index.is_pending(hashes[number], lane):
            number += 1
        return number

    def _will_pass(self, owner: Sequence, follower: Sequence, at: int) -> bool:
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

    # Sequences

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Takes the blocks of the prefix, its snapshot's slot, and free blocks for the known tokens after it."""
        assert isinstance(prefix, FoundPrefix)
        found, num_tokens = prefix.snapshot, prefix.num_tokens
        state = sequence.state = SequenceState(started_at=num_tokens, last=found)
        self.snapshots.note_request()
        junction = self._num_shared(sequence, prefix, NO_LIMIT) * self.block_size
        if junction - num_tokens >= self.block_size:
            state.junctions.append(junction)
        if found is not None:
            state.slot, state.at = found.slot, found.base
            self.slots.hold(found.slot)  # its blocks may be overwritten by those that are taken now
            self.snapshots.touch(found)
        super().start(sequence, prefix)
        sequence.num_computed = sequence.num_committed = num_tokens
        own = sequence.block_table[len(prefix) :]
        self._copies += [copy for copy in zip(prefix.partial, own, strict=False) if copy[0]]

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """See `BlockTables.grow`. None also if there is no slot that the next step may write."""
        if not self._has_target(sequence):
            return None
        copies = super().grow(sequence, num_tokens)
        if copies and sequence.state is not None:
            sequence.state.is_torn = True
        return copies

    def will_have_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """See `BlockTables.will_have_room`; a slot is free when the next step has come back."""
        return not self._has_target(sequence) or super().will_have_room(sequence, num_tokens)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Lets the child share what the parent has of its tokens; False if nobody kept the state after them."""
        num_shared = min(len(child.token_ids) - 1, parent.num_committed)
        state = parent.state
        if state is None:
            return False
        slot, at = state.slot, state.at
        if parent.num_computed != num_shared:
            if state.fork is None or num_shared != parent.num_prompt_tokens - 1:
                return False
            slot, at = state.fork
        super().fork(parent, child)
        self.slots.hold(slot)
        child.state = SequenceState(slot, at, started_at=num_shared, last=state.last)
        return True

    def hand_over(self, parent: Sequence, heir: Sequence) -> None:
        """Gives the heir what a fork would share; the parent, which is done, keeps nothing."""
        super().hand_over(parent, heir)
        heir.state, parent.state = parent.state, None

    def commit(self, sequence: Sequence, num_committed: int) -> None:
        """Confirms the tokens before `num_committed`; their full blocks and their snapshots are found from now on."""
        super().commit(sequence, num_committed)
        state = sequence.state
        if state is None:
            return
        state.is_torn = False
        while state.promised and state.promised[0].end <= num_committed:
            self._keep(state.promised.pop(0))

    def release(self, sequence: Sequence) -> None:
        """Gives blocks and slots back; the sequence's state becomes a snapshot, if it is whole."""
        state = sequence.state
        if state is not None:
            if self._is_worth_keeping(sequence, state):
                self._keep_end(sequence, state)
            self._give_up(sequence, state)
        super().release(sequence)

    # Steps

    def begin_step(self, copies: list[tuple[int, int]]) -> int:
        """See `BlockTables.begin_step`. The copies for sequences that have started are added to those given."""
        copies += self._copies
        self._copies = []
        return super().begin_step(copies)

    def assign(self, plan: Plan) -> None:
        """Tells the chunks of a step that begins their slots, and which snapshots to take."""
        read = self._read.setdefault(plan.number, [])
        for chunk in plan.chunks:
            state = chunk.sequence.state
            assert state is not None
            chunk.state = ChunkState(state.slot, state.next or state.slot, chunk.start - state.at)
            if chunk.start < chunk.sequence.num_prompt_tokens:
                self._plan_saves(chunk, chunk.state, state)
            elif state.fork is not None and chunk.sequence.num_output_tokens:
                self._end_forks(state)
            if state.next:
                read.append(state.slot)
                state.slot, state.next = state.next, 0
            state.at = chunk.start + chunk.num_tokens - len(chunk.drafts)

    def take_back(self, plan: Plan) -> list[Sequence]:
        """Takes back what `assign` did to a step that the device had no room for, and that may have begun.

        Returns:
            The sequences whose states were written where they were read, so that nobody knows what they are.
        """
        lost, read = [], self._read[plan.number]
        for chunk in plan.chunks:
            told, state = chunk.state, chunk.sequence.state
            assert told is not None
            assert state is not None
            chunk.state = None
            slots = {save.slot for save in told.saves}
            for snapshot in [s for s in state.promised if s.slot in slots]:
                state.promised.remove(snapshot)
                self._withdraw(snapshot)
            if chunk.start < chunk.sequence.num_prompt_tokens:
                self._end_forks(state)
            state.at = chunk.start - told.replayed
            if told.target == told.source:
                state.is_lost = True
                lost.append(chunk.sequence)
            else:
                state.slot, state.next = told.source, told.target
                read.remove(told.source)  # the reference is the sequence's again
        return lost

    def end_step(self, number: int, *, has_failed: bool = False) -> None:
        """See `BlockTables.end_step`. What sequences left is found now, unless the step has failed."""
        for slot in self._read.pop(number, ()):
            self.slots.release(slot)
        while self._ended and (has_failed or self._ended[0].number <= number):
            self._land(self._ended.popleft(), has_failed=has_failed)
        super().end_step(number)

    def _plan_saves(self, chunk: Chunk, told: ChunkState, state: SequenceState) -> None:
        """Plans the snapshots of a chunk that begins within a prompt."""
        start, last = chunk.start, chunk.sequence.num_prompt_tokens - 1
        end = start + chunk.num_tokens - len(chunk.drafts)
        base = max(start, last - self._num_pending) if start < last <= end else end + 1
        for at in sorted(state.junctions):
            if start <= at < base:
                self._save(chunk, told, state, at, end)
        state.junctions = [at for at in state.junctions if at > end]
        forks = last < end and _forks(chunk.sequence)
        slot = 0
        if base <= end:
            slot = self._save(chunk, told, state, base, end, is_needed=forks)
        elif state.next:  # what the chunk reads stays as it is
            slot, base = state.slot, state.at
        if forks and slot:
            self.slots.hold(slot)
            state.fork = slot, base

    def _save(
        self,
        chunk: Chunk,
        told: ChunkState,
        state: SequenceState,
        base: int,
        end: int,
        *,
        is_needed: bool = False,
    ) -> int:
        """Plans a snapshot of the state of the first `base` tokens; returns its slot, 0 if there is none for it."""
        if not (self.prefix_cache or is_needed):
            return 0
        num_pending = min(self._num_pending, end - base)
        snapshot = self._snapshot(chunk.sequence, state, base, base + num_pending)
        snapshot.slot = self._slot(inf if is_needed else snapshot.gain)
        if snapshot.slot:
            told.saves = [*told.saves, Save(base - chunk.start, snapshot.slot, num_pending)]
            state.promised.append(snapshot)
            state.last = snapshot
        return snapshot.slot

    # Slots

    def _has_target(self, sequence: Sequence) -> bool:
        """Whether there is a slot for the next step of a sequence to write: its own, or one that is reserved now."""
        state = sequence.state
        assert state is not None
        if state.next:
            return True
        is_alone = self.slots.ref_counts[state.slot] == 1
        if is_alone and not (_forks(sequence) and sequence.num_computed == sequence.num_prompt_tokens - 1):
            return True
        state.next = self._slot()
        return bool(state.next) or is_alone or self._take_over(state.slot)

    def _end_forks(self, state: SequenceState) -> None:
        if state.fork is not None:
            self.slots.release(state.fork[0])
            state.fork = None

    def _give_up(self, sequence: Sequence, state: SequenceState) -> None:
        """Gives back all slots of a sequence, and what was to be done for it."""
        for snapshot in state.promised:
            self._withdraw(snapshot)
        self._end_forks(state)
        self.slots.release(state.slot)
        self.slots.release(state.next)
        if self._copies:
            held = set(sequence.block_table)
            self._copies = [copy for copy in self._copies if copy[1] not in held]
        sequence.state = None


def _forks(sequence: Sequence) -> bool:
    """Whether other choices are to fork from it once its prompt is computed."""
    request = sequence.request
    is_plain = request.beams is None and not request.branches
    return request.n > 1 and not sequence.index and is_plain and not sequence.num_output_tokens
