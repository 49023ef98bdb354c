from __future__ import annotations

import random
from threading import Lock

import pytest

from penstock.engine.execution.draft_kv import DraftChunk
from penstock.engine.launching import launch_fitting
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.step import OPEN, Chunk, StepPlan
from penstock.priority.queue import LaneQueue
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
        self.tables = SequenceMemory(num_blocks, BLOCK_SIZE, prefix_cache=pace.random() < 0.7)
        self.runner = FakeRunner(num_blocks, BLOCK_SIZE)
        self.runner.drafter = self.draft = FakeDraftModel(num_blocks, BLOCK_SIZE, pace, accuracy)
        self.drafting = UnpricedDrafting(None, pace.choice([1, 4, 8]), pace, has_model=True)
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
        self.forget()
        if not plan.chunks:
            return
        result = launch_fitting(self.runner, self.scheduler, plan).wait()
        for output in self.scheduler.commit(plan, result, 0.0):
            self.tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            if output.timings is not None and "draft" in output.timings.drafts:
                count = output.timings.drafts["draft"]
                self.counts = [self.counts[0] + count.num_drafted, self.counts[1] + count.num_accepted]
        self.forget()
        self.scheduler.sequences.check()

    def forget(self) -> None:
        departed = self.scheduler.sequences.take_departed()
        self.runner.forget(departed)
        self.drafting.forget(departed)

    def disturb(self) -> None:
        running = self.scheduler.sequences.running
        if running and self.pace.random() < 0.1:
            self.scheduler.sequences.preempt(self.pace.choice(running))
        if running and self.pace.random() < 0.03:
            name = self.pace.choice(running).request.request_id
            self.scheduler.sequences.cancel(name, 0.0)
            del self.requests[name]

    def run(self) -> None:
        for _ in range(12):
            self.submit()
        while not self.scheduler.sequences.is_idle or any(self.queue.depths().values()):
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
        assert not life.draft.kv._progress, "nobody asks after those who ended"
        drafted, accepted = drafted + life.counts[0], accepted + life.counts[1]
    assert drafted > 2_000
    assert (accepted == drafted) == (accuracy == 1.0)


def started(tables: SequenceMemory, name: str, prompt: list[int]) -> Sequence:
    sequence = Sequence(make_request(name, prompt))
    tables.start(sequence)
    tables.grow(sequence, len(prompt) + 12)
    tables.commit(sequence, len(prompt) - 1)
    return sequence


class Recorder(FakeDraftModel):
    """Tells what it is asked to read."""

    def __init__(self) -> None:
        super().__init__(40, BLOCK_SIZE, random.Random(1), 1.0)
        self.spans: list[tuple[int, int]] = []

    def run(self, chunk: DraftChunk, length: int) -> list[int]:
        self.spans.append((chunk.start, chunk.start + chunk.num_tokens))
        return super().run(chunk, length)

    def draft_for(self, sequence: Sequence, length: int) -> list[int]:
        drafts = list[int]()
        num_spans = len(self.spans)
        while len(self.spans) == num_spans:  # now and then it knows nothing
            chunk = Chunk(sequence, len(sequence.token_ids) - 1, 1 + length, True, drafts=[OPEN] * length)
            (drafts,) = self.draft(StepPlan([chunk]))
        return drafts


def test_it_catches_up_in_passes_of_bounded_size_and_drafts_when_it_has() -> None:
    tables, model = SequenceMemory(40, BLOCK_SIZE), Recorder()
    sequence = started(tables, "r", list(range(40)))
    assert [len(model.draft_for(sequence, 3)) for _ in range(3)] == [0, 0, 3]
    assert model.spans == [(0, 16), (16, 32), (32, 40)]


def test_right_drafts_and_blocks_that_others_filled_are_not_read_again() -> None:
    tables, model = SequenceMemory(40, BLOCK_SIZE), Recorder()
    first = started(tables, "r", list(range(11)))
    drafts = model.draft_for(first, 4)
    first.token_ids += [*drafts[:2], 49]
    drafts = model.draft_for(first, 4)
    assert model.spans == [(0, 11), (13, 14)]
    first.token_ids += [*drafts, 49]
    model.draft_for(first, 4)
    assert model.spans[2:] == [(17, 19)], "the last draft was not read"
    second = started(tables, "s", list(range(10)))
    model.draft_for(second, 1)
    assert model.spans[3:] == [(8, 10)]


def test_who_wants_most_drafts_comes_first_and_who_gets_none_last() -> None:
    tables, model = SequenceMemory(40, BLOCK_SIZE), Recorder()
    few, many, late = (started(tables, name, [i] * 7) for i, name in enumerate("abc"))
    late.token_ids += [9] * 3
    chunks = model.kv.begin({few: 1, many: 3, late: 4})
    assert [chunk.sequence for chunk in chunks] == [many, few, late]
    assert [chunk.samples for chunk in chunks] == [True, True, False]
