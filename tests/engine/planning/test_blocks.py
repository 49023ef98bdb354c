from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.blocks import BlockPool, PoolViolation


def test_block_0_is_never_handed_out() -> None:
    pool = BlockPool(4)
    assert sorted(pool.allocate() for _ in range(3)) == [1, 2, 3]
    with pytest.raises(IndexError):
        pool.allocate()


def test_a_pool_of_one_block_is_refused() -> None:
    with pytest.raises(ValueError, match="at least 2"):
        BlockPool(1)


def test_the_block_released_first_is_reused_first() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    pool.release([blocks[1]])
    pool.release([blocks[2], blocks[0]])
    assert [pool.allocate() for _ in range(3)] == [blocks[1], blocks[2], blocks[0]]


def test_a_free_block_whose_content_is_found_again_leaves_the_middle_of_the_free_list() -> None:
    pool = BlockPool(5)
    blocks = [pool.allocate() for _ in range(4)]
    pool.release(blocks)
    pool.hold(blocks[1])
    assert list(pool.free_blocks()) == [blocks[0], blocks[2], blocks[3]]


def test_a_forgotten_block_is_the_next_to_be_reused() -> None:
    pool = BlockPool(4)
    blocks = [pool.allocate() for _ in range(3)]
    pool.release(blocks)
    pool.forget(blocks[2])
    assert pool.allocate() == blocks[2]


def test_forgetting_a_held_block_changes_nothing() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.forget(block)
    pool.check([[block]])


def test_reuse_is_told_with_the_block() -> None:
    reused: list[int] = []
    pool = BlockPool(3, on_reuse=reused.append)
    block = pool.allocate()
    pool.hold(block)
    assert reused == [block]


def test_one_release_too_many_is_a_violation() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    pool.release([block])
    with pytest.raises(PoolViolation, match="more often"):
        pool.release([block])


def test_check_names_the_block_nobody_accounts_for() -> None:
    pool = BlockPool(3)
    block = pool.allocate()
    with pytest.raises(PoolViolation, match=f"block {block}: 1 references, 0 holders"):
        pool.check([])


@given(
    st.integers(2, 9),
    st.lists(st.tuples(st.sampled_from(["allocate", "hold", "release"]), st.integers(0, 99))),
)
def test_against_a_plain_model(num_blocks: int, actions: list[tuple[str, int]]) -> None:
    """The pool is a list of references and a list of free blocks in order of release, whatever happens to it."""
    pool = BlockPool(num_blocks)
    free = list(range(1, num_blocks))
    held: list[int] = []
    for action, pick in actions:
        if action == "allocate" and free:
            held.append(pool.allocate())
            assert held[-1] == free.pop(0)
        elif action == "hold":
            block = 1 + pick % (num_blocks - 1)
            pool.hold(block)
            held.append(block)
            free = [b for b in free if b != block]
        elif action == "release" and held:
            block = held.pop(pick % len(held))
            pool.release([block])
            free += [block] if block not in held else []
    assert list(pool.free_blocks()) == free
    assert pool.num_free == len(free)
    pool.check([held])
