from __future__ import annotations

import random
from threading import Lock

import pytest

from engine.planning.block_tables import BlockTables
from engine.planning.draft_model import DraftModel
from engine.planning.request import Request, Sequence
from engine.planning.scheduler import Scheduler, SchedulerLimits
from engine.planning.step import DraftChunk
from priority.queue import LaneQueue
from tests.engine.fake_runner import (
    FakeDraftModel,
    FakeRunner,
    FakeSink,
    UnpricedDrafting,
    expected_output,
    make_request,
)

BLOCK_SIZE = 4


class DraftModelRun:
    """Requests that share prompts, fork, give way, start again and are cancelled while a draft model follows them."""

    def __init__(self, seed: int, accuracy: float) -> None:
        self.pace = pace = random.Random(seed)
        num_blocks = pace.choice([12, 16, 40])
        self.tables = BlockTables(num_blocks, BLOCK_SIZE, prefix_cache=pace.random() < 0.7)
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        self.draft = FakeDraftModel(num_blocks, BLOCK_SIZE, pace, accuracy)
        self.drafting = UnpricedDrafting(None, pace.choice([1, 4, 8]), DraftModel(self.draft), pace)
        self.queue = LaneQueue(Lock())
        limits = SchedulerLimits(max_batch_tokens=pace.choice([5, 12, 30]), max_num_seqs=5, max_model_len=32)
        self.scheduler = Scheduler(self.queue, self.tables, FakeSink(), limits, self.drafting)
        self.requests: dict[str, Request] = {}
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.counts = [0, 0]
        """Drafted, accepted."""

    def submit(self) -> None:
        pace, name = self.pace, f"r{len(self.requests)}"
        stem = pace.randrange(2)
        prompt = [(stem * 7 + i) % 11 for i in range(pace.randint(1, 16))]
        max_tokens, n = pace.randint(4, 14), pace.choice([1, 1, 2, 3])
        self.requests[name] = make_request(name, prompt, max_tokens=max_tokens, n=n, seed=pace.randrange(3))
        self.queue.put(self.requests[name], 0.0)

    def step(self) -> None:
        plan = self.scheduler.plan(0.0)
        result = self.runner.execute(plan)
        for output in self.scheduler.commit(plan, result, 0.0):
            self.tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            if output.timings is not None and "draft" in output.timings.drafts:
                count = output.timings.drafts["draft"]
                self.counts = [self.counts[0] + count.num_drafted, self.counts[1] + count.num_accepted]
        self.drafting.forget(self.scheduler.take_departed())
        self.scheduler.check()

    def disturb(self) -> None:
        running = self.scheduler.running
        if running and self.pace.random() < 0.1:
            self.scheduler.preempt(self.pace.choice(running))
        if running and self.pace.random() < 0.03:
            name = self.pace.choice(running).request.request_id
            self.scheduler.cancel(name, 0.0)
            del self.requests[name]

    def run(self) -> None:
        for _ in range(12):
            self.submit()
        while not self.scheduler.is_idle or any(self.queue.depths().values()):
            self.disturb()
            self.step()
        for name, request in self.requests.items():
            for index in range(request.n):
                assert self.tokens[name, index] == expected_output(request, index, self.scheduler.max_len)


@pytest.mark.parametrize("accuracy", [1.0, 0.8, 0.0])
def test_what_the_draft_knows_is_what_the_sequences_are(accuracy: float) -> None:
    drafted = accepted = 0
    for seed in range(60):
        life = DraftModelRun(seed, accuracy)
        life.run()
        assert not life.drafting.failed, f"seed {seed}"
        assert not life.drafting._model._progress, "nobody asks after those who ended"  # type: ignore[union-attr]
        drafted, accepted = drafted + life.counts[0], accepted + life.counts[1]
    assert drafted > 2_000
    assert (accepted == drafted) == (accuracy == 1.0)


def started(tables: BlockTables, name: str, prompt: list[int]) -> Sequence:
    sequence = Sequence(make_request(name, prompt))
    tables.start(sequence, tables.find_prefix(sequence))
    tables.grow(sequence, len(prompt) + 12)
    tables.commit(sequence, len(prompt) - 1)
    return sequence


class Recorder(FakeDraftModel):
    """Tells what it is asked to compute."""

    def __init__(self) -> None:
        super().__init__(40, BLOCK_SIZE, random.Random(1), 1.0)
        self.spans: list[tuple[int, int]] = []

    def knows(self, sequence: Sequence) -> bool:  # noqa: ARG002
        return True

    def draft(self, chunks: list[DraftChunk], length: int) -> list[list[int]]:
        self.spans += [(chunk.start, chunk.end) for chunk in chunks]
        return super().draft(chunks, length)


def test_it_catches_up_in_passes_of_bounded_size_and_drafts_when_it_has() -> None:
    tables, runner = BlockTables(40, BLOCK_SIZE), Recorder()
    model = DraftModel(runner)
    sequence = started(tables, "r", list(range(40)))
    assert model.propose([sequence], [3]) == [[]]
    assert model.propose([sequence], [3]) == [[]]
    (drafts,) = model.propose([sequence], [3])
    assert len(drafts) == 3
    assert runner.spans == [(0, 16), (16, 32), (32, 40)]


def test_right_drafts_and_blocks_that_others_filled_are_not_computed_again() -> None:
    tables, runner = BlockTables(40, BLOCK_SIZE), Recorder()
    model = DraftModel(runner)
    first = started(tables, "r", list(range(11)))
    (drafts,) = model.propose([first], [4])
    first.token_ids += [*drafts[:2], 49]
    (drafts,) = model.propose([first], [4])
    assert runner.spans == [(0, 11), (13, 14)]
    first.token_ids += [*drafts, 49]
    model.propose([first], [4])
    assert runner.spans[2:] == [(17, 19)], "the last draft was not computed"
    second = started(tables, "s", list(range(10)))
    model.propose([second], [1])
    assert runner.spans[3:] == [(8, 10)]


def test_what_there_is_to_catch_up_counts_in_what_drafting_takes() -> None:
    """A pass takes 1 s and 0.1 s for each token; five drafts and what the host does are six passes."""
    now = 0.0

    class Ticking(Timed):
        def draft(self, chunks: list[DraftChunk], length: int) -> list[list[int]]:
            nonlocal now
            now += (length + 1) * (1.0 + 0.1 * len(chunks)) + 0.1 * (
                chunks[0].end - chunks[0].start - len(chunks)
            )
            return super().draft(chunks, length)

    model = DraftModel(Ticking(), lambda: now, lambda prefill, decode, _: 10.0 + 1.0 * (prefill + decode))
    late, prompt = Sequence(make_request("late", [1] * 400)), Sequence(make_request("known", [1, 2]))
    assert model.seconds([late], 5) == 0.0, "nobody knows"
    for _ in range(8):
        model.propose([prompt], [5])
        prompt.token_ids.append(3)
    caught_up = 6 * 1.1
    assert model.seconds([prompt], 5) == pytest.approx(caught_up, rel=0.05)
    assert model.seconds([late], 5) > 1.1 * caught_up
    model.propose([late], [5])
    assert model.seconds([late], 5) == pytest.approx(caught_up, rel=0.05)


class Timed:
    """Drafts nothing but 7."""

    block_size, max_tokens, reads_target = BLOCK_SIZE, 512, False

    def knows(self, sequence: Sequence) -> bool:  # noqa: ARG002
        return True

    def draft(self, chunks: list[DraftChunk], length: int) -> list[list[int]]:
        return [[7] * length for _ in chunks]
