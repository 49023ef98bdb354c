"""Long sequences of bytes are kept in pieces that are found by their content.

Sequences that begin alike share the pieces of that beginning. So a chain of sequences, each of which is the one before
it and a little more, takes space that grows with its last one and not with the sum of them all.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from hashlib import blake2b

from penstock.gateway.store.interface import PIECE, Key, Store
from penstock.gateway.store.packing import Base64

PIECE_BYTES = 2048
FANOUT = 16
"""A list of pieces has so many, and is a piece itself."""


@dataclass(frozen=True, slots=True)
class Pieces:
    """Pieces are what a record keeps of a sequence."""

    levels: tuple[tuple[str, ...], ...] = ()
    """The ids of the last pieces, of the last lists of pieces, of the last lists of such lists, and so on: fewer than
    FANOUT each."""
    rest: Base64 = b""
    """The end of the sequence, which is no piece yet."""


def cut(items: Iterable[bytes]) -> tuple[Pieces, dict[str, bytes]]:
    """Cuts a sequence behind items, and returns the pieces by their ids, too.

    Where a sequence is cut depends on nothing that comes later.
    """
    made: dict[str, bytes] = {}

    def keep(content: bytes) -> str:
        made[name := blake2b(content, digest_size=16).hexdigest()] = content
        return name

    ids, rest = list[str](), bytearray()
    for item in items:
        rest += item
        if len(rest) >= PIECE_BYTES:
            ids.append(keep(bytes(rest)))
            rest.clear()
    levels = []
    while ids:
        whole = len(ids) - len(ids) % FANOUT
        levels.append(tuple(ids[whole:]))
        ids = [keep(" ".join(ids[start : start + FANOUT]).encode()) for start in range(0, whole, FANOUT)]
    return Pieces(tuple(levels), bytes(rest)), made


async def keep_pieces(store: Store, tenant: str, pieces: dict[str, bytes], ttl_s: float) -> None:
    """Keeps what `cut` returned; pieces that are there already live longer."""
    for id_, content in pieces.items():
        await store.share(Key(PIECE, tenant, id_), content, ttl_s)


async def join(store: Store, tenant: str, pieces: Pieces, ttl_s: float) -> bytes | None:
    """Reads a sequence, whose pieces live longer then; None if one of them is gone.

    The store is asked once for each level, whatever the length is.

    Raises:
        StoreUnavailable: the store does not answer.
    """

    async def read(ids: Sequence[str]) -> list[bytes | None]:
        return await store.shared([Key(PIECE, tenant, id_) for id_ in ids], ttl_s)

    ids: list[str] = []
    for level in reversed(pieces.levels):
        lists = await read(ids)
        ids = [id_ for content in lists if content is not None for id_ in content.decode().split()]
        if None in lists:
            return None
        ids += level
    contents = [content for content in await read(ids) if content is not None]
    return b"".join((*contents, pieces.rest)) if len(contents) == len(ids) else None
