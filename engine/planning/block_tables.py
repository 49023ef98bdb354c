"""Block tables: which blocks hold a sequence's KV, from its first prefix hit to its last release.

Ownership of a sequence's table, by token range:

    [0, num_committed)             computed and confirmed; full blocks of it are in the prefix index
    [num_committed, num_computed)  being written by steps in flight; full prompt blocks are marked pending
    [num_computed, ...)            room that was allocated ahead

One table entry is one reference in the pool. A block with more than one reference is never written: `grow` replaces it
by a copy first.

A step in flight may read and write what its sequences held when it was planned. What is released meanwhile keeps its
references, here, until all steps planned before have come back: no such block is handed out earlier, and one that is
found by its hash can be shared at any time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable
from collections.abc import Sequence as TokenIds
from itertools import chain

from engine.planning.blocks import BlockPool
from engine.planning.prefix_events import Dropped, Found, PrefixLog
from engine.planning.prefix_index import PrefixIndex, extend_hashes
from engine.planning.request import Sequence


class BlockTables:
    """Allocates, shares and frees the blocks of sequences. The only place that touches pool and index."""

    def __init__(
        self,
        num_blocks: int,
        block_size: int,
        *,
        prefix_cache: bool = True,
        log: PrefixLog | None = None,
    ) -> None:
        """`log` is told of every block that comes to be found, is found, or is no more."""
        self.block_size = block_size
        self.prefix_cache = prefix_cache
        self.log = log
        self.index = PrefixIndex()
        self.pool = BlockPool(num_blocks, on_reuse=self._drop)
        self._num_steps = 0
        self._in_flight: deque[int] = deque()
        """Numbers of the steps that have not come back, oldest first."""
        self._returning: deque[tuple[int, list[int]]] = deque()
        """Blocks that were given up, and the last step that may still use them. Each entry is a reference."""

    # Steps in flight

    @property
    def num_in_flight(self) -> int:
        return len(self._in_flight)

    @property
    def num_returning(self) -> int:
        """Blocks that will be free once the steps in flight have come back."""
        return sum(self.pool.ref_counts[block] == n for block, n in self._references_returning().items())

    def begin_step(self, copies: list[tuple[int, int]]) -> int:
        """A step was planned; returns its number. The sources of its copies stay as they are until it is back."""
        self._num_steps += 1
        self._in_flight.append(self._num_steps)
        returning = self._references_returning() if copies else Counter()
        for source in {source for source, _ in copies}:
            if self.pool.ref_counts[source] == returning[source]:  # no sequence holds it any more
                self.pool.hold(source)
                self._returning.append((self._num_steps, [source]))
        return self._num_steps

    def end_step(self, number: int) -> None:
        """The step came back, or will never run."""
        if number in self._in_flight:
            self._in_flight.remove(number)
        while self._returning and (not self._in_flight or self._returning[0][0] < self._in_flight[0]):
            self._give_back(self._returning.popleft()[1])

    # Sequences

    @property
    def max_tokens(self) -> int:
        """The longest sequence that the whole pool can hold."""
        return (self.pool.num_blocks - 1) * self.block_size

    def blocks_for(self, num_tokens: int) -> int:
        return -(-num_tokens // self.block_size)

    def find_prefix(self, sequence: Sequence) -> list[int]:
        """Blocks of the longest cached prefix. The last known token is never part of it: its logits are needed."""
        if not self.prefix_cache:
            return []
        num_full = (len(sequence.token_ids) - 1) // self.block_size
        salt = sequence.request.salt
        extend_hashes(sequence.block_hashes, sequence.token_ids, num_full, self.block_size, salt)
        return self.index.match(sequence.block_hashes[:num_full])

    def num_cached_tokens(self, token_ids: TokenIds[int], salt: bytes) -> int:
        """How many tokens of a prompt are cached. Reads single entries only, so that another thread may ask."""
        if not self.prefix_cache or not len(self.index):
            return 0
        hashes: list[bytes] = []
        for number in range(1, (len(token_ids) - 1) // self.block_size + 1):
            extend_hashes(hashes, token_ids, number, self.block_size, salt)
            if not self.index.knows_hash(hashes[-1]):
                return (number - 1) * self.block_size
        return len(hashes) * self.block_size

    def awaits_prefix(self, sequence: Sequence, num_found: int) -> bool:
        """True if another sequence is computing the very block that this one would compute next."""
        hashes = sequence.block_hashes
        return num_found < len(hashes) and self.index.is_pending(hashes[num_found])

    def num_free_needed(self, sequence: Sequence, prefix: list[int]) -> int:
        """Free blocks it takes to hold all known tokens; a found block counts if it is free, for then it is no more."""
        in_use = sum(1 for block in prefix if self.pool.ref_counts[block])
        return self.blocks_for(len(sequence.token_ids)) - in_use

    def num_held_alone(self, sequence: Sequence) -> int:
        """Blocks that would be free if this sequence gave its own back."""
        return sum(1 for block in sequence.block_table if self.pool.ref_counts[block] == 1)

    def start(self, sequence: Sequence, prefix: list[int]) -> None:
        """Takes the prefix and room for all known tokens; the caller has seen that there is enough."""
        for block in prefix:
            self.pool.hold(block)
        if prefix and self.log is not None and sequence.num_cached_tokens < 0:  # else it was preempted
            self.log.add(Found(sequence.block_hashes[len(prefix) - 1]))
        sequence.block_table = list(prefix)
        sequence.num_computed = sequence.num_committed = len(prefix) * self.block_size
        self._extend(sequence, len(sequence.token_ids))
        for i in range(len(prefix), len(sequence.block_hashes)):
            self.index.begin(sequence.block_hashes[i], sequence.block_table[i])

    def grow(self, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Makes the first `num_tokens` tokens of a running sequence writable from `num_computed` on.

        Returns:
            The block copies (source, target) that must happen first, or None if there are not enough free blocks; then
            nothing has changed.
        """
        table, counts = sequence.block_table, self.pool.ref_counts
        first = sequence.num_computed // self.block_size
        if num_tokens <= len(table) * self.block_size and all(counts[b] == 1 for b in table[first:]):
            return []  # the common case: a token goes into a block that is there and its own
        shared = [i for i in range(first, len(table)) if counts[table[i]] > 1]
        if len(shared) + self.blocks_for(num_tokens) - len(table) > self.pool.num_free:
            return None
        copies = [(table[i], self._replace(sequence, i)) for i in shared]
        self._extend(sequence, num_tokens)
        return copies

    def will_have_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Whether `grow` will succeed once the steps in flight have come back, if nobody else takes anything."""
        table, counts = sequence.block_table, self.pool.ref_counts
        first = sequence.num_computed // self.block_size
        num_shared = sum(1 for block in table[first:] if counts[block] > 1)
        num_needed = num_shared + self.blocks_for(num_tokens) - len(table)
        return num_needed <= self.pool.num_free + self.num_returning

    def fork(self, parent: Sequence, child: Sequence) -> None:
        """The child shares the parent's prompt; it computes only the last prompt token again, for its logits."""
        child.block_table = parent.block_table[: self.blocks_for(parent.num_prompt_tokens)]
        child.block_hashes = parent.block_hashes[: (parent.num_prompt_tokens - 1) // self.block_size]
        child.num_computed = child.num_committed = parent.num_prompt_tokens - 1
        for block in child.block_table:
            self.pool.hold(block)

    def commit(self, sequence: Sequence, num_committed: int) -> None:
        """The step that computed tokens up to `num_committed` came back: its full blocks can be found from now on."""
        first, last = sequence.num_committed // self.block_size, num_committed // self.block_size
        sequence.num_committed = num_committed
        if first == last or not self.prefix_cache:
            return
        hashes, table = sequence.block_hashes, sequence.block_table
        extend_hashes(hashes, sequence.token_ids, last, self.block_size, sequence.request.salt)
        for i in range(first, last):
            self.index.end(hashes[i], table[i])
            if self.index.add(hashes[i], table[i]) and self.log is not None:
                self.log.stored(hashes, sequence.token_ids, i, self.block_size, sequence.request.salt)

    def release(self, sequence: Sequence) -> None:
        """Gives everything back; safe to call again. What is in the index can be found on, deepest given up first.

        With steps in flight, the blocks are free when these have come back.
        """
        table, sequence.block_table = sequence.block_table, []
        for block_hash, block in zip(sequence.block_hashes, table, strict=False):
            self.index.end(block_hash, block)
        sequence.num_computed = sequence.num_committed = 0
        if self._in_flight:
            self._returning.append((self._num_steps, table))
        else:
            self._give_back(table)

    def check(self, sequences: Iterable[Sequence]) -> None:
        """Proves the pool against the sequences that are alive and what is on its way back.

        Raises:
            PoolViolation: if a reference is unaccounted for.
        """
        tables = (sequence.block_table for sequence in sequences)
        self.pool.check(chain(tables, (blocks for _, blocks in self._returning)))

    def _references_returning(self) -> Counter[int]:
        return Counter(chain.from_iterable(blocks for _, blocks in self._returning))

    def _give_back(self, table: list[int]) -> None:
        self.pool.release(reversed(table))
        for block in table:
            if not self.index.knows_block(block):
                self.pool.forget(block)

    def _drop(self, block: int) -> None:
        block_hash = self.index.drop(block)
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
