"""Sequences whose blocks come and go through tiers with faults, under the scheduler's random machine.

Reads arrive late, in any order, or not at all; files are torn, damaged and deleted; the disk is full; another server
writes to the same folder; the server stops at any time and another goes on. Whatever happens, every text is that of an
undisturbed run, the pool balances, and the folder is never larger than it may be.
"""

from __future__ import annotations

import errno
import random
import shutil
import tempfile
from pathlib import Path
from unittest.mock import patch

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import initialize, invariant, precondition, rule

from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.step import StepPlan
from penstock.engine.tiers import folder as folders
from penstock.engine.tiers.block_file import HEADER_BYTES, BlockKey, digest_of
from penstock.engine.tiers.disk import DiskTier
from penstock.engine.tiers.folder import SUFFIX, BlockFolder
from penstock.engine.tiers.host import HostTier
from tests.engine.fake_states import FakeStates
from tests.engine.planning.test_scheduler_machine import BLOCK_SIZE, WINDOWS, SchedulerMachine
from tests.engine.planning.test_state_machine import StateMachine
from tests.engine.tiers.fake_carrier import FakeCarrier, HandDrivenTiers
from tests.few import examples

FILE_BYTES = HEADER_BYTES + 12 * BLOCK_SIZE
DIGEST = digest_of(["machine"])


class TierMachine(SchedulerMachine):
    @initialize(
        num_blocks=st.integers(6, 16),
        budget=st.integers(4, 24),
        windows=st.sampled_from(WINDOWS),
        is_queued=st.booleans(),
        max_drafts=st.sampled_from([0, 1, 3]),
        host_blocks=st.sampled_from([0, 0, 2, 20]),
        disk_blocks=st.sampled_from([0, 6, 20, 100, 100]),
        pace=st.randoms(use_true_random=False),
    )
    def build(
        self,
        num_blocks: int,
        budget: int,
        windows: tuple[int, ...],
        is_queued: bool,
        max_drafts: int,
        host_blocks: int,
        disk_blocks: int,
        pace: random.Random,
    ) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.max_bytes = disk_blocks * FILE_BYTES + 7
        self.host_blocks = host_blocks
        self.set_up(num_blocks, windows, prefix_cache=True, is_queued=is_queued, pace=pace)
        self.carrier = FakeCarrier(self.runner)
        self.schedule(budget, 4, max_drafts, "both", 0.5)
        self.open()

    def open(self) -> None:
        self.disk = DiskTier(BlockFolder(self.path, self.max_bytes), DIGEST, lambda: self.tiers.now_s)
        host = [HostTier(self.host_blocks * self.carrier.num_bytes)] if self.host_blocks else []
        seconds = self.pace.choice([0.0, 1e-9, 1.0])
        staged = self.pace.choice([1, 4, 100])
        self.tiers = HandDrivenTiers(
            [*host, self.disk],
            self.carrier,
            self.pace,
            lambda num_prefill, *_: seconds * num_prefill,
            staged,
        )
        assert isinstance(self.tables, SequenceMemory)
        self.tiers.attach(self.tables)

    def plan(self) -> StepPlan:
        self.tiers.turn()
        return super().plan()

    def launch(self, plan: StepPlan) -> bool:
        self.tiers.save()
        return super().launch(plan)

    def one_step(self) -> None:
        self.tiers.now_s += self.pace.choice([0.0, 0.0, 0.1, 5.0])
        if self.pace.random() < 0.7:
            self.tiers.write_some(self.pace.randint(1, 4))
        if self.pace.random() < 0.7:
            self.tiers.read_some(self.pace.randint(1, 4))
        plan = self.plan()
        is_launched = bool(plan.chunks) and self.launch(plan)
        self.land(self.runner.num_ahead if is_launched else 0)

    @rule(pick=st.integers(0, 5))
    def queue_tells_of_those_who_wait(self, pick: int) -> None:
        self.tiers.expect([*self.requests.values()][-1 - pick :])

    def files(self) -> list[Path]:
        return sorted(self.path.glob(f"*/*/*{SUFFIX}"))

    @precondition(lambda self: self.files())
    @rule(pick=st.integers(0, 100), how=st.sampled_from(["tear", "damage", "delete", "swap"]))
    def spoil(self, pick: int, how: str) -> None:
        """Something happens to a file."""
        files = self.files()
        path, other = files[pick % len(files)], files[(pick + 1) % len(files)]
        data = bytearray(path.read_bytes())
        if how == "delete" or not data:
            path.unlink()
        elif how == "tear":
            path.write_bytes(data[: pick % len(data)])
        elif how == "swap":
            path.write_bytes(other.read_bytes()[: len(data)])  # no spoilt file takes more room than before
        else:
            data[pick * 7 % len(data)] ^= 1 + pick % 255
            path.write_bytes(data)

    @rule()
    def disk_is_full(self) -> None:
        def write(*_: object) -> None:
            raise OSError(errno.ENOSPC, "No space left on device")

        with patch.object(folders, "_write", write):
            self.tiers.write_some()

    @rule()
    def write_is_killed(self) -> None:
        """A server dies while it writes: it leaves a part of a file, and has told of all of it."""
        (self.path / "00" / "00").mkdir(parents=True, exist_ok=True)
        (self.path / "00" / "00" / f"torn{SUFFIX}.tmp").write_bytes(b"PENSTOCK")

    @rule(number=st.integers(0, 8), is_of_this_model=st.booleans())
    def another_server_writes(self, number: int, is_of_this_model: bool) -> None:
        digest = DIGEST if is_of_this_model else digest_of(["other"])
        other = DiskTier(BlockFolder(self.path, self.max_bytes), digest)
        other.write(BlockKey(bytes([number] * 16)), bytes(12 * BLOCK_SIZE))
        other.close()

    @rule()
    def look_over(self) -> None:
        self.disk.look_over()

    @rule(is_killed=st.booleans())
    def restart(self, is_killed: bool) -> None:
        """The server stops, and what it left is found by one that has nothing else, but for what it computes."""
        if is_killed:
            self.disk.close()
        else:
            self.tiers.finish()
        self.tables.parts[0].index._pending.clear()  # of a memory that is gone
        self.open()

    @invariant()
    def folder_is_bounded(self) -> None:
        if hasattr(self, "path") and self.path.exists():
            assert sum(path.stat().st_size for path in self.files()) <= self.max_bytes

    def teardown(self) -> None:
        if hasattr(self, "path"):
            try:
                super().teardown()
            finally:
                shutil.rmtree(self.path)


