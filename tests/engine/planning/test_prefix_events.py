"""The events of the prefix cache: replayed, they give the index, step by step."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterable
from queue import SimpleQueue

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.engine import Engine
from penstock.engine.planning import prefix_events as events
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.prefix_events import Cleared, Dropped, Found, PrefixEvent, PrefixLog, Stored
from penstock.engine.planning.prefix_index import extend_hashes
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason, Sequence
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeRunner, FakeSink, make_request
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads
from tests.few import examples

modest = settings(max_examples=examples(60), deadline=None)
PATIENCE_S = 20.0


class Replay:
    """Knows nothing but the events."""

    def __init__(self) -> None:
        self.resident: dict[bytes, Stored] = {}
        self.ever: dict[bytes, Stored] = {}
        self.num_found_tokens = 0

    def take(self, told: Iterable[PrefixEvent]) -> None:
        for event in told:
            match event:
                case Stored():
                    self._store(event)
                case Found():
                    self.num_found_tokens += self.resident[event.hash].depth * BLOCK_SIZE
                case Dropped():
                    del self.resident[event.hash]
                case Cleared():
                    self.resident.clear()

    def _store(self, event: Stored) -> None:
        assert event.hash not in self.resident
        assert event.depth == 1 + (0 if event.parent is None else self.ever[event.parent].depth)
        assert self.tokens_of(event)[1] == event.hash
        self.resident[event.hash] = self.ever[event.hash] = event

    def tokens_of(self, event: Stored) -> tuple[list[int], bytes]:
        """The tokens from the start of the chain on, and the hash that they give."""
        chain = [event]
        while chain[-1].parent is not None:
            chain.append(self.ever[chain[-1].parent])
        assert {block.salt for block in chain} == {event.salt}
        token_ids = [token_id for block in reversed(chain) for token_id in block.token_ids]
        hashes: list[bytes] = []
        extend_hashes(hashes, token_ids, len(chain), BLOCK_SIZE, event.salt)
        return token_ids, hashes[-1]


def logged(workload: Workload) -> tuple[Run, PrefixLog]:
    run = Run(workload)
    run.tables.log = log = PrefixLog()
    return run, log


def hashes_of(tables: SequenceMemory, replay: Replay) -> set[bytes]:
    """Returns the hashes in the index that a replay can know of, and checks that there are no others."""
    known = {block_hash for block_hash in replay.ever if tables.index.block_of(block_hash) is not None}
    assert len(known) == len(tables.index)
    return known


@modest
@given(
    workloads(prefix_cache=True, num_blocks=(8, 14)),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=4),
)
def test_replayed_events_are_the_index_after_every_step(
    workload: Workload, preemptions: list[tuple[int, int]]
) -> None:
    run, log = logged(workload)
    replay = Replay()

    def compare(run: Run) -> None:
        for at, pick in preemptions:
            if at == len(run.steps):
                run.preempt(pick)
        replay.take(log.drain())
        assert set(replay.resident) == hashes_of(run.tables, replay)

    run.finish(compare)
    compare(run)
    assert tuple(log.drain()) == ()


@modest
@given(workloads(prefix_cache=True, num_blocks=(8, 14)))
def test_hits_are_those_that_are_counted(workload: Workload) -> None:
    run, log = logged(workload)
    replay = Replay()
    run.finish(lambda _: replay.take(log.drain()))
    replay.take(log.drain())
    assert replay.num_found_tokens == run.scheduler.sequences.counters.num_prefix_hit_tokens


@modest
@given(workloads(prefix_cache=False))
def test_without_a_prefix_cache_nothing_is_told(workload: Workload) -> None:
    run, log = logged(workload)
    run.finish()
    assert tuple(log.drain()) == ()


def test_a_block_is_told_with_all_that_finds_it_again() -> None:
    tables = SequenceMemory(20, 4, log=PrefixLog())
    assert tables.log is not None
    sequence = Sequence(make_request("r", list(range(10)), salt=b"alice"))
    tables.start(sequence)
    tables.commit(sequence, 9)
    first, second = list(tables.log.drain())
    assert first == Stored(sequence.block_hashes[0], None, 1, (0, 1, 2, 3), b"alice")
    assert second == Stored(sequence.block_hashes[1], first.hash, 2, (4, 5, 6, 7), b"alice")

    again = Sequence(make_request("s", list(range(10)), salt=b"alice"))
    tables.start(again)
    assert tuple(tables.log.drain()) == (Found(second.hash),)


def test_a_log_that_nobody_drains_starts_over(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(events, "MAX_EVENTS", 3)
    log = PrefixLog()
    for number in range(4):
        log.add(Dropped(bytes([number])))
    assert tuple(log.drain()) == (Cleared(), Dropped(bytes([3])))
    assert tuple(log.drain()) == ()


class Watched:
    """An engine, and its reports as they come."""

    def __init__(self, *, prefix_cache: bool = True) -> None:
        self.reports: SimpleQueue[StepReport] = SimpleQueue()
        self.queue = LaneQueue(threading.Lock())
        ticks = itertools.count(1)
        self.engine = Engine(
            lambda: FakeRunner(64, BLOCK_SIZE),
            self.queue,
            FakeSink(),
            SchedulerLimits(max_batch_tokens=32, max_num_seqs=4, max_model_len=100),
            deliver=self.reports.put,
            clock=lambda: float(next(ticks)),
            prefix_cache=prefix_cache,
        )

    def events_of(self, name: str, prompt: list[int]) -> list[PrefixEvent]:
        """Returns the events of all reports until the request has ended."""
        self.queue.put(make_request(name, prompt, max_tokens=1), 0.0)
        self.engine.wake()
        told: list[PrefixEvent] = []
        while True:
            report = self.reports.get(timeout=PATIENCE_S)
            told += report.prefix_events
            if any(output.finish_reason is FinishReason.LENGTH for output in report.outputs):
                return told


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_reports_carry_the_events_of_their_steps(prefix_cache: bool) -> None:
    watched = Watched(prefix_cache=prefix_cache)
    watched.engine.start()
    try:
        first = watched.events_of("one", list(range(9)))
        again = watched.events_of("two", list(range(9)))
    finally:
        assert watched.engine.stop(PATIENCE_S)
    expected = [Stored, Stored, Found] if prefix_cache else []
    assert [type(event) for event in first + again] == expected


def test_a_pool_that_starts_afresh_says_that_all_is_gone() -> None:
    watched = Watched()
    watched.engine.start()
    try:
        watched.events_of("one", list(range(9)))
        scheduler = watched.engine._scheduler
        assert scheduler is not None
        scheduler.memory.parts[0].pool.hold(7)  # the books do not balance: found out when it is idle
        told = watched.events_of("two", [5] * 6)
        while watched.engine.stats().num_pool_violations == 0:
            threading.Event().wait(0.005)
        told += watched.events_of("three", list(range(9)))
    finally:
        assert watched.engine.stop(PATIENCE_S)
    kinds = [type(event) for event in told]
    assert kinds.count(Cleared) == 1
    assert kinds[-2:] == [Stored, Stored]
