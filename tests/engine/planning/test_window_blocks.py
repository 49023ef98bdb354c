"""Under a sliding window: which blocks a sequence gives back while it runs, and what is found of them afterwards."""

from __future__ import annotations

import random
from threading import Lock

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import NO_LIMIT, Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.step import StepPlan
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink, expected_output, make_request
from tests.engine.queued_runner import QueuedRunner
from tests.few import examples

BLOCK_SIZE = 4


def computed(tables: SequenceMemory, prompt: list[int]) -> Sequence:
    sequence = Sequence(make_request("r", prompt))
    tables.start(sequence)
    sequence.num_computed = len(prompt)
    tables.commit(sequence, len(prompt))
    return sequence


class WindowedScheduler:
    """A scheduler with a window, and a runner that reads no block behind it."""

    def __init__(
        self, *windows: int, num_blocks: int, budget: int = 8, is_queued: bool = False, seed: int = 0
    ) -> None:
        pace = random.Random(seed)
        self.window = 0 if 0 in windows else max(windows)
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE, windows)
        self.tables = SequenceMemory(num_blocks, BLOCK_SIZE, windows=windows)
        if is_queued:
            self.runner = late = QueuedRunner(num_blocks, BLOCK_SIZE, lambda: pace.random() < 0.5, windows)
            late.watch(self.tables)
        self.queue = LaneQueue(Lock())
        limits = SchedulerLimits(max_batch_tokens=budget, max_num_seqs=4, max_model_len=400)
        self.scheduler = Scheduler(self.queue, self.tables, FakeSink(), limits)
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.cached: dict[str, int] = {}
        self.most_held = 0

    def run(self, *prompts: list[int], max_tokens: int = 6, n: int = 1) -> None:
        requests = [make_request(f"r{i}", p, max_tokens=max_tokens, n=n) for i, p in enumerate(prompts)]
        for request in requests:
            self.queue.put(request, 0.0)
        flights = []
        self.tokens = {}
        for _ in range(2_000):
            plan = self.scheduler.plan(0.0)
            if plan.chunks:
                flights.append((plan, self.runner.launch(plan)))
            self.note_held()
            while len(flights) > (self.runner.num_ahead if plan.chunks else 0):
                landed, step = flights.pop(0)
                self.commit(landed, step.wait())
            if self.scheduler.sequences.is_idle and not any(self.queue.depths().values()):
                break
        assert self.scheduler.sequences.is_idle, "the work does not end"
        self.scheduler.sequences.check()
        assert self.tables.pool.num_free == self.tables.pool.num_blocks - 1
        for request in requests:
            for index in range(n):
                expected = expected_output(request, index, self.scheduler.max_len, self.window)
                assert self.tokens[request.request_id, index] == expected

    def note_held(self) -> None:
        for sequence in self.scheduler.sequences.running:
            self.most_held = max(self.most_held, sum(map(bool, sequence.block_table)))

    def commit(self, plan: StepPlan, result: object) -> None:
        for output in self.scheduler.commit(plan, result, 0.0):  # type: ignore[arg-type]
            self.tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            if output.timings is not None:
                self.cached[output.request_id] = output.timings.num_cached_tokens


def test_blocks_behind_the_window_are_given_back_and_their_entries_are_the_null_block() -> None:
    tables = SequenceMemory(20, BLOCK_SIZE, windows=[6])
    sequence = computed(tables, list(range(30)))
    before = list(sequence.block_table)
    assert tables.grow(sequence, 31) == []
    assert sequence.block_table == [0] * 6 + before[6:], "token 30 sees 25 to 30, and a fork sees 24"
    assert tables.pool.num_free == 19 - 2
    tables.check([sequence])
    tables.release(sequence)
    assert tables.pool.num_free == 19
    tables.check([])


def test_no_more_room_is_taken_at_the_start_than_window_and_chunk_need() -> None:
    tables = SequenceMemory(20, BLOCK_SIZE, windows=[6])
    tables.limit_chunks(10)
    sequence = Sequence(make_request("r", list(range(60))))
    assert tables.num_free_needed(sequence) == 4
    tables.start(sequence)
    assert len(sequence.block_table) == 4


