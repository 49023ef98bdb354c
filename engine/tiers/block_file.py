"""The bytes of one block outside of a server: they are the same in a file and on the way between replicas.

    magic     8   b"PENSTOCK"
    version   2   of this header
    table     2   the block table whose layers' keys and values it holds, or STATE for the state after the block
    checksum  4   CRC-32 of all other bytes
    digest   16   of everything that gives the payload its meaning: see `digest_of`
    hash     16   of the block's tokens and all before them, the salt of their tenant included: see prefix_index.py
    length    8   bytes of the payload
    zeros     8
    payload       as the kernels left it in the cache

All numbers are little-endian. The checksum finds what was torn or has rotted. It is no signature: whoever can write a
block decides what a model reads, so folders and wires of blocks belong to those who may do that.
"""

from __future__ import annotations

from collections.abc import Iterable
from hashlib import blake2b
from struct import Struct
from typing import NamedTuple
from zlib import crc32

from penstock.engine.planning.device import Payload
from penstock.engine.planning.outside import STATE

__all__ = ["BadBlock", "BlockKey", "Payload", "digest_of", "header", "pack", "parse_key", "unpack"]

VERSION = 1
DIGEST_BYTES = 16
MAX_TABLE = (1 << 16) - 1

_MAGIC = b"PENSTOCK"
_HEADER = Struct("<8sHHI16s16sQ8x")
HEADER_BYTES = _HEADER.size


class BadBlock(ValueError):
    """The bytes are not those of the block that was asked for, or are damaged."""


class BlockKey(NamedTuple):
    """Says which block it is, among those with the same digest."""

    hash: bytes
    """16 bytes: of its tokens and all before them."""
    table: int = 0
    """The block table of a sequence whose layers it is for; STATE for the state of layers that have one."""

    @property
    def is_state(self) -> bool:
        return self.table == STATE

    @property
    def text(self) -> str:
        """The key in letters that suit a file's name or an address."""
        return f"{self.hash.hex()}-{self.table}"


def parse_key(text: str) -> BlockKey | None:
    """Returns the key that has this text; None if none has."""
    digits, _, table = text.partition("-")
    try:
        key = BlockKey(bytes.fromhex(digits), int(table))
    except ValueError:
        return None
    is_key = len(key.hash) == DIGEST_BYTES and key.table <= MAX_TABLE and key.text == text
    return key if is_key else None


def digest_of(parts: Iterable[object]) -> bytes:
    """Returns the digest of what must be equal for two servers' blocks to mean the same: weights, types, layout."""
    return blake2b(repr(tuple(parts)).encode(), digest_size=DIGEST_BYTES, person=b"penstock.kvfile").digest()


def header(key: BlockKey, payload: Payload, digest: bytes) -> bytes:
    """Returns what goes before a block's payload."""
    fields = digest, key.hash, len(payload)
    checksum = crc32(payload, crc32(_HEADER.pack(_MAGIC, VERSION, key.table, 0, *fields)))
    return _HEADER.pack(_MAGIC, VERSION, key.table, checksum, *fields)


def pack(key: BlockKey, payload: Payload, digest: bytes) -> bytes:
    return b"".join((header(key, payload, digest), payload))


def length_of(header_: Payload) -> int:
    """Returns how many bytes of payload are to follow a header, which was not verified yet."""
    length: int = _HEADER.unpack_from(header_)[-1]
    return length


def unpack(data: Payload, key: BlockKey, digest: bytes) -> memoryview:
    """Returns the payload of a packed block, which is part of `data`.

    Raises:
        BadBlock: it is another block, of another digest or version, or not as it was packed.
    """
    view = memoryview(data)
    if len(view) < HEADER_BYTES:
        raise BadBlock(f"{len(view)} bytes are no block")
    magic, version, table, _, its_digest, its_hash, length = _HEADER.unpack_from(view)
    payload = view[HEADER_BYTES:]
    if magic != _MAGIC or version != VERSION:
        raise BadBlock(f"no block of version {VERSION}")
    if its_digest != digest:
        raise BadBlock("a block of other weights, or of another layout")
    if BlockKey(its_hash, table) != key:
        raise BadBlock("another block")
    if length != len(payload):
        raise BadBlock(f"{len(payload)} bytes in place of {length}")
    if view[:HEADER_BYTES] != header(BlockKey(*key), payload, digest):
        raise BadBlock("the checksum is wrong")
    return payload
