"""Who may hold a block together with whom, who may write it, and that in the end nobody holds any."""

from __future__ import annotations

from itertools import combinations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.request import FinishReason, Sequence
from penstock.engine.planning.step import StepPlan
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads
from tests.few import examples

modest = settings(max_examples=examples(40), deadline=None)


def may_share(a: Sequence, b: Sequence, i: int) -> bool:
    """The i-th block: choices of one request share its prompt, others full blocks of the same tokens and salt."""
    end = (i + 1) * BLOCK_SIZE
    if a.request is b.request and i * BLOCK_SIZE < a.num_prompt_tokens:
        return True
    same = a.token_ids[:end] == b.token_ids[:end] and a.request.salt == b.request.salt
    return same and min(len(a.token_ids), len(b.token_ids)) >= end


@modest
@given(workloads())
def test_two_sequences_hold_one_block_only_for_a_common_prefix(workload: Workload) -> None:
    def watch(run: Run, _: StepPlan) -> None:
        for a, b in combinations(run.scheduler.sequences.running, 2):
            for block in set(a.block_table) & set(b.block_table):
                i = a.block_table.index(block)
                assert b.block_table.index(block) == i
                assert may_share(a, b, i)

    Run(workload, watch).finish()


@modest
@given(workloads(prefix_cache=False, num_choices=(1,)))
def test_without_forks_and_prefix_cache_no_block_has_two_holders(workload: Workload) -> None:
    def watch(run: Run, _: StepPlan) -> None:
        assert max(run.tables.pool.ref_counts) <= 1

    Run(workload, watch).finish()


@modest
@given(workloads())
def test_what_a_step_writes_belongs_to_one_sequence_alone(workload: Workload) -> None:
    def watch(run: Run, plan: StepPlan) -> None:
        written: set[int] = set()
        for chunk in plan.chunks:
            positions = range(chunk.start, chunk.start + chunk.num_tokens)
            blocks = {chunk.sequence.block_table[p // BLOCK_SIZE] for p in positions}
            assert all(run.tables.pool.ref_counts[block] == 1 for block in blocks)
            assert not blocks & written
            written |= blocks

    Run(workload, watch).finish()


@modest
@given(workloads())
def test_a_copy_goes_into_a_block_of_its_own_that_its_new_holder_writes(workload: Workload) -> None:
    def watch(run: Run, plan: StepPlan) -> None:
        targets = [target for _, target in plan.copies]
        assert len(set(targets)) == len(targets)
        assert not set(targets) & {source for source, _ in plan.copies}
        for source, target in plan.copies:
            assert run.tables.pool.ref_counts[target] == 1
            (holder,) = (c.sequence for c in plan.chunks if target in c.sequence.block_table)
            assert holder.request.n > 1
            assert source not in holder.block_table

    Run(workload, watch).finish()


@modest
@given(workloads(num_choices=(1,)))
def test_a_single_choice_is_never_copied(workload: Workload) -> None:
    def watch(_: Run, plan: StepPlan) -> None:
        assert plan.copies == []

    Run(workload, watch).finish()


@modest
@given(workloads())
def test_nobody_holds_more_blocks_than_the_known_tokens_need(workload: Workload) -> None:
    def watch(run: Run, _: StepPlan) -> None:
        for sequence in run.scheduler.sequences.running:
            held = len(sequence.block_table)
            assert sequence.num_committed <= sequence.num_computed <= held * BLOCK_SIZE
            assert held <= run.tables.blocks_for(len(sequence.token_ids))
        assert all(not sequence.block_table for sequence in run.scheduler.sequences.waiting)

    Run(workload, watch).finish()


def assert_all_free(run: Run) -> None:
    pool = run.tables.pool
    assert not any(pool.ref_counts)
    assert sorted(pool.free_blocks()) == list(range(1, pool.num_blocks))
    assert run.tables.index.num_pending == 0


@modest
@given(workloads(), st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=4))
def test_in_the_end_every_count_is_zero(workload: Workload, preemptions: list[tuple[int, int]]) -> None:
    def disturb(run: Run) -> None:
        run.scheduler.sequences.check()
        for at, pick in preemptions:
            if at == len(run.steps):
                run.preempt(pick)

    assert_all_free(Run(workload).finish(disturb))


@modest
@given(workloads(), st.integers(0, 25))
def test_cancelling_all_at_any_step_frees_all(workload: Workload, at: int) -> None:
    run = Run(workload)
    for _ in range(at):
        run.step()
    run.arrive()
    for request in workload.requests:
        run.cancel(request)
    assert run.is_over
    assert_all_free(run)
    assert run.step().pieces == ()


@modest
@given(workloads(), st.integers(0, 25), st.integers(0, 5))
def test_who_is_cancelled_during_a_step_gets_nothing_of_it(workload: Workload, at: int, pick: int) -> None:
    victim = workload.requests[pick % len(workload.requests)]

    def watch(run: Run, _: StepPlan) -> None:
        if len(run.steps) == at:
            run.receive(run.scheduler.sequences.cancel(victim.request_id, run.now))

    run = Run(workload, watch).finish()
    for index in range(victim.n):
        last = run.ended[victim.request_id, index]
        assert last.finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    assert_all_free(run)


@modest
@given(workloads(), st.integers(0, 25))
def test_a_failure_in_flight_ends_every_choice_once_and_frees_all(workload: Workload, at: int) -> None:
    def watch(run: Run, plan: StepPlan) -> None:
        if len(run.steps) == at:
            run.receive(run.scheduler.fail_step(plan, "broken", run.now))
            assert run.scheduler.fail_step(plan, "again", run.now) == []

    run = Run(workload, watch).finish()
    assert len(run.ended) == sum(request.n for request in workload.requests)
    for output in run.ended.values():
        assert (output.error is not None) == (output.finish_reason is FinishReason.FAILED)
    assert_all_free(run)
