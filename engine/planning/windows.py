"""How many blocks a sequence holds at a time, where some or all of its block tables have a sliding window."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.planning.request import NO_LIMIT


@dataclass(frozen=True, slots=True)
class Windows:
    """The block tables of every sequence, by what a token sees of them.

    Layers that see equally much share a table, or several tables if they are many: a block holds the keys and values of
    one table's layers. So a table with a window gives back the blocks behind it, while others keep all of theirs.
    """

    sizes: tuple[int, ...]
    """By table, the tokens that a token sees, itself included; 0 where it sees all of them."""
    block_size: int

    @property
    def num_tables(self) -> int:
        return len(self.sizes)

    @property
    def longest(self) -> int:
        return max(self.sizes)

    @property
    def num_unbounded(self) -> int:
        """The tables that keep all of a sequence."""
        return self.sizes.count(0)

    def max_chunk(self, num_blocks: int) -> int:
        """Tokens of the largest chunk that fits into so many blocks together with the windows before it; NO_LIMIT if
        no table has a window."""
        if not self.longest:
            return NO_LIMIT
        return (num_blocks // self.num_tables - 1) * self.block_size - self.longest + 1

    def num_held(self, num_tokens: int, chunk: int) -> int:
        """The most blocks that a sequence of so many tokens holds at a time, if no step computes more than `chunk`."""
        whole = -(-num_tokens // self.block_size)
        return self.num_unbounded * whole + sum(min(whole, most) for most in self._most_held(chunk))

    def most_tokens(self, num_blocks: int, chunk: int) -> int:
        """Tokens of the longest sequence that never holds more blocks; NO_LIMIT if it may have any length."""
        # As a sequence grows, one table after another has all that it will ever hold.
        num_growing, num_left = self.num_tables, num_blocks
        for most in sorted(self._most_held(chunk)):
            if num_left < most * num_growing:
                break
            num_growing, num_left = num_growing - 1, num_left - most
        return num_left // num_growing * self.block_size if num_growing else NO_LIMIT

    def room(self, num_blocks: int, chunk: int) -> int:
        """Tokens that so many blocks hold: of one sequence, or if every table has a window, of any number."""
        if self.num_unbounded:
            return self.most_tokens(num_blocks, chunk)
        return num_blocks // self.num_tables * self.block_size

    def _most_held(self, chunk: int) -> list[int]:
        """The blocks that each table with a window needs for it and a chunk, which may begin anywhere in a block."""
        return [-(-(size + chunk - 1) // self.block_size) + 1 for size in self.sizes if size]
