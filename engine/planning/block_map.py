"""A picture of the pool of KV blocks: what is held, shared, free with content, and free, at any size in a few cells."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from operator import gt

MAX_CELLS = 1024
_MAX_SEEN_PER_CELL = 4
"""Blocks that are looked at, evenly spaced: a picture costs the same at any size."""
_IS_HELD = bytes([0] + [1] * 255)
_IS_SHARED = bytes([0, 0] + [1] * 254)


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Cells in the order of the pool's blocks, with one byte for each in each string."""

    num_blocks: int
    blocks_per_cell: int
    """The last cell may have fewer."""
    held: bytes
    """The part of a cell that sequences hold, of 255."""
    shared: bytes
    """The part of a cell that several sequences hold, of 255."""
    cached: bytes
    """The part of a cell that nobody holds and that a prompt may find again, of 255."""
    holders: bytes
    """The most sequences that hold one block of the cell; 255 if they are more."""
    num_shared: int
    """Blocks that several sequences hold."""
    num_saved: int
    """Blocks that would be taken beside those that are, if nothing were shared."""


def block_map(ref_counts: list[int], is_found: Callable[[int], bool]) -> BlockMap:
    """Draws blocks 1 to len(ref_counts) - 1.

    It copies the counts at once and then looks at single blocks of the index, so that any thread may call it; what is
    found may be of a moment later than the counts.

    Args:
        ref_counts: by block, how many hold it.
        is_found: whether the prefix index finds a block.
    """
    num_blocks = len(ref_counts) - 1
    apart = -(-num_blocks // (_MAX_SEEN_PER_CELL * MAX_CELLS))
    """One block in so many is looked at."""
    counts = ref_counts[1::apart]
    size = -(-len(counts) // MAX_CELLS)
    holders = bytes([count if count < 255 else 255 for count in counts])
    held = holders.translate(_IS_HELD)
    shared = holders.translate(_IS_SHARED)
    found = map(is_found, range(1, num_blocks + 1, apart))
    return BlockMap(
        num_blocks,
        size * apart,
        held=_parts(held, size),
        shared=_parts(shared, size),
        cached=_parts(bytes(map(gt, found, held)), size),
        holders=bytes(map(max, zip(*_columns(holders, size), strict=True))),
        num_shared=sum(shared) * apart,
        num_saved=(sum(counts) - sum(held)) * apart,
    )


def _parts(flags: bytes, size: int) -> bytes:
    """By cell of so many flags, the part of them that is set, of 255."""
    columns = _columns(flags, size)
    # One addition of long numbers: no digit overflows, because a cell has few flags.
    sums = sum(int.from_bytes(column) for column in columns).to_bytes(len(columns[0]))
    return sums.translate(bytes([255 * number // size for number in range(size + 1)]).ljust(256))


def _columns(values: bytes, size: int) -> list[bytes]:
    """The first values of all cells, the second ones, and so on; the last cell is filled up with zeros."""
    padded = values + bytes(-len(values) % size)
    return [padded[i::size] for i in range(size)]
