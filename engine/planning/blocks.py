"""Pools of pages: KV blocks in one, state slots in another. Who holds them, and in which order free ones are reused.

A block is free when nobody holds it. A free block may still have content that a prompt can find; the free list is in
order of last use, so that the content that was used longest ago is overwritten first. A block that nobody can find is
the next to be reused, so that memory that was never used is touched late.

A step in flight may read and write all that its sequences held when it was planned. So blocks that are given back
meanwhile keep their references, in here, until it has come back: they are not handed out earlier, though a prompt
that finds one of them may share it at any time.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Callable, Iterable
from itertools import chain, islice

_REMEMBERED = 4096
"""The blocks that were taken or became free last."""


class PoolViolation(AssertionError):
    """The reference counts of the pool are not what its holders say they hold."""


class BlockPool:
    """Blocks 1 to num_blocks - 1 with reference counts; block 0 is nobody's (it pads block tables).

    The free list is intrusive and doubly linked (two arrays of neighbours, block 0 as both ends), so that taking from
    the front, appending, and pulling a block out of the middle are O(1).

    Several pools may share one row of numbers: those of one begin where those of another end, with a block `first` that
    is nobody's either. They have the same arrays, so that a number is enough to look a block up.
    """

    def __init__(
        self,
        num_blocks: int,
        on_reuse: Callable[[int], None] = lambda _: None,
        unit: str = "block",
        after: BlockPool | None = None,
    ) -> None:
        """Makes a pool of blocks that nobody holds.

        Args:
            on_reuse: is called with every block that is handed out, whose old content is lost.
            after: the pool that has the numbers before.
        """
        if num_blocks < 2:
            raise ValueError(f"a pool needs at least 2 {unit}s, not {num_blocks}")
        self.num_blocks = num_blocks
        self.num_free = num_blocks - 1
        self.ref_counts: list[int] = [] if after is None else after.ref_counts
        self.findable: bytearray = bytearray() if after is None else after.findable
        """1 for each block whose content can be found, for a view of all blocks at once. Their owner sets it."""
        self.generation = 0
        """The number of times that a block was held which was free, or free which was held."""
        self._turned: deque[int] = deque(maxlen=_REMEMBERED)
        """The blocks of the last of these times."""
        self._on_reuse, self._unit = on_reuse, unit
        self._next: list[int] = [] if after is None else after._next
        self._previous: list[int] = [] if after is None else after._previous
        self.first = first = len(self.ref_counts)
        self.ref_counts += [0] * num_blocks
        self.findable += bytes(num_blocks)
        self._next += [*range(first + 1, first + num_blocks), first]
        self._previous += [first + num_blocks - 1, *range(first, first + num_blocks - 1)]
        self._returning: deque[tuple[int, list[int]]] = deque()
        """Blocks that were given back, each with the last step that may use it. Every entry is a reference."""

    def allocate(self) -> int:
        """Returns the free block that was used longest ago; it is held once now.

        Raises:
            IndexError: none is free; callers look at `num_free` first.
        """
        block = self._next[self.first]
        if block == self.first:
            raise IndexError(f"no free {self._unit}")
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
                raise PoolViolation(f"{self._unit} {block} was released more often than held")

    def forget(self, block: int) -> None:
        """Moves a free block whose content nobody can find to the front: it is the next to be reused."""
        if self.ref_counts[block] == 0:
            self._unlink(block)
            self._insert_after(self.first, block)

    # Giving back

    def give_back(self, blocks: list[int], step: int = 0) -> None:
        """Takes a holder from each block but block 0, at once or when `step` and all before it have come back.

        Those that can be found are reused in the order of last use, the last of `blocks` first; others before them.
        """
        if step:
            self._returning.append((step, blocks))
            return
        held = [block for block in blocks if block]
        self.release(reversed(held))
        for block in held:
            if not self.findable[block]:
                self.forget(block)

    def take_back(self, blocks: list[int], step: int) -> None:
        """Undoes `give_back` of the same blocks and step."""
        self._returning.remove((step, blocks))

    def land(self, oldest: float) -> None:
        """Frees what was given back and no step from `oldest` on may use; those before it have come back."""
        while self._returning and self._returning[0][0] < oldest:
            self.give_back(self._returning.popleft()[1])

    def keep(self, blocks: set[int], step: int) -> None:
        """Lets blocks that no sequence holds keep their content until `step` has come back."""
        returning = self._references_returning()
        for block in blocks:
            if self.ref_counts[block] == returning[block]:
                self.hold(block)
                self._returning.append((step, [block]))

    @property
    def is_free(self) -> bool:
        """Whether nobody holds any block, as far as the count of free ones says it: a pool of any size is as quick."""
        return self.num_free == self.num_blocks - 1

    @property
    def num_returning(self) -> int:
        """Blocks that will be free once the steps in flight have come back."""
        return sum(self.ref_counts[block] == n for block, n in self._references_returning().items())

    def num_alone(self, blocks: Iterable[int]) -> int:
        """The number of these blocks that have one holder."""
        return sum(1 for block in blocks if self.ref_counts[block] == 1)

    def turned_since(self, generation: int) -> Iterable[int] | None:
        """Returns the blocks that were taken or became free since then; None if they are too many to remember."""
        num = self.generation - generation
        return islice(reversed(self._turned), num) if num <= len(self._turned) else None

    def _references_returning(self) -> Counter[int]:
        return Counter(chain.from_iterable(blocks for _, blocks in self._returning))

    # Proof

    def check(self, holders: Iterable[Iterable[int]]) -> None:
        """Compares the reference counts with what every holder says it holds, and what is returning.

        Raises:
            PoolViolation: naming the first block for which they differ.
        """
        expected = Counter(chain(*holders, *(blocks for _, blocks in self._returning)))
        for block in range(self.first + 1, self.first + self.num_blocks):
            if expected[block] != self.ref_counts[block]:
                raise PoolViolation(
                    f"{self._unit} {block}: {self.ref_counts[block]} references, {expected[block]} holders"
                )
        free = list(self.free_blocks())
        if len(free) != self.num_free or any(self.ref_counts[block] for block in free):
            raise PoolViolation(f"free list of {len(free)} {self._unit}s, {self.num_free} counted free")

    def free_blocks(self) -> Iterable[int]:
        """Returns the free blocks in order of reuse."""
        block = self._next[self.first]
        while block != self.first:
            yield block
            block = self._next[block]

    def _append(self, block: int) -> None:
        self._insert_after(self._previous[self.first], block)

    def _insert_after(self, left: int, block: int) -> None:
        right = self._next[left]
        self._next[left] = self._previous[right] = block
        self._previous[block], self._next[block] = left, right
        self.num_free += 1
        self.generation += 1
        self._turned.append(block)

    def _unlink(self, block: int) -> None:
        left, right = self._previous[block], self._next[block]
        self._next[left], self._previous[right] = right, left
        self.num_free -= 1
        self.generation += 1
        self._turned.append(block)
