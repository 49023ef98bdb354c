"""What is cached is known, told to the store whatever becomes of it, found there, and computed again."""

from __future__ import annotations

import asyncio
import itertools
import logging
import threading
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.engine import Engine
from penstock.engine.planning.prefix_events import Cleared, Dropped, Found, PrefixEvent, PrefixLog, Stored
from penstock.engine.planning.prefix_index import PRIVATE, extend_hashes, prompt_hashes
from penstock.engine.planning.report import StepReport
from penstock.engine.planning.request import FinishReason
from penstock.engine.planning.scheduler import SchedulerLimits
from penstock.gateway.errors import ApiError
from penstock.gateway.service import ServiceOptions
from penstock.gateway.sessions.prefixes.sharing import (
    PrefixLocator,
    PrefixWriter,
    WarmUp,
    choose_prefixes,
    parse_token_ids,
)
from penstock.gateway.sessions.prefixes.tracker import MAX_RECENT, PASS_ON_S, PrefixTracker
from penstock.gateway.store.interface import PrefixChange, StoreUnavailable
from penstock.priority.queue import LaneQueue
from tests.clock import Clock
from tests.engine.fake_runner import FakeRunner, FakeSink, make_request
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads
from tests.few import examples
from tests.gateway.harness import MODEL, Gateway
from tests.gateway.store.durable_store import DurableStore
from tests.gateway.store.stores import redis_store
from tests.redis_server import RedisServer

pytestmark = pytest.mark.anyio

modest = settings(max_examples=examples(40), deadline=None)


class PrefixStore(DurableStore):
    """Away when the test says so."""

    def __init__(self) -> None:
        super().__init__()
        self.away = False
        self.written: list[PrefixChange] = []

    async def write_prefixes(self, changes: Sequence[PrefixChange]) -> None:
        self._answer()
        self.written += changes
        await super().write_prefixes(changes)

    async def locate(self, hashes: Sequence[bytes]) -> dict[str, int]:
        self._answer()
        return await super().locate(hashes)

    async def hottest(self, limit: int) -> Sequence[PrefixChange]:
        self._answer()
        return await super().hottest(limit)

    def _answer(self) -> None:
        if self.away:
            raise StoreUnavailable("away")


