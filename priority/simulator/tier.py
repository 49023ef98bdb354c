"""A simulated tier below the device: the hashes of the blocks that it holds, and which of them goes next."""

from __future__ import annotations

from collections import OrderedDict


class SimulatedTier:
    """Takes the blocks that the device evicts, and drops those that were used longest ago."""

    def __init__(self, num_blocks: int) -> None:
        self._num_blocks = num_blocks
        self._held: OrderedDict[bytes, None] = OrderedDict()
        """The one that was used longest ago first."""

    def __contains__(self, block_hash: bytes) -> bool:
        return block_hash in self._held

    def put(self, block_hash: bytes) -> bytes | None:
        """Takes a block in; returns the hash of the one that goes for it: its own, if there is no room at all."""
        self._held[block_hash] = None
        self._held.move_to_end(block_hash)
        return self._held.popitem(last=False)[0] if len(self._held) > self._num_blocks else None

    def touch(self, block_hash: bytes) -> None:
        """Notes that a block was read; one that is not here is passed over."""
        if block_hash in self._held:
            self._held.move_to_end(block_hash)
