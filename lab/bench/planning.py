"""Measures the host's part of a step: planning, placing in the device's table and committing, nothing executed."""

from __future__ import annotations

import threading
import time
from typing import TYPE_CHECKING

from penstock.app.bench.statistics import percentile
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request, Sequence
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits, TokenSink
from penstock.engine.planning.step import Sampled, StepPlan, StepResult
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.queue import LaneQueue

if TYPE_CHECKING:
    from penstock.engine.execution.seats import Seats

_BLOCK_SIZE = 16
_PROMPT_TOKENS = 32


class NoText(TokenSink):
    """Sequences that end when they have all their tokens."""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:  # noqa: ARG002
        return "", FinishReason.LENGTH if is_last else None


def measure_planning(
    num_sequences: int = 256, num_steps: int = 200, num_context: int = _PROMPT_TOKENS
) -> dict[str, float]:
    """Milliseconds of host time that a step takes in which `num_sequences` decode one token each.

    Args:
        num_context: prompt tokens of each sequence.
    """
    # Not above: importing torch takes seconds, and other figures do without.
    import torch

    from penstock.engine.execution.seats import Seats
    from penstock.engine.kernels.sequence_table import SequenceTable

    length = _length(num_sequences, num_steps, num_context)
    table = SequenceTable(num_sequences, length // _BLOCK_SIZE + 1, _BLOCK_SIZE, torch.device("cpu"))
    seats = Seats(table)
    scheduler = _running_scheduler(num_sequences, num_steps, num_context, seats)
    times_ms = [_step(scheduler, seats) * 1000 for _ in range(num_steps)]
    assert len(scheduler.sequences.running) == num_sequences
    return {
        "sequences": num_sequences,
        "context": num_context,
        "host_p50_ms": percentile(times_ms, 50),
        "host_p99_ms": percentile(times_ms, 99),
    }


def _length(num_sequences: int, num_steps: int, num_context: int) -> int:
    """The tokens of a sequence at the most: while prompts are computed one by one, those before them decode."""
    return num_context + num_sequences + num_steps + 8


def _running_scheduler(num_sequences: int, num_steps: int, num_context: int, seats: Seats) -> Scheduler:
    length = _length(num_sequences, num_steps, num_context)
    memory = SequenceMemory((length // _BLOCK_SIZE + 2) * num_sequences + 1, _BLOCK_SIZE)
    limits = SchedulerLimits(
        max_batch_tokens=max(num_context, _PROMPT_TOKENS * num_sequences),
        max_num_seqs=num_sequences,
        max_model_len=length,
    )
    unbounded = LanePolicy(max_tokens=1 << 62, max_bytes=1 << 62)
    queue = LaneQueue(threading.Lock(), dict.fromkeys(Lane, unbounded))
    scheduler = Scheduler(queue, memory, NoText(), limits)
    for i in range(num_sequences):
        prompt = (i, *(place % 256 for place in range(num_context - 1)))  # numbers that Python has once
        sampling = SamplingParams(max_tokens=length, temperature=0)
        queue.put(Request(request_id=str(i), prompt_token_ids=prompt, sampling=sampling), 0.0)
    running = scheduler.sequences.running
    while len(running) < num_sequences or any(sequence.num_remaining != 1 for sequence in running):
        _step(scheduler, seats)
    return scheduler


def _step(scheduler: Scheduler, seats: Seats) -> float:
    """One step that brings a token for each; seconds of planning, placing and committing."""
    started = time.perf_counter()
    plan = scheduler.plan(started)
    _place(plan, seats)
    placed = time.perf_counter()
    result = _result(plan)
    executed = time.perf_counter()
    scheduler.commit(plan, result, executed)
    return time.perf_counter() - executed + placed - started


def _place(plan: StepPlan, seats: Seats) -> None:
    from penstock.engine.execution.seats import StepShape

    placed = seats.place(plan, StepShape.of(plan))
    seats.note_launched(plan, placed.seats)


def _result(plan: StepPlan) -> StepResult:
    return StepResult([Sampled([chunk.start % 1000]) for chunk in plan.chunks if chunk.samples])