def test_blocks_that_a_step_in_flight_may_read_are_free_when_it_is_back() -> None:
    tables = SequenceMemory(20, BLOCK_SIZE, windows=[6])
    sequence = computed(tables, list(range(30)))
    step = tables.begin_step([])
    num_free = tables.pool.num_free
    tables.grow(sequence, 31)
    assert (tables.pool.num_free, tables.num_returning) == (num_free, 6)
    tables.check([sequence])
    tables.end_step(step)
    assert tables.pool.num_free == num_free + 6
    tables.check([sequence])


def test_blocks_without_a_hash_are_kept_until_their_step_is_back() -> None:
    """Else no prompt that is longer than the window would ever be found in the cache."""
    tables = SequenceMemory(20, BLOCK_SIZE, windows=[6])
    sequence = computed(tables, list(range(30)))
    sequence.num_committed, sequence.num_computed = 12, 30
    tables.grow(sequence, 31)
    assert sequence.block_table.count(0) == 3
    assert tables.will_have_room(sequence, 30 + 4 * (tables.pool.num_free + 3))
    assert not tables.will_have_room(sequence, 30 + 4 * (tables.pool.num_free + 5))
    tables.commit(sequence, 30)
    tables.grow(sequence, 31)
    assert sequence.block_table.count(0) == 6


def test_a_prefix_is_found_by_the_blocks_in_its_window() -> None:
    tables = SequenceMemory(20, BLOCK_SIZE, windows=[6])
    owner = computed(tables, list(range(30)))
    blocks = list(owner.block_table)
    tables.grow(owner, 31)
    for block in blocks[:5]:  # they are free, and their content is gone when they are reused
        tables.index.drop(block)
    other = Sequence(make_request("x", [*range(28), 90, 91]))
    prefix = tables.find_prefix(other).entries
    assert prefix == [0] * 5 + blocks[5:7], "two blocks cover the window of 6 tokens"
    assert tables.num_free_needed(other) == 2, "one that is free, and one for the last two tokens"
    tables.start(other)
    assert (other.num_computed, other.block_table.count(0)) == (28, 5)
    tables.check([owner, other])


def test_a_prefix_whose_window_is_not_cached_is_no_hit() -> None:
    tables = SequenceMemory(20, BLOCK_SIZE, windows=[6])
    owner = computed(tables, list(range(30)))
    blocks = list(owner.block_table)
    other = Sequence(make_request("x", [*range(28), 90, 91]))
    for dropped, num_found in ((6, 6), (0, 6), (4, 4), (2, 0)):
        tables.index.drop(blocks[dropped])
        expected = blocks[:num_found]
        expected[: max(0, num_found - 2)] = [0] * max(0, num_found - 2)
        assert tables.find_prefix(other).entries == expected


@pytest.mark.parametrize(("num_prompt", "num_null"), [(9, 0), (10, 1), (20, 3)])
def test_a_fork_of_a_parent_that_is_a_step_ahead_has_its_window(num_prompt: int, num_null: int) -> None:
    """The child computes the last prompt token again, which sees one token before those that the parent needs."""
    tables = SequenceMemory(20, BLOCK_SIZE, windows=[6])
    parent = computed(tables, list(range(num_prompt)))
    tables.grow(parent, num_prompt + 1)
    child = Sequence(parent.request, 1)
    tables.fork(parent, child)
    assert child.num_computed == num_prompt - 1
    assert child.block_table[: num_null + 1] == [0] * num_null + [parent.block_table[num_null]]
    assert num_null * BLOCK_SIZE <= child.num_computed - 5, "the first token that it sees"
    tables.check([parent, child])
    tables.release(parent)
    tables.release(child)
    assert tables.pool.num_free == 19


def test_a_window_sets_no_limit_to_the_length_unless_it_is_wider_than_the_pool() -> None:
    for num_blocks, window, max_tokens in ((5, 4, NO_LIMIT), (5, 12, NO_LIMIT), (5, 13, 16), (5, 0, 16)):
        tables = SequenceMemory(num_blocks, BLOCK_SIZE, windows=[window])
        assert tables.max_tokens == max_tokens
        assert tables.num_free_tokens == 16


