"""Values are written compressed where that pays, and token ids as four bytes each.

value    format (1 byte: "p" as it is, "z" zlib) | the rest
prefix   a block as JSON, its bytes in base64
tokens   uint32 each, all little-endian
"""

from __future__ import annotations

import struct
import zlib
from base64 import b64decode, b64encode
from collections.abc import Sequence
from typing import Annotated

from pydantic import PlainSerializer, PlainValidator, TypeAdapter

from penstock.gateway.store.interface import PrefixChange

COMPRESS_BYTES = 1024
MAX_VALUE_BYTES = 64 * 1024 * 1024
TOKEN_BYTES = 4

_PREFIX = TypeAdapter(PrefixChange)


def pack(value: bytes) -> bytes:
    return b"p" + value if len(value) < COMPRESS_BYTES else b"z" + zlib.compress(value, 1)


def unpack(packed: bytes) -> bytes:
    """Reads what `pack` made.

    Raises:
        ValueError: this was not made by `pack`.
    """
    if packed[:1] == b"p":
        return packed[1:]
    decompressor = zlib.decompressobj()
    try:
        value = decompressor.decompress(packed[1:], MAX_VALUE_BYTES)
    except zlib.error as error:
        raise ValueError(str(error)) from None
    if packed[:1] != b"z" or not decompressor.eof:
        raise ValueError("it is no packed value")
    return value


def pack_tokens(token_ids: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(token_ids)}I", *token_ids)


def unpack_tokens(packed: bytes) -> tuple[int, ...]:
    """Reads what `pack_tokens` made.

    Raises:
        ValueError: this was not made by it.
    """
    if len(packed) % TOKEN_BYTES:
        raise ValueError("a packed token id has four bytes")
    return struct.unpack(f"<{len(packed) // TOKEN_BYTES}I", packed)


def _bytes_of_text(text: object) -> bytes:
    if not isinstance(text, str):
        raise ValueError("packed bytes are text")
    return b64decode(text, validate=True)


def _bytes_as_text(packed: bytes) -> str:
    return b64encode(packed).decode()


Base64 = Annotated[bytes, PlainValidator(_bytes_of_text), PlainSerializer(_bytes_as_text)]
"""Bytes are in base64 as a field of a record."""

Tokens = Annotated[
    tuple[int, ...],
    PlainValidator(lambda text: unpack_tokens(_bytes_of_text(text))),
    PlainSerializer(lambda token_ids: _bytes_as_text(pack_tokens(token_ids))),
]
"""Token ids are packed and in base64 as a field of a record, where JSON's numbers would be long and slow."""


def pack_prefix(change: PrefixChange) -> bytes:
    return _PREFIX.dump_json(change)


def unpack_prefix(packed: bytes) -> PrefixChange:
    """Reads what `pack_prefix` made; raises ValueError if it was not made by it."""
    return _PREFIX.validate_json(packed)
