"""The planning side under a random machine: submit, step, fork, preempt, cancel, fail, finish, in any order.

It plays with a runner that has done each step before the next is planned, and with one that has a step in flight then.

After every action the pool must balance; at the end every choice of every request has brought exactly the tokens of an
undisturbed run, or ended once as cancelled or failed.
"""

from __future__ import annotations

import random
from collections import deque
from dataclasses import replace
from threading import Lock
from typing import Any

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, precondition, rule

from penstock.engine.launching import launch_fitting
from penstock.engine.planning.device import OutOfMemory, StepInFlight
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.setup import make_memory
from penstock.engine.planning.step import StepPlan
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import (
    FakeDraftModel,
    FakeProposer,
    FakeRunner,
    FakeSink,
    UnpricedDrafting,
    expected_output,
    make_request,
)
from tests.engine.fake_states import FakeStates
from tests.engine.queued_runner import QueuedRunner
from tests.few import examples

BLOCK_SIZE = 4
WINDOWS = [(0,), (0,), (1,), (3,), (4,), (5,), (8,), (11,), (20,), (0, 5), (0, 3, 3), (9, 4), (0, 0)]
"""By table of a sequence."""


class SchedulerMachine(RuleBasedStateMachine):
    @initialize(
        num_blocks=st.integers(5, 60),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        prefix_cache=st.booleans(),
        windows=st.sampled_from(WINDOWS),
        is_queued=st.booleans(),
        max_drafts=st.sampled_from([0, 1, 3, 8]),
        proposers=st.sampled_from(["lookup", "draft", "both"]),
        accuracy=st.sampled_from([0.0, 0.5, 0.9, 1.0]),
        pace=st.randoms(use_true_random=False),
    )
    def build(
        self,
        num_blocks: int,
        budget: int,
        max_num_seqs: int,
        prefix_cache: bool,
        windows: tuple[int, ...],
        is_queued: bool,
        max_drafts: int,
        proposers: str,
        accuracy: float,
        pace: random.Random,
    ) -> None:
        self.set_up(num_blocks, windows, prefix_cache=prefix_cache, is_queued=is_queued, pace=pace)
        self.schedule(budget, max_num_seqs, max_drafts, proposers, accuracy)

    def set_up(
        self,
        num_blocks: int,
        windows: tuple[int, ...],
        *,
        prefix_cache: bool,
        is_queued: bool,
        pace: random.Random,
        states: FakeStates | None = None,
        num_ranks: int = 1,
    ) -> None:
        """An empty engine, of ranks with so many blocks each."""
        self.queue = LaneQueue(Lock())
        self.windows = windows
        self.runner: FakeRunner = FakeRunner(num_ranks * num_blocks, BLOCK_SIZE, windows)
        if is_queued:
            self.runner = QueuedRunner(
                num_ranks * num_blocks, BLOCK_SIZE, lambda: pace.random() < 0.5, windows
            )
        self.runner.states = states
        facts = replace(self.runner.load(), windows=windows, num_blocks=num_blocks, num_ranks=num_ranks)
        self.tables = make_memory(facts, prefix_cache=prefix_cache, log=None)
        if isinstance(self.runner, QueuedRunner):
            self.runner.watch(self.tables)
        self.flights: deque[tuple[StepPlan, StepInFlight]] = deque()
        self.pace = pace
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.ended: dict[tuple[str, int], FinishReason] = {}
        self.now = 0.0

    def schedule(
        self,
        budget: int,
        max_num_seqs: int,
        max_drafts: int,
        proposers: str,
        accuracy: float,
        max_model_len: int = 28,
    ) -> None:
        """Its scheduler."""
        self.budget, windows, pace = budget, self.windows, self.pace
        limits = SchedulerLimits(
            max_batch_tokens=budget,
            max_num_seqs=min(max_num_seqs, self.tables.max_running),
            max_model_len=max_model_len,
        )
        lookup = None
        if proposers != "draft" or windows[0]:  # then blocks are given back that a draft would read
            lookup = FakeProposer(pace, accuracy, self.runner.window)
        if proposers != "lookup" and not windows[0]:
            num_blocks = self.runner.num_blocks
            self.runner.drafter = FakeDraftModel(num_blocks, BLOCK_SIZE, pace, accuracy, len(windows))
        has_model = self.runner.drafter is not None
        self.drafting = (
            UnpricedDrafting(lookup, max_drafts, pace, has_model=has_model) if max_drafts else None
        )
        self.scheduler = Scheduler(self.queue, self.tables, FakeSink(), limits, self.drafting)

    def receive(self, outputs: list[Output]) -> None:
        for output in outputs:
            key = output.request_id, output.index
            assert key not in self.ended, f"{key} went on after its end"
            self.tokens.setdefault(key, []).extend(output.token_ids)
            if output.finish_reason is not None:
                assert output.timings is not None
                assert output.timings.arrival_s <= output.timings.scheduled_s <= output.timings.finished_s
                self.ended[key] = output.finish_reason

    @rule(
        stem=st.integers(0, 2),
        length=st.integers(1, 20),
        max_tokens=st.integers(1, 12),
        n=st.sampled_from([1, 1, 1, 2, 3]),
        lane=st.integers(0, 2),
        salt=st.sampled_from([b"", b"other"]),
    )
    def submit(self, stem: int, length: int, max_tokens: int, n: int, lane: int, salt: bytes) -> None:
        prompt = [(stem * 7 + i) % 11 for i in range(min(length, self.scheduler.max_len - 1))]
        self.put(prompt, max_tokens=max_tokens, n=n, lane=lane, salt=salt, seed=length)

    def put(self, prompt: list[int], **options: Any) -> None:
        name = f"r{len(self.requests)}"
        self.requests[name] = request = make_request(name, prompt, arrival_s=self.now, **options)
        self.queue.put(request, self.now)

    @rule(steps=st.integers(1, 4))
    def step(self, steps: int) -> None:
        for _ in range(steps):
            self.one_step()

    def one_step(self) -> None:
        plan = self.plan()
        is_launched = bool(plan.chunks) and self.launch(plan)
        if not plan.chunks and not self.flights:
            assert self.scheduler.sequences.is_idle, "there is work, and the step is idle"
            assert not any(self.queue.depths().values()), "somebody waits for an empty engine"
        self.land(self.runner.num_ahead if is_launched else 0)

    def launch(self, plan: StepPlan) -> bool:
        """False if there was no room for any of it; then it has failed."""
        before = self.runner.num_refused
        try:
            self.flights.append((plan, launch_fitting(self.runner, self.scheduler, plan)))
        except OutOfMemory:
            assert plan.num_tokens == 1 > self.runner.room
            self.land(0)
            self.receive(self.scheduler.fail_step(plan, "no room", self.now))
        assert self.runner.num_refused - before <= 1 + self.budget.bit_length(), "halved every time"
        return plan.num_tokens <= self.runner.room

    def plan(self) -> StepPlan:
        self.now += 1.0
        if self.flights and self.scheduler.awaits_tokens:
            self.land(0)
        plan = self.scheduler.plan(self.now)
        self.forget()
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks) <= self.budget
        assert len({chunk.sequence.key for chunk in plan.chunks}) == len(plan.chunks)
        assert len({target for _, target in plan.copies}) == len(plan.copies)
        for chunk in plan.chunks:
            assert chunk.start + chunk.num_tokens < chunk.sequence.max_len, "nobody needs its last token's KV"
            for number, window in enumerate(self.windows):
                visible = self.runner.visible(chunk.start + 1, window)
                blocks = chunk.sequence.block_table[number :: len(self.windows)]
                last = (chunk.start + chunk.num_tokens - 1) // BLOCK_SIZE
                assert all(blocks[visible.start // BLOCK_SIZE : last + 1]), "a visible block was given back"
        return plan

    def land(self, num_left: int) -> None:
        while len(self.flights) > num_left:
            plan, step = self.flights.popleft()
            self.receive(self.scheduler.commit(plan, step.wait(), self.now))
            self.forget()
            if self.drafting is not None:
                self.drafting.observe(plan, self.pace.random())

    def forget(self) -> None:
        departed = self.scheduler.sequences.take_departed()
        self.runner.forget(departed)
        if self.drafting is not None:
            self.drafting.forget(departed)

    @precondition(lambda self: self.scheduler.sequences.running)
    @rule(pick=st.integers(0, 5))
    def preempt(self, pick: int) -> None:
        self.scheduler.sequences.preempt(
            self.scheduler.sequences.running[pick % len(self.scheduler.sequences.running)]
        )

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 50))
    def cancel(self, pick: int) -> None:
        name = f"r{pick % len(self.requests)}"
        if self.queue.cancel(name):
            for index in range(self.requests[name].n):
                self.ended[name, index] = FinishReason.CANCELLED
        else:
            self.receive(self.scheduler.sequences.cancel(name, self.now))

    @precondition(lambda self: self.scheduler.sequences.running)
    @rule()
    def fail_at_launch(self) -> None:
        """A step that was planned and then broke: its sequences fail, the others do not notice."""
        plan = self.plan()
        self.land(0)
        if plan.chunks:
            self.receive(self.scheduler.fail_step(plan, "broken", self.now))

    @precondition(lambda self: self.flights)
    @rule()
    def fail_in_flight(self) -> None:
        """The next one is launched already, and computes on for sequences that then have failed."""
        plan = self.plan()
        if plan.chunks:
            self.launch(plan)
        if not self.flights:
            return
        broken, step = self.flights.popleft()
        step.wait()
        self.receive(self.scheduler.fail_step(broken, "broken", self.now))

    @precondition(lambda self: self.flights)
    @rule()
    def no_memory_in_flight(self) -> None:
        """A step finds no memory while it runs, and nothing of what was launched after it counts."""
        plan = self.plan()
        if plan.chunks:
            self.launch(plan)
        if not self.flights or self.flights[0][0].num_tokens < 2:
            self.land(self.runner.num_ahead)
            return
        plans = []
        while self.flights:
            given_up, step = self.flights.popleft()
            step.wait()
            plans.append(given_up)
        self.scheduler.size.give_up(plans)
        self.forget()

    @rule(room=st.integers(1, 24) | st.just(0), late=st.booleans())
    def memory_is_short(self, room: int, late: bool) -> None:
        """From now on the device refuses larger steps."""
        self.runner.room, self.runner.refuses_late = room, late

    @rule(late=st.booleans())
    def no_memory_for_a_step(self, late: bool) -> None:
        room, self.runner.room, self.runner.refuses_late = self.runner.room, 0, late
        self.one_step()
        self.runner.room = room

    @rule()
    def memory_is_there_again(self) -> None:
        self.runner.room = 1 << 30

    @precondition(lambda self: self.scheduler.sequences.running)
    @rule(pick=st.integers(0, 5))
    def bad_logits(self, pick: int) -> None:
        self.runner.bad.add(
            self.scheduler.sequences.running[pick % len(self.scheduler.sequences.running)].key
        )

    @invariant()
    def books_balance(self) -> None:
        if hasattr(self, "scheduler"):
            self.scheduler.sequences.check()
            self.room_is_bounded_by_the_window()
            assert [*self.tables.findable] == [*map(self.is_findable, range(len(self.tables.findable)))]
            assert len(self.scheduler.sequences.running) <= self.scheduler.limits.max_num_seqs

    @invariant()
    def what_is_remembered_is_what_would_be_found(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for sequence in [*self.scheduler.sequences.waiting, *self.scheduler._candidates.values()]:
            remembered, num_needed = self.tables.find_prefix(sequence), self.tables.num_free_needed(sequence)
            sequence.prefix = None
            found = self.tables.find_prefix(sequence)
            assert (remembered.entries, remembered.num_tokens) == (found.entries, found.num_tokens)
            assert (remembered.snapshot, remembered.num_known) == (found.snapshot, found.num_known)
            assert num_needed == self.tables.num_free_needed(sequence)
            sequence.prefix = remembered

    def is_findable(self, block: int) -> bool:
        return any(part.index.knows_block(block) for part in self.tables.parts)

    def room_is_bounded_by_the_window(self) -> None:
        for sequence in self.scheduler.sequences.running:
            part = self.tables.part_of(sequence)
            for number, window in enumerate(part.windows.sizes):
                blocks = sequence.block_table[number :: len(self.windows)]
                if not window:
                    assert 0 not in blocks
                elif not self.flights:
                    most = part.blocks_for(window + part.max_chunk) + 1
                    assert sum(map(bool, blocks)) <= most

    def teardown(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        self.runner.room = max(1, self.runner.room)
        for _ in range(3_000):
            if (
                self.scheduler.sequences.is_idle
                and not self.flights
                and not any(self.queue.depths().values())
            ):
                break
            self.one_step()
        assert self.scheduler.sequences.is_idle, "the work does not end"
        self.scheduler.sequences.check()
        assert self.tables.num_free_blocks == self.tables.num_blocks
        assert not any(part.index.num_pending for part in self.tables.parts)
        if self.drafting is not None:
            self.drafting.forget(self.scheduler.sequences.take_departed())
            assert not self.drafting._records, "nobody asks after those who ended"
            assert not self.drafting.failed
        for name, request in self.requests.items():
            for index in range(request.n):
                self.check_choice(name, index, request)

    def check_choice(self, name: str, index: int, request: Request) -> None:
        tokens = self.tokens.get((name, index), [])
        expected = expected_output(request, index, self.scheduler.max_len, self.runner.window)
        if self.ended[name, index] is FinishReason.LENGTH:
            assert tokens == expected
        else:
            assert tokens == expected[: len(tokens)]


SchedulerMachine.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
TestScheduler = SchedulerMachine.TestCase
