from __future__ import annotations

import pytest

from penstock.engine.planning.blocks import PoolViolation
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import Sequence
from tests.engine.fake_runner import make_request


def started(tables: SequenceMemory, prompt: list[int], **options: bytes) -> Sequence:
    sequence = Sequence(make_request("r", prompt, **options))  # type: ignore[arg-type]
    tables.start(sequence)
    return sequence


def computed(tables: SequenceMemory, prompt: list[int]) -> Sequence:
    sequence = started(tables, prompt)
    sequence.num_computed = len(prompt)
    tables.commit(sequence, len(prompt))
    return sequence


def test_only_confirmed_full_blocks_are_found() -> None:
    tables = SequenceMemory(20, 4)
    owner = started(tables, list(range(10)))
    assert tables.find_prefix(Sequence(make_request("x", list(range(10))))).entries == []
    owner.num_computed = 10
    tables.commit(owner, 7)
    assert tables.find_prefix(Sequence(make_request("x", list(range(10))))).entries == owner.block_table[:1]
    tables.commit(owner, 10)
    assert tables.find_prefix(Sequence(make_request("x", list(range(10))))).entries == owner.block_table[:2]


def test_room_without_tokens_is_at_the_ends_of_sequences() -> None:
    tables = SequenceMemory(20, 4)
    assert tables.unfilled([]) == 0.0
    first, second = started(tables, list(range(10))), started(tables, [50] * 8)
    assert tables.unfilled([first, second]) == (12 - 10) / (12 + 8)
    other = computed(tables, list(range(100, 109)))
    assert tables.unfilled([first, second, other]) == (2 + 3) / (12 + 8 + 12)


def test_a_block_is_awaited_from_start_to_commit() -> None:
    tables = SequenceMemory(20, 4)
    owner = started(tables, list(range(9)))
    other = Sequence(make_request("x", list(range(9))))
    assert tables.awaited_hash(other)
    owner.num_computed = 9
    tables.commit(owner, 9)
    assert not tables.awaited_hash(other)


def test_a_released_sequence_can_be_found_until_its_blocks_are_needed() -> None:
    tables = SequenceMemory(4, 4)
    owner = computed(tables, list(range(9)))
    tables.release(owner)
    tables.release(owner)
    assert len(tables.find_prefix(Sequence(make_request("x", list(range(9))))).entries) == 2
    started(tables, [50] * 8)
    assert len(tables.find_prefix(Sequence(make_request("x", list(range(9))))).entries) == 1


def test_deeper_blocks_are_given_up_before_their_parents() -> None:
    tables = SequenceMemory(5, 4)
    owner = computed(tables, list(range(16)))
    tables.release(owner)
    started(tables, [50] * 4)
    found = tables.find_prefix(Sequence(make_request("x", [*range(16), 1]))).entries
    assert len(found) == 3


def test_grow_says_no_and_changes_nothing_when_blocks_are_short() -> None:
    tables = SequenceMemory(4, 4)
    sequence = computed(tables, list(range(8)))
    before = list(sequence.block_table)
    assert tables.grow(sequence, 17) is None
    assert sequence.block_table == before
    assert tables.grow(sequence, 12) == []
    tables.check([sequence])


def test_a_shared_block_is_copied_before_it_is_written_by_whoever_writes_first() -> None:
    tables = SequenceMemory(20, 4)
    parent = computed(tables, list(range(6)))
    child = Sequence(parent.request, 1)
    tables.fork(parent, child)
    shared = parent.block_table[1]
    assert child.num_remaining == 1
    assert tables.grow(child, 6) == [(shared, child.block_table[1])]
    assert child.block_table[0] == parent.block_table[0]
    assert tables.grow(parent, 7) == []
    tables.check([parent, child])


