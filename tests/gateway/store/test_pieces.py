"""Sequences in pieces: they come back whole, and share what they begin with."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.store.interface import PIECE, Key
from penstock.gateway.store.memory import MemoryStore
from penstock.gateway.store.pieces import FANOUT, PIECE_BYTES, Pieces, cut, join, keep_pieces
from tests.clock import Clock

pytestmark = pytest.mark.anyio

TTL_S = 600.0


class CountingStore(MemoryStore):
    """Counts how often it is asked."""

    def __init__(self) -> None:
        super().__init__(Clock())
        self.num_asked = 0

    async def shared(self, keys: Sequence[Key], ttl_s: float) -> list[bytes | None]:
        self.num_asked += 1
        return await super().shared(keys, ttl_s)


async def kept(store: MemoryStore, items: list[bytes]) -> Pieces:
    pieces, made = cut(items)
    await keep_pieces(store, "t", made, TTL_S)
    return pieces


@pytest.mark.parametrize(
    "num_pieces", [0, 1, FANOUT - 1, FANOUT, FANOUT + 1, 2 * FANOUT, FANOUT**2, FANOUT**2 + 17]
)
@pytest.mark.parametrize("rest", [b"", b"end"])
async def test_a_sequence_comes_back_whole(num_pieces: int, rest: bytes) -> None:
    store = CountingStore()
    items = [*(b"%d " % i * PIECE_BYTES for i in range(num_pieces)), rest]
    pieces = await kept(store, items)
    assert pieces.rest == rest
    assert await join(store, "t", pieces, TTL_S) == b"".join(items)
    assert store.num_asked == len(pieces.levels) + 1 <= 4


def test_a_piece_is_full_with_so_many_bytes() -> None:
    pieces, made = cut([b"x" * PIECE_BYTES, b"y"])
    assert (list(made.values()), pieces.rest) == ([b"x" * PIECE_BYTES], b"y")


@given(st.lists(st.binary(max_size=3000), max_size=60), st.integers(0, 60))
def test_what_begins_alike_shares_all_pieces_of_it_and_a_record_is_small(
    items: list[bytes], length: int
) -> None:
    _, whole = cut(items)
    beginning, made = cut(items[:length])
    contents = {id_ for id_, content in made.items() if content in b"".join(items[:length])}
    assert contents <= whole.keys()
    assert len(beginning.rest) < PIECE_BYTES
    assert all(len(level) < FANOUT for level in beginning.levels)


def test_a_chain_of_sequences_takes_space_that_grows_with_the_last() -> None:
    items = [b"%d" % i * 100 for i in range(2_000)]
    made: dict[str, bytes] = {}
    taken = []
    for length in range(0, 2_001, 2):
        pieces, more = cut(items[:length])
        made |= more
        records = sum(map(len, pieces.levels)) * 35 + len(pieces.rest)
        taken.append(records)
    assert sum(map(len, made.values())) < 1.1 * sum(map(len, items))
    assert max(taken) < 40 * 35 + PIECE_BYTES
    assert all(after < before + PIECE_BYTES for before, after in pairwise(taken))


async def test_pieces_live_for_as_long_as_a_sequence_is_asked_for() -> None:
    clock = Clock()
    store = MemoryStore(clock)
    items = [b"%d " % i * PIECE_BYTES for i in range(40)]
    first = await kept(store, items[:20])
    clock.now += TTL_S / 2
    second = await kept(store, items)
    clock.now += TTL_S * 0.9
    assert await join(store, "t", second, TTL_S) == b"".join(items)
    clock.now += TTL_S * 0.9
    assert await join(store, "t", first, TTL_S) == b"".join(items[:20])


async def test_a_piece_that_is_gone_is_noticed() -> None:
    store = MemoryStore(Clock())
    pieces, made = cut([b"%d " % i * PIECE_BYTES for i in range(40)])
    for missing in made:
        await keep_pieces(store, "t", made, TTL_S)
        await store.delete(Key(PIECE, "t", missing))
        assert await join(store, "t", pieces, TTL_S) is None
