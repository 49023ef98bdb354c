"""A map of the pool of KV blocks: held, shared, free with content, and free, in a few cells at any size."""

from __future__ import annotations

from dataclasses import dataclass

MAX_CELLS = 1024
_IS_HELD = bytes([0] + [1] * 255)
_IS_SHARED = bytes([0, 0] + [1] * 254)


@dataclass(frozen=True, slots=True)
class BlockMap:
    """Cells in the order of the pool's blocks, with one byte for each in each string."""

    num_blocks: int
    blocks_per_cell: int
    """The last cell may have fewer."""
    held: bytes
    """The part of a cell that sequences hold, of 255; at least 1 if they hold any of it."""
    shared: bytes
    """The part of a cell that several sequences hold, likewise."""
    cached: bytes
    """The part of a cell that nobody holds and that a prompt may find again, likewise."""
    holders: bytes
    """The most sequences that hold one block of the cell; 255 if they are more."""
    num_held: int
    num_shared: int
    num_cached: int
    num_saved: int
    """The extra blocks that would be in use if nothing were shared."""


def block_map(ref_counts: list[int], findable: bytearray) -> BlockMap:
    """Draws blocks 1 to len(ref_counts) - 1.

    It copies what it is given at once, so that any thread may call it: the counts are of one moment, and what can be
    found is of a moment later.

    Args:
        ref_counts: by block, how many hold it.
        findable: by block, 1 if the prefix index finds it, else 0.
    """
    counts, found = ref_counts[1:], findable[1:]
    size = -(-len(counts) // MAX_CELLS)
    holders = _as_bytes(counts)
    held, shared = holders.translate(_IS_HELD), holders.translate(_IS_SHARED)
    # Long numbers of one digit a block: 1 where it is found and not held.
    cached = int.from_bytes(found) & ~int.from_bytes(held)
    shared_parts = _parts(shared, size)
    starts = range(0, len(counts), size)
    return BlockMap(
        len(counts),
        size,
        held=_parts(held, size),
        shared=shared_parts,
        cached=_parts(cached.to_bytes(len(counts)), size),
        holders=bytes(
            [
                max(holders[start : start + size]) if is_shared else 1 in held[start : start + size]
                for start, is_shared in zip(starts, shared_parts, strict=True)
            ]
        ),
        num_held=int.from_bytes(held).bit_count(),
        num_shared=int.from_bytes(shared).bit_count(),
        num_cached=cached.bit_count(),
        num_saved=sum(counts) - int.from_bytes(held).bit_count(),
    )


def _as_bytes(counts: list[int]) -> bytes:
    try:
        return bytes(counts)
    except ValueError:
        return bytes([min(count, 255) for count in counts])


def _parts(flags: bytes, size: int) -> bytes:
    """The part of the flags of each cell, which has `size` of them, that is 1: of 255, rounded up."""
    cells = (flags[start : start + size] for start in range(0, len(flags), size))
    return bytes([-(-255 * int.from_bytes(cell).bit_count() // size) for cell in cells])
