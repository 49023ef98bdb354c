"""The picture of the pool against a plain count of its blocks."""

from __future__ import annotations

from fractions import Fraction
from math import ceil

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.block_map import MAX_CELLS, block_map
from tests.few import examples


def drawn_plainly(counts: list[int], findable: bytearray, per_cell: int) -> dict[str, bytes]:
    cells = [range(start, min(start + per_cell, len(counts))) for start in range(1, len(counts), per_cell)]

    def parts(wanted: list[bool]) -> bytes:
        return bytes(ceil(Fraction(255 * sum(wanted[block] for block in cell), per_cell)) for cell in cells)

    return {
        "held": parts([count > 0 for count in counts]),
        "shared": parts([count > 1 for count in counts]),
        "cached": parts([count == 0 and findable[block] == 1 for block, count in enumerate(counts)]),
        "holders": bytes(min(255, max(counts[block] for block in cell)) for cell in cells),
    }


@settings(max_examples=examples(30))
@given(
    st.integers(1, 5 * MAX_CELLS),
    st.lists(st.sampled_from([0, 0, 1, 1, 2, 9, 300]), min_size=1),
    st.binary(min_size=1, max_size=9),
)
def test_the_picture_says_what_a_plain_count_says(num_blocks: int, counts: list[int], found: bytes) -> None:
    ref_counts = [0] + [counts[block * 7 % len(counts)] for block in range(num_blocks)]
    findable = bytearray([0] + [found[block % len(found)] & 1 for block in range(num_blocks)])
    drawn = block_map(ref_counts, findable)
    expected = drawn_plainly(ref_counts, findable, drawn.blocks_per_cell)
    assert {name: getattr(drawn, name) for name in expected} == expected
    assert drawn.num_blocks == num_blocks
    assert len(drawn.held) <= MAX_CELLS
    assert drawn.num_held == sum(count > 0 for count in ref_counts)
    assert drawn.num_cached == sum(
        count == 0 and flag for count, flag in zip(ref_counts, findable, strict=True)
    )
    assert drawn.num_shared == sum(count > 1 for count in ref_counts)
    assert drawn.num_saved == sum(count - 1 for count in ref_counts if count)


def test_one_block_in_use_is_seen_in_a_large_pool() -> None:
    ref_counts, findable = [0] * 500_001, bytearray(500_001)
    ref_counts[123_456] = findable[499_999] = 1
    drawn = block_map(ref_counts, findable)
    assert len(drawn.held) <= MAX_CELLS
    assert [number for number in drawn.held if number] == [number for number in drawn.cached if number] == [1]
    assert drawn.held[123_455 // drawn.blocks_per_cell] == 1
