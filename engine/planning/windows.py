"""The groups of layers with keys and values: full ones, and those with a sliding window; which blocks each keeps."""

from __future__ import annotations

from dataclasses import dataclass

from penstock.engine.planning.request import NO_LIMIT


def most_tokens_of_forks(num_blocks: int, block_size: int, num_prompt: int, num_forks: int) -> int:
    """The tokens that forks of a prompt, which share its full blocks, can have each while all are in so many blocks."""
    num_shared = num_prompt // block_size
    return (num_shared + (num_blocks - num_shared) // num_forks) * block_size


@dataclass(frozen=True, slots=True)
class Windows:
    """The block tables of every sequence, one for each group of layers, by what a token sees of them.

    Layers that see equally much are a group, or several groups if they are many: a block holds the keys and values of
    one group's layers. So a table with a window gives back the blocks behind it, while others keep all of theirs.
    """

    sizes: tuple[int, ...]
    """The tokens that a token sees, itself included, by table; 0 if it sees all of them."""
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

    @property
    def num_seen(self) -> list[int]:
        """The blocks of a window by table; 0 if it has none."""
        return [-(-size // self.block_size) for size in self.sizes]

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

    def ends_at_start(self, num_known: int, num_found: int, chunk: int) -> list[int]:
        """The number of entries, from the first on, that each table has when a sequence starts.

        With a window, a table has what the window and the largest chunk need: it never needs more at a time.
        """
        return [
            -(-(min(num_known, max(num_found, size) + chunk) if size else num_known) // self.block_size)
            for size in self.sizes
        ]

    def behind(self, table: list[int], num_computed: int, num_committed: int) -> list[int]:
        """The entries, not given back yet, of blocks with committed tokens that no token from `num_computed` on sees.

        One token more than a window has is kept: a fork starts one token before its parent.
        """
        entries = list[int]()
        for number, size in enumerate(self.sizes):
            if size:
                num_behind = min(num_computed - size, num_committed) // self.block_size
                i = (num_behind - 1) * self.num_tables + number
                while i >= 0 and table[i]:
                    entries.append(i)
                    i -= self.num_tables
        return entries[::-1]

    def _most_held(self, chunk: int) -> list[int]:
        """The blocks that each table with a window needs for it and a chunk, which may begin anywhere in a block."""
        return [-(-(size + chunk - 1) // self.block_size) + 1 for size in self.sizes if size]
