"""Block tables: which blocks hold the KV of a sequence, from its first prefix hit to its release.

A sequence has a table for each group of the model's layers (see `Windows`). They lie in one list, the entries for the
same tokens side by side, and cover these token ranges:

    [0, ...)                       behind the table's sliding window: the blocks are given back, the entries are 0
    [..., num_committed)           computed and confirmed; its full blocks are in the prefix index
    [num_committed, num_computed)  being written by steps in flight; full prompt blocks are marked pending
    [num_computed, ...)            room that was allocated ahead; 0 where a table with a window has none yet

One entry that is not 0 is one reference in the pool. A block with more than one reference is never written: `grow`
replaces it by a copy first.

A step in flight may read and write all that its sequences held when it was planned. So blocks that are given back keep
their references, in here, until every step planned before has come back: they are not handed out earlier, though a
prompt that finds one of them by its hash may share it at any time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from itertools import chain

from penstock.engine.planning.blocks import BlockPool
from penstock.engine.planning.prefix_events import Dropped, Found, PrefixLog
from penstock.engine.planning.prefix_index import PrefixIndex, extend_hashes
from penstock.engine.planning.request import NO_LIMIT, Sequence
from penstock.engine.planning.states import StateUse
from penstock.engine.planning.step import Plan
from penstock.engine.planning.windows import Windows


def most_tokens_of_forks(num_blocks: int, block_size: int, num_prompt: int, num_forks: int) -> int:
    """The tokens that forks of a prompt, which share its full blocks, can have each while all are in so many blocks."""
    num_shared = num_prompt // block_size
    return (num_shared + (num_blocks - num_shared) // num_forks) * block_size


class BlockTables:
    """Allocates, shares and frees the blocks of sequences. Nothing else touches the pool and the prefix index."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        windows: TokenIds[int] = (0,),
        log: PrefixLog | None = None,
    ) -> None:
        """Makes the tables of an empty pool.

        Args:
            num_blocks: blocks of the pool, the null block (block 0) included.
            windows: by table of a sequence, how many tokens a token sees, itself included; 0 if it sees all.
            log: hears of every block that can be found from now on, is found, or is gone.
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
        self._num_seen = [self.blocks_for(size) for size in self.windows.sizes]
        """By table, the blocks of a window; 0 if it has none."""
        self.index = PrefixIndex(self.num_tables)
        self.findable = bytearray(num_blocks)
        """By block, 1 if the prefix index finds it: what `knows_block` says, for a look at all of them."""
        self.pool = BlockPool(num_blocks, on_reuse=self._drop)
        self._num_steps = 0
        self._in_flight: deque[int] = deque()
        """Numbers of the steps that have not come back, oldest first."""
        self._returning: deque[tuple[int, list[int]]] = deque()
        """Blocks that were given back, each with the last step that may use it. Every entry is a reference."""

    def limit_chunks(self, max_tokens: int) -> None:
        """No chunk will be larger than this: it bounds the room that a sequence needs under a sliding window."""
        self.max_chunk = min(self.max_chunk, max_tokens)

    # Steps in flight

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_returning(self) -> int:
        """Blocks that will be free once the steps in flight have come back."""
        return sum(self.pool.ref_counts[block] == n for block, n in self._references_returning().items())

    def begin_step(self, copies: list[tuple[int, int]]) -> int:
        """Numbers a step that was planned. The sources of its copies keep their content until it is back."""
        self._num_steps += 1
        self._in_flight.append(self._num_steps)
        returning = self._references_returning() if copies else Counter()
        for source in {source for source, _ in copies}:
            if self.pool.ref_counts[source] == returning[source]:  # no sequence holds it any more
                self.pool.hold(source)
                self._returning.append((self._num_steps, [source]))
        return self._num_steps

    def assign(self, plan: Plan) -> None:
        """Prepares a plan whose number was made by `begin_step`: there is nothing to prepare."""

    def take_back(self, plan: Plan) -> list[Sequence]:  # noqa: ARG002
        """Takes back what `assign` did to a plan that may have begun; returns the sequences that have lost by it."""
        return []

    def end_step(self, number: int, *, has_failed: bool = False) -> None:  # noqa: ARG002
        """Ends a step that came back, or that will never run."""
        if number in self._in_flight:
            self._in_flight.remove(number)
        while self._returning and (not self._in_flight or self._returning[0][0] < self._in_flight[0]):
            self._release_now(self._returning.popleft()[1])

    # Sequences

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that can be computed: NO_LIMIT if every table has a window."""
        return self.windows.most_tokens(self.pool.num_blocks - 1, self.max_chunk)

    @property
    def max_running(self) -> int:
        """Sequences that may run at a time, as far as it depends on what they hold beside blocks."""
        return NO_LIMIT

    @property
    def state_use(self) -> StateUse:
        """What becomes of state slots, for any thread."""
        return StateUse()

    @property
    def num_kv_tokens(self) -> int:
        """Tokens that there is room for in all blocks."""
        return self.windows.room(self.pool.num_blocks - 1, self.max_chunk)

    @property
    def num_free_tokens(self) -> int:
        """Tokens that there is room for in the free blocks."""
        return self.windows.room(self.pool.num_free, self.max_chunk)

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the table entries of the longest cached prefix.

        No token whose logits are needed is part of it. Of a table with a window, the blocks of the prefix's last tokens
        have to be cached, as many as the window has; the entries before them are 0.
        """
        if not self.prefix_cache:
            return []
        num_full = sequence.num_reusable // self.block_size
        self._extend_hashes(sequence, num_full)
        return self.index.match(sequence.block_hashes[:num_full], self._num_seen)

    def find_cached(self, hashes: TokenIds[bytes], token_ids: TokenIds[int] = ()) -> tuple[int, int]:  # noqa: ARG002
        """Returns how many first tokens of a prompt are cached, without regard to windows, and how many are in use.

        It reads single entries only, so that another thread may call it.

        Args:
            hashes: those of the prompt's full blocks.
        """
        if not self.prefix_cache:
            return 0, 0
        num_cached = num_in_use = 0
        for block_hash in hashes:
            block = self.index.block_of(block_hash)
            if block is None:
                break
            num_cached += self.block_size
            num_in_use += self.block_size * (self.pool.ref_counts[block] > 0)
        return num_cached, num_in_use

    def awaited_hash(self, sequence: Sequence, prefix: list[int]) -> bytes:
        """Returns the hash of the block after the cached ones if it is worth waiting for, else b"".

        It is if another sequence is computing it that is at least as urgent: a less urgent one may be held up by
        everybody who goes before it, and would hold this one up as well.
        """
        hashes, num_found = sequence.block_hashes, len(prefix) // self.num_tables
        is_awaited = num_found < len(hashes) and self.index.is_pending(
            hashes[num_found], sequence.request.lane
        )
        return hashes[num_found] if is_awaited else b""

    def num_free_needed(self, sequence: Sequence, prefix: list[int]) -> int:
        """Returns how many free blocks `start` takes, those of the found blocks included that nobody holds."""
        in_use = sum(1 for block in prefix if self.pool.ref_counts[block])
        return sum(self._ends_at_start(sequence, prefix)) - prefix.count(0) - in_use

    def num_held_alone(self, sequence: Sequence) -> int:
        """Returns how many blocks would be free if this sequence gave its blocks back."""
        return self._num_alone(sequence.block_table)

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Takes the blocks of the prefix, and free ones for the known tokens after it; there have to be enough.

        For a table with a window, it takes what the window and the largest chunk need: the table never needs more at a
        time, because `grow` gives back what is behind the window.
        """
        for block in filter(None, prefix):
            self.pool.hold(block)
        num_found, log = len(prefix) // self.num_tables, self.log
        if prefix and log is not None and sequence.timings.num_cached_tokens < 0:  # else it was preempted
            log.add(Found(sequence.block_hashes[num_found - 1]))
        sequence.block_table = list(prefix)
        sequence.num_computed = sequence.num_committed = num_found * self.block_size
        self._extend(sequence, self._ends_at_start(sequence, prefix))
        for block_hash in sequence.block_hashes[num_found:]:
            self.index.begin(block_hash, sequence, sequence.request.lane)

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Makes the first `num_tokens` tokens of a running sequence writable from `num_computed` on.

        Blocks that lie behind the window of the token at `num_computed` are given back first.

        Returns:
            The block copies (source, target) that must happen first. None if there are not enough free blocks; then
            nothing was allocated.
        """
        if self._has_windows:
            self._free_behind_windows(sequence)
        table, counts, num_tables = sequence.block_table, self.pool.ref_counts, self.num_tables
        first, num_held = sequence.num_computed // self.block_size * num_tables, len(table)
        if (
            first + num_tables == num_held
            and counts[table[first]] == 1
            and num_tokens * num_tables <= num_held * self.block_size
            and (num_tables == 1 or all(counts[b] == 1 for b in table[first:]))
        ):
            return []  # the usual decode: its token goes into the last blocks, which are its own
        shared = [i for i in range(first, num_held) if counts[table[i]] > 1]
        if len(shared) + self._num_missing(sequence, num_tokens) > self.pool.num_free:
            return None
        copies = [(table[i], self._replace(sequence, i)) for i in shared]
        self._extend(sequence, [self.blocks_for(num_tokens)] * num_tables)
        return copies

    def will_have_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Says whether `grow` succeeds once the steps in flight have come back, if nobody else takes a block."""
        table, counts = sequence.block_table, self.pool.ref_counts
        first = sequence.num_computed // self.block_size * self.num_tables
        num_needed = sum(1 for block in table[first:] if counts[block] > 1)
        num_needed += self._num_missing(sequence, num_tokens)
        behind = [table[i] for i in self._behind_windows(sequence, sequence.num_computed)]
        return num_needed <= self.pool.num_free + self.num_returning + self._num_alone(behind)

    def fork(self, parent: Sequence, child: Sequence) -> bool:
        """Lets the child share what the parent has of its tokens, but for the last one, whose logits it needs.

        Returns:
            False if the parent has given everything back.
        """
        if not parent.block_table:
            return False
        num_shared = self._continue(parent, child)
        child.block_table = parent.block_table[: self.blocks_for(num_shared + 1) * self.num_tables]
        child.block_hashes = parent.block_hashes[: num_shared // self.block_size]
        for block in filter(None, child.block_table):
            self.pool.hold(block)
        return True

    def hand_over(self, parent: Sequence, heir: Sequence) -> None:
        """Gives the heir what a fork would share; the parent, which is done, keeps nothing."""
        self._continue(parent, heir)
        heir.block_table, parent.block_table = parent.block_table, []
        heir.block_hashes, parent.block_hashes = parent.block_hashes, []

    def _continue(self, parent: Sequence, child: Sequence) -> int:
        """Notes of how many tokens the child has the parent's KV, and returns the number."""
        num_shared = min(len(child.token_ids) - 1, parent.num_committed)
        child.num_computed = child.num_committed = num_shared
        return num_shared

    def commit(self, sequence: Sequence, num_committed: int) -> None:
        """Confirms the tokens before `num_committed`, whose step came back; from now on their full blocks are found."""
        first, last = sequence.num_committed // self.block_size, num_committed // self.block_size
        sequence.num_committed = num_committed
        if first == last or not self.prefix_cache:
            return
        hashes, table = sequence.block_hashes, sequence.block_table
        self._extend_hashes(sequence, last)
        for i in range(first, last):
            self.index.end(hashes[i], sequence)
            self._note_full(sequence, i, table[i * self.num_tables : (i + 1) * self.num_tables])

    def _note_full(self, sequence: Sequence, i: int, blocks: list[int]) -> None:
        """Lets the i-th block of a sequence be found, in each of its tables."""
        hashes = sequence.block_hashes
        for number, block in enumerate(blocks):
            if self.index.add(hashes[i], block, number):
                self.findable[block] = 1
                if self.log is not None and not number:
                    self.log.stored(hashes, sequence.token_ids, i, self.block_size, sequence.request.salt)

    def distrust(self, sequence: Sequence) -> None:
        """Lets the blocks of a sequence be found no more, those included that it found itself."""
        for block in filter(None, sequence.block_table):
            if self.findable[block]:
                self._drop(block)

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks of a sequence back; it is safe to call it again.

        Blocks in the prefix index can still be found until they are reused, the deepest of a chain first. They are free
        when the steps in flight have come back.
        """
        for block_hash in sequence.block_hashes[sequence.num_committed // self.block_size :]:
            self.index.end(block_hash, sequence)
        blocks = [block for block in sequence.block_table if block]
        sequence.block_table = []
        sequence.num_computed = sequence.num_committed = 0
        self._release(blocks)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Compares the pool's reference counts with what these sequences, all there are, and steps in flight hold.

        Raises:
            PoolViolation: if a reference is unaccounted for.
        """
        tables = (sequence.block_table for sequence in sequences)
        self.pool.check(chain(tables, (blocks for _, blocks in self._returning)))

    def _ends_at_start(self, sequence: Sequence, prefix: list[int]) -> list[int]:
        """The number of entries, from the first on, that a sequence has in each table when it starts."""
        num_known, num_found = len(sequence.token_ids), len(prefix) // self.num_tables * self.block_size
        return [
            self.blocks_for(min(num_known, max(num_found, size) + self.max_chunk) if size else num_known)
            for size in self.windows.sizes
        ]

    def _behind_windows(self, sequence: Sequence, num_committed: int) -> list[int]:
        """The entries, not given back yet, of blocks with committed tokens that no token from `num_computed` on sees.

        One token more than a window has is kept: a fork starts one token before its parent.
        """
        table, found = sequence.block_table, list[int]()
        for number, size in enumerate(self.windows.sizes):
            if size:
                num_behind = min(sequence.num_computed - size, num_committed) // self.block_size
                i = (num_behind - 1) * self.num_tables + number
                while i >= 0 and table[i]:
                    found.append(i)
                    i -= self.num_tables
        return found[::-1]

    def _free_behind_windows(self, sequence: Sequence) -> None:
        """Gives back the blocks behind windows, but for those that have no hash yet: these are to be found again."""
        table, blocks = sequence.block_table, list[int]()
        for i in self._behind_windows(sequence, sequence.num_committed):
            blocks.append(table[i])
            table[i] = 0
        if blocks:
            self._release(blocks)

    def _extend_hashes(self, sequence: Sequence, num_blocks: int) -> None:
        """Makes the hashes of the sequence's first full blocks known."""
        hashes, request = sequence.block_hashes, sequence.request
        if len(hashes) < num_blocks:
            hashes += request.block_hashes[len(hashes) : num_blocks]
            extend_hashes(hashes, sequence.token_ids, num_blocks, self.block_size, request.salt)

    def _num_alone(self, blocks: list[int]) -> int:
        return sum(1 for block in blocks if self.pool.ref_counts[block] == 1)

    def _references_returning(self) -> Counter[int]:
        return Counter(chain.from_iterable(blocks for _, blocks in self._returning))

    def _release(self, blocks: list[int]) -> None:
        """Gives up one reference to each, once the steps in flight have come back."""
        if self._in_flight:
            self._returning.append((self._num_steps, blocks))
        else:
            self._release_now(blocks)

    def _release_now(self, blocks: list[int]) -> None:
        self.pool.release(reversed(blocks))
        for block in blocks:
            if not self.findable[block]:
                self.pool.forget(block)

    def _drop(self, block: int) -> None:
        block_hash = self.index.drop(block)
        self.findable[block] = 0
        if block_hash is not None and self.log is not None:
            self.log.add(Dropped(block_hash))

    def _num_missing(self, sequence: Sequence, num_tokens: int) -> int:
        """Returns how many entries for tokens between `num_computed` and `num_tokens` have no block."""
        table, first = sequence.block_table, sequence.num_computed // self.block_size * self.num_tables
        end = self.blocks_for(num_tokens) * self.num_tables
        return table[first:end].count(0) + max(0, end - len(table))

    def _extend(self, sequence: Sequence, ends: list[int]) -> None:
        """Takes a free block for every entry from `num_computed` on that has none, in each table up to its own end."""
        table, num_tables = sequence.block_table, self.num_tables
        first = sequence.num_computed // self.block_size * num_tables
        table += [0] * (max(ends) * num_tables - len(table))
        for number, end in enumerate(ends):
            for i in range(first + number, end * num_tables, num_tables):
                table[i] = table[i] or self.pool.allocate()

    def _replace(self, sequence: Sequence, i: int) -> int:
        shared = sequence.block_table[i]
        sequence.block_table[i] = copy = self.pool.allocate()
        self.pool.release((shared,))
        return copy
