"""Block tables: which blocks hold the KV of a sequence, from its first prefix hit to its release.

A sequence's block table covers these token ranges:

    [0, num_null_blocks * block_size)  behind the sliding window: the blocks are given back, the entries are block 0
    [..., num_committed)               computed and confirmed; its full blocks are in the prefix index
    [num_committed, num_computed)      being written by steps in flight; full prompt blocks are marked pending
    [num_computed, ...)                room that was allocated ahead

One table entry is one reference in the pool. A block with more than one reference is never written: `grow` replaces it
by a copy first.

A step in flight may read and write all that its sequences held when it was planned. So blocks that are given back keep
their references, in here, until every step planned before has come back: they are not handed out earlier, though a
prompt that finds one of them by its hash may share it at any time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from itertools import chain

from engine.planning.blocks import BlockPool
from engine.planning.prefix_events import Dropped, Found, PrefixLog
from engine.planning.prefix_index import PrefixIndex, extend_hashes
from engine.planning.request import NO_LIMIT, Sequence


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
        window: int = 0,
        log: PrefixLog | None = None,
    ) -> None:
        """Makes the tables of an empty pool.

        Args:
            num_blocks: blocks of the pool, the null block (block 0) included.
            window: if every layer of the model has a sliding window, the largest of them: so many tokens, itself
                included, are all that a token sees. 0 if some layer sees all tokens.
            log: hears of every block that can be found from now on, is found, or is gone.
        """
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.log = log
        self.index = PrefixIndex()
        self.findable = bytearray(num_blocks)
        """By block, 1 if the prefix index finds it: what `knows_block` says, for a look at all of them."""
        self.pool = BlockPool(num_blocks, on_reuse=self._drop)
        max_chunk = (num_blocks - 2) * block_size - window + 1
        # A window that is wider than the pool gives no block back before the pool is full.
        self.window = window if max_chunk > 0 else 0
        self.max_chunk = max_chunk if self.window else NO_LIMIT
        """Tokens of the largest chunk: its blocks and those of the window before it fit into the pool together."""
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

    def end_step(self, number: int) -> None:
        """Ends a step that came back, or that will never run."""
        if number in self._in_flight:
            self._in_flight.remove(number)
        while self._returning and (not self._in_flight or self._returning[0][0] < self._in_flight[0]):
            self._release_now(self._returning.popleft()[1])

    # Sequences

    @property
    def num_kv_tokens(self) -> int:
        """Tokens whose KV the whole pool can hold."""
        return (self.pool.num_blocks - 1) * self.block_size

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sequence that can be computed; a sliding window sets no limit."""
        return NO_LIMIT if self.window else self.num_kv_tokens

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Returns the blocks of the longest cached prefix.

        No token whose logits are needed is part of it. With a sliding window, the prefix is a hit if the blocks of its
        last `window` tokens are cached; the blocks before them are 0.
        """
        if not self.prefix_cache:
            return []
        num_full = sequence.num_reusable // self.block_size
        salt = sequence.request.salt
        extend_hashes(sequence.block_hashes, sequence.token_ids, num_full, self.block_size, salt)
        hashes = sequence.block_hashes[:num_full]
        if self.window:
            return self.index.match_end(hashes, self.blocks_for(self.window))
        return self.index.match(hashes)

    def num_cached_tokens(self, token_ids: TokenIds[int], salt: bytes) -> int:
        """Returns how many first tokens of a prompt are cached, without regard to a sliding window.

        It reads single entries only, so that another thread may call it.
        """
        if not self.prefix_cache or not len(self.index):
            return 0
        hashes: list[bytes] = []
        for number in range(1, (len(token_ids) - 1) // self.block_size + 1):
            extend_hashes(hashes, token_ids, number, self.block_size, salt)
            if not self.index.knows_hash(hashes[-1]):
                return (number - 1) * self.block_size
        return len(hashes) * self.block_size

    def awaits_prefix(self, sequence: Sequence, num_found: int) -> bool:
        """Says whether the block after the `num_found` cached ones is worth waiting for.

        It is if another sequence is computing it that is at least as urgent: a less urgent one may be held up by
        everybody who goes before it, and would hold this one up as well.
        """
        hashes = sequence.block_hashes
        return num_found < len(hashes) and self.index.is_pending(hashes[num_found], sequence.request.lane)

    def num_free_needed(self, sequence: Sequence, prefix: list[int]) -> int:
        """Returns how many free blocks `start` takes, those of the found blocks included that nobody holds."""
        in_use = sum(1 for block in prefix if self.pool.ref_counts[block])
        num_tokens = self._num_tokens_at_start(sequence, prefix)
        return self.blocks_for(num_tokens) - prefix.count(0) - in_use

    def num_held_alone(self, sequence: Sequence) -> int:
        """Returns how many blocks would be free if this sequence gave its blocks back."""
        return self._num_alone(sequence.block_table)

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Takes the blocks of the prefix, and free ones for the known tokens after it; there have to be enough.

        With a sliding window, it takes what the window and the largest chunk need: the sequence never needs more at a
        time, because `grow` gives back what is behind the window.
        """
        sequence.num_null_blocks = prefix.count(0)
        for block in prefix[sequence.num_null_blocks :]:
            self.pool.hold(block)
        if prefix and self.log is not None and sequence.num_cached_tokens < 0:  # else it was preempted
            self.log.add(Found(sequence.block_hashes[len(prefix) - 1]))
        sequence.block_table = list(prefix)
        sequence.num_computed = sequence.num_committed = len(prefix) * self.block_size
        self._extend(sequence, self._num_tokens_at_start(sequence, prefix))
        for block_hash in sequence.block_hashes[len(prefix) :]:
            self.index.begin(block_hash, sequence, sequence.request.lane)

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Makes the first `num_tokens` tokens of a running sequence writable from `num_computed` on.

        Blocks that lie behind the sliding window of the token at `num_computed` are given back first.

        Returns:
            The block copies (source, target) that must happen first. None if there are not enough free blocks; then
            nothing was allocated.
        """
        if self.window:
            self._free_behind_window(sequence)
        table, counts, block_size = sequence.block_table, self.pool.ref_counts, self.block_size
        first, num_held = sequence.num_computed // block_size, len(table)
        if num_tokens <= num_held * block_size and first == num_held - 1 and counts[table[first]] == 1:
            return []  # the usual decode: its token goes into the last block, which is its own
        shared = [i for i in range(first, num_held) if counts[table[i]] > 1]
        if len(shared) + self.blocks_for(num_tokens) - num_held > self.pool.num_free:
            return None
        copies = [(table[i], self._replace(sequence, i)) for i in shared]
        self._extend(sequence, num_tokens)
        return copies

    def will_have_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Says whether `grow` succeeds once the steps in flight have come back, if nobody else takes a block."""
        table, counts = sequence.block_table, self.pool.ref_counts
        first = sequence.num_computed // self.block_size
        num_shared = sum(1 for block in table[first:] if counts[block] > 1)
        num_needed = num_shared + self.blocks_for(num_tokens) - len(table)
        behind_window = table[sequence.num_null_blocks : self._num_behind_window(sequence.num_computed)]
        return num_needed <= self.pool.num_free + self.num_returning + self._num_alone(behind_window)

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """Lets the child share what the parent has of its tokens, but for the last one, whose logits it needs."""
        num_shared = self._continue(parent, child)
        child.block_table = parent.block_table[: self.blocks_for(num_shared + 1)]
        child.block_hashes = parent.block_hashes[: num_shared // self.block_size]
        for block in child.block_table[child.num_null_blocks :]:
            self.pool.hold(block)

    def hand_over(self, parent: Sequence, heir: Sequence) -> None:
        """Gives the heir what a fork would share; the parent, which is done, keeps nothing."""
        self._continue(parent, heir)
        heir.block_table, parent.block_table = parent.block_table, []
        heir.block_hashes, parent.block_hashes = parent.block_hashes, []
        parent.num_null_blocks = 0

    def _continue(self, parent: Sequence, child: Sequence) -> int:
        """Notes of how many tokens the child has the parent's KV, and returns the number."""
        num_shared = min(len(child.token_ids) - 1, parent.num_committed)
        child.num_null_blocks = parent.num_null_blocks
        child.num_computed = child.num_committed = num_shared
        return num_shared

    def commit(self, sequence: Sequence, num_committed: int) -> None:
        """Confirms the tokens before `num_committed`, whose step came back; from now on their full blocks are found."""
        first, last = sequence.num_committed // self.block_size, num_committed // self.block_size
        sequence.num_committed = num_committed
        if first == last or not self.prefix_cache:
            return
        hashes, table = sequence.block_hashes, sequence.block_table
        extend_hashes(hashes, sequence.token_ids, last, self.block_size, sequence.request.salt)
        for i in range(first, last):
            self.index.end(hashes[i], sequence)
            if not self.index.add(hashes[i], table[i]):
                continue
            self.findable[table[i]] = 1
            if self.log is not None:
                self.log.stored(hashes, sequence.token_ids, i, self.block_size, sequence.request.salt)

    def release(self, sequence: Sequence) -> None:
        """Gives all blocks of a sequence back; it is safe to call it again.

        Blocks in the prefix index can still be found until they are reused, the deepest of a chain first. They are free
        when the steps in flight have come back.
        """
        for block_hash in sequence.block_hashes[sequence.num_committed // self.block_size :]:
            self.index.end(block_hash, sequence)
        blocks = sequence.block_table[sequence.num_null_blocks :]
        sequence.block_table = []
        sequence.num_computed = sequence.num_committed = sequence.num_null_blocks = 0
        self._release(blocks)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Compares the pool's reference counts with what these sequences, all there are, and steps in flight hold.

        Raises:
            PoolViolation: if a reference is unaccounted for.
        """
        tables = (sequence.block_table for sequence in sequences)
        self.pool.check(chain(tables, (blocks for _, blocks in self._returning)))

    def _num_tokens_at_start(self, sequence: Sequence, prefix: list[int]) -> int:
        """Tokens, from the first on, whose table entries a sequence gets when it starts."""
        num_known = len(sequence.token_ids)
        if not self.window:
            return num_known
        return min(num_known, max(len(prefix) * self.block_size, self.window) + self.max_chunk)

    def _num_behind_window(self, position: int) -> int:
        """First blocks of a sequence that no token from `position` on sees.

        One token more than the window has is kept: a fork starts one token before its parent.
        """
        return max(0, position - self.window) // self.block_size if self.window else 0

    def _free_behind_window(self, sequence: Sequence) -> None:
        """Gives back the blocks behind the window, but for those that have no hash yet: these are to be found again."""
        position = min(sequence.num_computed, sequence.num_committed + self.window)
        start, end = sequence.num_null_blocks, self._num_behind_window(position)
        if start < end:
            blocks = sequence.block_table[start:end]
            sequence.block_table[start:end] = [0] * len(blocks)
            sequence.num_null_blocks = end
            self._release(blocks)

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
            if not self.index.knows_block(block):
                self.pool.forget(block)

    def _drop(self, block: int) -> None:
        block_hash = self.index.drop(block)
        self.findable[block] = 0
        if block_hash is not None and self.log is not None:
            self.log.add(Dropped(block_hash))

    def _extend(self, sequence: Sequence, num_tokens: int) -> None:
        table = sequence.block_table
        while len(table) * self.block_size < num_tokens:
            table.append(self.pool.allocate())

    def _replace(self, sequence: Sequence, i: int) -> int:
        shared = sequence.block_table[i]
        sequence.block_table[i] = copy = self.pool.allocate()
        self.pool.release((shared,))
        return copy
