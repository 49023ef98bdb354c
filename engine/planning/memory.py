"""The memory of sequences: what each holds on the device, from the prefix that it finds to its release.

Layers that need the same of the tokens before are a group, and a sequence holds pages of each group:

    full      blocks with the keys and values of all tokens (`Windows`)
    window    blocks with those of the tokens that are still seen; what is behind is given back (`Windows`)
    state     one slot, with the state after the last token (`StateGroup`)

Blocks and slots are pages of two sizes, each from a `BlockPool`. They are found again by what they hold: a block by the
hash of its tokens and all before them (`PrefixIndex`), a state by the tokens that it follows from (`Snapshots`).

The block tables of a sequence lie in one list, the entries for the same tokens side by side. They cover these tokens:

    [0, ...)                       behind the table's sliding window: the blocks are given back, the entries are 0
    [..., num_committed)           computed and confirmed; its full blocks are in the prefix index
    [num_committed, num_computed)  being written by steps in flight; full prompt blocks are marked pending
    [num_computed, ...)            room that was allocated ahead; 0 where a table with a window has none yet

Where only a part of a long sequence is kept (keeping.py), tokens in its middle are dropped: their entries leave the
list, and those of later tokens lie `num_dropped` tokens further to the front. What such tokens leave is never found.

One entry that is not 0 is one reference in the pool. A block with more than one reference is never written: `grow`
replaces it by a copy first.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from collections.abc import Sequence as ListLike
from math import inf

from penstock.engine.planning.blocks import BlockPool
from penstock.engine.planning.outside import STATE, Content, Outside
from penstock.engine.planning.prefix_events import Dropped, Found, PrefixLog
from penstock.engine.planning.prefix_index import PRIVATE, PrefixIndex, extend_chain
from penstock.engine.planning.request import NO_LIMIT, Sequence
from penstock.engine.planning.snapshots import Snapshots
from penstock.engine.planning.state_group import StateGroup, most_running
from penstock.engine.planning.state_records import Prefix, Snapshot, StateUse
from penstock.engine.planning.step import StepPlan
from penstock.engine.planning.windows import Windows


class SequenceMemory:
    """Finds, allocates, shares and frees the pages of sequences. Nothing else touches the pools and the indexes."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        num_states: int = 0,
        num_pending: int = 0,
        prefix_cache: bool = True,
        windows: ListLike[int] = (0,),
        log: PrefixLog | None = None,
        after: SequenceMemory | None = None,
    ) -> None:
        """Makes the memory of no sequence.

        Args:
            num_blocks: blocks of the pool, the null block (block 0) included.
            num_states: state slots, slot 0 included; 0 if no layer has a state.
            num_pending: the pending rows that a slot has room for.
            windows: by table of a sequence, how many tokens a token sees, itself included; 0 if it sees all.
            log: hears of every block that can be found from now on, is found, or is gone.
            after: the memory whose blocks have the numbers before those of this one; see `BlockPool`.
        """
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.log = log
        self.windows = Windows(tuple(windows), block_size)
        if self.windows.max_chunk(num_blocks - 1) <= 0:
            # A window that is wider than the pool gives no block back before the pool is full.
            self.windows = Windows((0,) * len(windows), block_size)
        self.num_tables, self._has_windows = self.windows.num_tables, self.windows.longest > 0
        self.max_chunk = self.windows.max_chunk(num_blocks - 1)
        """Tokens of the largest chunk: its blocks and those of the windows before it fit into the pool together."""
        self.index = PrefixIndex(self.windows.num_seen)
        self.pool: BlockPool = BlockPool(num_blocks, self._reuse, after=None if after is None else after.pool)
        self.slots = BlockPool(num_states or 2, unit="state slot")  # without states, nobody asks for one
        self.snapshots = Snapshots(block_size, self.index, self.pool, self.slots, self._note_dropped)
        states = StateGroup(self.slots, self.snapshots, self.windows, num_pending, prefix_cache=prefix_cache)
        self.states = states if num_states else None
        self._num_steps = 0
        self._in_flight: deque[int] = deque()
        """Numbers of the steps that have not come back, oldest first."""
        self._copies: list[tuple[int, int]] = []
        """Block copies for sequences that started, to be made by the next step."""
        self.outside: Outside | None = None
        """Keeps what is overwritten here, if anybody does."""
        self.private: set[int] = set()
        """The blocks of private prompts that can be found; they are not kept outside."""
        self._brought_back: set[int] = set()
        """The blocks whose content it has brought back, and that no sequence has found since."""

    def keep_outside(self, outside: Outside) -> None:
        """From now on, this keeps what is overwritten here."""
        self.outside = outside
        if self.states is not None:
            self.states.are_kept_outside = True

    def limit_chunks(self, max_tokens: int) -> None:
        """No chunk will be larger than this: it bounds the room that a sequence needs under a sliding window."""
        self.max_chunk = min(self.max_chunk, max_tokens)

    # Room

    @property
    def parts(self) -> ListLike[SequenceMemory]:
        """The memories that have pools of their own: this one; see `RankedMemory`."""
        return (self,)

    def part_of(self, sequence: Sequence) -> SequenceMemory:  # noqa: ARG002
        """The memory that a sequence is in, or will start in: here there is one for all; see `RankedMemory`."""
        return self

    def beside(self, sequence: Sequence, running: list[Sequence]) -> list[Sequence]:  # noqa: ARG002
        """Those of the running sequences that share the sequence's memory."""
        return running

    @property
    def num_blocks(self) -> int:
        """The blocks that sequences can have."""
        return self.pool.num_blocks - 1

    @property
    def num_free_blocks(self) -> int:
        return self.pool.num_free

    @property
    def num_cached_blocks(self) -> int:
        """The blocks that can be found."""
        return len(self.index)

    @property
    def ref_counts(self) -> list[int]:
        """How many hold each block, for a view of all blocks at once."""
        return self.pool.ref_counts

    @property
    def findable(self) -> bytearray:
        """1 for each block that a prompt may find, for a view of all blocks at once."""
        return self.pool.findable

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that can be computed: NO_LIMIT if every table has a window."""
        return self.windows.most_tokens(self.pool.num_blocks - 1, self.max_chunk)

    @property
    def max_running(self) -> int:
        """The sequences that may run at a time, as limited by resources other than blocks."""
        return NO_LIMIT if self.states is None else most_running(self.slots.num_blocks)

    @property
    def state_use(self) -> StateUse:
        """The use of state slots, for any thread."""
        return StateUse() if self.states is None else self.states.use

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that there is room for in all blocks."""
        return self.windows.room(self.pool.num_blocks - 1, self.max_chunk)

    @property
    def num_free_tokens(self) -> int:
        """Tokens that there is room for in the free blocks."""
        return self.windows.room(self.pool.num_free, self.max_chunk)

    def unfilled(self, sequences: Iterable[Sequence]) -> float:
        """The share of the room in the blocks in use that no token of these sequences, all that run, will fill.

        That is the end of the last block of each: all other blocks are full, or will be by tokens that are known.
        """
        size, num_used = self.block_size, self.pool.num_blocks - 1 - self.pool.num_free
        tables = (
            (len(s.block_table) // self.num_tables * size, len(s.token_ids) - s.num_dropped)
            for s in sequences
        )
        num_unfilled = sum(max(0, room - num_tokens) for room, num_tokens in tables) * self.num_tables
        return num_unfilled / (num_used * size) if num_used else 0.0

    @property
    def num_returning(self) -> int:
        """Blocks that will be free once the steps in flight have come back."""
        return self.pool.num_returning

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def num_held_alone(self, sequence: Sequence) -> int:
        """Returns how many blocks would be free if this sequence gave its blocks back."""
        return self.pool.num_alone(sequence.block_table)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Compares the pools' reference counts with what these sequences, all there are, and steps in flight hold.

        Raises:
            PoolViolation: if a reference is unaccounted for.
        """
        everybody = list(sequences)
        self.pool.check(sequence.block_table for sequence in everybody)
        if self.states is not None:
            self.states.check(everybody)

    def check_idle(self) -> None:
        """Like `check` without a sequence, but looks at single blocks only where one is held.

        Raises:
            PoolViolation: if a block is held, or a state slot by anything but a snapshot.
        """
        if not self.pool.is_free:
            self.pool.check(())
        if self.states is not None:
            self.states.check(())

    # Steps in flight

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def _last_step(self) -> int:
        """The number of the last step in flight; 0 if there is none."""
        return self._num_steps if self._in_flight else 0

    def begin_step(self, copies: list[tuple[int, int]]) -> int:
        """Numbers a step that was planned, and adds the copies to it that sequences need which have started.

        The sources of its copies keep their content until it is back.
        """
        copies += self._copies
        self._copies = []
        self._num_steps += 1
        self._in_flight.append(self._num_steps)
        if copies:
            self.pool.keep({source for source, _ in copies}, self._num_steps)
        return self._num_steps

    def assign(self, plan: StepPlan) -> None:
        """Prepares a plan whose number was made by `begin_step`: its chunks get the slots of their states."""
        if self.states is not None:
            self.states.assign(plan)

    def take_back(self, plan: StepPlan) -> list[Sequence]:
        """Takes back what `assign` did to a plan that may have begun; returns the sequences that have lost by it."""
        return [] if self.states is None else self.states.take_back(plan)

    def end_step(self, number: int, *, has_failed: bool = False) -> None:
        """Ends a step that came back, or that will never run. What sequences left in it is found from now on."""
        if number in self._in_flight:
            self._in_flight.remove(number)
        oldest = self._in_flight[0] if self._in_flight else inf
        if self.states is not None:
            for left in self.states.end_step(number, oldest, has_failed=has_failed):
                self._note_full(left.sequence, left.first, left.entries)
                self.snapshots.add(left.snapshot)
        self.pool.land(oldest)

    # Finding

    def find_prefix(self, sequence: Sequence) -> Prefix:
        """Returns the longest cached prefix, and remembers it on the sequence until something else can be found.

        No token whose logits are needed is part of it. Of a table with a window, the blocks of the prefix's last tokens
        have to be cached, as many as the window has; the entries before them are 0. Where layers have a state, there is
        one after the prefix.
        """
        most, prefix = min(sequence.num_reusable, sequence.num_findable), sequence.prefix
        key = self.index, self.index.generation, most
        if prefix is None or prefix.key != key:
            before = prefix if prefix is not None and prefix.key[0] is self.index else None
            prefix = sequence.prefix = self._look_up(sequence, most, before)
            prefix.key = key
        return prefix

    def _look_up(self, sequence: Sequence, most: int, before: Prefix | None) -> Prefix:
        if not self.prefix_cache:
            return Prefix()
        num_full = most // self.block_size
        hashes = extend_chain(sequence, num_full, self.block_size)
        if self.states is None and self.num_tables == 1 and not self._has_windows:
            return self._updated(before or Prefix(), hashes, num_full)
        known = self.index.match(hashes := hashes[:num_full])
        num_known = len(known) // self.num_tables
        if self.states is not None:
            return self.snapshots.look_up(sequence, most, hashes, num_known)
        return Prefix(known, num_known * self.block_size, num_known=num_known)

    def _updated(self, prefix: Prefix, hashes: list[bytes], num_full: int) -> Prefix:
        """Brings what was found before up to date, which may have been nothing."""
        num_kept = self.index.update(prefix.entries, prefix.num_drops, hashes, num_full)
        prefix.num_drops = self.index.num_drops
        prefix.num_ready -= prefix.ready.count(1, num_kept)
        del prefix.ready[num_kept:]
        prefix.num_known = len(prefix.entries)
        prefix.num_tokens = prefix.num_known * self.block_size
        return prefix

    def find_cached(self, hashes: ListLike[bytes], token_ids: ListLike[int] = ()) -> tuple[int, int]:
        """Returns how many first tokens of a prompt are cached, without regard to windows, and how many are in use.

        It reads single entries only, so that another thread may call it.

        Args:
            hashes: those of the prompt's full blocks.
            token_ids: the prompt, needed where layers have a state: there has to be one after what is cached.
        """
        if not self.prefix_cache:
            return 0, 0
        blocks = self.index.blocks_of(hashes)
        num_cached = self.block_size * len(blocks)
        num_in_use = self.block_size * (
            len(blocks) - list(map(self.pool.ref_counts.__getitem__, blocks)).count(0)
        )
        if self.states is not None:
            keys = [b"", *hashes[: num_cached // self.block_size]]
            _, num_cached = self.snapshots.find(keys, token_ids, len(token_ids) - 1)
        return num_cached, min(num_in_use, num_cached)

    def awaited_hash(self, sequence: Sequence) -> bytes:
        """Returns the hash of a block that another sequence is computing if it is worth waiting for, else b"".

        It is if that one is at least as urgent: a less urgent one may be held up by everybody who goes before it, and
        would hold this one up as well. Without states, it is the block after the cached ones; with states, the last
        block that the two share, if the other will leave a snapshot there and what is found already is not near. What
        comes from outside is worth waiting for in either case.
        """
        prefix, hashes, lane = self.find_prefix(sequence), sequence.block_hashes, sequence.request.lane
        num_usable = prefix.num_known if self.states is None else prefix.num_tokens // self.block_size
        if self.outside is not None:
            self.outside.fetch(sequence, hashes, num_usable)
        awaited = hashes[num_usable] if num_usable < len(hashes) else b""
        owner = self.index.owner_of(awaited, lane)
        if self.states is None or not (owner is None or isinstance(owner, Sequence)):
            return b"" if owner is None else awaited
        num_shared = self.index.num_shared(hashes, prefix.num_known, lane)
        at = num_shared * self.block_size
        if at - prefix.num_tokens < self.block_size:
            return b""
        awaited = hashes[num_shared - 1]
        owner = self.index.owner_of(awaited, lane)
        waits = isinstance(owner, Sequence) and self.states.will_leave(owner, sequence, at)
        return awaited if waits else b""

    def is_awaited(self, sequence: Sequence) -> bool:
        """Returns whether another sequence is still computing the block that this one was found to wait for."""
        return self.index.is_pending(sequence.awaited_hash, sequence.request.lane)

    def num_free_needed(self, sequence: Sequence) -> int:
        """Returns how many free blocks `start` takes, those of the found blocks included that nobody holds."""
        prefix = self.find_prefix(sequence)
        if prefix.counted_at != self.pool.generation or len(prefix.ready) < len(prefix.entries):
            self._count_ready(prefix)
        return sum(self._ends_at_start(sequence, prefix)) - prefix.num_ready

    def _count_ready(self, prefix: Prefix) -> None:
        """Counts the entries that take no free block: anew those that were not looked at, and blocks that turned."""
        entries, ready, counts = prefix.entries, prefix.ready, self.pool.ref_counts
        turned = None if self.states is not None else self.pool.turned_since(prefix.counted_at)
        if turned is None:
            ready.clear()
        for block in turned or ():
            place = self.index.place_of(block)
            if 0 <= place < len(ready) and entries[place] == block:
                prefix.num_ready += (counts[block] > 0) - ready[place]
                ready[place] = counts[block] > 0
        if not ready:
            prefix.num_ready = 0
        new = bytes([not block or counts[block] > 0 for block in entries[len(ready) :]])
        prefix.num_ready += new.count(1)
        ready += new
        prefix.counted_at = self.pool.generation

    # Sequences

    def start(self, sequence: Sequence) -> None:
        """Takes the pages of the cached prefix, and free blocks for the known tokens after it: `num_free_needed`."""
        prefix = self.find_prefix(sequence)
        if self.states is not None:  # the snapshot's blocks may be overwritten by those that are taken now
            num_shared = self.index.num_shared(sequence.block_hashes, prefix.num_known, NO_LIMIT)
            self.states.start(sequence, prefix, num_shared * self.block_size)
        num_full, log = len(prefix.entries) // self.num_tables, self.log
        for block in filter(None, prefix.entries):
            self.pool.hold(block)
        if num_full and log is not None and sequence.timings.num_cached_tokens < 0:  # else it was preempted
            log.add(Found(sequence.block_hashes[num_full - 1]))
        if self.outside is not None and not sequence.request.salt.endswith(PRIVATE):
            self._note_found(sequence, prefix)
        sequence.prefix, sequence.block_table, sequence.rewritten = None, list(prefix.entries), []
        sequence.num_computed = sequence.num_committed = prefix.num_tokens
        self._extend(sequence, self._ends_at_start(sequence, prefix))
        own = sequence.block_table[len(prefix.entries) :]
        self._copies += [copy for copy in zip(prefix.partial, own, strict=False) if copy[0]]
        for block_hash in sequence.block_hashes[num_full:]:
            self.index.begin(block_hash, sequence, sequence.request.lane)

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Makes the first `num_tokens` tokens of a running sequence writable from `num_computed` on.

        Blocks that lie behind the window of the token at `num_computed`, or are dropped before it, are given back
        first.

        Returns:
            The block copies (source, target) that must happen first. None if there are not enough free blocks, or no
            slot that the next step may write, or if steps in flight have to come back before tokens are dropped; then
            nothing was allocated.
        """
        if self.states is not None and not self.states.has_target(sequence):
            return None
        if sequence.num_computed >= sequence.drop_at and not self._drop_middle(sequence):
            return None
        if self._has_windows:
            self._free_behind_windows(sequence)
        table, counts, num_tables = sequence.block_table, self.pool.ref_counts, self.num_tables
        first, num_held = self._first_entry(sequence), len(table)
        num_tokens -= sequence.num_dropped
        if (
            first + num_tables == num_held
            and counts[table[first]] == 1
            and num_tokens * num_tables <= num_held * self.block_size
            and (num_tables == 1 or all(counts[b] == 1 for b in table[first:]))
        ):
            return []  # the usual decode: its token goes into the last blocks, which are its own
        shared = self._shared(sequence, num_tokens)
        if len(shared) + self._num_missing(sequence, num_tokens) > self.pool.num_free:
            return None
        copies = [(table[i], self.pool.allocate()) for i in shared]
        for i, (source, copy) in zip(shared, copies, strict=True):
            table[i] = copy
            self.pool.release((source,))
        sequence.rewritten += shared
        self._extend(sequence, [self.blocks_for(num_tokens)] * num_tables)
        if copies and sequence.state is not None:
            sequence.state.is_torn = True
        return copies

    def will_have_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Says whether `grow` succeeds once the steps in flight have come back, if nobody else takes a page."""
        if self.states is not None and not self.states.has_target(sequence):
            return True  # a slot is free when the next step has come back
        if sequence.num_computed >= sequence.drop_at:
            return True  # what is dropped next is known when the steps in flight have come back
        table, num_dropped = sequence.block_table, sequence.num_dropped
        num_needed = len(self._shared(sequence, num_tokens - num_dropped))
        num_needed += self._num_missing(sequence, num_tokens - num_dropped)
        num_sure = sequence.num_computed - num_dropped - sequence.num_unsure
        behind = [table[i] for i in self.windows.behind(table, num_sure, num_sure)]
        return num_needed <= self.pool.num_free + self.num_returning + self.pool.num_alone(behind)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Lets the child share what the parent has of its tokens, but for the last one, whose logits it needs.

        Returns:
            False if the parent has given everything back, or has dropped what the child's next token attends to, or
            nobody kept the state after these tokens.
        """
        num_shared, keeping = min(len(child.token_ids) - 1, parent.num_committed), child.keeping
        if not parent.block_table or parent.num_dropped != (
            keeping.num_dropped(num_shared) if keeping else 0
        ):
            return False
        if self.states is not None and not self.states.fork(parent, child, num_shared):
            return False
        child.num_computed = child.num_committed = num_shared
        child.num_dropped, child.drop_at = parent.num_dropped, parent.drop_at
        child.timings.num_kv_dropped = parent.num_dropped
        num_held = num_shared - parent.num_dropped
        child.block_table = parent.block_table[: self.blocks_for(num_held + 1) * self.num_tables]
        child.block_hashes = parent.block_hashes[: num_shared // self.block_size]
        for block in filter(None, child.block_table):
            self.pool.hold(block)
        return True

    def hand_over(self, parent: Sequence, heir: Sequence) -> None:
        """Gives the heir what a fork would share; the parent, which is done, keeps nothing."""
        heir.num_computed = heir.num_committed = min(len(heir.token_ids) - 1, parent.num_committed)
        heir.block_table, parent.block_table = parent.block_table, []
        heir.block_hashes, parent.block_hashes = parent.block_hashes, []
        heir.state, parent.state = parent.state, None

    def commit(self, sequence: Sequence, num_committed: int) -> None:
        """Confirms the tokens before `num_committed`, whose step came back; from now on what they left is found."""
        num_findable = (
            num_committed if sequence.keeping is None else min(num_committed, sequence.num_findable)
        )
        first, last = sequence.num_committed // self.block_size, num_findable // self.block_size
        sequence.num_committed = num_committed
        if first < last and self.prefix_cache:
            for block_hash in extend_chain(sequence, last, self.block_size)[first:last]:
                self.index.end(block_hash, sequence)
            start, end = (self._entry(sequence, i * self.block_size) for i in (first, last))
            self._note_full(sequence, first, sequence.block_table[start:end])
        if self.states is not None:
            self.states.commit(sequence, num_committed)

    def distrust(self, sequence: Sequence) -> None:
        """Lets the blocks of a sequence be found no more, those included that it found itself."""
        for block in filter(None, sequence.block_table):
            if self.findable[block]:
                if self.outside is not None:
                    self._forget_outside(block, self.outside)
                self._drop(block)

    def release(self, sequence: Sequence) -> None:
        """Gives all pages of a sequence back; it is safe to call it again.

        Blocks in the prefix index can still be found until they are reused, the deepest of a chain first. They are free
        when the steps in flight have come back.
        """
        if self.states is not None:
            self.states.release(sequence, self._last_step)
        for block_hash in sequence.block_hashes[sequence.num_committed // self.block_size :]:
            self.index.end(block_hash, sequence)
        blocks, sequence.block_table = sequence.block_table, []
        sequence.num_computed = sequence.num_committed = 0
        sequence.drop_nothing()
        if self._copies:
            held = set(blocks)
            self._copies = [copy for copy in self._copies if copy[1] not in held]
        self.pool.give_back(blocks, self._last_step)

    # Contents from outside

    def take(self, most: int) -> list[int]:
        """Takes free blocks, at most so many, for contents from outside; they are given back by `bring_back`."""
        return [self.pool.allocate() for _ in range(min(most, self.pool.num_free))]

    def bring_back(self, blocks: list[int], contents: ListLike[Content]) -> None:
        """Gives back blocks that were taken; the first of them, which have these contents now, can be found."""
        for block, content in zip(blocks, contents, strict=False):
            if self.index.add(content.hash, block, content.table, content.depth):
                self.findable[block] = 1
                self._brought_back.add(block)
                if self.log is not None and not content.table:
                    self.log.stored(*content[:2], content.depth, self.block_size, content.salt)
        self.pool.give_back(blocks)

    def take_slot(self, worth: int) -> int:
        """Takes a slot for a state from outside that saves so many tokens; it is given back by `bring_back_state`.

        Returns:
            0 if there is none.
        """
        return 0 if self.states is None else self.states.allocate(worth)

    def bring_back_state(self, slot: int, content: Content | None, num_fetched: int = 0) -> None:
        """Gives back a slot that was taken; with this content, it can be found.

        Args:
            num_fetched: the tokens that need not be computed for it.
        """
        if content is None:
            self.slots.give_back([slot])
            return
        end, key = (content.depth + 1) * self.block_size, content.hash
        self.snapshots.add(Snapshot(slot, end, key, [], [], end, kept_as=key, num_fetched=num_fetched))

    def refresh(self, hashes: list[bytes]) -> None:
        """Lets the known blocks of a chain be those that are reused last: more of it is about to be brought back."""
        free = [block for block in self.index.match(hashes) if block and not self.pool.ref_counts[block]]
        for block in free:
            self.pool.hold(block)
        self.pool.give_back(free)

    # Blocks

    def _entry(self, sequence: Sequence, position: int) -> int:
        """The place in a sequence's table of the first entry of the block of a token that was not dropped."""
        return (position - sequence.num_dropped) // self.block_size * self.num_tables

    def _first_entry(self, sequence: Sequence) -> int:
        """The place of the first entry for tokens that are not computed."""
        return (sequence.num_computed - sequence.num_dropped) // self.block_size * self.num_tables

    def _drop_middle(self, sequence: Sequence) -> bool:
        """Drops the tokens that the one at `num_computed` does not attend to, and gives their blocks back.

        Returns:
            False if steps in flight have to come back first: with wrong drafts the sequence is still before this place,
            and blocks whose tokens are not confirmed are yet to be found.
        """
        keeping, num_sure = sequence.keeping, sequence.num_computed - sequence.num_unsure
        assert keeping is not None
        start = sequence.num_dropped + keeping.num_first
        if num_sure < sequence.drop_at or sequence.num_committed < start + keeping.stride:
            return False
        first, end = (self._entry(sequence, position) for position in (start, start + keeping.stride))
        table = sequence.block_table
        sequence.block_table, sequence.rewritten = table[:first] + table[end:], []
        sequence.drop()
        self.pool.give_back(table[first:end], self._last_step)
        return True

    def _note_full(self, sequence: Sequence, first: int, entries: list[int]) -> None:
        """Lets the full blocks of a sequence from the `first` on be found, in each of its tables."""
        hashes, num_tables = sequence.block_hashes, self.num_tables
        is_private = sequence.request.salt.endswith(PRIVATE)
        for place, block in enumerate(entries):
            i, number = first + place // num_tables, place % num_tables
            if self.index.add(hashes[i], block, number, i):
                self.findable[block] = 1
                if is_private:
                    self.private.add(block)
                if self.log is not None and not number:
                    self.log.stored(hashes, sequence.token_ids, i, self.block_size, sequence.request.salt)

    def _note_found(self, sequence: Sequence, prefix: Prefix) -> None:
        """Tells who keeps contents outside what a sequence that starts has found, and counts what came from there."""
        assert self.outside is not None
        entries, snapshot, back = prefix.entries, prefix.snapshot, self._brought_back
        kept = snapshot
        while kept is not None and not kept.kept_as:
            kept = kept.parent
        self.outside.note_found(sequence.block_hashes, entries, kept)
        num_fetched = 0
        if back and not back.isdisjoint(entries):
            places = {i // self.num_tables for i, block in enumerate(entries) if block in back}
            num_fetched = len(places) * self.block_size
            back.difference_update(entries)
        if snapshot is not None:
            num_fetched, snapshot.num_fetched = max(num_fetched, snapshot.num_fetched), 0
        if num_fetched and sequence.timings.num_cached_tokens < 0:  # it starts for the first time
            sequence.timings.num_fetched_tokens = num_fetched

    def _reuse(self, block: int) -> None:
        """A block is handed out, and will be overwritten."""
        if self.outside is not None and block not in self.private:
            key = self.index.key_of(block)
            if key is not None:
                self.outside.note_reused(block, *key)
            for snapshot in self.snapshots.needing(block, key[0] if key else b""):
                self._note_dropped(snapshot)
        self._drop(block)

    def _note_dropped(self, snapshot: Snapshot) -> None:
        """A snapshot makes way, and its slot may be overwritten."""
        if self.outside is not None and snapshot.kept_as:
            self.outside.note_reused(snapshot.slot, snapshot.kept_as, STATE)

    def _forget_outside(self, block: int, outside: Outside) -> None:
        """Has the content of a block dropped outside, and the states that follow from it."""
        key = self.index.key_of(block)
        kept = {snapshot.kept_as for snapshot in self.snapshots.needing(block, key[0] if key else b"")}
        if key is not None:
            outside.forget(*key)
            kept.add(key[0])
        if self.states is not None:
            for block_hash in kept - {b""}:
                outside.forget(block_hash, STATE)

    def _drop(self, block: int) -> None:
        """The content of a block is gone, and what can only be found together with it."""
        self.findable[block] = 0
        self._brought_back.discard(block)
        self.private.discard(block)
        block_hash, table = self.index.drop(block) or (b"", 0)
        if block_hash and not table and self.log is not None:
            self.log.add(Dropped(block_hash))
        self.snapshots.drop_with(block, block_hash)

    def _ends_at_start(self, sequence: Sequence, prefix: Prefix) -> list[int]:
        num_found = prefix.num_tokens // self.block_size * self.block_size
        num_known = min(len(sequence.token_ids), sequence.num_findable)
        return self.windows.ends_at_start(num_known, num_found, self.max_chunk)

    def _free_behind_windows(self, sequence: Sequence) -> None:
        """Gives back the blocks behind windows, but for those that have no hash yet: these are to be found again."""
        table, blocks = sequence.block_table, list[int]()
        num_sure = sequence.num_computed - sequence.num_dropped - sequence.num_unsure
        for i in self.windows.behind(table, num_sure, sequence.num_committed - sequence.num_dropped):
            blocks.append(table[i])
            table[i] = 0
            sequence.rewritten.append(i)
        if blocks:
            self.pool.give_back(blocks, self._last_step)

    def _shared(self, sequence: Sequence, num_tokens: int) -> list[int]:
        """The entries from `num_computed` on, for so many tokens in all, whose blocks others hold, too."""
        table, counts = sequence.block_table, self.pool.ref_counts
        first = self._first_entry(sequence)
        end = min(len(table), self.blocks_for(num_tokens) * self.num_tables)
        return [i for i in range(first, end) if counts[table[i]] > 1]

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns how many entries from `num_computed` on, for so many tokens in all, have no block."""
        table, first = sequence.block_table, self._first_entry(sequence)
        end = self.blocks_for(num_tokens) * self.num_tables
        return table[first:end].count(0) + max(0, end - len(table))

    def _extend(self, sequence: Sequence, ends: list[int]) -> None:
        """Takes a free block for every entry from `num_computed` on that has none, in each table up to its own end."""
        table, num_tables, num_held = sequence.block_table, self.num_tables, len(sequence.block_table)
        first = self._first_entry(sequence)
        table += [0] * (max(ends) * num_tables - num_held)
        for number, end in enumerate(ends):
            for i in range(first + number, end * num_tables, num_tables):
                if not table[i]:
                    table[i] = self.pool.allocate()
                    if i < num_held:
                        sequence.rewritten.append(i)
