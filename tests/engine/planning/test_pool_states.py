"""Every state of a block (never used, held, shared, free with content, forgotten), and copy-on-write among forks."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.planning.blocks import BlockPool, PoolViolation
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import Sequence
from tests.engine.fake_runner import make_request
from tests.few import examples

BLOCK_SIZE = 4
modest = settings(max_examples=examples(50), deadline=None)


class PoolMachine(RuleBasedStateMachine):
    """The model: how often each block is held, and the free ones in order of reuse."""

    @initialize(num_blocks=st.integers(2, 7))
    def build(self, num_blocks: int) -> None:
        self.reused: list[int] = []
        self.pool = BlockPool(num_blocks, on_reuse=self.reused.append)
        self.held: Counter[int] = Counter()
        self.free = list(range(1, num_blocks))
        self.allocated: list[int] = []

    def pick(self, number: int) -> int:
        return 1 + number % (self.pool.num_blocks - 1)

    @precondition(lambda self: self.free)
    @rule()
    def allocate(self) -> None:
        block = self.pool.allocate()
        assert block == self.free.pop(0)
        self.held[block] = 1
        self.allocated.append(block)

    @precondition(lambda self: not self.free)
    @rule()
    def allocate_from_nothing(self) -> None:
        with pytest.raises(IndexError):
            self.pool.allocate()

    @rule(number=st.integers(0, 20))
    def hold(self, number: int) -> None:
        block = self.pick(number)
        self.pool.hold(block)
        self.held[block] += 1
        self.free = [other for other in self.free if other != block]

    @rule(numbers=st.lists(st.integers(0, 20), max_size=4))
    def release_some(self, numbers: list[int]) -> None:
        wanted = [block for block in map(self.pick, numbers) if self.held[block]]
        blocks = [b for i, b in enumerate(wanted) if wanted[:i].count(b) < self.held[b]]
        self.pool.release(blocks)
        for block in blocks:
            self.held[block] -= 1
            if not self.held[block]:
                self.free.append(block)

    @rule(number=st.integers(0, 20))
    def forget(self, number: int) -> None:
        block = self.pick(number)
        self.pool.forget(block)
        if not self.held[block]:
            self.free.remove(block)
            self.free.insert(0, block)

    @invariant()
    def the_books_agree(self) -> None:
        if not hasattr(self, "pool"):
            return
        assert list(self.pool.free_blocks()) == self.free
        assert self.pool.num_free == len(self.free)
        assert self.reused == self.allocated
        self.pool.check([[block] * count for block, count in self.held.items()])


PoolMachine.TestCase.settings = settings(max_examples=examples(30), stateful_step_count=30, deadline=None)
TestPool = PoolMachine.TestCase


@modest
@given(st.integers(1, 4), st.integers(1, 4))
def test_each_hold_allows_one_release_and_no_more(holds: int, num_blocks: int) -> None:
    pool = BlockPool(num_blocks + 1)
    block = pool.allocate()
    for _ in range(holds):
        pool.hold(block)
    pool.release([block] * (holds + 1))
    assert pool.num_free == num_blocks
    with pytest.raises(PoolViolation, match=f"block {block} was released more often than held"):
        pool.release([block])


def test_check_finds_a_free_list_that_lost_a_block() -> None:
    pool = BlockPool(4)
    pool.num_free -= 1
    with pytest.raises(PoolViolation, match="free list of 3 blocks, 2 counted free"):
        pool.check([])


# Copy-on-write


def running(tables: SequenceMemory, num_prompt: int, n: int = 1) -> Sequence:
    """A sequence whose prompt is computed, and which knows its first output token."""
    sequence = Sequence(make_request("r", list(range(num_prompt)), n=n))
    tables.start(sequence)
    sequence.num_computed = num_prompt
    tables.commit(sequence, num_prompt)
    return sequence


def family(tables: SequenceMemory, num_prompt: int, num_children: int) -> list[Sequence]:
    parent = running(tables, num_prompt, n=num_children + 1)
    children = [Sequence(parent.request, 1 + i) for i in range(num_children)]
    for child in children:
        tables.fork(parent, child)
    parent.token_ids.append(99)
    return [parent, *children]


@modest
@given(st.integers(1, 13), st.integers(0, 4))
def test_a_fork_holds_every_block_of_the_prompt_once_more(num_prompt: int, num_children: int) -> None:
    tables = SequenceMemory(9, BLOCK_SIZE)
    everybody = family(tables, num_prompt, num_children)
    blocks = tables.blocks_for(num_prompt)
    assert tables.pool.num_free == 8 - blocks
    assert all(tables.pool.ref_counts[b] == num_children + 1 for b in everybody[0].block_table)
    for child in everybody[1:]:
        assert child.block_table == everybody[0].block_table
        assert child.num_remaining == 1
    tables.check(everybody)


@modest
@given(st.integers(1, 13), st.integers(1, 4), st.data())
def test_the_last_to_write_keeps_the_shared_block_and_the_others_copy_it(
    num_prompt: int, num_children: int, data: st.DataObject
) -> None:
    tables = SequenceMemory(40, BLOCK_SIZE)
    everybody = family(tables, num_prompt, num_children)
    shared = everybody[0].block_table[-1]
    copied = []
    for sequence in data.draw(st.permutations(everybody)):
        copies = tables.grow(sequence, len(sequence.token_ids))
        assert copies is not None
        copied += copies
        assert all(source == shared for source, _ in copies)
    writes_shared = num_children + (num_prompt % BLOCK_SIZE > 0)
    assert len(copied) == writes_shared - (writes_shared == num_children + 1)
    assert len({target for _, target in copied}) == len(copied)
    lasts = [s.block_table[(s.num_computed) // BLOCK_SIZE] for s in everybody]
    assert len(set(lasts)) == len(lasts)
    tables.check(everybody)


@modest
@given(st.integers(1, 13), st.integers(1, 4), st.data())
def test_a_family_can_end_in_any_order(num_prompt: int, num_children: int, data: st.DataObject) -> None:
    tables = SequenceMemory(40, BLOCK_SIZE)
    alive = family(tables, num_prompt, num_children)
    for sequence in data.draw(st.permutations(alive)):
        if data.draw(st.booleans()):
            tables.grow(sequence, len(sequence.token_ids))
        tables.release(sequence)
        alive = [other for other in alive if other is not sequence]
        tables.check(alive)
    assert tables.pool.num_free == 39


def test_a_copy_that_finds_no_block_changes_nothing() -> None:
    tables = SequenceMemory(4, BLOCK_SIZE)
    parent, child = family(tables, 10, 1)
    before = (list(parent.block_table), list(child.block_table), list(tables.pool.free_blocks()))
    assert tables.grow(child, 10) is None
    assert (parent.block_table, child.block_table, list(tables.pool.free_blocks())) == before
    tables.release(parent)
    assert tables.grow(child, 10) == []
    tables.check([child])


def test_a_copied_block_is_not_what_the_index_finds() -> None:
    """The last block of a prompt of whole blocks is shared and full: the child's copy of it is a second one."""
    tables = SequenceMemory(20, BLOCK_SIZE)
    parent, child = family(tables, 8, 1)
    tables.grow(child, 8)
    tables.commit(child, 8)
    found = tables.find_prefix(Sequence(make_request("x", [*range(8), 1]))).entries
    assert found == parent.block_table[:2]
    assert child.block_table[1] not in found
    tables.release(parent)
    tables.release(child)
    assert tables.pool.allocate() not in found
