"""Events of the prefix cache: blocks stored, found and dropped, so that others can know what is cached.

Whoever replays all events from the start has exactly the hashes in the prefix index.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

MAX_EVENTS = 20_000
"""The most events kept until they are drained; several times what one step can bring."""


class Stored(NamedTuple):
    """A full block can be found from now on. Its parent was stored before it, but may be gone already."""

    hash: bytes
    parent: bytes | None
    """The hash of the block before it; None at the start of a chain."""
    depth: int
    """Number of blocks from the start of the chain, this one included."""
    token_ids: tuple[int, ...]
    salt: bytes


class Found(NamedTuple):
    """A new sequence found the chain of blocks that ends with this hash."""

    hash: bytes
    """The hash of the deepest block found."""


class Dropped(NamedTuple):
    """The content of a block is gone."""

    hash: bytes


class Cleared(NamedTuple):
    """All blocks that were stored before are gone, or must be taken to be."""


PrefixEvent = Stored | Found | Dropped | Cleared


_Block = tuple[list[bytes], list[int], int, int, bytes]
"""A stored block: the hashes and tokens of its chain (lists that only grow), its index there, block size and salt."""


class PrefixLog:
    """Collects events until they are drained; the step thread owns it.

    If nobody drains it, it starts over: then a replay knows fewer blocks than are cached, never more.
    """

    def __init__(self) -> None:
        self._events: list[_Block | Found | Dropped | Cleared] = []

    def stored(self, hashes: list[bytes], token_ids: list[int], i: int, block_size: int, salt: bytes) -> None:
        """Adds that the i-th block of a chain can be found from now on."""
        if len(self._events) >= MAX_EVENTS:
            self.clear()
        self._events.append((hashes, token_ids, i, block_size, salt))

    def add(self, event: Found | Dropped) -> None:
        if len(self._events) >= MAX_EVENTS:
            self.clear()
        self._events.append(event)

    def clear(self) -> None:
        """Adds that all blocks are gone at once."""
        self._events = [Cleared()]

    def drain(self) -> Iterator[PrefixEvent]:
        """Returns the events since the last call. They are made while they are read, which takes no time of a step."""
        events, self._events = self._events, []
        return map(_spelt_out, events)


def _spelt_out(event: _Block | Found | Dropped | Cleared) -> PrefixEvent:
    if isinstance(event, Found | Dropped | Cleared):
        return event
    hashes, token_ids, i, block_size, salt = event
    tokens = tuple(token_ids[i * block_size : (i + 1) * block_size])
    return Stored(hashes[i], hashes[i - 1] if i else None, i + 1, tokens, salt)
