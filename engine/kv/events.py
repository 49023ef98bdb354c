"""What becomes of blocks that can be found: told step by step, so that others can know what is cached.

Replayed from the start, the events give exactly the hashes in the prefix index.
"""

from __future__ import annotations

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


class PrefixLog:
    """Events in order, until they are drained; the step thread owns it.

    If nobody drains it, it starts over: what is replayed from then on is less than the truth, never more.
    """

    def __init__(self) -> None:
        self._events: list[PrefixEvent] = []

    def add(self, event: PrefixEvent) -> None:
        if len(self._events) >= MAX_EVENTS:
            self.clear()
        self._events.append(event)

    def clear(self) -> None:
        """All blocks are gone at once."""
        self._events = [Cleared()]

    def drain(self) -> tuple[PrefixEvent, ...]:
        """What happened since it was last asked."""
        if not self._events:
            return ()
        events = tuple(self._events)
        self._events = []
        return events
