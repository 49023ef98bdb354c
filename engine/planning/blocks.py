"""The pool of KV blocks: reference counts, and the order in which free blocks are reused.

A block is free when nobody holds it. A free block may still have content that the prefix index finds; the free list is
in order of last use, so that the content that was used longest ago is overwritten first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable


class PoolViolation(AssertionError):
    """The reference counts of the pool are not what its holders say they hold."""


class BlockPool:
    """Blocks 1 to num_blocks - 1 with reference counts; block 0 is never handed out (it pads block tables).

    The free list is intrusive and doubly linked (two arrays of neighbours, block 0 as both ends), so that taking from
    the front, appending, and pulling a block out of the middle are O(1).
    """

    def __init__(self, num_blocks: int, on_reuse: Callable[[int], None] = lambda _: None) -> None:
        """`on_reuse` is called with every block that is handed out, whose old content is lost."""
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 blocks, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_counts = [0] * num_blocks
        self._on_reuse = on_reuse
        self._next: list[int] = [*range(1, num_blocks), 0]
        self._previous: list[int] = [num_blocks - 1, *range(num_blocks - 1)]

    def allocate(self) -> int:
        """Returns the free block that was used longest ago; it is held once now.

        Raises:
            IndexError: none is free; callers look at `num_free` first.
        """
        block = self._next[0]
        if block == 0:
            raise IndexError("no free block")
        self._unlink(block)
        self.ref_counts[block] = 1
        self._on_reuse(block)
        return block

    def hold(self, block: int) -> None:
        """Adds a holder to a block in use, or to a free one whose content was found again."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
        self.ref_counts[block] += 1

    def release(self, blocks: Iterable[int]) -> None:
        """Takes a holder from each block; those left without one are the last to be reused, in the order given."""
        for block in blocks:
            self.ref_counts[block] -= 1
            if self.ref_counts[block] == 0:
                self._append(block)
            elif self.ref_counts[block] < 0:
                raise PoolViolation(f"block {block} was released more often than held")

    def forget(self, block: int) -> None:
        """Moves a free block whose content nobody can find to the front: it is the next to be reused."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
            self._insert_after(0, block)

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Compares the reference counts with what every holder says it holds.

        Raises:
            PoolViolation: naming the first block for which they differ.
        """
        expected = [0] * self.num_blocks
        for blocks in holders:
            for block in blocks:
                expected[block] += 1
        for block in range(1, self.num_blocks):
            if expected[block] != self.ref_counts[block]:
                raise PoolViolation(
                    f"block {block}: {self.ref_counts[block]} references, {expected[block]} holders"
                )
        free = list(self.free_blocks())
        if len(free) != self.num_free or any(self.ref_counts[block] for block in free):
            raise PoolViolation(f"free list of {len(free)} blocks, {self.num_free} counted free")

    def free_blocks(self) -> Iterable[int]:
        """Returns the free blocks in order of reuse."""
        block = self._next[0]
        while block != 0:
            yield block
            block = self._next[block]

    def _append(self, block: int) -> None:
        self._insert_after(self._previous[0], block)

    def _insert_after(self, left: int, block: int) -> None:
        right = self._next[left]
        self._next[left] = self._previous[right] = block
        self._previous[block], self._next[block] = left, right
        self.num_free += 1

    def _unlink(self, block: int) -> None:
        left, right = self._previous[block], self._next[block]
        self._next[left], self._previous[right] = right, left
        self.num_free -= 1
