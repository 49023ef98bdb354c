"""How values are written in Redis, so that one that was damaged there is found out when it is read.

value    format (1 byte: "p" as it is, "z" zlib) | CRC-32 of the rest (4 bytes) | the rest
prefix   a value: depth, hits (uint32), last use (float64), lengths of parent, salt and tokens | these three
tokens   uint32 each, all little-endian
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence

from gateway.store.interface import PrefixChange

COMPRESS_BYTES = 1024
MAX_VALUE_BYTES = 64 * 1024 * 1024
TOKEN_BYTES = 4

_CRC = struct.Struct("<I")
_PREFIX = struct.Struct("<IIdhHI")
_NO_PARENT = -1


class Corrupt(Exception):
    """This is not what was written."""


def pack(value: bytes) -> bytes:
    if len(value) < COMPRESS_BYTES:
        return b"p" + _CRC.pack(zlib.crc32(value)) + value
    compressed = zlib.compress(value, 1)
    return b"z" + _CRC.pack(zlib.crc32(compressed)) + compressed


def unpack(packed: bytes) -> bytes:
    """Raises Corrupt."""
    rest = packed[1 + _CRC.size :]
    if len(packed) < 1 + _CRC.size or _CRC.unpack_from(packed, 1)[0] != zlib.crc32(rest):
        raise Corrupt
    if packed[:1] == b"p":
        return rest
    if packed[:1] != b"z":
        raise Corrupt
    decompressor = zlib.decompressobj()
    try:
        value = decompressor.decompress(rest, MAX_VALUE_BYTES)
    except zlib.error:
        raise Corrupt from None
    if not decompressor.eof:
        raise Corrupt
    return value


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Raises Corrupt."""
    if len(packed) % TOKEN_BYTES:
        raise Corrupt
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


def pack_prefix(change: PrefixChange) -> bytes:
    parent = change.parent or b""
    head = _PREFIX.pack(
        change.depth,
        min(change.hits, 0xFFFFFFFF),
        change.last_used_s,
        _NO_PARENT if change.parent is None else len(parent),
        len(change.salt),
        len(change.token_ids),
    )
    return pack(head + parent + change.salt + pack_tokens(change.token_ids))


def unpack_prefix(block_hash: bytes, packed: bytes) -> PrefixChange:
    """As it was written, but resident nowhere. Raises Corrupt."""
    value = unpack(packed)
    if len(value) < _PREFIX.size:
        raise Corrupt
    depth, hits, last_used_s, len_parent, len_salt, num_tokens = _PREFIX.unpack_from(value)
    parent_end = _PREFIX.size + max(0, len_parent)
    salt_end = parent_end + len_salt
    if len(value) != salt_end + num_tokens * TOKEN_BYTES:
        raise Corrupt
    return PrefixChange(
        hash=block_hash,
        parent=None if len_parent == _NO_PARENT else value[_PREFIX.size : parent_end],
        depth=depth,
        token_ids=unpack_tokens(value[salt_end:]),
        salt=value[parent_end:salt_end],
        hits=hits,
        last_used_s=last_used_s,
        resident=False,
    )
