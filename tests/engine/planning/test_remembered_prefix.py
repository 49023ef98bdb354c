"""What was found for a waiting sequence is remembered: while nothing changed, looking again reads nothing."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import Request, Sequence
from tests.engine.fake_runner import make_request
from tests.engine.planning.test_scheduler import SchedulerHarness
from tests.engine.planning.test_states import Harness
from tests.few import examples

BLOCK_SIZE = 4
PROMPT = list(range(400))
NUM_KNOWN = 99


class CountingDict(dict[bytes, int]):
    num_reads = 0

    def get(self, *arguments: object) -> int | None:  # type: ignore[override]
        self.num_reads += 1
        return super().get(*arguments)  # type: ignore[call-overload, no-any-return]


class CountingList(list[int]):
    num_reads = 0

    def __getitem__(self, place: object) -> int:  # type: ignore[override]
        self.num_reads += 1
        return super().__getitem__(place)  # type: ignore[call-overload, no-any-return]


class Reads:
    """The reads of the prefix index and of the reference counts since it was asked last."""

    def __init__(self, tables: SequenceMemory) -> None:
        self.hashes = tables.index._block_of[0] = CountingDict(tables.index._block_of[0])
        self.counts = tables.pool.ref_counts = CountingList(tables.pool.ref_counts)

    def take(self) -> int:
        num_reads = self.hashes.num_reads + self.counts.num_reads
        self.hashes.num_reads = self.counts.num_reads = 0
        return num_reads


def looked(tables: SequenceMemory, sequence: Sequence) -> tuple[list[int], int]:
    return tables.find_prefix(sequence).entries, tables.num_free_needed(sequence)


def crowded() -> SchedulerHarness:
    """Two thirds of the pool are held by a sequence of 64 blocks; a long prompt of which 99 blocks are cached waits."""
    harness = SchedulerHarness(num_blocks=182, budget=512, max_model_len=700)
    harness.submit(make_request("known", PROMPT, max_tokens=1))
    harness.finish()
    harness.submit(make_request("runs", list(range(1000, 1256)), max_tokens=400, lane=0))
    harness.step()
    return harness


@pytest.fixture
def counted() -> tuple[SchedulerHarness, Reads]:
    harness = crowded()
    return harness, Reads(harness.tables)


def test_a_request_that_does_not_fit_is_looked_up_once_while_nothing_changes(
    counted: tuple[SchedulerHarness, Reads],
) -> None:
    harness, reads = counted
    harness.submit(make_request("waits", [*PROMPT[:-1], *range(2000, 2080)], max_tokens=1))
    while harness.scheduler.sequences.running[0].num_computed % BLOCK_SIZE:
        harness.step()
    harness.step()
    assert harness.queue.depths()
    assert reads.take() > NUM_KNOWN
    for _ in range(BLOCK_SIZE - 1):
        harness.step()
        assert reads.take() < 10, "those of the sequence that runs"
    harness.step()
    assert reads.take() < 10, "nor is more looked up when a block was filled, and another taken"


def test_several_requests_that_a_queue_tries_are_looked_up_once_each(
    counted: tuple[SchedulerHarness, Reads], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As those of lanes more urgent than the one whose turn it is."""
    harness, reads = counted
    tails = [range(2000 + 100 * number, 2080 + 100 * number) for number in range(3)]
    requests = [make_request(f"waits {tail.start}", [*PROMPT[:-1], *tail]) for tail in tails]

    def take(fits: Callable[[Request], bool], *_: object) -> Request | None:
        return next(filter(fits, requests), None)

    monkeypatch.setattr(harness.queue, "take", take)
    while harness.scheduler.sequences.running[0].num_computed % BLOCK_SIZE != 1:
        harness.step()
    assert reads.take() > 3 * NUM_KNOWN
    for _ in range(BLOCK_SIZE - 1):
        harness.step()
        assert reads.take() < 10


