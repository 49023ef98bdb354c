"""What becomes of blocks that can be found: told step by step, so that others can know what is cached.

Replayed from the start, the events give exactly the hashes in the prefix index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_EVENTS = 20_000
"""Kept until they are drained; several times what one step can bring."""


class Stored(NamedTuple):
    """A full block can be found from now on. Its parent was stored before it, but may be gone already."""

    hash: bytes
    parent: bytes | None
    """None at the start of a chain."""
    depth: int
    """Blocks from the start of the chain up to here, this one included."""
    token_ids: tuple[int, ...]
    salt: bytes


class Found(NamedTuple):
    """A new sequence begins with these blocks; a hit for the whole chain up to here."""

    hash: bytes
    """Of the deepest block found."""


class Dropped(NamedTuple):
    """What the block held was given up."""

    hash: bytes


class Cleared(NamedTuple):
    """Whatever was known before no longer counts."""


PrefixEvent = Stored | Found | Dropped | Cleared


_Block = tuple[list[bytes], list[int], int, int, bytes]
"""A block that was stored: its chain's hashes and tokens (lists that only grow), its place, its size, the salt."""


class PrefixEvents:
    """What happened, in order. It is spelt out where it is read, so that this takes no time of a step."""

    def __init__(self, told: list[_Block | Found | Dropped | Cleared]) -> None:
        self._told = told

    def __iter__(self) -> Iterator[PrefixEvent]:
        for event in self._told:
            yield event if isinstance(event, Found | Dropped | Cleared) else _spelt_out(*event)


class PrefixLog:
    """Events in order, until they are drained; the step thread owns it.

    If nobody drains it, it starts over: what is replayed from then on is less than the truth, never more.
    """

    def __init__(self) -> None:
        self._told: list[_Block | Found | Dropped | Cleared] = []

    def stored(self, hashes: list[bytes], token_ids: list[int], i: int, block_size: int, salt: bytes) -> None:
        """The i-th block of a chain can be found from now on."""
        if len(self._told) >= MAX_EVENTS:
            self.clear()
        self._told.append((hashes, token_ids, i, block_size, salt))

    def add(self, event: Found | Dropped) -> None:
        if len(self._told) >= MAX_EVENTS:
            self.clear()
        self._told.append(event)

    def clear(self) -> None:
        """All blocks are gone at once."""
        self._told = [Cleared()]

    def drain(self) -> PrefixEvents | tuple[()]:
        """What happened since it was last asked."""
        if not self._told:
            return ()
        told, self._told = self._told, []
        return PrefixEvents(told)


def _spelt_out(hashes: list[bytes], token_ids: list[int], i: int, block_size: int, salt: bytes) -> Stored:
    tokens = tuple(token_ids[i * block_size : (i + 1) * block_size])
    return Stored(hashes[i], hashes[i - 1] if i else None, i + 1, tokens, salt)
