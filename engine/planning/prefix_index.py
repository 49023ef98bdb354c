"""The prefix index: which full block holds which tokens in which context.

A block's hash covers its parent's hash and its own tokens, so equal hashes mean equal tokens from the start on
(BLAKE2b, 128 bits). The chain of a request starts with its salt: other tenants' chains never meet it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as TokenIds
from hashlib import blake2b


def chain_start(salt: bytes) -> bytes:
    return blake2b(salt, digest_size=16, person=b"penstock.kv").digest()


def block_hash(parent: bytes, token_ids: TokenIds[int]) -> bytes:
    """Returns the hash of a full block that follows `parent`: the hash before it, or `chain_start` for the first."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def extend_hashes(
    hashes: list[bytes], token_ids: TokenIds[int], num_blocks: int, block_size: int, salt: bytes
) -> None:
    """Grows `hashes` to the hashes of the first `num_blocks` full blocks of `token_ids`."""
    for i in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else chain_start(salt)
        hashes.append(block_hash(parent, token_ids[i * block_size : (i + 1) * block_size]))


class PrefixIndex:
    """Maps hashes to blocks and back, and knows which sequence is computing the block of a hash right now."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._pending: dict[bytes, tuple[object, int]] = {}
        """By hash: who computes the block, and in which lane."""

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hashes: TokenIds[bytes] | list[bytes]) -> list[int]:
        """Returns the blocks of the longest known prefix of the chain."""
        blocks = []
        for block_hash_ in hashes:
            block = self._block_of.get(block_hash_)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def match_end(self, hashes: list[bytes], num_blocks: int) -> list[int]:
        """Returns the blocks of the longest prefix of the chain whose last `num_blocks` blocks are known.

        That is enough under a sliding window of so many blocks. The blocks before them are 0 in the result.
        """
        num_known = 0
        for i in range(len(hashes) - 1, -1, -1):
            num_known = num_known + 1 if hashes[i] in self._block_of else 0
            if num_known and (i == 0 or num_known == num_blocks):
                return [0] * i + [self._block_of[hash_] for hash_ in hashes[i : i + num_known]]
        return []

    def add(self, block_hash_: bytes, block: int) -> bool:
        """Records a full block whose tokens are confirmed.

        Returns:
            False if another block is found by this hash already; it stays the one that is found.
        """
        if block_hash_ in self._block_of:
            return False
        self._block_of[block_hash_] = block
        self._hash_of[block] = block_hash_
        return True

    def drop(self, block: int) -> bytes | None:
        """Forgets a block whose content is gone; returns the hash that it was found by."""
        block_hash_ = self._hash_of.pop(block, None)
        if block_hash_ is not None:
            del self._block_of[block_hash_]
        return block_hash_

    def knows_block(self, block: int) -> bool:
        return block in self._hash_of

    def knows_hash(self, block_hash_: bytes) -> bool:
        return block_hash_ in self._block_of

    def begin(self, block_hash_: bytes, owner: object, lane: int = 0) -> None:
        """Notes that `owner` computes the block of this hash.

        The first owner stays, unless the new one is of a more urgent lane.
        """
        pending = self._pending.get(block_hash_)
        if pending is None or lane < pending[1]:
            self._pending[block_hash_] = owner, lane

    def end(self, block_hash_: bytes, owner: object) -> None:
        """Notes that `owner` has computed the block, or never will."""
        pending = self._pending.get(block_hash_)
        if pending is not None and pending[0] == owner:
            del self._pending[block_hash_]

    def is_pending(self, block_hash_: bytes, lane: int = 0) -> bool:
        """Says whether somebody who is at least as urgent as `lane` computes the block of this hash."""
        pending = self._pending.get(block_hash_)
        return pending is not None and pending[1] <= lane

    @property
    def num_pending(self) -> int:
        return len(self._pending)
