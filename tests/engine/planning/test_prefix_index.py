from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.prefix_index import (
    PrefixIndex,
    block_hash,
    chain_start,
    extend_hashes,
    prompt_hashes,
)

token_lists = st.lists(st.integers(0, 5), max_size=16)


def hashes_of(token_ids: list[int], salt: bytes = b"", block_size: int = 4) -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, len(token_ids) // block_size, block_size, salt)
    return hashes


@given(token_lists, token_lists)
def test_hashes_are_equal_exactly_as_far_as_the_tokens_are(a: list[int], b: list[int]) -> None:
    for i, (left, right) in enumerate(zip(hashes_of(a), hashes_of(b), strict=False)):
        assert (left == right) == (a[: 4 * i + 4] == b[: 4 * i + 4])


@given(token_lists, st.integers(0, 4))
def test_growing_a_chain_is_the_same_as_making_it_at_once(token_ids: list[int], first: int) -> None:
    grown: list[bytes] = []
    num_full = len(token_ids) // 4
    extend_hashes(grown, token_ids, min(first, num_full), 4, b"s")
    extend_hashes(grown, token_ids, num_full, 4, b"s")
    assert grown == hashes_of(token_ids, b"s")


@given(token_lists)
def test_a_chain_is_that_of_its_blocks_one_by_one(token_ids: list[int]) -> None:
    parent, chain = chain_start(b"s"), list[bytes]()
    for start in range(0, len(token_ids) - 3, 4):
        parent = block_hash(parent, token_ids[start : start + 4])
        chain.append(parent)
    assert hashes_of(token_ids, b"s") == chain
    assert list(prompt_hashes(token_ids, 4, b"s")) == chain[: max(0, len(token_ids) - 1) // 4]


def test_another_salt_is_another_chain() -> None:
    assert not set(hashes_of([1] * 8, b"a")) & set(hashes_of([1] * 8, b"b"))


def test_a_token_is_hashed_as_a_whole_number() -> None:
    assert block_hash(chain_start(b""), [1, 256]) != block_hash(chain_start(b""), [256, 1])
    assert block_hash(chain_start(b""), [1]) != block_hash(chain_start(b""), [1 + 2**32])


def test_match_ends_at_the_first_unknown_block() -> None:
    index = PrefixIndex()
    index.add(b"a", 1)
    index.add(b"c", 3)
    assert index.match([b"a", b"b", b"c"]) == [1]


def test_the_first_block_of_a_hash_stays() -> None:
    index = PrefixIndex()
    index.add(b"a", 1)
    index.add(b"a", 2)
    index.drop(2)
    assert index.match([b"a"]) == [1]
    index.drop(1)
    assert index.match([b"a"]) == []
    assert len(index) == 0


def test_only_the_block_that_began_ends_the_wait() -> None:
    index = PrefixIndex()
    index.begin(b"a", 1)
    index.begin(b"a", 2)
    index.end(b"a", 2)
    assert index.is_pending(b"a")
    index.end(b"a", 1)
    assert not index.is_pending(b"a")
    assert index.num_pending == 0
