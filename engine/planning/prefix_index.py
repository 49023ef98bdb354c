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
    """Hash of a full block that follows `parent` (the hash before it, or `chain_start` for the first)."""
    return blake2b(array("q", token_ids).tobytes(), digest_size=16, key=parent).digest()


def extend_hashes(
    hashes: list[bytes], token_ids: TokenIds[int], num_blocks: int, block_size: int, salt: bytes
) -> None:
    """Grows `hashes` to the hashes of the first `num_blocks` full blocks of `token_ids`."""
    for i in range(len(hashes), num_blocks):
        parent = hashes[-1] if hashes else chain_start(salt)
        hashes.append(block_hash(parent, token_ids[i * block_size : (i + 1) * block_size]))


class PrefixIndex:
    """Hash to block and back; and the hashes whose blocks are being computed right now."""

    def __init__(self) -> None:
        self._block_of: dict[bytes, int] = {}
        self._hash_of: dict[int, bytes] = {}
        self._pending: dict[bytes, int] = {}

    def __len__(self) -> int:
        return len(self._block_of)

    def match(self, hashes: TokenIds[bytes] | list[bytes]) -> list[int]:
        """Blocks of the longest known prefix of the chain."""
        blocks = []
        for block_hash_ in hashes:
            block = self._block_of.get(block_hash_)
            if block is None:
                break
            blocks.append(block)
        return blocks

    def add(self, block_hash_: bytes, block: int) -> bool:
        """Records a full block whose tokens are confirmed, and says whether it is the one that is found.

        The first block of a hash stays it.
        """
        if block_hash_ in self._block_of:
            return False
        self._block_of[block_hash_] = block
        self._hash_of[block] = block_hash_
        return True

    def drop(self, block: int) -> bytes | None:
        """The block's content is gone; returns the hash that it was found by."""
        block_hash_ = self._hash_of.pop(block, None)
        if block_hash_ is not None:
            del self._block_of[block_hash_]
        return block_hash_

    def knows_block(self, block: int) -> bool:
        return block in self._hash_of

    def knows_hash(self, block_hash_: bytes) -> bool:
        return block_hash_ in self._block_of

    def begin(self, block_hash_: bytes, block: int) -> None:
        """`block` is on its way to holding this."""
        self._pending.setdefault(block_hash_, block)

    def end(self, block_hash_: bytes, block: int) -> None:
        """Whether it got there or not, `block` is no longer on its way."""
        if self._pending.get(block_hash_) == block:
            del self._pending[block_hash_]

    def is_pending(self, block_hash_: bytes) -> bool:
        return block_hash_ in self._pending

    @property
    def num_pending(self) -> int:
        return len(self._pending)
