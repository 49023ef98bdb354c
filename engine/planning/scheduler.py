"""What the next step computes, and what it meant when it came back.

There is no prefill phase and no decode phase. A sequence's work is the tokens between `num_computed` and what is known
of it; every step hands out one budget of tokens, within what the queue allows: first one token to each running sequence
that decodes, then chunks to those with more to do, to preempted ones and to new ones, the more urgent lanes first.

A step may be planned while the one before it is in flight. Then a sequence computes a token that nobody here knows yet,
one that turns out to have ended is dropped from the results, and blocks that were given up are free only when the step
has come back; a sequence that lacks nothing else sits the step out.

The unified budget follows Sarathi-Serve (Agrawal et al., OSDI 2024) and vLLM's v1 scheduler; preemption recomputes.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Protocol

from engine.planning.block_tables import BlockTables
from engine.planning.request import FinishReason, Output, Request, Sequence, Timings
from engine.planning.step import Chunk, Plan, RequestQueue, Sampled, StepResult

log = logging.getLogger("penstock.engine")

_STEPS_TO_GROW, _MOST_STEPS_TO_GROW = 32, 4096
"""Steps that the device had room for, before larger ones are tried again: twice as many each time."""


class TokenSink(Protocol):
    """Turns the tokens of a sequence into text and decides where it ends."""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:
        """Called once `token_id` is the sequence's last known token: text that can be shown now, and why it ends.

        After `is_last` there is no room for another token: it must end.
        """


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_batch_tokens: int
    """Tokens in one step, prefill and decode together. In an engine, its runner may set a lower bound."""
    max_num_seqs: int
    """Sequences running at a time."""
    max_model_len: int
    """Prompt and output tokens of one sequence."""
    kv_shares: tuple[float, ...] = ()
    """By lane: a sequence starts only while the pool is in use up to this share with it. Missing: all of it."""


@dataclass(slots=True)
class Counters:
    """Ever-growing counts; readers take differences."""

    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0


class Scheduler:
    """The sequences that the engine holds, and the steps made of them.

    Not thread-safe: the step thread owns it. Every plan that is not empty is ended by `commit` or `fail_step`, in the
    order in which they were made; `cancel`, `preempt` and `fail` come at any time between these calls.
    """

    def __init__(
        self, queue: RequestQueue, tables: BlockTables, sink: TokenSink, limits: SchedulerLimits
    ) -> None:
        self.queue = queue
        self.tables = tables
        self.sink = sink
        self.limits = limits
        self.max_len = min(limits.max_model_len, tables.max_tokens)
        self.counters = Counters()
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        """Taken from the queue, holding nothing: preempted, or waiting for a prefix. In order of arrival."""
        self._candidate: Sequence | None = None
        """The queue's head as it was last looked at, so that its hashes are not computed twice."""
        self._refused: Request | None = None
        """The first request of the current turn that did not fit."""
        self._ended: list[Request] = []
        """One entry for each choice that ended and that the queue was not told of."""
        self._tokens_left = 0
        """Tokens that the step being planned has room for."""
        self._num_started = 0
        self._turn = 0
        self.most_tokens = limits.max_batch_tokens
        """Tokens that a step may have at present: fewer after one that the device had no room for."""
        self._num_fitted = 0
        """Steps that came back since `most_tokens` changed."""
        self._steps_to_grow = _STEPS_TO_GROW
        self._queue_goes_first = False
        """Others gave way for the next request, and its blocks are on their way back: they would take them again."""

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting and not self.tables.num_in_flight

    def plan(self, now: float) -> Plan:
        """The next step. `num_computed` of what it covers is advanced here; `commit` takes the result."""
        plan = Plan()
        queue_goes_first, self._queue_goes_first = self._queue_goes_first, False
        preemptions = self.counters.num_preemptions
        allowance = self.queue.allowance(self.running)
        remaining = [(s.num_remaining, s) for s in self.running]
        decodes = [s for num, s in remaining if num == 1]
        chunked = [s for num, s in remaining if num > 1]
        self._tokens_left = min(allowance.num_decodes, self.most_tokens)
        for sequence in self._in_turn(decodes, self._tokens_left):
            self._plan_chunk(plan, sequence)
        self._tokens_left = min(allowance.num_prefill, self.most_tokens - plan.num_tokens)
        for sequence in sorted(chunked, key=_urgency):
            if sequence.block_table:  # else it gave way a moment ago
                self._admit_queued(plan, now, above=sequence.request.lane)
                self._plan_chunk(plan, sequence)
        if queue_goes_first:
            self._admit_queued(plan, now)
        if self.counters.num_preemptions == preemptions:
            self._admit_waiting(plan, now)
        self._admit_queued(plan, now)
        if plan.chunks:
            plan.number = self.tables.begin_step(plan.copies)
        return plan

    def commit(self, plan: Plan, result: StepResult, now: float) -> list[Output]:
        """Applies what a step brought: confirms KV, appends tokens, ends and forks sequences."""
        self.tables.end_step(plan.number)
        self._note_fitted()
        outputs: list[Output] = []
        work: list[tuple[Request, int, int]] = []
        sampled = iter(result.sampled)
        for chunk in plan.chunks:
            sequence = chunk.sequence
            brought = next(sampled) if chunk.samples else None
            if sequence.finish_reason is not None:  # it ended while this step was in flight
                continue
            if chunk.is_current:
                self.tables.commit(sequence, chunk.start + chunk.num_tokens)
            if brought is not None:
                sequence.num_pending -= 1
                self._fork_if_due(sequence)
                outputs.append(self._apply_safely(sequence, brought, now))
            num_prompt = max(0, min(sequence.num_prompt_tokens - chunk.start, chunk.num_tokens))
            work.append((sequence.request, num_prompt, len(brought.token_ids) if brought else 0))
        self.queue.charge(work, now)
        self._settle(now)
        return outputs

    def cancel(self, request_id: str, now: float) -> list[Output]:
        """Ends all choices of a request; unknown ids are none of ours and bring nothing."""
        found = [s for s in self._all() if s.request.request_id == request_id]
        outputs = [output for s in found for output in self._abort(s, FinishReason.CANCELLED, None, now)]
        self._settle(now)
        return outputs

    def fail(self, sequences: list[Sequence], error: str, now: float) -> list[Output]:
        """Ends these sequences with an error; those that ended already are passed over."""
        alive = [s for s in sequences if s.finish_reason is None]
        outputs = [output for s in alive for output in self._abort(s, FinishReason.FAILED, error, now)]
        self._settle(now)
        return outputs

    def fail_step(self, plan: Plan, error: str, now: float) -> list[Output]:
        """In place of `commit`, for a step that brought nothing."""
        self.tables.end_step(plan.number)
        return self.fail([chunk.sequence for chunk in plan.chunks], error, now)

    def shrink(self, plan: Plan) -> bool:
        """Halves a step that was just planned and that the device had no room for.

        Chunks of many tokens are cut first, then decodes, the least urgent ones first: all that is left out comes with
        a later step, and nothing is computed again. Steps to come are as small, until many of them have come back.

        Returns:
            False, and nothing has changed, if the step has one token.
        """
        num_over = plan.num_tokens // 2
        if not num_over:
            return False
        order = sorted(plan.chunks, key=lambda chunk: (chunk.num_tokens > 1, _urgency(chunk.sequence)))
        while num_over > 0:
            num_over -= self._cut(plan, order.pop(), num_over)
        self.most_tokens, self._num_fitted = plan.num_tokens, 0
        return True

    def fail_all(self, error: str, now: float) -> list[Output]:
        return self.fail(list(self._all()), error, now)

    def preempt(self, sequence: Sequence) -> None:
        """Takes back all blocks of a running sequence; it keeps its place and is computed again later.

        What it had computed stays in the prefix cache while nobody needs the room, so it mostly comes back as hits.
        """
        self.running.remove(sequence)
        self.tables.release(sequence)
        sequence.num_preemptions += 1
        self.counters.num_preemptions += 1
        self._enqueue_waiting(sequence)

    def check(self) -> None:
        """Raises PoolViolation if a block is unaccounted for."""
        self.tables.check(self._all())

    # Planning

    def _in_turn(self, decodes: list[Sequence], room: int) -> list[Sequence]:
        """Who decodes first. If there is not room for all, the least urgent ones take turns.

        Those beyond the room come last in the list: one of them steps in for one that gives way.
        """
        if len(decodes) <= room:
            return decodes
        decodes.sort(key=_urgency)
        lane = decodes[room].request.lane
        num_sure = min(room - 1, sum(1 for s in decodes if s.request.lane < lane))
        sure, others = decodes[:num_sure], decodes[num_sure:]
        start = self._turn % len(others)
        self._turn = start + room - num_sure
        return sure + others[start:] + others[:start]

    def _plan_chunk(self, plan: Plan, sequence: Sequence) -> None:
        num_tokens = min(sequence.num_remaining, self._tokens_left)
        if num_tokens <= 0 or not sequence.block_table:  # preempted a moment ago, in this very loop
            return
        copies = self._make_room(plan, sequence, sequence.num_computed + num_tokens)
        if copies is None:
            return
        plan.copies.extend(copies)
        self._add_chunk(plan, sequence, num_tokens)

    def _add_chunk(self, plan: Plan, sequence: Sequence, num_tokens: int) -> None:
        start = sequence.num_computed
        sequence.num_computed = start + num_tokens
        chunk = Chunk(sequence, start, num_tokens, samples=sequence.num_remaining == 0)
        plan.chunks.append(chunk)
        sequence.num_pending += chunk.samples
        plan.num_tokens += num_tokens
        self._tokens_left -= num_tokens

    def _make_room(self, plan: Plan, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Grows the sequence's table, preempting as the queue says; None if it gave way itself, or has to wait.

        It waits for blocks that were given up and that steps in flight still use: nobody else gives way for it then.
        """
        while (copies := self.tables.grow(sequence, num_tokens)) is None:
            if self.tables.will_have_room(sequence, num_tokens):
                return None
            victim = self.queue.victim(self.running, sequence) or sequence
            self._withdraw(plan, victim)
            self.preempt(victim)
            if victim is sequence:
                return None
        return copies

    def _withdraw(self, plan: Plan, victim: Sequence) -> None:
        """Takes a victim that this step already counted on out of it again, budget included."""
        for chunk in [c for c in plan.chunks if c.sequence is victim]:
            plan.chunks.remove(chunk)
            victim.num_pending -= chunk.samples
            plan.num_tokens -= chunk.num_tokens
            self._tokens_left += chunk.num_tokens
        held = set(victim.block_table)
        plan.copies = [copy for copy in plan.copies if copy[1] not in held]

    def _cut(self, plan: Plan, chunk: Chunk, num_tokens: int) -> int:
        """Leaves the last tokens of a chunk, all of them at most, to a later step; returns how many.

        A sequence that is left out whole keeps its blocks, unless some are to be copied first: then it gives way, for
        this step may yet fail and those who are not in it go on.
        """
        sequence, num_tokens = chunk.sequence, min(num_tokens, chunk.num_tokens)
        if num_tokens == chunk.num_tokens:
            awaits_copies = any(target in sequence.block_table for _, target in plan.copies)
            self._withdraw(plan, sequence)
            sequence.num_computed = chunk.start
            if awaits_copies:
                self.preempt(sequence)
            return num_tokens
        sequence.num_computed -= num_tokens
        sequence.num_pending -= chunk.samples
        chunk.samples = False
        chunk.num_tokens -= num_tokens
        plan.num_tokens -= num_tokens
        return num_tokens

    def _admit_waiting(self, plan: Plan, now: float) -> None:
        for sequence in sorted(self.waiting, key=_urgency):
            if not self._has_seat() or self._tokens_left <= 0 or sequence.num_pending:
                return
            prefix = self.tables.find_prefix(sequence)
            if self.tables.awaits_prefix(sequence, len(prefix)):
                continue
            if self._blocks_short(sequence, prefix) > 0:
                return
            self.waiting.remove(sequence)
            self._start(plan, sequence, prefix, now)

    def _admit_queued(self, plan: Plan, now: float, above: int | None = None) -> None:
        """Takes what the queue gives. A sequence that was here before goes before those of its lane and below."""
        lanes = [s.request.lane for s in self.waiting if s.num_preemptions]
        above = min(lanes if above is None else [above, *lanes], default=None)
        way_was_made = False
        while self._tokens_left > 0 and self._num_deferred() < self.limits.max_num_seqs:
            self._refused = None
            request = self.queue.take(self._fits, above)
            if request is not None:
                self._begin(plan, request, now)
            elif self._refused is None or way_was_made or not self._make_way(plan, self._refused):
                return
            else:
                way_was_made = True

    def _num_deferred(self) -> int:
        """Sequences that wait for a prefix that another one computes."""
        return sum(1 for s in self.waiting if not s.num_preemptions)

    def _begin(self, plan: Plan, request: Request, now: float) -> None:
        sequence = self._candidate_for(request)
        self._candidate = None
        self._num_started += 1
        prefix = self.tables.find_prefix(sequence)
        if self.tables.awaits_prefix(sequence, len(prefix)):
            self._enqueue_waiting(sequence)
        else:
            self._start(plan, sequence, prefix, now)

    def _make_way(self, plan: Plan, request: Request) -> bool:
        """Preempts for a request whose turn it is, if that is enough to start it; else nothing changes.

        What steps in flight still use counts as room: the request starts with the next step.
        """
        sequence = self._candidate_for(request)
        prefix = self.tables.find_prefix(sequence)
        seats, blocks = len(self.running) - self.limits.max_num_seqs, self._blocks_short(sequence, prefix)
        blocks -= self.tables.num_returning
        victims: list[Sequence] = []
        candidates = iter(self.queue.giving_way(request, self.running))
        while seats >= 0 or blocks > 0:
            victim = next(candidates, None)
            if victim is None:
                return False
            victims.append(victim)
            seats, blocks = seats - 1, blocks - self.tables.num_held_alone(victim)
        for chosen in victims:
            self._withdraw(plan, chosen)
            self.preempt(chosen)
        self._queue_goes_first = self.tables.num_in_flight > 0
        return bool(victims)

    def _has_seat(self) -> bool:
        return len(self.running) < self.limits.max_num_seqs

    def _blocks_short(self, sequence: Sequence, prefix: list[int]) -> int:
        """Free blocks missing to hold all that is known, what its lane must leave free included."""
        pool = self.tables.pool
        held_back = 0
        if self.running:
            # Each that runs may need a block next; and the lane may not use all of the pool.
            shares = self.limits.kv_shares
            share = shares[sequence.request.lane] if sequence.request.lane < len(shares) else 1.0
            held_back = max(1 + len(self.running) // 4, int((1.0 - share) * (pool.num_blocks - 1)))
        return self.tables.num_free_needed(sequence, prefix) + held_back - pool.num_free

    def _fits(self, request: Request) -> bool:
        """Whether the request could start now; remembers one that could not."""
        sequence = self._candidate_for(request)
        if self._has_seat() and self._blocks_short(sequence, self.tables.find_prefix(sequence)) <= 0:
            return True
        self._refused = self._refused or request
        return False

    def _candidate_for(self, request: Request) -> Sequence:
        if self._candidate is None or self._candidate.request is not request:
            self._candidate = Sequence(request, order=self._num_started, max_len=self.max_len)
        return self._candidate

    def _start(self, plan: Plan, sequence: Sequence, prefix: list[int], now: float) -> None:
        self.tables.start(sequence, prefix)
        self.running.append(sequence)
        self._note_first_start(sequence, now)
        self._plan_chunk(plan, sequence)

    def _note_first_start(self, sequence: Sequence, now: float) -> None:
        if sequence.num_cached_tokens >= 0:
            return
        sequence.scheduled_s = now
        sequence.num_cached_tokens = sequence.num_computed
        self.counters.num_prefix_query_tokens += sequence.num_prompt_tokens
        self.counters.num_prefix_hit_tokens += sequence.num_computed

    def _enqueue_waiting(self, sequence: Sequence) -> None:
        """Keeps `waiting` in order of arrival: a preempted sequence goes before those that came after it."""
        position = next((i for i, other in enumerate(self.waiting) if other.order > sequence.order), None)
        if position is None:
            self.waiting.append(sequence)
        else:
            self.waiting.insert(position, sequence)

    # Committing

    def _note_fitted(self) -> None:
        """What the device lacked may be there again, or may be what only larger steps need: they are tried in time."""
        self._num_fitted += 1
        if self._num_fitted >= self._steps_to_grow and self.most_tokens < self.limits.max_batch_tokens:
            self.most_tokens = min(2 * self.most_tokens, self.limits.max_batch_tokens)
            self._num_fitted = 0
            self._steps_to_grow = min(2 * self._steps_to_grow, _MOST_STEPS_TO_GROW)

    def _apply_safely(self, sequence: Sequence, sampled: Sampled, now: float) -> Output:
        """A fault in the text of one sequence ends that sequence, and no other."""
        try:
            return self._apply(sequence, sampled, now)
        except Exception:
            log.exception("the text of %r failed; it ends with an error", sequence)
            return self._finish(sequence, FinishReason.FAILED, "the output could not be decoded", now)

    def _apply(self, sequence: Sequence, sampled: Sampled, now: float) -> Output:
        output = Output(request_id=sequence.request.request_id, index=sequence.index)
        if sampled.error is not None:
            return self._finish(sequence, FinishReason.FAILED, sampled.error, now, output)
        if sequence.first_token_s < 0:
            sequence.first_token_s = now
        reason = None
        for token_id in sampled.token_ids:
            sequence.token_ids.append(token_id)
            output.token_ids.append(token_id)
            text, reason = self.sink.accept(sequence, token_id, len(sequence.token_ids) >= sequence.max_len)
            output.text += text
            if reason is not None:
                break
        if sampled.logprobs is not None:
            output.logprobs = sampled.logprobs[: len(output.token_ids)]
        return output if reason is None else self._finish(sequence, reason, None, now, output)

    def _fork_if_due(self, parent: Sequence) -> None:
        """The other choices of a request start when its prompt is computed, and share its blocks."""
        if parent.index > 0 or parent.num_output_tokens > 0:
            return
        for index in range(1, parent.request.n):
            child = Sequence(parent.request, index, parent.order, self.max_len)
            child.scheduled_s, child.num_cached_tokens = parent.scheduled_s, parent.num_cached_tokens
            if self._has_seat() and parent.block_table:  # else it gave way while this step was in flight
                self.tables.fork(parent, child)
                self.running.append(child)
            else:
                self._enqueue_waiting(child)

    def _abort(
        self, sequence: Sequence, reason: FinishReason, error: str | None, now: float
    ) -> Iterator[Output]:
        """Ends a sequence, and with it the choices that it has not brought forth yet."""
        unborn = sequence.request.n if sequence.index == 0 and sequence.num_output_tokens == 0 else 0
        yield self._finish(sequence, reason, error, now)
        for index in range(1, unborn):
            yield self._finish(Sequence(sequence.request, index, sequence.order), reason, error, now)

    def _finish(
        self,
        sequence: Sequence,
        reason: FinishReason,
        error: str | None,
        now: float,
        output: Output | None = None,
    ) -> Output:
        output = output or Output(request_id=sequence.request.request_id, index=sequence.index)
        sequence.finish_reason = output.finish_reason = reason
        output.error = error
        output.timings = _timings(sequence, now)
        self._remove(sequence)
        self._ended.append(sequence.request)
        return output

    def _settle(self, now: float) -> None:
        """Tells the queue who ended, once what they did has been charged."""
        ended, self._ended = self._ended, []
        for request in ended:
            self.queue.settle(request, now)

    def _remove(self, sequence: Sequence) -> None:
        self.tables.release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _all(self) -> list[Sequence]:
        return [*self.running, *self.waiting]


def _urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.lane, sequence.order


def _timings(sequence: Sequence, now: float) -> Timings:
    scheduled = sequence.scheduled_s if sequence.scheduled_s >= 0 else now
    return Timings(
        arrival_s=sequence.request.arrival_s,
        scheduled_s=scheduled,
        first_token_s=sequence.first_token_s if sequence.first_token_s >= 0 else now,
        finished_s=now,
        num_prompt_tokens=sequence.num_prompt_tokens,
        num_cached_tokens=max(0, sequence.num_cached_tokens),
        num_output_tokens=sequence.num_output_tokens,
        num_preemptions=sequence.num_preemptions,
    )
