"""The random machine of `test_scheduler_machine` with layers that have a state, on a runner whose states are tokens.

A state that is read too early or too late, shared wrongly, written while others need it, or that drafts have left a
trace in, is not the state of the tokens before a chunk, and the runner says so. What is found of a prompt is compared
with what a plain reference finds among the states that the device holds.
"""

from __future__ import annotations

import random

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.prefix_index import chain_start, extend_hashes
from penstock.engine.planning.request import FinishReason, Sequence
from penstock.engine.planning.state_records import Snapshot
from tests.engine.fake_runner import make_request
from tests.engine.fake_states import FakeStates
from tests.engine.planning.test_scheduler_machine import BLOCK_SIZE, SchedulerMachine
from tests.few import examples


class StateMachine(SchedulerMachine):
    @initialize(
        num_blocks=st.integers(8, 60),
        budget=st.integers(1, 24),
        max_num_seqs=st.integers(1, 6),
        prefix_cache=st.sampled_from([True, True, True, False]),
        windows=st.sampled_from([(0,), (0,), (0,), (0, 0), (0, 5), (3,), (9, 4)]),
        is_queued=st.booleans(),
        num_states=st.sampled_from([2, 3, 4, 5, 6, 9, 20]),
        num_pending=st.sampled_from([0, 3, 8]),
        max_drafts=st.sampled_from([0, 0, 1, 3, 8]),
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
        num_states: int,
        num_pending: int,
        max_drafts: int,
        proposers: str,
        accuracy: float,
        pace: random.Random,
    ) -> None:
        def begin() -> None:
            states = FakeStates(num_states, max(num_pending, max_drafts))
            self.set_up(
                num_blocks,
                windows,
                prefix_cache=prefix_cache,
                is_queued=is_queued,
                pace=pace,
                states=states,
            )
            self.schedule(budget, max_num_seqs, max_drafts, proposers, accuracy, max_model_len=48)

        self.begin = begin
        begin()

    @property
    def states(self) -> FakeStates:
        assert self.runner.states is not None
        return self.runner.states

    @property
    def state_tables(self) -> SequenceMemory:
        assert isinstance(self.tables, SequenceMemory)
        return self.tables

    @precondition(lambda self: self.tokens)
    @rule(
        pick=st.integers(0, 50),
        num_cut=st.sampled_from([0, 0, 1, 2, 5]),
        length=st.integers(1, 6),
        max_tokens=st.integers(1, 8),
    )
    def go_on(self, pick: int, num_cut: int, length: int, max_tokens: int) -> None:
        """The next turn of a conversation, which may have left the end of the last one out."""
        (name, index), tokens = [*self.tokens.items()][pick % len(self.tokens)]
        before = self.requests[name]
        known = [*before.prompt_token_ids, *tokens]
        prompt = known[: len(known) - num_cut] + [30 + (pick + i + index) % 7 for i in range(length)]
        if len(prompt) < self.scheduler.max_len:
            self.put(prompt, max_tokens=max_tokens, salt=before.salt, lane=before.lane)

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 50), n=st.integers(1, 3))
    def ask_again(self, pick: int, n: int) -> None:
        before = self.requests[f"r{pick % len(self.requests)}"]
        self.put(list(before.prompt_token_ids), max_tokens=3, n=n, salt=before.salt)

    @rule()
    def restart(self) -> None:
        """All that was cached is gone, and whoever was running."""
        if not hasattr(self, "scheduler"):
            return
        requests, tokens, ended, now = self.requests, self.tokens, self.ended, self.now
        for name, request in requests.items():
            for index in range(request.n):
                ended.setdefault((name, index), FinishReason.CANCELLED)
        self.begin()
        self.requests, self.tokens, self.ended, self.now = requests, tokens, ended, now

    @precondition(lambda self: self.requests)
    @rule(pick=st.integers(0, 50), num_cut=st.integers(0, 12), num_more=st.integers(0, 9))
    def look(self, pick: int, num_cut: int, num_more: int) -> None:
        """What is found of some prompt is what the plain reference finds, or less where a window has been left."""
        name = f"r{pick % len(self.requests)}"
        before = self.requests[name]
        known = [*before.prompt_token_ids, *self.tokens.get((name, 0), [])]
        prompt = [*known[: max(0, len(known) - num_cut)], *range(60, 60 + num_more)]
        if not prompt or not self.state_tables.prefix_cache:
            return
        found = self.state_tables.find_prefix(Sequence(make_request("look", prompt, salt=before.salt)))
        expected = max(
            (self.found_at(s, prompt, before.salt) for s in self.state_tables.snapshots), default=0
        )
        assert found.num_tokens == expected or (max(self.windows) and found.num_tokens < expected)

    def found_at(self, snapshot: Snapshot, prompt: list[int], salt: bytes) -> int:
        """The tokens at which a state on the device serves a prompt, if their keys and values are there, too."""
        state = self.states.states[snapshot.slot]
        assert state is not None
        known = [*state, *self.states.pending[snapshot.slot]]
        pairs = enumerate(zip(known, prompt[:-1], strict=False))
        common = next((i for i, (a, b) in pairs if a != b), min(len(known), len(prompt) - 1))
        hashes: list[bytes] = []
        num_blocks = len(state) // BLOCK_SIZE
        extend_hashes(hashes, prompt, min(num_blocks, len(prompt) // BLOCK_SIZE), BLOCK_SIZE, salt)
        is_there = all(self.state_tables.index.block_of(known_hash) is not None for known_hash in hashes)
        is_same_salt = snapshot.key in self.keys(prompt, salt)
        return common if common >= len(state) and is_there and is_same_salt else 0

    def keys(self, prompt: list[int], salt: bytes) -> list[bytes]:
        hashes: list[bytes] = []
        extend_hashes(hashes, prompt, len(prompt) // BLOCK_SIZE, BLOCK_SIZE, salt)
        return [chain_start(salt), *hashes]

    def is_findable(self, block: int) -> bool:
        return super().is_findable(block) or self.state_tables.snapshots.needs(block)

    @invariant()
    def snapshots_are_what_they_say(self) -> None:
        if not hasattr(self, "scheduler"):
            return
        for snapshot in self.state_tables.snapshots:
            state, pending = self.states.states[snapshot.slot], self.states.pending[snapshot.slot]
            assert state is not None
            assert len(state) == snapshot.base
            assert len(state) + len(pending) >= snapshot.end
            first = snapshot.base // BLOCK_SIZE * BLOCK_SIZE
            assert [*state, *pending][first : snapshot.end] == snapshot.tail

    def teardown(self) -> None:
        super().teardown()
        if hasattr(self, "scheduler"):
            assert self.state_tables.state_use.num_held == 0


StateMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
TestStates = StateMachine.TestCase