def test_what_can_be_found_now_is_found_by_who_looked_before() -> None:
    tables = SequenceMemory(120, BLOCK_SIZE)
    waits = Sequence(make_request("waits", [*PROMPT[:40], 7]))
    assert looked(tables, waits) == ([], 11)
    owner = Sequence(make_request("owner", PROMPT[:41]))
    tables.start(owner)
    owner.num_computed = 41
    tables.commit(owner, 41)
    assert looked(tables, waits) == (owner.block_table[:10], 1)
    blocks = owner.block_table[:10]
    tables.release(owner)
    assert looked(tables, waits) == (blocks, 11), "nobody holds what is found"
    hog = Sequence(make_request("hog", list(range(2000, 2000 + 111 * BLOCK_SIZE))))
    tables.start(hog)
    assert looked(tables, waits) == (blocks[:8], 11), "the deepest are overwritten first"


def test_a_token_that_is_known_meanwhile_lets_more_be_found() -> None:
    """A sequence that gave way waits while the step brings its token."""
    tables = SequenceMemory(20, BLOCK_SIZE)
    owner, waits = Sequence(make_request("a", PROMPT[:9])), Sequence(make_request("b", PROMPT[:8]))
    tables.start(owner)
    owner.num_computed = 9
    tables.commit(owner, 9)
    assert looked(tables, waits)[0] == owner.block_table[:1]
    waits.token_ids.append(PROMPT[8])
    assert looked(tables, waits)[0] == owner.block_table[:2]


def test_who_starts_remembers_nothing() -> None:
    tables = SequenceMemory(20, BLOCK_SIZE)
    sequence = Sequence(make_request("a", PROMPT[:9]))
    looked(tables, sequence)
    tables.start(sequence)
    assert sequence.prefix is None


def test_a_state_within_a_block_is_found_by_who_looked_before_and_missed_when_it_is_gone() -> None:
    """No block is full, so that nothing but the snapshot changes."""
    harness = Harness()
    waits = Sequence(make_request("waits", PROMPT[:10]))
    assert harness.tables.find_prefix(waits).num_tokens == 0
    harness.run(make_request("a", PROMPT[:10], max_tokens=1))
    assert harness.tables.find_prefix(waits).num_tokens == 9
    for snapshot in harness.tables.snapshots:
        harness.tables.snapshots.drop(snapshot)
    assert harness.tables.find_prefix(waits).num_tokens == 0


@settings(max_examples=examples(60), deadline=None)
@given(st.data())
def test_what_is_kept_up_to_date_is_what_a_new_look_would_find(data: st.DataObject) -> None:
    """Whatever comes, is found again, shared and overwritten between two looks."""
    tables = SequenceMemory(14, BLOCK_SIZE)
    prompts = [[*PROMPT[:fork], *range(1000 + fork, 1030 + fork)] for fork in (0, 4, 9, 16, 24)]
    running: list[Sequence] = []
    watching = [Sequence(make_request(f"waits {i}", prompt)) for i, prompt in enumerate(prompts)]
    for number in range(data.draw(st.integers(1, 12), "operations")):
        ends = data.draw(st.booleans(), "ends")
        if ends and running:
            tables.release(running.pop(data.draw(st.integers(0, len(running) - 1), "which")))
        else:
            length = data.draw(st.integers(1, 30), "length")
            prompt = data.draw(st.sampled_from(prompts), "prompt")[:length]
            sequence = Sequence(make_request(f"runs {number}", prompt))
            if tables.num_free_needed(sequence) <= tables.pool.num_free:
                tables.start(sequence)
                sequence.num_computed = len(prompt)
                tables.commit(
                    sequence, data.draw(st.integers(sequence.num_committed, len(prompt)), "confirmed")
                )
                running.append(sequence)
        for sequence in watching:
            if data.draw(st.booleans(), "looks"):
                assert looked(tables, sequence) == looked(tables, Sequence(sequence.request))


def test_more_changes_than_are_remembered_have_it_looked_up_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.planning.prefix_index._REMEMBERED", 2)
    monkeypatch.setattr("penstock.engine.planning.blocks._REMEMBERED", 2)
    tables = SequenceMemory(20, BLOCK_SIZE)
    owner, waits = Sequence(make_request("a", PROMPT[:40])), Sequence(make_request("b", PROMPT[:40]))
    tables.start(owner)
    owner.num_computed = 40
    tables.commit(owner, 40)
    assert looked(tables, waits) == (owner.block_table[:9], 1)
    tables.release(owner)
    hog = Sequence(make_request("hog", list(range(2000, 2060))))
    tables.start(hog)
    assert looked(tables, waits) == looked(tables, Sequence(waits.request))