def test_without_a_prefix_cache_nothing_is_found_or_awaited() -> None:
    tables = SequenceMemory(20, 4, prefix_cache=False)
    owner = computed(tables, list(range(9)))
    other = Sequence(make_request("x", list(range(9))))
    assert tables.find_prefix(other).entries == []
    assert not tables.awaited_hash(other)
    tables.release(owner)
    assert len(tables.index) == 0


def test_check_is_against_what_sequences_hold() -> None:
    tables = SequenceMemory(20, 4)
    sequence = computed(tables, [1, 2])
    tables.check([sequence])
    with pytest.raises(PoolViolation):
        tables.check([])


# With steps in flight


def test_what_is_released_is_free_when_the_steps_planned_before_are_back() -> None:
    tables = SequenceMemory(5, 4)
    early, late = computed(tables, [1] * 5), computed(tables, [2] * 5)
    first = tables.begin_step([])
    tables.release(early)
    second = tables.begin_step([])
    tables.release(late)
    assert (tables.pool.num_free, tables.num_returning, tables.num_in_flight) == (0, 4, 2)
    tables.check([])
    tables.end_step(first)
    assert (tables.pool.num_free, tables.num_returning) == (2, 2)
    tables.end_step(second)
    assert (tables.pool.num_free, tables.num_returning, tables.num_in_flight) == (4, 0, 0)
    tables.check([])


def test_what_is_on_its_way_back_can_be_found_and_is_kept() -> None:
    tables = SequenceMemory(5, 4)
    owner = computed(tables, list(range(8)))
    step = tables.begin_step([])
    tables.release(owner)
    again = started(tables, list(range(8)))
    assert again.num_computed == 4
    assert tables.num_returning == 1
    tables.end_step(step)
    assert tables.pool.num_free == 2
    tables.check([again])


def test_growth_that_only_waits_for_steps_in_flight_is_told_from_growth_that_never_succeeds() -> None:
    tables = SequenceMemory(4, 4)
    gone, stays = computed(tables, [1] * 8), computed(tables, [2] * 4)
    step = tables.begin_step([])
    assert not tables.will_have_room(stays, 5)
    tables.release(gone)
    assert tables.grow(stays, 5) is None
    assert tables.will_have_room(stays, 12)
    assert not tables.will_have_room(stays, 13)
    tables.end_step(step)
    assert tables.grow(stays, 12) == []


def test_the_source_of_a_copy_stays_as_it_is_although_nobody_holds_it_any_more() -> None:
    """The child copies, and the parent gives way before the step is launched."""
    tables = SequenceMemory(6, 4)
    parent = computed(tables, list(range(6)))
    child = Sequence(parent.request, 1)
    tables.fork(parent, child)
    source = parent.block_table[1]
    copies = tables.grow(child, 6)
    tables.release(parent)
    assert source in tables.pool.free_blocks()
    assert copies is not None
    step = tables.begin_step(copies)
    assert source not in tables.pool.free_blocks()
    tables.check([child])
    tables.end_step(step)
    assert source in tables.pool.free_blocks()
    tables.check([child])


def test_the_source_of_a_copy_outlives_the_step_before() -> None:
    """Its last holder ended while that step was in flight."""
    tables = SequenceMemory(6, 4)
    parent = computed(tables, list(range(6)))
    child = Sequence(parent.request, 1)
    tables.fork(parent, child)
    source = parent.block_table[1]
    first = tables.begin_step([])
    copies = tables.grow(child, 6)
    tables.release(parent)
    assert copies == [(source, child.block_table[1])]
    second = tables.begin_step(copies)
    tables.end_step(first)
    assert source not in tables.pool.free_blocks()
    tables.end_step(second)
    assert source in tables.pool.free_blocks()


def test_the_check_of_an_idle_pool_names_the_block_that_is_held() -> None:
    memory = SequenceMemory(20, 4)
    memory.check_idle()
    block = memory.pool.allocate()
    with pytest.raises(PoolViolation, match=f"block {block}: 1 references, 0 holders"):
        memory.check_idle()
