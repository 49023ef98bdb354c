"""Who holds which prefix: as a plain search says, in bounded memory, and without those that are gone."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority.routing.index import BlockIndex
from tests.few import examples
from tests.priority.routing.messages import chain

CHAIN = chain("a", 40)
EVERYBODY = 0b1111


def index_of(lengths: list[int], max_blocks: int = 1_000) -> BlockIndex:
    """Replica i holds the first `lengths[i]` blocks of the chain."""
    index = BlockIndex(max_blocks)
    for slot, length in enumerate(lengths):
        index.add(CHAIN[:length], 1 << slot)
    return index


@given(
    lengths=st.lists(st.integers(0, 40), min_size=1, max_size=4),
    among=st.integers(0, 15),
    most=st.integers(1, 4),
    num_asked=st.integers(0, 40),
)
@settings(max_examples=examples(150))
def test_a_match_is_what_a_plain_search_finds(
    lengths: list[int], among: int, most: int, num_asked: int
) -> None:
    expected: dict[int, int] = {}
    for slot, length in enumerate(lengths):
        if among >> slot & 1 and min(length, num_asked):
            found = min(length, num_asked)
            expected[found] = expected.get(found, 0) | 1 << slot
    found_all = sorted(expected.items(), reverse=True)
    assert index_of(lengths).match(CHAIN[:num_asked], among, most) == found_all[:most]


def test_a_block_is_forgotten_with_its_last_holder() -> None:
    index = index_of([10, 10])
    index.remove(CHAIN[5:10], 0b01)
    assert index.match(CHAIN, EVERYBODY, 4) == [(10, 0b10), (5, 0b01)]
    assert index.num_blocks == 10
    index.remove(CHAIN, 0b10)
    assert index.match(CHAIN, EVERYBODY, 4) == [(5, 0b01)]
    assert index.num_blocks == 5


def test_what_is_expected_is_found_until_it_is_not() -> None:
    index = index_of([10])
    index.expect(CHAIN[4:20], 0b10)
    assert index.match(CHAIN, EVERYBODY, 4) == [(20, 0b10), (10, 0b01)]
    index.expect_no_longer(CHAIN[4:20], 0b01)
    assert index.match(CHAIN, EVERYBODY, 1) == [(20, 0b10)]
    index.expect_no_longer(CHAIN[4:20], 0b10)
    assert index.match(CHAIN, EVERYBODY, 4) == [(10, 0b01)]


def test_memory_is_bounded_and_long_hits_are_still_found() -> None:
    """A quarter of the 4,000 blocks is kept, the same ones of all chains, so a hit is known to within a few blocks."""
    index = BlockIndex(1_000)
    chains = [chain(f"{i}", 400) for i in range(10)]
    for slot, blocks in enumerate(chains):
        index.add(blocks, 1 << slot)
        assert index.num_blocks <= 1_000
    for slot, blocks in enumerate(chains):
        [(length, holders)] = index.match(blocks, 2**10 - 1, 1)
        assert holders == 1 << slot
        assert 360 < length <= 400
    for slot, blocks in enumerate(chains):
        index.remove(blocks, 1 << slot)
    assert index.num_blocks == 0


def test_those_who_are_gone_are_swept_out_part_by_part() -> None:
    index = index_of([40, 20])
    for part in range(index.num_parts):
        index.sweep(part, 0b01)
    assert index.num_blocks == 20
    assert index.match(CHAIN, EVERYBODY, 4) == [(20, 0b10)]