def hashes_of(token_ids: Sequence[int], salt: bytes = b"") -> list[bytes]:
    hashes: list[bytes] = []
    extend_hashes(hashes, token_ids, len(token_ids) // BLOCK_SIZE, BLOCK_SIZE, salt)
    return hashes


def num_cached(tracked: TrackedEngine, prompt: Sequence[int], salt: bytes) -> int:
    return tracked.engine.find_cached(prompt_hashes(prompt, BLOCK_SIZE, salt))[0]


def num_resident(tracker: PrefixTracker, token_ids: Sequence[int]) -> int:
    """Blocks of the chain that are tracked."""
    return sum(known in tracker._blocks for known in hashes_of(token_ids))


def stored(token_ids: Sequence[int], salt: bytes = b"") -> list[PrefixEvent]:
    """All blocks of a chain, as the engine tells of them."""
    hashes = hashes_of(token_ids, salt)
    return [
        Stored(
            hashes[i],
            hashes[i - 1] if i else None,
            i + 1,
            tuple(token_ids[i * BLOCK_SIZE : (i + 1) * BLOCK_SIZE]),
            salt,
        )
        for i in range(len(hashes))
    ]


def written(changes: Sequence[PrefixChange]) -> set[bytes]:
    """Who is resident for someone who read all these."""
    latest = {change.hash: change.resident for change in changes}
    return {known for known, resident in latest.items() if resident}


# What is tracked


@modest
@given(workloads(prefix_cache=True, num_blocks=(8, 14)), st.data())
def test_the_tracker_and_its_changes_follow_the_index(workload: Workload, data: st.DataObject) -> None:
    """Whatever the batches are, and whichever of them fail on the way."""
    run = Run(workload)
    run.tables.log = log = PrefixLog()
    tracker = PrefixTracker()
    resident: set[bytes] = set()
    told: list[PrefixChange] = []
    seen: set[bytes] = set()

    def follow(run: Run) -> None:
        events = list(log.drain())
        tracker.take(events)
        seen.update(event.hash for event in events if isinstance(event, Stored))
        resident.clear()
        resident.update(known for known in seen if run.tables.index.block_of(known) is not None)
        assert tracker.num_tracked == len(resident) == len(run.tables.index)
        batch = tracker.changes(data.draw(st.integers(1, 6)))
        if data.draw(st.booleans()):
            told.extend(batch)
        else:
            tracker.failed(batch)

    run.finish(follow)
    follow(run)
    while batch := tracker.changes(3):
        told.extend(batch)
    assert written(told) == resident
    assert tracker.num_unwritten == 0


@modest
@given(workloads(prefix_cache=True, num_blocks=(16, 24)), st.integers(1, 6))
def test_of_more_than_may_be_tracked_the_rest_is_counted(workload: Workload, max_blocks: int) -> None:
    run = Run(workload)
    run.tables.log = log = PrefixLog()
    tracker = PrefixTracker(max_blocks=max_blocks)
    told: list[PrefixChange] = []

    def follow(run: Run) -> None:
        tracker.take(log.drain())
        told.extend(tracker.changes(100))
        assert tracker.num_tracked <= max_blocks
        assert tracker.num_tracked <= len(run.tables.index) <= tracker.num_tracked + tracker.num_untracked

    run.finish(follow)
    follow(run)
    assert len(written(told)) == tracker.num_tracked
    tracker.take([Cleared()])
    assert (tracker.num_tracked, tracker.deepest) == (0, 0)
    assert not tracker.hottest(9, [b""])


def test_a_change_says_all_that_finds_and_computes_the_block_again() -> None:
    clock = Clock()
    tracker = PrefixTracker(clock=clock)
    tracker.take(stored([1, 2, 3, 4, 5, 6, 7, 8, 9], b"alice"))
    first, second = hashes_of([1, 2, 3, 4, 5, 6, 7, 8], b"alice")
    assert tracker.changes(9) == [
        PrefixChange(first, None, 1, (1, 2, 3, 4), b"alice", 0, clock.now, True),
        PrefixChange(second, first, 2, (5, 6, 7, 8), b"alice", 0, clock.now, True),
    ]
    assert tracker.changes(9) == []


def test_a_hit_is_one_of_every_block_up_to_there() -> None:
    clock = Clock()
    tracker = PrefixTracker(clock=clock)
    tracker.take(stored(range(12)))
    tracker.changes(9)
    clock.now += 5
    hashes = hashes_of(range(12))
    tracker.take([Found(hashes[1])])
    assert {(change.hash, change.hits, change.last_used_s) for change in tracker.changes(9)} == {
        (hashes[0], 1, clock.now),
        (hashes[1], 1, clock.now),
    }


def test_the_hottest_are_where_hits_ended_and_then_what_came_last() -> None:
    clock = Clock()
    tracker = PrefixTracker(clock=clock)
    system = list(range(8))
    for number in range(5):
        clock.now += 1
        tracker.take(stored([*system, *[50 + number] * 8]))
        tracker.take([Found(hashes_of(system)[-1])])
    tracker.take([Found(hashes_of([*system, *[50] * 8])[-1])])
    found = tracker.hottest(3, [b""])
    assert [prefix.num_tokens for prefix in found] == [8, 16, 16]
    assert [prefix.hits for prefix in found] == [6, 1, 0]
    assert found[2].leaf == hashes_of([*system, *[54] * 8])[-1]
    assert tracker.deepest == 4
    assert tracker.num_tracked == 2 + 5 * 2


def test_what_was_used_longest_ago_is_given_up_from_its_end() -> None:
    clock = Clock()
    tracker = PrefixTracker(max_blocks=4, clock=clock)
    old, young = list(range(8)), list(range(20, 28))
    for chain in (old, young):
        clock.now += 1
        tracker.take(stored(chain))
    clock.now += 1
    tracker.take([Found(hashes_of(old)[-1])])
    tracker.take(stored([9] * 4))
    assert num_resident(tracker, old) == 2
    assert num_resident(tracker, young) == 1
    tracker.take(stored([8] * 4))
    assert num_resident(tracker, young) == 0
    assert num_resident(tracker, old) == 2
    assert tracker.num_untracked == 2


def test_what_was_never_written_goes_without_a_word() -> None:
    tracker = PrefixTracker()
    tracker.take(stored(range(4)))
    tracker.take([Dropped(hashes_of(range(4))[0])])
    assert tracker.changes(9) == []


def test_a_write_that_fails_after_the_block_went_is_no_longer_of_interest() -> None:
    tracker = PrefixTracker()
    known = hashes_of(range(4))[0]
    tracker.take(stored(range(4)))
    batch = tracker.changes(9)
    tracker.take([Dropped(known)])
    tracker.failed(batch)
    (change,) = tracker.changes(9)
    assert (change.hash, change.resident) == (known, False)
    tracker.take(stored(range(4)))
    tracker.failed([change])
    (change,) = tracker.changes(9)
    assert change.resident
    assert tracker.changes(9) == []


def test_hits_of_before_a_restart_are_not_forgotten() -> None:
    tracker = PrefixTracker()
    tracker.take(stored(range(8)))
    tracker.take([Found(hashes_of(range(8))[-1])] * 3)
    tracker.changes(9)
    tracker.take([Dropped(hashes_of(range(8))[-1])])
    restarted = PrefixTracker()
    restarted.remember(tracker.changes(9))
    restarted.take(stored(range(8)))
    assert [change.hits for change in restarted.changes(9)] == [3, 3]


def test_a_chain_that_is_found_often_is_not_walked_every_time() -> None:
    clock = Clock()
    tracker = PrefixTracker(clock=clock)
    tokens = range(4 * 500)
    tracker.take(stored(tokens))
    hashes = hashes_of(tokens)
    tracker.take([Found(hashes[-1])])
    assert len(tracker.changes(1000)) == 500
    tracker.take([Found(hashes[-1])] * 50)
    (end,) = tracker.changes(1000)
    assert (end.hash, end.hits) == (hashes[-1], 51)
    clock.now += PASS_ON_S
    tracker.take([Found(hashes[-1])])
    assert [change.hits for change in tracker.changes(1000)] == [52] * 500


def test_one_tenant_does_not_hide_the_prefixes_of_another() -> None:
    tracker = PrefixTracker()
    tracker.take(stored(range(8), b"quiet"))
    for number in range(MAX_RECENT + 5):
        tracker.take(stored([number] * 4, b"noisy"))
        tracker.take([Found(hashes_of([number] * 4, b"noisy")[0])])
    (found,) = tracker.hottest(5, [b"quiet", b"nobody"])
    assert (found.leaf, found.num_tokens) == (hashes_of(range(8), b"quiet")[-1], 8)
    assert len(tracker.hottest(MAX_RECENT + 5, [b"noisy"])) == MAX_RECENT


def test_a_block_that_comes_and_goes_between_two_writes_is_gone_for_the_store_too() -> None:
    tracker = PrefixTracker()
    known = hashes_of(range(4))[0]
    tracker.take(stored(range(4)))
    assert written(tracker.changes(9)) == {known}
    tracker.take([Dropped(known), *stored(range(4)), Dropped(known)])
    assert [(change.hash, change.resident) for change in tracker.changes(9)] == [(known, False)]


# What is written


def test_a_listener_looks_at_what_is_there_a_piece_at_a_time() -> None:
    tracker = PrefixTracker()
    known = [bytes([number]) for number in range(7)]
    tracker.take([Stored(each, None, 1, (1,), b"mine" if each != b"\5" else b"another's") for each in known])
    with tracker.listening([b"mine"]) as changes:
        tracker.take([Dropped(b"\0"), Stored(b"\7", None, 1, (1,), b"mine")])
        pieces = [changes.take(3)]
        assert changes.is_behind
        tracker.take([Dropped(b"\6")])
        while changes.is_behind:
            pieces.append(changes.take(3))
        pieces.append(changes.take(3))
    stored = [each for some, _ in pieces for each in some]
    removed = [each for _, some in pieces for each in some]
    assert sorted(set(stored).difference(removed)) == [b"\1", b"\2", b"\3", b"\4", b"\7"]
    assert len(stored) == len(set(stored))
    assert set(removed) <= set(stored), "what was not told of need not be taken back"
    assert all(len(some) <= 3 for piece in pieces for some in piece)


async def test_changes_are_written_in_batches_and_kept_while_the_store_is_away() -> None:
    tracker, store = PrefixTracker(), PrefixStore()
    writer = PrefixWriter(tracker, store, max_changes=2)
    tracker.take(stored(range(12)))
    store.away = True
    await writer.write()
    assert tracker.num_unwritten == 3
    store.away = False
    await writer.write()
    assert len(store.written) == 2
    await writer.write()
    await writer.write()
    assert written(store.written) == set(hashes_of(range(12)))
    assert len(store.written) == 3


@pytest.mark.parametrize("with_tokens", [True, False])
async def test_prompts_leave_the_process_only_where_they_may(with_tokens: bool) -> None:
    """The store is still told which blocks are resident."""
    tracker, store = PrefixTracker(), PrefixStore()
    prompts = {salt: stored(range(8), salt) for salt in (b"ann", b"ann" + PRIVATE)}
    for events in prompts.values():
        tracker.take(events)
    await PrefixWriter(tracker, store, with_tokens=with_tokens).write()
    found = await store.hottest(100)
    assert {block.salt for block in found if block.token_ids} == ({b"ann"} if with_tokens else set())
    for salt in prompts:
        hashes = hashes_of(range(8), salt)
        assert await store.locate(hashes) == {"local": len(hashes)}


async def test_a_store_that_lost_its_memory_is_told_everything_again() -> None:
    tracker, store = PrefixTracker(), PrefixStore()
    writer = PrefixWriter(tracker, store)
    tracker.take(stored(range(12)))
    await writer.write()
    store.written.clear()
    await writer.write()
    assert store.written == []
    store.num_losses += 1
    await writer.write()
    assert written(store.written) == set(hashes_of(range(12)))


async def test_it_is_written_by_itself_while_running_and_faults_do_not_end_that() -> None:
    tracker = PrefixTracker()
    told = asyncio.Event()

    class Faulty(PrefixStore):
        fault: Exception | None = LookupError("a fault")

        async def write_prefixes(self, changes: Sequence[PrefixChange]) -> None:
            fault, self.fault = self.fault, None
            if fault is not None:
                raise fault
            await super().write_prefixes(changes)
            told.set()

    store = Faulty()
    async with PrefixWriter(tracker, store, every_s=0.001).running():
        tracker.take(stored(range(12)))
        await asyncio.wait_for(told.wait(), 10)
    assert written(store.written) == set(hashes_of(range(12)))


# What is chosen to be computed again


def changes_of(*chains: tuple[Sequence[int], int], salt: bytes = b"") -> list[PrefixChange]:
    """Returns the records of these chains and their hits, one used after the other."""
    clock = Clock()
    tracker = PrefixTracker(clock=clock)
    for chain, num_hits in chains:
        clock.now += 1
        tracker.take(stored(chain, salt))
        for _ in range(num_hits):
            clock.now += PASS_ON_S
            tracker.take([Found(hashes_of(chain, salt)[-1])])
    return tracker.changes(10_000)


def test_the_hottest_chains_that_fit_are_chosen_and_shared_blocks_count_once() -> None:
    system = [1] * 8
    often, once, big = [*system, *[2] * 4], [*system, *[3] * 4], [4] * 40
    blocks = changes_of((once, 1), (often, 7), (big, 3))
    chosen, num_tokens = choose_prefixes(blocks, 16, BLOCK_SIZE)
    assert [prefix.token_ids for prefix in chosen] == [system, often, once]
    assert num_tokens == 16


@pytest.mark.parametrize("max_tokens", range(0, 60, 3))
def test_no_more_tokens_are_chosen_than_asked_for(max_tokens: int) -> None:
    blocks = changes_of(([1] * 12, 2), ([2] * 20, 1), ([3] * 4, 0), ([1, 1, 1, 1, 5, 5, 5, 5], 0))
    chosen, num_tokens = choose_prefixes(blocks, max_tokens, BLOCK_SIZE)
    hashes = {known for prefix in chosen for known in hashes_of(prefix.token_ids)}
    assert num_tokens == len(hashes) * BLOCK_SIZE <= max_tokens


def test_chains_that_are_not_what_they_say_are_left_out() -> None:
    whole, gap, damaged = [1] * 12, [2] * 12, [3] * 12
    blocks = changes_of((whole, 0), (gap, 0), (damaged, 0))
    damaged_block = hashes_of(damaged)[0]
    blocks = [
        replace(block, token_ids=(0, 0, 0, 0)) if block.hash == damaged_block else block
        for block in blocks
        if block.hash != hashes_of(gap)[0]
    ]
    chosen, _ = choose_prefixes(blocks, 1_000, BLOCK_SIZE)
    assert [prefix.token_ids for prefix in chosen] == [whole]
    assert choose_prefixes(blocks, 1_000, 16) == ([], 0)
    strangers = [replace(block, salt=b"mallory") for block in blocks]
    assert choose_prefixes(strangers, 1_000, BLOCK_SIZE) == ([], 0)


# Computing it again


class TrackedEngine:
    """A real engine on a fake runner whose reports come to the event loop, where a tracker follows them."""

    def __init__(self) -> None:
        self._loop = asyncio.get_running_loop()
        self.queue = LaneQueue(threading.Lock())
        self.tracker = PrefixTracker()
        self.runner = FakeRunner(64, BLOCK_SIZE)
        self.ended: dict[str, asyncio.Future[None]] = {}
        self.salts: list[bytes] = []
        self._names = itertools.count()
        ticks = itertools.count(1)
        self.engine = Engine(
            lambda: self.runner,
            self.queue,
            FakeSink(),
            SchedulerLimits(max_batch_tokens=32, max_num_seqs=4, max_model_len=100),
            deliver=self._hand_over,
            clock=lambda: float(next(ticks)),
        )

    @classmethod
    @asynccontextmanager
    async def open(cls) -> AsyncIterator[TrackedEngine]:
        tracked = cls()
        tracked.engine.start()
        try:
            yield tracked
        finally:
            assert await asyncio.to_thread(tracked.engine.stop, 20.0)

    def _hand_over(self, report: StepReport) -> None:
        self._loop.call_soon_threadsafe(self._deliver, report)

    def _deliver(self, report: StepReport) -> None:
        self.tracker.take(report.prefix_events)
        for output in report.outputs:
            if output.finish_reason is not None:
                assert output.finish_reason is FinishReason.LENGTH
                self.ended[output.request_id].set_result(None)

    async def generate(self, prompt: Sequence[int], salt: bytes = b"", max_tokens: int = 1) -> None:
        name = f"r{next(self._names)}"
        self.ended[name] = self._loop.create_future()
        self.salts.append(salt)
        self.queue.put(make_request(name, list(prompt), max_tokens=max_tokens, lane=2, salt=salt), 0.0)
        self.engine.wake()
        await asyncio.wait_for(self.ended[name], 20)


def warm_up(tracked: TrackedEngine, max_tokens: int = 1_000) -> WarmUp:
    return WarmUp(tracked.generate, lambda: True, block_size=BLOCK_SIZE, max_tokens=max_tokens, poll_s=0.001)


async def test_after_a_restart_the_hot_prefixes_are_cached_again(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "penstock.gateway")
    store = PrefixStore()
    hers, his = [*range(1, 23)], [*range(1, 9), 40, 41, 42]
    async with TrackedEngine.open() as tracked:
        await tracked.generate(hers, b"alice", max_tokens=6)
        await tracked.generate(hers, b"alice")
        await tracked.generate(his, b"bob")
        await PrefixWriter(tracked.tracker, store).write()
        before = {b"alice": num_cached(tracked, [*hers, 0, 0, 0], b"alice")}
        known = tracked.tracker.num_tracked
    assert before == {b"alice": 20}

    async with TrackedEngine.open() as tracked:
        assert num_cached(tracked, hers, b"alice") == 0
        await warm_up(tracked).run(store, tracked.tracker)
        assert num_cached(tracked, [*hers, 0, 0, 0], b"alice") == 20
        assert num_cached(tracked, his, b"bob") == 8
        assert num_cached(tracked, hers, b"bob") == 8
        assert num_cached(tracked, hers, b"") == 0
        assert tracked.salts[0] == b"alice"
        assert tracked.tracker.num_tracked == known
    first, last = (record.getMessage() for record in caplog.records if "again" in record.getMessage())
    assert first == "computing 3 prefixes of before again, 32 tokens"
    assert last.startswith("computed 3 prefixes again, 32 tokens in ")


async def test_exactly_the_blocks_of_a_chain_are_computed_again() -> None:
    store = PrefixStore()
    await store.write_prefixes(changes_of((range(12), 2), salt=b"alice"))
    async with TrackedEngine.open() as tracked:
        await warm_up(tracked).run(store, tracked.tracker)
        assert tracked.runner.num_tokens == 12
        assert {change.hash for change in tracked.tracker.changes(99)} == set(hashes_of(range(12), b"alice"))
        assert tracked.tracker.hottest(1, [b"alice"])[0].hits == 2


async def test_it_gives_way_at_once_and_goes_on_when_it_is_idle_again() -> None:
    store = PrefixStore()
    await store.write_prefixes(changes_of((range(8), 2), (range(50, 58), 1)))
    began: asyncio.Queue[list[int]] = asyncio.Queue()
    cancelled: list[list[int]] = []
    may_end = asyncio.Event()
    users: set[str] = {"somebody"}

    async def submit(token_ids: list[int], _: bytes) -> None:
        began.put_nowait(token_ids)
        try:
            await may_end.wait()
        except asyncio.CancelledError:
            cancelled.append(token_ids)
            raise

    warming = WarmUp(submit, lambda: not users, block_size=BLOCK_SIZE, max_tokens=100, poll_s=0.001)
    task = asyncio.create_task(warming.run(store, PrefixTracker()))
    for _ in range(50):
        await asyncio.sleep(0)
    assert began.empty()
    users.clear()
    assert await asyncio.wait_for(began.get(), 10) == list(range(8))
    users.add("another")
    while not cancelled:
        await asyncio.sleep(0)
    assert began.empty()
    users.clear()
    assert await asyncio.wait_for(began.get(), 10) == list(range(8))
    may_end.set()
    assert await asyncio.wait_for(began.get(), 10) == list(range(50, 58))
    await asyncio.wait_for(task, 10)
    assert cancelled == [list(range(8))]


async def test_cancelling_a_warm_up_cancels_its_request() -> None:
    store = PrefixStore()
    await store.write_prefixes(changes_of((range(8), 2)))
    began, ended = asyncio.Event(), asyncio.Event()

    async def submit(_: list[int], __: bytes) -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()

    warming = WarmUp(submit, lambda: True, block_size=BLOCK_SIZE, max_tokens=100)
    task = asyncio.create_task(warming.run(store, PrefixTracker()))
    await asyncio.wait_for(began.wait(), 10)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert ended.is_set()


async def test_a_prefix_that_fails_is_passed_over(caplog: pytest.LogCaptureFixture) -> None:
    store = PrefixStore()
    await store.write_prefixes(changes_of((range(8), 2), (range(50, 58), 1)))
    done: list[list[int]] = []

    async def submit(token_ids: list[int], _: bytes) -> None:
        if token_ids[0] == 0:
            raise ValueError("the model is another one")
        done.append(token_ids)

    await WarmUp(submit, lambda: True, block_size=BLOCK_SIZE, max_tokens=100).run(store, PrefixTracker())
    assert done == [list(range(50, 58))]
    assert "the model is another one" in caplog.text


async def test_a_prefix_that_was_computed_again_is_no_longer_waited_for() -> None:
    store = DurableStore()
    await store.write_prefixes(changes_of((range(8), 2)))
    gateway = Gateway(ServiceOptions(models=(MODEL,), block_size=BLOCK_SIZE, warm_up_tokens=100), store=store)
    gateway.service.warm_up()
    request = await gateway.taken()
    assert request.prompt_token_ids == tuple(range(8))
    assert len(gateway.service.dispatch) == 1
    gateway.finish(request)
    await gateway.left()


@pytest.mark.parametrize(("away", "max_tokens"), [(True, 100), (False, 0)])
async def test_without_a_store_or_tokens_nothing_is_computed(away: bool, max_tokens: int) -> None:
    store = PrefixStore()
    await store.write_prefixes(changes_of((range(8), 2)))
    store.away = away

    computed: list[list[int]] = []

    async def submit(token_ids: list[int], _: bytes) -> None:
        computed.append(token_ids)

    warming = WarmUp(submit, lambda: True, block_size=BLOCK_SIZE, max_tokens=max_tokens)
    await warming.run(store, PrefixTracker())
    assert computed == []


# Who holds it


class BusyStore(PrefixStore):
    """A store that several replicas write to."""

    def __init__(self, **held: int) -> None:
        super().__init__()
        self.held = held
        self.asked: list[list[bytes]] = []

    async def locate(self, hashes: Sequence[bytes]) -> dict[str, int]:
        self._answer()
        self.asked.append(list(hashes))
        return dict(self.held)


def locator(store: PrefixStore, num_cached: int = 0) -> PrefixLocator:
    return PrefixLocator(store, "here", BLOCK_SIZE, lambda *_: (num_cached, 0))


async def test_replicas_are_listed_best_first_and_this_one_speaks_for_itself() -> None:
    store = BusyStore(here=3, there=1, elsewhere=2)
    assert await locator(store, num_cached=4).locate(b"alice", range(14)) == {
        "object": "prefix.location",
        "block_size": BLOCK_SIZE,
        "num_tokens": 14,
        "replicas": [
            {"replica": "elsewhere", "num_cached_tokens": 8, "this": False},
            {"replica": "here", "num_cached_tokens": 4, "this": True},
            {"replica": "there", "num_cached_tokens": 4, "this": False},
        ],
    }
    assert store.asked == [hashes_of(range(14), b"alice")]


async def test_the_block_of_the_last_token_is_not_asked_for() -> None:
    store = BusyStore()
    await locator(store).locate(b"", range(8))
    assert store.asked == [hashes_of(range(4))]
    await locator(store).locate(b"", range(4))
    await locator(store).locate(b"", [])
    assert len(store.asked) == 1


async def test_another_tenant_asks_for_other_hashes() -> None:
    store = PrefixStore()
    await store.write_prefixes(changes_of((range(8), 0), salt=b"alice"))
    for salt, expected in ((b"alice", 8), (b"bob", 0), (b"", 0)):
        neighbour = PrefixLocator(store, "new", BLOCK_SIZE, lambda *_: (0, 0))
        replicas = (await neighbour.locate(salt, range(9)))["replicas"]
        assert isinstance(replicas, list)
        assert replicas[0]["num_cached_tokens"] == expected


async def test_without_the_store_this_replica_is_known() -> None:
    store = BusyStore(there=3)
    store.away = True
    location = await locator(store, num_cached=8).locate(b"", range(14))
    assert location["replicas"] == [{"replica": "here", "num_cached_tokens": 8, "this": True}]


def test_token_ids_are_read_as_they_are_asked_for() -> None:
    assert parse_token_ids("1,2, 3") == [1, 2, 3]
    for text in ("", "1,,2", "1.5", "one", "[1]"):
        with pytest.raises(ApiError, match="tokens"):
            parse_token_ids(text)


# With a real Redis


@pytest.fixture
def server() -> Iterator[RedisServer]:
    with RedisServer() as server:
        yield server


@pytest.mark.usefixtures("closing")
async def test_redis_keeps_prefixes_for_the_neighbours_and_for_the_time_after_a_restart(
    server: RedisServer,
) -> None:
    prompt = [*range(1, 23)]
    async with TrackedEngine.open() as tracked:
        await tracked.generate(prompt, b"alice")
        await tracked.generate(prompt, b"alice")
        store = redis_store(server, replica="a")
        await PrefixWriter(tracked.tracker, store).write()
        neighbour = PrefixLocator(redis_store(server, replica="b"), "b", BLOCK_SIZE, lambda *_: (0, 0))
        assert (await neighbour.locate(b"alice", prompt))["replicas"] == [
            {"replica": "a", "num_cached_tokens": 20, "this": False},
            {"replica": "b", "num_cached_tokens": 0, "this": True},
        ]
        assert (await neighbour.locate(b"bob", prompt))["replicas"] == [
            {"replica": "b", "num_cached_tokens": 0, "this": True}
        ]

    async with TrackedEngine.open() as tracked:
        await warm_up(tracked).run(redis_store(server, replica="a"), tracked.tracker)
        assert num_cached(tracked, prompt, b"alice") == 20
        assert [prefix.hits for prefix in tracked.tracker.hottest(1, [b"alice"])] == [1]


@pytest.mark.usefixtures("closing")
async def test_a_redis_that_comes_back_empty_learns_all_of_it_again(server: RedisServer) -> None:
    tracker, clock = PrefixTracker(), Clock()
    store = redis_store(server, link_clock=clock)
    writer = PrefixWriter(tracker, store)
    tracker.take(stored(range(40)))
    await writer.write()
    server.stop()
    tracker.take(stored(range(50, 90)))
    await writer.write()
    assert tracker.num_unwritten == 10
    server.start()
    while tracker.num_unwritten:
        clock.now += 60  # so that the breaker lets it try
        await writer.write()
    await store.beat()
    assert store.num_losses in (1, 2)  # the connection has noticed it, and the heartbeat may have
    await writer.write()
    for chain in (range(40), range(50, 90)):
        assert await store.locate(hashes_of(chain)) == {"a": 10}
