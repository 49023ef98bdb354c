"""Ranks that have sequences of their own: the memory of each, and the random machine of `test_scheduler_machine`."""

from __future__ import annotations

import random
from threading import Lock

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.ranked_memory import RankedMemory
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.step import StepPlan
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink, make_request
from tests.engine.planning.test_scheduler_machine import BLOCK_SIZE, WINDOWS, SchedulerMachine
from tests.few import examples


class RankedMachine(SchedulerMachine):
    """The ranks' blocks are those of one device, so that whatever reads another rank's reads wrong tokens."""

    @initialize(
        num_blocks=st.integers(5, 30),
        num_ranks=st.sampled_from([2, 3]),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        prefix_cache=st.sampled_from([True, True, True, False]),
        windows=st.sampled_from(WINDOWS),
        is_queued=st.booleans(),
        pace=st.randoms(use_true_random=False),
    )
    def build(
        self,
        num_blocks: int,
        num_ranks: int,
        budget: int,
        max_num_seqs: int,
        prefix_cache: bool,
        windows: tuple[int, ...],
        is_queued: bool,
        pace: random.Random,
    ) -> None:
        self.set_up(
            num_blocks,
            windows,
            prefix_cache=prefix_cache,
            is_queued=is_queued,
            pace=pace,
            num_ranks=num_ranks,
        )
        self.schedule(budget, max_num_seqs, 0, "lookup", 0.0)
        self.size = num_blocks

    def plan(self) -> StepPlan:
        before = {sequence: sequence.rank for sequence in self.scheduler.sequences.running}
        plan = super().plan()
        for source, target in plan.copies:
            assert source // self.size == target // self.size, "a block of another rank is copied"
        for sequence in self.scheduler.sequences.running:
            is_new = sequence.num_preemptions or sequence not in before
            assert is_new or sequence.rank == before[sequence], "it moved while it ran"
        return plan

    @invariant()
    def each_has_blocks_of_its_rank_alone(self) -> None:
        if hasattr(self, "scheduler"):
            for sequence in self.scheduler.sequences.running:
                assert {block // self.size for block in sequence.block_table if block} == {sequence.rank}


RankedMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
TestRanks = RankedMachine.TestCase


def memory(num_blocks: int, num_ranks: int = 2) -> RankedMemory:
    return RankedMemory(num_ranks, lambda after: SequenceMemory(num_blocks, BLOCK_SIZE, after=after))


def started(tables: RankedMemory, name: str, token_ids: list[int]) -> Sequence:
    sequence = Sequence(make_request(name, token_ids))
    tables.start(sequence)
    return sequence


def commit(tables: RankedMemory, sequence: Sequence) -> None:
    sequence.num_computed = len(sequence.token_ids)
    tables.commit(sequence, sequence.num_computed)


def test_sequences_go_where_most_blocks_are_free() -> None:
    tables = memory(num_blocks=11)
    sequences = [
        started(tables, f"r{i}", [20 * i + j for j in range(n)]) for i, n in enumerate((12, 4, 4, 8))
    ]
    assert [sequence.rank for sequence in sequences] == [0, 1, 1, 1]
    assert [part.num_free_blocks for part in tables.parts] == [7, 6]
    assert sequences[0].block_table == [1, 2, 3]
    assert sequences[1].block_table == [12], "block 11 is nobody's"
    tables.check(sequences)


def test_follow_ups_go_where_their_prefix_is() -> None:
    """Also if that rank has fewer free blocks, as long as it lacks no more than is found there."""
    tables = memory(num_blocks=41)
    first, second = (started(tables, name, [*range(at, at + 32)]) for name, at in (("a", 0), ("b", 100)))
    for sequence in (first, second):
        commit(tables, sequence)
    tables.release(second)
    commit(tables, third := started(tables, "c", [*range(200, 248)]))
    assert (first.rank, second.rank, third.rank) == (0, 1, 1)
    again = started(tables, "b again", [*range(100, 132), 7])
    assert (again.rank, again.num_computed) == (1, 32)
    assert again.block_table[:8] == [*range(42, 50)]
    tables.release(first)
    assert started(tables, "a again", [*range(32), 7]).rank == 0


def test_a_common_start_of_prompts_does_not_draw_all_of_them() -> None:
    tables = memory(num_blocks=101)
    ranks = []
    for number in range(8):
        sequence = started(tables, f"r{number}", [*range(8), *range(100 * number + 100, 100 * number + 124)])
        commit(tables, sequence)
        ranks.append(sequence.rank)
    assert sorted(ranks) == [0, 0, 0, 0, 1, 1, 1, 1]


def test_a_rank_without_room_draws_nobody() -> None:
    """Two thirds of the last prompt are cached on rank 0, whose free blocks are too few for all of it."""
    tables = memory(num_blocks=21)
    commit(tables, first := started(tables, "a", [*range(40)]))
    tables.release(first)
    second, third = started(tables, "b", [*range(100, 132)]), started(tables, "c", [*range(200, 216)])
    assert (first.rank, second.rank, third.rank) == (0, 0, 1)
    assert [part.num_free_blocks for part in tables.parts] == [12, 16]
    assert started(tables, "d", [*range(40), *range(300, 320)]).rank == 1


def test_what_forks_is_on_its_parents_rank() -> None:
    tables = memory(num_blocks=11)
    _, parent = started(tables, "a", [*range(12)]), started(tables, "b", [*range(50, 56)])
    commit(tables, parent)
    child = Sequence(parent.request, 1)
    assert tables.fork(parent, child)
    assert (parent.rank, child.rank) == (1, 1)
    assert child.block_table == parent.block_table


def test_who_gives_way_is_of_the_rank_that_lacks_a_block() -> None:
    """Two prompts on each rank; of the second pair, one lacks a block, and the newest of all is on the other rank."""
    queue, runner = LaneQueue(Lock()), FakeRunner(2 * 9, BLOCK_SIZE)
    limits = SchedulerLimits(max_batch_tokens=64, max_num_seqs=8, max_model_len=64)
    scheduler = Scheduler(queue, memory(num_blocks=9), FakeSink(), limits)
    for number, length in enumerate((16, 21, 12, 3)):
        queue.put(make_request(f"r{number}", [20 * number + i for i in range(length)], max_tokens=9), 0.0)

    def step() -> None:
        plan = scheduler.plan(0.0)
        scheduler.commit(plan, runner.launch(plan).wait(), 0.0)

    step()
    sequences = [*scheduler.sequences.running]
    assert [sequence.rank for sequence in sequences] == [0, 1, 0, 1]
    step()
    assert [sequence.num_preemptions for sequence in sequences] == [0, 0, 1, 0]
    scheduler.sequences.check()