@settings(max_examples=examples(60), deadline=None)
@given(
    window=st.integers(1, 24),
    num_blocks=st.integers(4, 16),
    budget=st.integers(1, 20),
    lengths=st.lists(st.integers(1, 120), min_size=1, max_size=3),
    n=st.integers(1, 3),
    is_queued=st.booleans(),
    seed=st.integers(0, 1000),
)
def test_prompts_longer_than_the_pool_are_served(
    window: int, num_blocks: int, budget: int, lengths: list[int], n: int, is_queued: bool, seed: int
) -> None:
    windowed = WindowedScheduler(window, num_blocks=num_blocks, budget=budget, is_queued=is_queued, seed=seed)
    longest = windowed.scheduler.max_len - 1
    windowed.run(*([i % 7 for i in range(min(length, longest))] for length in lengths), n=n)


@pytest.mark.parametrize("window", [1, 4, 7])
def test_a_sequence_holds_no_more_than_window_and_chunk(window: int) -> None:
    windowed = WindowedScheduler(window, num_blocks=40, budget=8)
    windowed.run(list(range(150)), max_tokens=20)
    assert windowed.most_held <= windowed.tables.blocks_for(window + 8) + 1


def test_the_next_turn_of_a_long_conversation_is_a_hit() -> None:
    windowed = WindowedScheduler(8, num_blocks=12)
    prompt = [i % 13 for i in range(100)]
    windowed.run(prompt, max_tokens=4)
    windowed.run([*prompt, 1, 2, 3], max_tokens=4)
    assert windowed.cached["r0"] == 100


# Several tables


def test_a_table_with_a_window_gives_back_what_others_keep() -> None:
    tables = SequenceMemory(40, BLOCK_SIZE, windows=[0, 6, 6])
    sequence = computed(tables, list(range(30)))
    before = list(sequence.block_table)
    assert tables.grow(sequence, 31) == []
    assert sequence.block_table[0::3] == before[0::3]
    for number in (1, 2):
        assert sequence.block_table[number::3] == [0] * 6 + before[18 + number :: 3]
    tables.check([sequence])
    tables.release(sequence)
    assert tables.pool.num_free == 39


def test_a_window_takes_blocks_as_its_tokens_come() -> None:
    tables = SequenceMemory(40, BLOCK_SIZE, windows=[0, 6])
    tables.limit_chunks(10)
    sequence = Sequence(make_request("r", list(range(60))))
    assert tables.num_free_needed(sequence) == 15 + 4
    tables.start(sequence)
    sequence.num_computed = 10
    tables.commit(sequence, 10)
    assert tables.grow(sequence, 20) == []
    assert [bool(block) for block in sequence.block_table[1::2]] == [False] + 4 * [True] + 10 * [False]
    tables.check([sequence])


def test_a_prefix_is_found_if_every_table_has_what_it_sees_of_it() -> None:
    tables = SequenceMemory(40, BLOCK_SIZE, windows=[0, 6])
    owner = computed(tables, list(range(30)))
    whole, windowed = owner.block_table[0::2], owner.block_table[1::2]
    other = Sequence(make_request("x", [*range(28), 90, 91]))

    def found() -> tuple[list[int], list[int]]:
        prefix = tables.find_prefix(other).entries
        return prefix[0::2], prefix[1::2]

    assert found() == (whole[:7], [0] * 5 + windowed[5:7])
    tables.index.drop(windowed[2])
    assert found() == (whole[:7], [0] * 5 + windowed[5:7]), "nobody sees it"
    tables.index.drop(windowed[6])
    assert found() == (whole[:6], [0] * 4 + windowed[4:6])
    tables.index.drop(windowed[5])
    assert found() == (whole[:5], [0] * 3 + windowed[3:5])
    tables.index.drop(windowed[4])
    assert found() == (whole[:2], windowed[:2]), "the third block is gone, and the fourth alone is no window"
    tables.index.drop(whole[0])
    assert found() == ([], [])


@pytest.mark.parametrize(
    ("windows", "num_blocks", "most"),
    [((0, 6), 10, 20), ((0, 6), 14, 36), ((0, 6, 6), 14, 20), ((0, 0), 11, 20), ((6, 6), 9, NO_LIMIT)],
)
def test_the_longest_sequence_is_the_longest_that_fits(
    windows: tuple[int, ...], num_blocks: int, most: int
) -> None:
    tables = SequenceMemory(num_blocks, BLOCK_SIZE, windows=windows)
    tables.limit_chunks(5)
    assert tables.max_tokens == most
    windowed = WindowedScheduler(*windows, num_blocks=num_blocks, budget=5)
    windowed.run([i % 7 for i in range(min(most, 120) - 6)], max_tokens=6)
