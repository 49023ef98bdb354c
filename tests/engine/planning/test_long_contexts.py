"""A step's work on the host does not depend on how long the contexts of its sequences are.

Work is counted, not timed: the instructions that Python runs, and the elements that are read of the lists which grow
with a context.
"""

from __future__ import annotations

import gc
import sys
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from types import FrameType
from typing import Any, SupportsIndex

import pytest
import torch

from penstock.engine.execution.seats import Seats, StepShape
from penstock.engine.kernels.sequence_table import SequenceTable
from penstock.engine.parallel.messages import Narrator
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.step import Sampled, StepPlan, StepResult
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import FakeSink
from tests.priority.simulated_engine import permissive

BLOCK_SIZE = 16
SHORT, LONG = 2_000, 200_000
LONGER = 256


class CountingList(list[Any]):
    """A list that counts the elements that are read of it."""

    num_reads = 0

    def __getitem__(self, place: SupportsIndex | slice) -> Any:
        found = super().__getitem__(place)
        CountingList.num_reads += len(found) if isinstance(place, slice) else 1
        return found

    def __iter__(self) -> Iterator[Any]:
        CountingList.num_reads += len(self)
        return super().__iter__()

    def __eq__(self, other: object) -> bool:
        CountingList.num_reads += len(self)
        return super().__eq__(other)

    def __ne__(self, other: object) -> bool:
        CountingList.num_reads += len(self)
        return super().__ne__(other)


def num_instructions(do: Callable[[], object]) -> int:
    """The instructions that Python runs meanwhile."""
    count = 0

    def trace(frame: FrameType, event: str, _: object) -> Any:
        nonlocal count
        frame.f_trace_opcodes, frame.f_trace_lines = True, False
        count += event == "opcode"
        return trace

    before, collects = sys.gettrace(), gc.isenabled()
    gc.disable()  # others may have asked to be called when garbage is collected
    sys.settrace(trace)
    try:
        do()
    finally:
        sys.settrace(before)
        if collects:
            gc.enable()
    return count


class Planning:
    """The scheduler, the queue, the table of sequences and the messages to other ranks, with a model that says 1."""

    def __init__(self, num_tokens: int, *, num_blocks: int, budget: int | None = None) -> None:
        num_seats = 8
        limits = SchedulerLimits(
            max_batch_tokens=budget or num_tokens, max_num_seqs=num_seats, max_model_len=num_tokens + LONGER
        )
        self.queue = LaneQueue(nullcontext(), permissive())
        self.memory = SequenceMemory(num_blocks, BLOCK_SIZE)
        self.scheduler = Scheduler(self.queue, self.memory, FakeSink(), limits)
        max_blocks = (num_tokens + LONGER) // BLOCK_SIZE + 2
        self.seats = Seats(SequenceTable(num_seats, max_blocks, BLOCK_SIZE, torch.device("cpu")))
        self.narrator = Narrator()
        self.num_words = 0
        self.now = 0.0

    def submit(self, name: str, num_tokens: int, *, max_tokens: int = LONGER, lane: int = 1) -> None:
        """Prompts of one length begin alike if their names do."""
        prompt = (sum(name[:1].encode()), *(place % 251 for place in range(num_tokens - 1)))
        sampling = SamplingParams(max_tokens=max_tokens, ignore_eos=True)
        self.queue.put(Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, lane=lane), 0.0)

    def step(self) -> StepPlan:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        placed = self.seats.place(plan, StepShape.of(plan))
        self.num_words += len(self.narrator.launch(plan).words)
        self.seats.note_launched(plan, placed.seats)
        result = StepResult([Sampled([1]) for chunk in plan.chunks if chunk.samples])
        self.scheduler.commit(plan, result, self.now)
        for sequence in self.scheduler.sequences.take_departed():
            self.seats.forget(sequence)
            self.narrator.forget([sequence])
        return plan

    def watch(self) -> None:
        """Counts what is read of the running sequences' lists from now on."""
        for sequence in self.scheduler.sequences.running:
            sequence.token_ids = CountingList(sequence.token_ids)
            sequence.block_table = CountingList(sequence.block_table)
            sequence.block_hashes = CountingList(sequence.block_hashes)
        for _ in range(BLOCK_SIZE):
            self.step()  # the new lists are told of as a whole

    def work(self, num_steps: int = 20) -> list[tuple[int, int, int]]:
        """Of each of so many steps: instructions, elements read, and bytes for other ranks."""
        steps = []
        for _ in range(num_steps):
            CountingList.num_reads = self.num_words = 0
            steps.append((num_instructions(self.step), CountingList.num_reads, self.num_words))
        return steps


def decoding(num_tokens: int) -> Planning:
    planning = Planning(num_tokens, num_blocks=3 * (num_tokens + LONGER) // BLOCK_SIZE + 8)
    for name in ("a", "b", "c"):
        planning.submit(name, num_tokens)
    while len(planning.scheduler.sequences.running) < 3:
        planning.step()
    planning.watch()
    return planning


def waiting(num_tokens: int) -> Planning:
    """Another runs in the blocks that a prompt needs whose first `num_tokens` tokens are cached."""
    planning = Planning(num_tokens + 80, num_blocks=(num_tokens + 80) // BLOCK_SIZE + 40)
    planning.submit("known", num_tokens, max_tokens=1)
    planning.step()
    planning.submit("runs", 16 * 20, lane=0)
    planning.step()
    planning.submit("known and more", num_tokens + 80 + 16 * 20)
    planning.step()
    planning.watch()
    assert len(planning.scheduler.sequences.running) == 1
    assert sum(planning.queue.depths().values()) == 1
    return planning


@pytest.mark.parametrize("begin", [decoding, waiting])
def test_a_step_is_as_much_work_at_two_hundred_thousand_tokens_as_at_two_thousand(
    begin: Callable[[int], Planning],
) -> None:
    work = begin(LONG).work()
    assert work == begin(SHORT).work()
    assert max(num_reads for _, num_reads, _ in work) < 200


def test_the_last_chunk_of_a_long_prompt_is_as_much_work_as_one_near_its_beginning() -> None:
    planning = Planning(LONG, num_blocks=LONG // BLOCK_SIZE + 40, budget=512)
    planning.submit("long", LONG)
    planning.step()
    early = num_instructions(planning.step)
    for _ in range(LONG // 512 - 3):
        planning.step()
    assert num_instructions(planning.step) == pytest.approx(early, rel=0.01)


def test_of_a_prompt_that_is_cached_only_what_is_new_is_computed() -> None:
    planning = Planning(LONG + 80, num_blocks=2 * LONG // BLOCK_SIZE)
    planning.submit("long", LONG, max_tokens=1)
    planning.step()
    planning.submit("longer", LONG + 64)
    plan = planning.step()
    assert [(chunk.start, chunk.num_tokens) for chunk in plan.chunks] == [(LONG, 64)]


def test_nobody_waits_for_the_check_of_an_idle_pool_however_large() -> None:
    small, large = (SequenceMemory(num_blocks, BLOCK_SIZE) for num_blocks in (20, 20_000))
    assert num_instructions(small.check_idle) == num_instructions(large.check_idle)
