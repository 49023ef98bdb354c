"""Snapshots: the states that can be found by the tokens that they follow from, as blocks are by their hashes.

What is found of a prompt is the state after some of its tokens, and the blocks with the keys and values of these. It is
found at any token, not only where a block ends. A snapshot holds its slot, but no blocks: these are free, and when one
of them is overwritten, the snapshot is gone.

When no slot is free, the snapshot goes that saves the least work, by the tokens that have to be computed again, and by
how long nobody has asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from collections.abc import Sequence as ListLike

from penstock.engine.planning.blocks import BlockPool
from penstock.engine.planning.prefix_index import PrefixIndex, chain_start
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.state_records import Prefix, Snapshot


class Snapshots:
    """The snapshots by the last full block before them; every one of them is a reference to its slot."""

    def __init__(
        self,
        block_size: int,
        index: PrefixIndex,
        pool: BlockPool,
        slots: BlockPool,
        on_reuse: Callable[[Snapshot], None] = lambda _: None,
    ) -> None:
        """`on_reuse` is called with every snapshot that makes way for the state of a sequence."""
        self._on_reuse = on_reuse
        self._block_size, self._index, self._pool, self._slots = block_size, index, pool, slots
        self._by_key: dict[bytes, tuple[Snapshot, ...]] = {}
        """Tuples, so that another thread may read them."""
        self._by_block: dict[int, list[Snapshot]] = {}
        """The snapshots that need a block which the prefix index does not have for them."""
        self._all: dict[Snapshot, None] = {}
        self._num_requests = 0
        self._most_pending = 0

    def __len__(self) -> int:
        return len(self._all)

    def __iter__(self) -> Iterator[Snapshot]:
        return iter(list(self._all))  # another thread may go over them

    def find(
        self,
        keys: ListLike[bytes],
        token_ids: ListLike[int],
        most: int,
        is_there: Callable[[int], bool] = lambda _: True,
    ) -> tuple[Snapshot | None, int]:
        """Returns the snapshot that is found at the most of a prompt's tokens, and how many; None and 0 if none is.

        Args:
            keys: the start of the chain, then the hashes of its blocks.
            most: the tokens that may be found.
            is_there: says whether the keys and values of so many blocks are cached.
        """
        block_size = self._block_size
        best, num_found = None, 0
        for depth in reversed(range(len(keys))):
            if (depth + 1) * block_size + self._most_pending <= num_found:
                break  # no snapshot from here on reaches as far
            for snapshot in self._by_key.get(keys[depth], ()):
                first = depth * block_size
                num_tokens = snapshot.reach(token_ids[first : min(most, first + len(snapshot.tail))])
                if num_tokens > num_found and is_there(depth):
                    best, num_found = snapshot, num_tokens
        return best, num_found

    def look_up(self, sequence: Sequence, most: int, hashes: list[bytes], num_known: int) -> Prefix:
        """Returns what is cached of a sequence before the last state that it can go on from.

        Args:
            hashes: those of its full blocks.
            num_known: the first of these that are cached.
        """
        match, num_tables = self._index.match, self._index.num_tables
        prefix = Prefix(num_known=num_known)
        keys = [chain_start(sequence.request.salt), *hashes[:num_known]]
        prefix.snapshot, prefix.num_tokens = self.find(
            keys, sequence.token_ids, most, lambda depth: len(match(hashes[:depth])) == depth * num_tables
        )
        if prefix.snapshot is not None:
            first = prefix.snapshot.base // self._block_size
            blocks, end = prefix.snapshot.blocks, (prefix.num_tokens // self._block_size - first) * num_tables
            prefix.entries = [*match(hashes[:first]), *blocks[:end]]
            if prefix.num_tokens % self._block_size:
                prefix.partial = blocks[end : end + num_tables]
        return prefix

    def note_request(self, snapshot: Snapshot | None) -> None:
        """Counts a request, by which snapshots age, and notes the use of the one that it goes on from."""
        self._num_requests += 1
        if snapshot is not None:
            snapshot.used = self._num_requests

    def add(self, snapshot: Snapshot) -> None:
        """Lets a snapshot be found whose state is written, and the blocks that it needs.

        It is given up if the block before it is gone, or if another snapshot is found wherever it would be.
        """
        key, others = snapshot.key, self._by_key.get(snapshot.key, ())
        if not key or (snapshot.base >= self._block_size and self._index.block_of(key) is None):
            self.withdraw(snapshot)
            return
        for other in others:
            if other.covers(snapshot):
                other.used = self._num_requests
                self.withdraw(snapshot)
                return
        for other in others:
            if snapshot.covers(other):
                self.drop(other)
        snapshot.used = self._num_requests
        self._by_key[key] = (*self._by_key.get(key, ()), snapshot)
        for block in filter(None, snapshot.blocks):
            self._by_block.setdefault(block, []).append(snapshot)
            self._pool.findable[block] = 1
        self._all[snapshot] = None
        self._most_pending = max(self._most_pending, snapshot.end - snapshot.base)
        self._index.generation += 1

    def withdraw(self, snapshot: Snapshot, last_step: int = 0) -> None:
        """Gives up a snapshot that cannot be found yet, or any more.

        Args:
            last_step: the last step in flight that may write it; 0 if none does.
        """
        snapshot.is_gone = True
        self._slots.give_back([snapshot.slot], last_step)

    def drop(self, snapshot: Snapshot) -> None:
        """Lets a snapshot be found no more: blocks that nobody else finds are the next to be overwritten."""
        del self._all[snapshot]
        self._index.generation += 1
        if left := tuple(other for other in self._by_key[snapshot.key] if other is not snapshot):
            self._by_key[snapshot.key] = left
        else:
            del self._by_key[snapshot.key]
        self.withdraw(snapshot)
        for block in filter(None, snapshot.blocks):
            self._by_block[block].remove(snapshot)
            if not self._by_block[block]:
                del self._by_block[block]
                if not self._index.knows_block(block):
                    self._pool.findable[block] = 0
                    self._pool.forget(block)

    def needing(self, block: int, key: bytes) -> tuple[Snapshot, ...]:
        """Returns the snapshots that need a block, those after it included: `key` is its hash."""
        return tuple(dict.fromkeys((*self._by_key.get(key, ()), *self._by_block.get(block, ()))))

    def drop_with(self, block: int, key: bytes) -> None:
        """Drops the snapshots that need a block whose content is gone."""
        for snapshot in self.needing(block, key):
            self.drop(snapshot)

    def has_state(self, block_hash: bytes, slot: int = 0) -> bool:
        """Returns whether the state right after a block is found, in that slot if one is given; for any thread."""
        return any(
            snapshot.kept_as == block_hash and slot in (0, snapshot.slot)
            for snapshot in self._by_key.get(block_hash, ())
        )

    def needs(self, block: int) -> bool:
        """Returns whether a snapshot needs this block, apart from the prefix index."""
        return block in self._by_block

    @property
    def num_alone(self) -> int:
        """The snapshots whose slots nobody else holds, for any thread."""
        return self._slots.num_alone(snapshot.slot for snapshot in self)

    def make_way(self, worth: float) -> bool:
        """Drops the snapshot that saves the least work, of those whose slots nobody else holds, if that is less than
        `worth`; returns whether there was one."""
        counts = self._slots.ref_counts
        least = min((s for s in self._all if counts[s.slot] == 1), key=self._value, default=None)
        if least is None or self._value(least) >= worth:
            return False
        self._on_reuse(least)
        self.drop(least)
        return True

    def leave(self, slot: int) -> bool:
        """Drops the snapshots of a slot if they are all that shares it with a sequence; returns whether they are."""
        sharing = [snapshot for snapshot in self._all if snapshot.slot == slot]
        if not slot or self._slots.ref_counts[slot] - len(sharing) != 1:
            return False
        for snapshot in sharing:
            self._on_reuse(snapshot)
            self.drop(snapshot)
        return True

    def _value(self, snapshot: Snapshot) -> float:
        """The tokens that it saves, less the longer nobody has asked for it."""
        return snapshot.gain / (1 + self._num_requests - snapshot.used)