TierMachine.TestCase.settings = settings(max_examples=examples(120), stateful_step_count=40, deadline=None)
TestTiers = TierMachine.TestCase


class StateTierMachine(TierMachine, StateMachine):
    """Layers have a state. A server that starts again has nothing in its memory."""

    @initialize(
        num_blocks=st.integers(8, 40),
        budget=st.integers(4, 24),
        windows=st.sampled_from([(0,), (0,), (0,), (0, 0), (0, 5), (3,), (9, 4)]),
        is_queued=st.booleans(),
        num_states=st.sampled_from([2, 3, 4, 5, 6, 9, 20]),
        max_drafts=st.sampled_from([0, 1, 3]),
        host_blocks=st.sampled_from([0, 0, 60]),
        disk_blocks=st.sampled_from([0, 20, 100, 400, 400]),
        pace=st.randoms(use_true_random=False),
    )
    def build(
        self,
        num_blocks: int,
        budget: int,
        windows: tuple[int, ...],
        is_queued: bool,
        num_states: int,
        max_drafts: int,
        host_blocks: int,
        disk_blocks: int,
        pace: random.Random,
    ) -> None:
        self.path = Path(tempfile.mkdtemp())
        self.max_bytes = disk_blocks * FILE_BYTES + 7
        self.host_blocks = host_blocks

        def begin() -> None:
            states = FakeStates(num_states, max(3, max_drafts))
            self.set_up(num_blocks, windows, prefix_cache=True, is_queued=is_queued, pace=pace, states=states)
            self.carrier = FakeCarrier(self.runner)
            self.schedule(budget, 4, max_drafts, "both", 0.5, max_model_len=48)
            self.open()

        self.begin = begin
        begin()

    @rule(is_killed=st.booleans())
    def restart(self, is_killed: bool) -> None:
        if is_killed:
            self.disk.close()
        else:
            self.tiers.finish()
        StateMachine.restart(self)


StateTierMachine.TestCase.settings = settings(
    max_examples=examples(120), stateful_step_count=40, deadline=None
)
TestTiersOfStates = StateTierMachine.TestCase


@pytest.mark.parametrize("seed", range(examples(100)))
def test_conversations_that_come_again(seed: int) -> None:
    """The device has room for few of them."""
    pace = random.Random(seed)
    machine = TierMachine()
    machine.build(
        num_blocks=pace.choice([8, 12, 16]),
        budget=pace.choice([4, 24]),
        windows=pace.choice([(0,), (0,), (0, 0), (0, 5), (0, 3, 3), (9, 4), (8,)]),
        is_queued=pace.random() < 0.5,
        max_drafts=pace.choice([0, 3]),
        host_blocks=pace.choice([0, 4, 40]),
        disk_blocks=pace.choice([0, 10, 200]),
        pace=pace,
    )
    converse(machine, pace)


@pytest.mark.parametrize("seed", range(examples(100)))
def test_conversations_with_states_that_come_again(seed: int) -> None:
    pace = random.Random(seed)
    machine = StateTierMachine()
    machine.build(
        num_blocks=pace.choice([12, 16, 40]),
        budget=pace.choice([4, 24]),
        windows=pace.choice([(0,), (0,), (0, 0), (0, 5)]),
        is_queued=pace.random() < 0.5,
        num_states=pace.choice([3, 5, 9]),
        max_drafts=pace.choice([0, 3]),
        host_blocks=pace.choice([0, 40]),
        disk_blocks=pace.choice([0, 20, 400]),
        pace=pace,
    )
    converse(machine, pace)


def converse(machine: TierMachine, pace: random.Random) -> None:
    for _ in range(40):
        stem, length = pace.randrange(4), min(pace.randint(6, 20), machine.scheduler.max_len - 1)
        prompt = [(stem * 3 + i) % 11 for i in range(length)]
        machine.put(prompt, max_tokens=2, n=pace.choice([1, 1, 2]), lane=pace.randrange(3), seed=stem)
        if pace.random() < 0.5:
            machine.queue_tells_of_those_who_wait(0)
        for _ in range(pace.randint(1, 8)):
            machine.one_step()
            machine.books_balance()
            machine.folder_is_bounded()
        chance = pace.random()
        if chance < 0.05:
            machine.restart(is_killed=pace.random() < 0.5)
        elif chance < 0.15 and machine.files():
            machine.spoil(pace.randrange(100), pace.choice(["tear", "damage", "delete", "swap"]))
        elif chance < 0.2:
            machine.disk_is_full()
        elif chance < 0.25:
            machine.another_server_writes(pace.randrange(9), is_of_this_model=pace.random() < 0.5)
    machine.teardown()
