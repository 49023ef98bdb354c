"""The picture of the pool against a plain count of its blocks."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planning.block_map import MAX_CELLS, block_map


def drawn_plainly(counts: list[int], found: set[int], per_cell: int) -> dict[str, bytes]:
    """The strings of a pool of which every block is looked at."""
    cells = [range(start, min(start + per_cell, len(counts))) for start in range(1, len(counts), per_cell)]

    def parts(wanted: list[bool]) -> bytes:
        return bytes(255 * sum(wanted[block] for block in cell) // per_cell for cell in cells)

    return {
        "held": parts([count > 0 for count in counts]),
        "shared": parts([count > 1 for count in counts]),
        "cached": parts([count == 0 and block in found for block, count in enumerate(counts)]),
        "holders": bytes(min(255, max(counts[block] for block in cell)) for cell in cells),
    }


@settings(max_examples=30)
@given(
    st.integers(1, 4 * MAX_CELLS), st.lists(st.sampled_from([0, 0, 1, 1, 2, 9, 300]), min_size=1), st.data()
)
def test_the_picture_says_what_a_plain_count_says(
    num_blocks: int, pattern: list[int], data: st.DataObject
) -> None:
    counts = [0] + [pattern[block * 7 % len(pattern)] for block in range(num_blocks)]
    found = set(range(data.draw(st.integers(0, 5)), num_blocks + 1, data.draw(st.integers(1, 5))))
    drawn = block_map(counts, found.__contains__)
    expected = drawn_plainly(counts, found, drawn.blocks_per_cell)
    assert {name: getattr(drawn, name) for name in expected} == expected
    assert drawn.num_blocks == num_blocks
    assert len(drawn.held) <= MAX_CELLS
    assert drawn.num_shared == sum(count > 1 for count in counts)
    assert drawn.num_saved == sum(count - 1 for count in counts if count)


def test_a_pool_of_any_size_is_drawn_from_as_few_blocks() -> None:
    looked_at: list[int] = []

    def is_found(block: int) -> bool:
        looked_at.append(block)
        return True

    drawn = block_map([0, *[2, 0] * 100_000], is_found)
    assert len(looked_at) <= 4 * MAX_CELLS
    assert max(looked_at) > 199_900
    assert len(drawn.held) <= MAX_CELLS
    assert drawn.blocks_per_cell * len(drawn.held) >= drawn.num_blocks == 200_000
