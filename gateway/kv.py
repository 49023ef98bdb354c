"""KV that moves between this replica and the others of its cluster."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from penstock.engine.tiers.block_file import BlockKey, Payload


class KvExchange(Protocol):
    """The blocks that this replica gives to others, and takes from them."""

    @property
    def digest(self) -> bytes:
        """What gives the blocks their meaning, see `block_file.digest_of`; empty while it is not known."""

    @property
    def tokens_per_s(self) -> float:
        """The rate at which blocks come from other replicas; 0 if none can."""

    async def read(self, keys: Sequence[BlockKey]) -> Sequence[Payload]:
        """Returns the payloads of the first of these blocks, up to the first that is not here."""

    def expect(self, source: str, hashes: Sequence[bytes]) -> None:
        """Says that the replica at an address holds the blocks with these hashes, which a request is about to need."""
