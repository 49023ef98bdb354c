"""Contents of blocks, and states at the ends of blocks, that are kept outside of the device's memory, as planning sees
them; engine/tiers has the rest."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from penstock.engine.planning.request import Sequence
from penstock.engine.planning.state_records import Snapshot

STATE = (1 << 16) - 1
"""In the place of a block table's number, it stands for the state slots."""


class Content(NamedTuple):
    """The content of a block: the KV of some tokens of a chain, in the layers of one block table; or the state after
    these tokens."""

    hashes: list[bytes]
    """The hashes of the chain's blocks."""
    token_ids: list[int]
    """The tokens of the chain."""
    salt: bytes
    depth: int
    """The blocks before it in the chain."""
    table: int
    """STATE for the state."""

    @property
    def hash(self) -> bytes:
        return self.hashes[self.depth]


class Outside(Protocol):
    """Keeps contents of blocks, and brings them back; `SequenceMemory` tells it what it has to know."""

    def note_reused(self, block: int, block_hash: bytes, table: int) -> None:
        """Notes that a block which could be found may be overwritten by the next step that is launched.

        Where `table` is STATE, `block` is the slot of a snapshot that could be found.
        """

    def note_found(self, hashes: list[bytes], entries: list[int], snapshot: Snapshot | None) -> None:
        """Notes what a sequence has found: the table entries of the first blocks of a chain, 0 where it needs none, and
        the snapshot that it goes on from, or the last one before it that may be kept outside."""

    def forget(self, block_hash: bytes, table: int) -> None:
        """Drops a content that is not to be trusted, and brings it back no more."""

    def fetch(self, sequence: Sequence, hashes: list[bytes], num_known: int) -> None:
        """Begins to bring back what follows the `num_known` first blocks of a chain, if that is worth it. Where layers
        have a state, there is one after the known blocks, and the last that is brought back.

        The hashes of blocks that are on their way are pending in the prefix index until they can be found, or are given
        up. It is asked again and again while a sequence waits.
        """
