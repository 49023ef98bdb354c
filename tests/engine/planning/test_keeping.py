"""A part of a long sequence is kept: which tokens, in how many blocks, and who finds what is left of it."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.parallel.messages import Listener, Narrator
from penstock.engine.planning.followed_table import FollowedTable
from penstock.engine.planning.keeping import Keeping, least_kept, num_attended
from penstock.engine.planning.request import NO_LIMIT, Request, Sequence
from penstock.engine.planning.step import StepPlan
from tests.engine.fake_runner import (
    FakeProposer,
    FakeRunner,
    UnpricedDrafting,
    expected_output,
    kept,
    make_request,
    next_token,
)
from tests.engine.queued_runner import QueuedRunner
from tests.engine.test_following_drafts import Following
from tests.engine.workloads import BLOCK_SIZE, Run, Workload
from tests.few import examples

KEEPING = Keeping(num_first=4, num_kept=16, stride=8)
"""Small numbers, of blocks of 4 tokens."""
NUM_HELD = KEEPING.most // BLOCK_SIZE
modest = settings(max_examples=examples(60), deadline=None)


# The rule


@given(num_tokens=st.integers(1, 5000), block_size=st.sampled_from([4, 16, 24, 32, 64, 128]))
def test_whole_blocks_are_kept_and_dropped(num_tokens: int, block_size: int) -> None:
    num_tokens = max(num_tokens, least_kept(block_size, 0))
    keeping = Keeping.of(num_tokens, block_size)
    assert num_tokens <= keeping.num_kept < num_tokens + block_size
    assert 16 <= keeping.num_first < keeping.num_kept
    assert keeping.stride % 64 == 0
    for tokens in (keeping.num_first, keeping.num_kept, keeping.stride):
        assert tokens % block_size == 0
    numbers = [keeping.num_dropped(position) for position in range(3 * keeping.most)]
    held = [position - num for position, num in enumerate(numbers)]
    assert held[: keeping.most] == [*range(keeping.most)]
    assert min(held[keeping.most :]) == keeping.num_kept
    assert max(held) == keeping.most - 1


@given(start=st.integers(0, 60), num=st.integers(0, 300))
def test_the_work_of_attention_is_about_that_of_each_token(start: int, num: int) -> None:
    end = start + num
    exact = sum(position + 1 - KEEPING.num_dropped(position) for position in range(start, end))
    assert abs(KEEPING.num_attended(start, end) - exact) <= KEEPING.stride**2
    if end <= KEEPING.most:
        assert KEEPING.num_attended(start, end) == exact == num_attended(start, end)


# Planning


@st.composite
def kept_workloads(draw: st.DrawFn) -> Workload:
    """Long and short prompts that begin alike, with choices; some keep everything, and blocks are short."""
    num_blocks = draw(st.integers(NUM_HELD + 2, 20))
    whole = (num_blocks - 1) * BLOCK_SIZE - 1
    requests = []
    for i in range(draw(st.integers(1, 5))):
        keeping = draw(st.sampled_from([KEEPING, KEEPING, None]))
        longest = 70 if keeping else min(whole, 70)
        shared, own = draw(st.integers(0, longest - 1)), draw(st.integers(1, 9))
        prompt = [3 * k % 11 for k in range(shared)] + [20 + i] * own
        requests.append(
            make_request(
                f"r{i}",
                prompt[:longest],
                max_tokens=draw(st.integers(1, 40)),
                n=draw(st.sampled_from([1, 1, 2])),
                lane=draw(st.integers(0, 2)),
                seed=draw(st.integers(0, 3)),
                keeping=keeping,
            )
        )
    return Workload(
        requests=tuple(requests),
        arrivals=tuple(draw(st.integers(0, 12)) for _ in requests),
        num_blocks=num_blocks,
        budget=draw(st.integers(1, 40)),
        max_num_seqs=draw(st.integers(1, 4)),
        max_model_len=110,
        prefix_cache=draw(st.booleans()),
    )


def expected(workload: Workload, request: Request, index: int) -> list[int]:
    max_len = workload.max_model_len if request.keeping else workload.max_len
    return expected_output(request, index, max_len)


def watched(workload: Workload, runner: FakeRunner, seed: int) -> Run:
    """The run of a workload, of which somebody gives way now and then; the pool is proven all the while."""
    pace = random.Random(seed)

    def watch(run: Run, plan: StepPlan) -> None:
        run.scheduler.sequences.check()
        for chunk in plan.chunks:
            if (keeping := chunk.sequence.keeping) is not None:
                last = chunk.start + chunk.num_tokens - 1
                assert (
                    keeping.num_dropped(chunk.start)
                    == keeping.num_dropped(last)
                    == chunk.sequence.num_dropped
                )
                assert len(chunk.sequence.block_table) <= NUM_HELD

    def disturb(run: Run) -> None:
        if pace.random() < 0.05:
            run.preempt(pace.randrange(4))

    run = Run(workload, watch, runner=runner)
    if isinstance(runner, QueuedRunner):
        runner.watch(run.tables)
    return run.finish(disturb)


def assert_right(run: Run) -> None:
    for request in run.workload.requests:
        for index in range(request.n):
            assert run.tokens[request.request_id, index] == expected(run.workload, request, index)
    run.scheduler.sequences.check()
    assert run.tables.pool.num_free == run.tables.pool.num_blocks - 1
    assert run.tables.index.num_pending == 0


@modest
@given(kept_workloads(), st.integers(0, 99))
def test_a_token_sees_the_same_however_prompts_are_cut_and_whoever_gives_way(
    workload: Workload, seed: int
) -> None:
    assert_right(watched(workload, FakeRunner(workload.num_blocks, BLOCK_SIZE), seed))


@modest
@given(kept_workloads(), st.integers(0, 99))
def test_a_token_sees_the_same_with_a_step_in_flight(workload: Workload, seed: int) -> None:
    pace = random.Random(seed)
    runner = QueuedRunner(workload.num_blocks, BLOCK_SIZE, runs_early=lambda: pace.random() < 0.5)
    assert_right(watched(workload, runner, seed))


@modest
@given(kept_workloads())
def test_windows_lie_in_what_is_kept(workload: Workload) -> None:
    """Two tables: one sees all that is kept, the other a window, whose blocks are given back as ever."""
    windows = (0, KEEPING.num_kept - KEEPING.num_first - BLOCK_SIZE)
    workload = replace(workload, num_blocks=4 * workload.num_blocks)
    run = Run(workload, runner=FakeRunner(workload.num_blocks, BLOCK_SIZE, windows)).finish()
    for request in workload.requests:
        for index in range(request.n):
            tokens = run.tokens[request.request_id, index]
            assert tokens == expected_output(request, index, workload.max_model_len)
    assert run.tables.pool.num_free == run.tables.pool.num_blocks - 1


class KeptProposer(FakeProposer):
    """Knows which tokens are kept, and guesses right half of the time."""

    def _propose(self, sequence: Sequence, most: int) -> list[int]:
        tokens, drafts = list(sequence.token_ids), list[int]()
        for _ in range(most):
            right = next_token(kept(tokens, sequence.keeping), sequence.request, sequence.index)
            tokens.append(right)
            drafts.append(right if self._pace.random() < self._rightness else self._pace.randrange(50))
        return drafts


@modest
@given(st.lists(st.integers(1, KEEPING.most - 1), min_size=4, max_size=8), st.integers(0, 10**6))
def test_a_step_that_follows_drafts_drops_nothing_that_wrong_ones_would_see(
    lengths: list[int], seed: int
) -> None:
    """A model drafts until tokens are dropped, and steps are launched as if its drafts were right."""
    requests = [
        make_request(f"r{i}", [i] * length, max_tokens=40, seed=i, keeping=KEEPING)
        for i, length in enumerate(lengths)
    ]
    workload = Workload(
        requests=tuple(requests),
        arrivals=(0,) * len(requests),
        num_blocks=100,
        budget=60,
        max_num_seqs=3,
        max_model_len=100,
        prefix_cache=False,
    )
    run = Following(workload, seed, stops=False)
    assert_right(run.finish())
    assert not run.drafting.failed


@modest
@given(kept_workloads(), st.integers(0, 99))
def test_drafts_change_no_answer(workload: Workload, seed: int) -> None:
    pace = random.Random(seed)
    run = Run(workload, runner=FakeRunner(workload.num_blocks, BLOCK_SIZE))
    run.scheduler.drafting = UnpricedDrafting(KeptProposer(pace, 0.7), 4, pace)
    assert_right(run.finish())


# What others find


def run_of(
    *requests: Request, num_blocks: int = 12, budget: int = 64, runner: FakeRunner | None = None
) -> Run:
    """One after another."""
    workload = Workload(
        requests=requests,
        arrivals=tuple(100 * number for number in range(len(requests))),
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=2,
        max_model_len=200,
        prefix_cache=True,
    )
    return Run(workload, runner=runner or FakeRunner(num_blocks, BLOCK_SIZE)).finish()


def test_a_prompt_longer_than_the_pool_is_answered() -> None:
    request = make_request("long", [k % 13 for k in range(150)], max_tokens=20, keeping=KEEPING)
    run = run_of(request, num_blocks=NUM_HELD + 1)
    assert run.tokens["long", 0] == expected_output(request, 0, 200)
    timings = run.ended["long", 0].timings
    assert timings is not None
    assert timings.num_kv_dropped == KEEPING.num_dropped(150 + 20 - 2)


def test_what_is_kept_has_to_fit_into_the_pool() -> None:
    """Else its sequences are as long as those of which everything is kept."""
    run = run_of(make_request("r", [1, 2, 3], max_tokens=190, keeping=KEEPING), num_blocks=NUM_HELD)
    assert len(run.tokens["r", 0]) == (NUM_HELD - 1) * BLOCK_SIZE - 3


def test_only_blocks_before_the_first_drop_are_found() -> None:
    prompt = [k % 13 for k in range(100)]
    first, whole, again = (
        make_request(name, prompt, max_tokens=2, keeping=keeping)
        for name, keeping in (("first", KEEPING), ("whole", None), ("again", KEEPING))
    )
    run = run_of(first, whole, again, num_blocks=60)
    cached = {name: run.ended[name, 0].timings for name in ("first", "whole", "again")}
    assert {name: t.num_cached_tokens for name, t in cached.items() if t} == {
        "first": 0,
        "whole": KEEPING.most,
        "again": KEEPING.most,
    }
    for request in (first, whole, again):
        assert run.tokens[request.request_id, 0] == expected_output(request, 0, 200)
    assert run.tables.num_cached_blocks == 101 // BLOCK_SIZE  # those of `whole` alone


def test_blocks_in_flight_are_found_once_they_are_written_although_some_are_to_be_dropped() -> None:
    """The second prompt begins behind two cached blocks, and one chunk goes up to the first place of a drop. The third
    reads all that was left."""
    prompt = [k % 13 for k in range(100)]
    requests = [
        make_request(name, prompt[:length], max_tokens=2, keeping=keeping)
        for name, length, keeping in (("short", 9, KEEPING), ("long", 100, KEEPING), ("whole", 99, None))
    ]
    run = run_of(*requests, num_blocks=60, budget=16, runner=QueuedRunner(60, BLOCK_SIZE))
    cached = [run.ended[request.request_id, 0].timings for request in requests]
    assert [timings.num_cached_tokens for timings in cached if timings] == [0, 8, KEEPING.most]
    for request in requests:
        assert run.tokens[request.request_id, 0] == expected_output(request, 0, 200)


def test_one_that_never_gets_so_long_keeps_all() -> None:
    run = run_of(make_request("r", [1] * 4, max_tokens=KEEPING.most - 4, keeping=KEEPING))
    assert run.tables.num_cached_blocks == KEEPING.most // BLOCK_SIZE - 1
    timings = run.ended["r", 0].timings
    assert timings is not None
    assert timings.num_kv_dropped == 0


@pytest.mark.parametrize("make", [FakeRunner, QueuedRunner])
@pytest.mark.parametrize("num_prompt", [KEEPING.most, KEEPING.most + 1, KEEPING.most + 8, 60, 64, 65])
def test_choices_fork_where_they_see_the_same(num_prompt: int, make: type[FakeRunner]) -> None:
    """With a step in flight, the first choice may have dropped what the others' next token sees."""
    request = make_request("r", [k % 7 for k in range(num_prompt)], max_tokens=30, n=3, keeping=KEEPING)
    run = run_of(request, num_blocks=40, runner=make(40, BLOCK_SIZE))
    for index in range(3):
        assert run.tokens["r", index] == expected_output(request, index, 200)


# Other ranks


def test_other_ranks_hear_of_what_was_dropped() -> None:
    narrator, listener = Narrator(), Listener()
    request = make_request("r", [k % 13 for k in range(90)], max_tokens=30, keeping=KEEPING)
    workload = Workload(
        requests=(request,),
        arrivals=(0,),
        num_blocks=12,
        budget=10,
        max_num_seqs=1,
        max_model_len=NO_LIMIT,
        prefix_cache=True,
    )
    numbers, followed, known = set(), FollowedTable(), list[int]()

    def watch(_: Run, plan: StepPlan) -> None:
        if not plan.chunks:
            return
        (mine,), (theirs,) = plan.chunks, listener.plan(narrator.launch(plan)).chunks
        assert theirs.sequence.block_table == mine.sequence.block_table
        assert theirs.sequence.num_dropped == mine.sequence.num_dropped
        numbers.add(mine.sequence.num_dropped)
        places, first = followed.changes(theirs.sequence)
        for place in places:
            known[place] = theirs.sequence.block_table[place]
        known[first:] = theirs.sequence.block_table[first:]
        assert known == mine.sequence.block_table, "whoever follows the rank's table has all of it"

    Run(workload, watch).finish()
    assert len(numbers) > 3
