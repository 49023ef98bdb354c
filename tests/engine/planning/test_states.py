"""What is found of a prompt where layers have a state, what is computed again, and which snapshots stay."""

from __future__ import annotations

from collections import deque
from dataclasses import replace
from random import Random
from threading import Lock

import pytest

from penstock.engine.launching import launch_fitting
from penstock.engine.planning.blocks import BlockPool
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.prefix_events import PrefixLog
from penstock.engine.planning.prefix_index import prompt_hashes
from penstock.engine.planning.request import FinishReason, Output, Request, Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.setup import fit_limits, make_memory
from penstock.engine.planning.state_records import StateUse
from penstock.engine.planning.step import StepPlan
from penstock.gateway.sessions.prefixes.sharing import choose_prefixes
from penstock.gateway.sessions.prefixes.tracker import PrefixTracker
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import (
    FakeProposer,
    FakeRunner,
    FakeSink,
    UnpricedDrafting,
    expected_output,
    make_request,
)
from tests.engine.fake_states import FakeStates
from tests.engine.queued_runner import QueuedRunner

BLOCK_SIZE = 16


class Harness:
    """A scheduler with state slots, stepped by hand."""

    def __init__(
        self,
        *,
        num_states: int = 40,
        num_pending: int = 8,
        num_blocks: int = 400,
        budget: int = 512,
        drafting: Drafting | None = None,
        prefix_cache: bool = True,
        log: PrefixLog | None = None,
        is_queued: bool = False,
    ) -> None:
        """With `is_queued`, each step is launched before the one before it has come back."""
        self.runner = (QueuedRunner if is_queued else FakeRunner)(num_blocks, BLOCK_SIZE)
        self.runner.states = self.states = FakeStates(num_states, num_pending)
        facts = self.runner.load()
        tables = make_memory(facts, prefix_cache=prefix_cache, log=log)
        assert isinstance(tables, SequenceMemory)
        self.tables = tables
        limits = SchedulerLimits(max_batch_tokens=budget, max_num_seqs=32, max_model_len=6000)
        self.queue = LaneQueue(Lock())
        self.scheduler = Scheduler(
            self.queue, tables, FakeSink(), fit_limits(limits, facts, tables), drafting
        )
        self.now = 0.0
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.last: dict[tuple[str, int], Output] = {}
        self.flights: deque[tuple[StepPlan, StepInFlight]] = deque()

    def step(self) -> StepPlan:
        plan = self.launch()
        self.land(self.runner.num_ahead if plan.chunks else 0)
        return plan

    def launch(self) -> StepPlan:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        if plan.chunks:
            self.flights.append((plan, launch_fitting(self.runner, self.scheduler, plan)))
        return plan

    def land(self, num_left: int = 0) -> None:
        while len(self.flights) > num_left:
            plan, step = self.flights.popleft()
            self.receive(self.scheduler.commit(plan, step.wait(), self.now))

    def fail(self) -> None:
        """The oldest step in flight comes back with an error."""
        plan, step = self.flights.popleft()
        step.wait()
        self.receive(self.scheduler.fail_step(plan, "broken", self.now))

    def receive(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            self.last[output.request_id, output.index] = output

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.queue.put(request, self.now)

    def run(self, *requests: Request) -> list[int]:
        """To the end; the tokens found of each request's prompt."""
        self.submit(*requests)
        for _ in range(3000):
            if (
                self.scheduler.sequences.is_idle
                and not self.flights
                and not any(self.queue.depths().values())
            ):
                break
            self.step()
        self.scheduler.sequences.check()
        for request in requests:
            for index in range(request.n):
                assert self.tokens[request.request_id, index] == expected_output(request, index, 6000)
        return [self.found(request.request_id) for request in requests]

    def found(self, name: str) -> int:
        timings = self.last[name, 0].timings
        assert timings is not None
        return timings.num_cached_tokens

    def look(self, prompt: list[int]) -> int:
        return self.tables.find_prefix(Sequence(make_request("look", prompt))).num_tokens


def words(seed: int, length: int) -> list[int]:
    """Tokens that no other seed has in this order."""
    return [(seed * 7919 + i * i * 31 + i) % 1000 for i in range(length)]


# What is found


@pytest.mark.parametrize("num_pending", [0, 8])
@pytest.mark.parametrize("length", [2, 16, 17, 100])
def test_the_same_prompt_is_found_but_for_its_last_token(length: int, num_pending: int) -> None:
    harness = Harness(num_pending=num_pending)
    prompt = words(1, length)
    assert harness.run(make_request("a", prompt)) == [0]
    assert harness.run(make_request("b", prompt)) == [length - 1]
    assert harness.run(make_request("c", prompt)) == [length - 1]


def test_ten_turns_of_a_conversation_are_found_but_for_what_is_new() -> None:
    harness = Harness()
    known = words(1, 120)
    for turn in range(10):
        prompt = known + words(2 + turn, 9)
        [found] = harness.run(make_request(f"turn {turn}", prompt, max_tokens=12))
        if turn:
            assert found == len(known) - 1, "the last token that came was not computed"
            assert found > 0.9 * len(prompt)
        known = prompt + harness.tokens[f"turn {turn}", 0]


@pytest.mark.parametrize("num_left_out", [1, 2, 5, 7])
def test_turns_that_leave_the_end_of_the_last_prompt_out_find_it_up_to_there(num_left_out: int) -> None:
    """As templates do that take what a model thought out of earlier turns, with the tokens that begin it."""
    harness = Harness()
    begin, num_before = words(99, num_left_out), 0
    known = words(1, 150)
    for turn in range(10):
        prompt = known + begin
        [found] = harness.run(make_request(f"turn {turn}", prompt, max_tokens=12))
        assert found == num_before
        num_before = len(known)
        known = known + harness.tokens[f"turn {turn}", 0][3:] + words(2 + turn, 9)


def test_a_third_prompt_with_the_same_beginning_finds_it() -> None:
    """The second shows where prompts part; the state there is kept on its way."""
    harness = Harness()
    system = words(1, 1003)
    assert harness.run(make_request("a", system + words(2, 20))) == [0]
    assert harness.run(make_request("b", system + words(3, 20))) == [0]
    assert harness.run(make_request("c", system + words(4, 20))) == [1000], "62 blocks, and pending rows"
    assert harness.states.num_saves == 4


@pytest.mark.parametrize(
    ("budget", "num_twice"), [(512, 0), (128, 0), (64, 1)], ids=["at once", "last chunk", "too late"]
)
def test_followers_of_a_prompt_that_is_being_computed_wait_for_what_they_share_with_it(
    budget: int, num_twice: int
) -> None:
    """They are looked at when a step has tokens left; if it has left their chain by then, the next computes it."""
    harness = Harness(budget=budget)
    system = words(1, 200)
    prompts = [system + words(seed, 20) for seed in range(2, 6)]
    found = harness.run(*(make_request(f"r{i}", prompt, max_tokens=1) for i, prompt in enumerate(prompts)))
    assert found == [0] * (1 + num_twice) + [200] * (3 - num_twice)
    assert harness.runner.num_tokens == 220 + 3 * 20 + 200 * num_twice


def test_equal_prompts_at_once_are_computed_once() -> None:
    harness = Harness()
    prompt = words(1, 100)
    found = harness.run(*(make_request(f"r{i}", prompt, max_tokens=1) for i in range(4)))
    assert found == [0, 99, 99, 99]
    assert harness.runner.num_tokens == 103


def test_another_salt_finds_nothing() -> None:
    harness = Harness()
    for length in (10, 100):
        prompt = words(length, length)
        harness.run(make_request(f"a{length}", prompt, salt=b"alice"))
        assert harness.run(make_request(f"b{length}", prompt, salt=b"bob")) == [0]


def test_without_a_prefix_cache_nothing_is_kept() -> None:
    harness = Harness(prefix_cache=False)
    for name in "ab":
        assert harness.run(make_request(name, words(1, 100), n=3)) == [0]
    assert len(harness.tables.snapshots) == 0
    assert harness.tables.slots.num_free == 39


def test_another_thread_is_told_what_a_prompt_would_find() -> None:
    harness = Harness()
    prompt = words(1, 100)
    harness.run(make_request("a", prompt))
    for known, found in ((100, 99), (97, 97), (90, 0)):
        asked = [*prompt[:known], 5, 5]
        hashes = prompt_hashes(asked, BLOCK_SIZE, b"")
        assert harness.tables.find_cached(hashes, asked) == (found, 0)


# Giving way, forks, drafts


def test_who_gave_way_goes_on_where_it_was() -> None:
    harness = Harness()
    harness.submit(make_request("a", words(1, 100), max_tokens=20))
    for _ in range(7):
        harness.step()
    [sequence] = harness.scheduler.sequences.running
    harness.scheduler.sequences.preempt(sequence)
    before = harness.runner.num_tokens
    harness.run()
    assert harness.runner.num_tokens - before == 20 - 7
    assert harness.tokens["a", 0] == expected_output(sequence.request, 0, 6000)


@pytest.mark.parametrize("prefix_cache", [True, False])
@pytest.mark.parametrize("is_known", [True, False])
def test_choices_fork_from_one_prompt(prefix_cache: bool, is_known: bool) -> None:
    """Also if all of it but the last token is found, whose state is then read by all of them."""
    harness = Harness(prefix_cache=prefix_cache)
    prompt = words(1, 100)
    if is_known:
        harness.run(make_request("before", prompt, max_tokens=1))
    before = harness.runner.num_tokens
    harness.run(make_request("r", prompt, max_tokens=5, n=4))
    num_new = 1 if is_known and prefix_cache else 100
    assert harness.runner.num_tokens - before == num_new + 3 + 4 * 4


def test_choices_run_with_as_many_slots_as_choices() -> None:
    """Then snapshots make way, and the last choice sits a step out."""
    harness = Harness(num_states=5)
    assert harness.scheduler.limits.max_num_seqs == 3
    harness.run(make_request("before", words(2, 40)))
    harness.run(make_request("r", words(1, 100), max_tokens=5, n=3))
    assert harness.scheduler.sequences.counters.num_preemptions == 0


@pytest.mark.parametrize("accuracy", [0.0, 0.7, 1.0])
def test_drafts_leave_no_trace_in_what_the_next_turn_finds(accuracy: float) -> None:
    """At the end of a turn, some of its tokens may be pending rows of its slot."""
    pace = Random(1)
    harness = Harness(drafting=UnpricedDrafting(FakeProposer(pace, accuracy), 8, pace))
    known, num_known = words(1, 60), 1
    for turn in range(8):
        [found] = harness.run(make_request(f"turn {turn}", known, max_tokens=23))
        assert found == num_known - 1
        num_known = len(known) + 23
        known = known + harness.tokens[f"turn {turn}", 0] + words(2 + turn, 9)


def test_a_step_that_the_device_has_no_room_for_may_have_changed_states() -> None:
    harness = Harness()
    harness.submit(*(make_request(f"r{i}", words(i, 50), max_tokens=9) for i in range(4)))
    for _ in range(3):
        harness.step()
    harness.runner.room = 2
    harness.step()
    harness.runner.room = 1 << 30
    harness.run()
    assert harness.scheduler.sequences.counters.num_preemptions == 4
    for i in range(4):
        request = make_request(f"r{i}", words(i, 50), max_tokens=9)
        assert harness.tokens[f"r{i}", 0] == expected_output(request, 0, 6000)


def test_choices_fork_where_the_last_step_of_a_prompt_has_one_token() -> None:
    """Its state before that token is kept for them, though nobody else has it."""
    harness = Harness(budget=99, prefix_cache=False)
    harness.run(make_request("r", words(1, 100), max_tokens=2, n=3))
    assert harness.runner.num_tokens == 100 + 2 + 3


def test_who_gives_way_before_its_blocks_were_copied_leaves_no_snapshot() -> None:
    harness = Harness()
    harness.submit(make_request("r", words(1, 100), max_tokens=9, n=2))
    harness.step()
    parent, child = harness.scheduler.sequences.running
    before = len(harness.tables.snapshots)
    assert harness.tables.grow(parent, 101), "the last block is shared by the child"
    harness.tables.release(parent)
    assert len(harness.tables.snapshots) == before
    harness.tables.check([child])


def test_who_gives_way_before_it_has_done_anything_leaves_no_snapshot() -> None:
    """Its slot is that of the snapshot it has found, which may be gone with its blocks."""
    harness = Harness(num_blocks=13)
    harness.run(make_request("a", words(1, 40), max_tokens=1))
    sequence = Sequence(make_request("b", words(1, 40)))
    harness.tables.start(sequence)
    for snapshot in list(harness.tables.snapshots):
        harness.tables.snapshots.drop(snapshot)
    harness.tables.release(sequence)
    assert len(harness.tables.snapshots) == 0
    assert harness.tables.slots.num_free == 39


# With steps in flight


def test_what_a_sequence_leaves_is_found_when_the_step_that_writes_it_has_come_back() -> None:
    harness = Harness(is_queued=True)
    harness.submit(make_request("a", words(1, 40), max_tokens=9))
    for _ in range(4):
        harness.step()
    assert harness.flights
    harness.receive(harness.scheduler.sequences.cancel("a", harness.now))
    known = [*words(1, 40), *harness.tokens["a", 0], 5, 5]
    assert harness.look(known) == 39
    harness.land()
    assert harness.look(known) == 43
    harness.scheduler.sequences.check()


def test_a_state_is_found_whose_last_block_was_filled_by_the_step_in_flight() -> None:
    harness = Harness(is_queued=True, num_pending=0)
    for length in range(40, 56):
        name, prompt = f"r{length}", words(length, length)
        harness.submit(make_request(name, prompt, max_tokens=9))
        for _ in range(4):
            harness.step()
        harness.receive(harness.scheduler.sequences.cancel(name, harness.now))
        harness.land()
        assert harness.look([*prompt, *harness.tokens[name, 0], 5, 5]) == length + 3


def test_a_step_that_failed_in_flight_leaves_nothing() -> None:
    harness = Harness(is_queued=True)
    harness.submit(make_request("a", words(1, 40), max_tokens=9))
    for _ in range(4):
        harness.step()
    harness.receive(harness.scheduler.sequences.cancel("a", harness.now))
    harness.fail()
    assert harness.look([*words(1, 40), *harness.tokens["a", 0], 5, 5]) == 39
    harness.scheduler.sequences.check()


def test_who_sits_a_step_out_that_was_to_copy_blocks_for_it_begins_anew_if_it_fails() -> None:
    """`b` has found the snapshot of `a`, which `again` reads; the slot of `gone` is free when a step has come back."""
    harness = Harness(num_states=4, is_queued=True)
    harness.run(make_request("a", words(1, 40), max_tokens=1))
    harness.submit(make_request("again", words(1, 40), max_tokens=9), make_request("gone", words(2, 40)))
    first = harness.launch()
    assert len(first.chunks) == 2
    harness.receive(harness.scheduler.sequences.cancel("gone", harness.now))
    harness.submit(make_request("b", words(1, 40), max_tokens=9))
    plan = harness.launch()
    assert [chunk.sequence.request.request_id for chunk in plan.chunks] == ["again"]
    [_, b] = harness.scheduler.sequences.running
    assert b.block_table
    harness.land(1)
    assert [target for _, target in plan.copies] == [b.block_table[2]]
    harness.fail()
    assert not b.block_table
    harness.run()
    assert harness.tokens["b", 0] == expected_output(b.request, 0, 6000)


# What stays


def test_a_snapshot_goes_with_the_blocks_that_it_needs() -> None:
    harness = Harness(num_blocks=13)
    harness.run(make_request("a", words(1, 40), max_tokens=1))
    assert harness.look(words(1, 40)) == 39
    harness.run(make_request("b", words(2, 170), max_tokens=1))
    assert harness.look(words(1, 40)) == 0
    assert all(snapshot.base > 40 for snapshot in harness.tables.snapshots)


def test_a_snapshot_that_ends_with_a_block_goes_with_it() -> None:
    harness = Harness(num_blocks=13, num_pending=0)
    harness.run(make_request("a", words(1, 65), max_tokens=1))
    for block in [b for b in range(13) if harness.tables.findable[b]]:
        harness.tables._drop(block)
    assert len(harness.tables.snapshots) == 0
    assert harness.tables.slots.num_free == 39


def test_a_snapshot_whose_slot_somebody_has_is_no_way_to_get_a_slot() -> None:
    harness = Harness(num_states=5)
    harness.run(make_request("a", words(1, 40), max_tokens=1))
    harness.submit(make_request("b", words(1, 40), max_tokens=9))
    sequence = Sequence(make_request("c", words(1, 40)))
    harness.tables.start(sequence)
    assert harness.tables.states is not None
    for _ in range(4):
        harness.tables.states.allocate()
    assert harness.look(words(1, 40)) == 39


def test_blocks_that_only_a_snapshot_needs_are_free_and_kept_until_others_are_gone() -> None:
    harness = Harness(num_blocks=20)
    harness.run(make_request("a", words(1, 40), max_tokens=1))
    assert harness.tables.pool.num_free == 19
    harness.run(make_request("b", words(2, 100), max_tokens=1))
    assert harness.look(words(1, 40)) == 39


def test_the_snapshot_goes_that_saves_the_least_work() -> None:
    harness = Harness(num_states=8)
    harness.run(make_request("long", words(1, 900), max_tokens=1))
    for i in range(2, 12):
        harness.run(make_request(f"r{i}", words(i, 30), max_tokens=1))
    assert harness.look(words(1, 900)) == 899
    assert harness.look(words(11, 30)) == 29
    assert harness.look(words(2, 30)) == 0


def test_what_nobody_asks_for_goes_in_the_end() -> None:
    harness = Harness(num_states=8)
    harness.run(make_request("long", words(1, 300), max_tokens=1))
    for i in range(2, 90):
        harness.run(make_request(f"r{i}", words(i, 30), max_tokens=1))
    assert harness.look(words(1, 300)) == 0


def test_one_slot_is_enough_for_one_sequence_at_a_time() -> None:
    harness = Harness(num_states=2)
    assert harness.run(make_request("a", words(1, 40), n=2), make_request("b", words(2, 40))) == [0, 0]
    assert harness.run(make_request("c", [*words(2, 40), *harness.tokens["b", 0], 5])) == [43]


def test_a_failed_sequence_leaves_nothing() -> None:
    harness = Harness()
    harness.runner.bad.add(("a", 0))
    harness.submit(make_request("a", words(1, 40)))
    harness.step()
    assert harness.last["a", 0].finish_reason is FinishReason.FAILED
    assert not list(harness.tables.snapshots)


def test_slots_are_counted() -> None:
    harness = Harness(num_states=12)
    harness.submit(make_request("a", words(1, 40), max_tokens=9))
    harness.step()
    tables = harness.tables
    assert (tables.state_use, tables.slots.num_free) == (StateUse(11, 1, 1), 9)
    harness.run()
    assert (tables.state_use, tables.slots.num_free) == (StateUse(11, 0, 2), 9)


def test_there_have_to_be_slots() -> None:
    with pytest.raises(ValueError, match="at least 2 state slots, not 1"):
        BlockPool(1, unit="state slot")


# After a restart


def test_snapshots_come_back_when_hot_prefixes_are_computed_again() -> None:
    log, tracker = PrefixLog(), PrefixTracker()
    harness = Harness(log=log)
    system = words(1, 320)
    chats = [system + words(seed, 100) for seed in (2, 3, 4)]
    for number, chat in enumerate(chats * 2):
        harness.run(make_request(f"r{number}", chat, max_tokens=1))
        tracker.take(log.drain())
    kept = [replace(change, resident=False) for change in tracker.changes(1000)]
    prefixes, _ = choose_prefixes(kept, 10_000, BLOCK_SIZE)
    after = Harness()
    for number, prefix in enumerate(prefixes):
        after.run(make_request(f"warm-up {number}", prefix.token_ids, max_tokens=1))
    for number, chat in enumerate(chats):
        turn = [*chat, *harness.tokens[f"r{number}", 0], 7, 8]
        [found] = after.run(make_request(f"turn {number}", turn, max_tokens=1))
        assert found >= 420 // BLOCK_SIZE * BLOCK_SIZE - 1
    assert after.look([*system, 5, 5]) >= 319
