"""State slots: reference counts, and the snapshots that are found by their tokens.

A slot is like a KV block: one with more than one reference is never written. Who runs has one of its own, or shares it
until its next step; every snapshot has one. When none is free, a snapshot goes: that which saves the least work, by
the tokens that have to be computed again, and by how long nobody has asked for it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as ListLike

from penstock.engine.planning.blocks import PoolViolation
from penstock.engine.planning.states import Snapshot


def most_running(num_slots: int) -> int:
    """The sequences that may run at a time with so many slots, slot 0 included: a quarter is left to snapshots."""
    usable = num_slots - 1
    return max(1, usable - max(1, usable // 4))


class StateSlots:
    """Slots 1 to num_slots - 1 with reference counts; slot 0 is nobody's."""

    def __init__(self, num_slots: int) -> None:
        if num_slots < 2:
            raise ValueError(f"there have to be at least 2 state slots, not {num_slots}")
        self.num_slots = num_slots
        self.ref_counts = [0] * num_slots
        self._free = list(range(num_slots - 1, 0, -1))
        """The one that was used last is the next: memory that was never used is touched late."""

    @property
    def num_free(self) -> int:
        return len(self._free)

    def allocate(self) -> int:
        """Returns a free slot, which is held once now; 0 if none is free."""
        if not self._free:
            return 0
        slot = self._free.pop()
        self.ref_counts[slot] = 1
        return slot

    def hold(self, slot: int) -> None:
        """Adds a holder to a slot in use; nobody holds slot 0."""
        if slot:
            self.ref_counts[slot] += 1

    def release(self, slot: int) -> None:
        """Takes a holder from a slot."""
        if not slot:
            return
        self.ref_counts[slot] -= 1
        if not self.ref_counts[slot]:
            self._free.append(slot)
        elif self.ref_counts[slot] < 0:
            raise PoolViolation(f"state slot {slot} was released more often than held")

    def check(self, holders: Iterable[int]) -> None:
        """Compares the reference counts with what all holders hold.

        Raises:
            PoolViolation: naming the first slot for which they differ.
        """
        expected = [0] * self.num_slots
        for slot in holders:
            expected[slot] += 1
        for slot in range(1, self.num_slots):
            if expected[slot] != self.ref_counts[slot]:
                raise PoolViolation(
                    f"state slot {slot}: {self.ref_counts[slot]} references, {expected[slot]} holders"
                )
        if sorted(self._free) != [slot for slot in range(1, self.num_slots) if not expected[slot]]:
            raise PoolViolation(f"{len(self._free)} state slots counted free")


class Snapshots:
    """The snapshots by the last full block before them; every one of them is a reference to its slot."""

    def __init__(self, block_size: int, on_drop: Callable[[Snapshot], None]) -> None:
        """`on_drop` is told of every snapshot that is no longer found."""
        self._block_size, self._on_drop = block_size, on_drop
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

    def note_request(self) -> None:
        """Counts a request: snapshots are as old as so many."""
        self._num_requests += 1

    def touch(self, snapshot: Snapshot) -> None:
        """Notes that a snapshot was found."""
        snapshot.used = self._num_requests

    def add(self, snapshot: Snapshot) -> bool:
        """Lets a snapshot be found from now on, unless another is found wherever it would be; then returns False."""
        others = self._by_key.get(snapshot.key, ())
        for other in others:
            if other.covers(snapshot):
                self.touch(other)
                return False
        for other in others:
            if snapshot.covers(other):
                self.drop(other)
        self.touch(snapshot)
        self._by_key[snapshot.key] = (*self._by_key.get(snapshot.key, ()), snapshot)
        for block in filter(None, snapshot.blocks):
            self._by_block.setdefault(block, []).append(snapshot)
        self._all[snapshot] = None
        self._most_pending = max(self._most_pending, snapshot.end - snapshot.base)
        return True

    def drop(self, snapshot: Snapshot) -> None:
        snapshot.is_gone = True
        del self._all[snapshot]
        left = tuple(other for other in self._by_key[snapshot.key] if other is not snapshot)
        if left:
            self._by_key[snapshot.key] = left
        else:
            del self._by_key[snapshot.key]
        for block in filter(None, snapshot.blocks):
            self._by_block[block].remove(snapshot)
            if not self._by_block[block]:
                del self._by_block[block]
        self._on_drop(snapshot)

    def drop_after(self, key: bytes) -> None:
        """Drops the snapshots after a block that is gone."""
        for snapshot in self._by_key.get(key, ()):
            self.drop(snapshot)

    def drop_with(self, block: int) -> None:
        """Drops the snapshots that need a block whose content is gone."""
        for snapshot in list(self._by_block.get(block, ())):
            self.drop(snapshot)

    def needs(self, block: int) -> bool:
        """Whether a snapshot needs this block, whatever the prefix index has."""
        return block in self._by_block

    def least(self, ref_counts: ListLike[int]) -> Snapshot | None:
        """The snapshot that saves the least work, of those whose slots nobody else holds."""
        return min((s for s in self._all if ref_counts[s.slot] == 1), key=self.value, default=None)

    def value(self, snapshot: Snapshot) -> float:
        """The tokens that it saves, less the longer nobody has asked for it."""
        return snapshot.gain / (1 + self._num_requests - snapshot.used)

    def of_slot(self, slot: int) -> list[Snapshot]:
        return [snapshot for snapshot in self._all if snapshot.slot == slot]
