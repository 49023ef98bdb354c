"""Which tokens of which sequences the next step computes.

There is no prefill phase and no decode phase. A sequence's work is its tokens from `num_computed` on. Every step hands
out one budget of tokens, within the queue's allowance: first one token to each running sequence that decodes, then
chunks to sequences with more to compute, to preempted ones and to new ones, the more urgent lanes first.

A step may be planned while the one before it is in flight. Then a sequence may compute a token that only the device
knows yet, results of a sequence that has ended meanwhile are dropped, and blocks that were given back are free only
when the step has come back; a sequence that lacks nothing but such blocks sits the step out.

A model that is cut into stages has as many steps in flight, each with its share of the sequences that decode: one whose
token is in flight sits out the others. The chunks of a prompt follow one another without waiting.

The unified budget follows Sarathi-Serve (Agrawal et al., OSDI 2024) and vLLM's v1 scheduler; preemption recomputes.
"""

from __future__ import annotations

from collections import deque
from itertools import groupby
from math import inf

from penstock.engine.planning.beams import Beams, BeamSequence
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.ranked_memory import Memory
from penstock.engine.planning.request import NO_LIMIT, Output, Request, Sequence
from penstock.engine.planning.request_queue import UNLIMITED, RequestQueue
from penstock.engine.planning.sequences import Counters, Sequences
from penstock.engine.planning.step import Chunk, StepPlan, StepResult
from penstock.engine.planning.step_results import SchedulerLimits, StepResults, TokenSink
from penstock.engine.planning.step_size import StepSize, urgency

__all__ = ["Counters", "Scheduler", "SchedulerLimits", "TokenSink"]

_BELOW_ALL_LANES = 1 << 30


class Scheduler:
    """Plans steps of the engine's sequences and applies their results.

    It is not thread-safe: the step thread owns it. Every plan with chunks is ended by `commit` or `fail_step`, in the
    order in which the plans were made, unless `size` withdraws all of it or gives it up; its `sequences` may be
    cancelled, fail and give way at any time between these calls.
    """

    def __init__(
        self,
        queue: RequestQueue,
        memory: Memory,
        sink: TokenSink,
        limits: SchedulerLimits,
        drafting: Drafting | None = None,
    ) -> None:
        memory.limit_chunks(limits.max_batch_tokens)
        self.memory = memory
        self.limits = limits
        self.drafting = drafting
        self.max_len = min(limits.max_model_len, memory.max_tokens)
        self.sequences = sequences = Sequences(queue, memory)
        self.queue = queue
        self._results = StepResults(sequences, queue, sink, limits.max_num_seqs, self.longest)
        self.size = StepSize(sequences, limits.max_batch_tokens)
        self._tokens_left = 0
        """Tokens that the step being planned has room for."""
        self._allowance = UNLIMITED
        """The allowance of that step."""
        self._work_left = inf
        """The work on prompts that it has room for; see `Allowance.work`."""
        self._scored_left = 0
        """The prompt tokens that it may score while other sequences run."""
        self._turn = 0
        """The place in the list of decodes where the next round begins, while a step has no room for all of them."""
        self._num_preemptions_before = 0
        """`counters.num_preemptions` when the planning of this step began."""
        self._queue_goes_first = False
        """Sequences gave way for the queue's next request and would take their blocks, which are returning, again."""
        self._num_started = 0
        self._candidates: dict[int, Sequence] = {}
        """Made of the requests that this step looked at in the queue, by `id`, so that each is looked up once."""
        self._candidates_before: dict[int, Sequence] = {}
        """Those of the step before."""
        self._passed_over: Sequence | None = None
        """The request to which others that start first leave the blocks that it needs."""
        self._refused: Request | None = None
        """The first request of the current turn that did not fit."""
        self._last: StepPlan | None = None
        """The plan that was made last, until it has ended."""

    def longest(self, keeping: Keeping | None) -> int:
        """The tokens of the longest sequence of which so much is kept; None stands for all of it."""
        if keeping is None or keeping.most > self.memory.max_tokens:
            return self.max_len
        return self.limits.max_model_len

    @property
    def most_tokens(self) -> int:
        """Tokens that a step may have at present: fewer for a while after one that the device had no room for."""
        return self.size.num_tokens

    @property
    def awaits_tokens(self) -> bool:
        """Whether steps in flight must land before the next is planned, because it may have drafts."""
        return self.drafting is not None and self.drafting.is_due

    def may_be_followed(self, plan: StepPlan) -> bool:
        """Whether the next step may be planned before the last one, this plan, is back: what drafts it has allow it."""
        return not plan.num_drafts or (self.drafting is not None and self.drafting.is_followed)

    def start_afresh(self, memory: Memory) -> None:
        """Goes on with an empty memory, while there is no sequence."""
        self.memory = self.sequences.memory = memory

    def plan(self, now: float) -> StepPlan:
        """Plans the next step and advances `num_computed` of its sequences; `commit` takes the result."""
        plan = StepPlan()
        self.sequences.planned_s = now
        self._num_preemptions_before = self.sequences.counters.num_preemptions
        self._candidates, self._candidates_before = {}, self._candidates
        queue_goes_first, self._queue_goes_first = self._queue_goes_first, False
        decodes, chunked = self._sort_running()
        allowance = self._allowance = self.queue.allowance(self.sequences.running, decodes, chunked)
        self._scored_left = self.limits.max_scored
        self._note_passed_over()
        self._tokens_left = min(allowance.num_decodes, self.most_tokens, self._most_decodes)
        self._work_left = inf
        self._plan_decodes(plan, decodes)
        self._tokens_left = min(allowance.num_prefill, self.most_tokens - plan.num_tokens)
        self._work_left = allowance.prefill_work
        self._plan_prefills(plan, chunked, now)
        if queue_goes_first:
            self._admit_queued(plan, now)
        self._resume_waiting(plan, now)
        self._admit_queued(plan, now)
        self._candidates_before.clear()  # of those nobody looked at, some may have been cancelled
        if self.drafting is not None:
            self.drafting.extend(plan, self.memory, self.most_tokens, allowance.most_s)
        if plan.chunks:
            plan.number = self.memory.begin_step(plan.copies)
            self.memory.assign(plan)
            self._last = plan
        return plan

    def commit(self, plan: StepPlan, result: StepResult, now: float) -> list[Output]:
        """Applies the result of a step; see StepResults."""
        self.size.note_fitted()
        if result.made and self.drafting is not None:
            self.drafting.note_made(plan, result.made, result.drafting_s)
        return self._results.commit(plan, result, now, self._later(plan))

    def fail_step(self, plan: StepPlan, error: str, now: float) -> list[Output]:
        """Ends the sequences of a step that brought no result; called in place of `commit`."""
        self._later(plan)
        return self._results.fail(plan, error, now)

    def _later(self, plan: StepPlan) -> StepPlan | None:
        """The plan that was made after one that has ended, if it has not."""
        if self._last is plan:
            self._last = None
        return self._last

    # Planning running sequences

    @property
    def _most_decodes(self) -> int:
        """The sequences that a step decodes: with stages a share of them, so that each stage has a step with others."""
        num_stages = self.limits.num_stages
        return NO_LIMIT if num_stages == 1 else -(-len(self.sequences.running) // num_stages)

    def _sort_running(self) -> tuple[list[Sequence], list[Sequence]]:
        """Returns the running sequences that have one token to compute, and those that have more."""
        running, last = self.sequences.running, self._last
        if last is not None and last.num_tokens > len(last.chunks) and not self.may_be_followed(last):
            # Where drafts in flight are not followed, their sequences sit the step out.
            running = [sequence for sequence in running if not sequence.num_unsure]
        if self.limits.num_stages > 1:
            running = [sequence for sequence in running if not sequence.num_pending]
        remaining = [sequence.num_remaining for sequence in running]
        if remaining.count(1) == len(remaining):
            return running[:], []
        pairs = [*zip(running, remaining, strict=True)]
        return [sequence for sequence, num in pairs if num == 1], [
            sequence for sequence, num in pairs if num > 1
        ]

    def _in_turn(self, decodes: list[Sequence], room: int) -> list[Sequence]:
        """Orders the decodes: if there is not room for all, the least urgent ones take turns.

        Those beyond the room come last, because one that gives way leaves its token to the next.
        """
        if len(decodes) <= room:
            return decodes
        decodes.sort(key=urgency)
        lane = decodes[room].request.lane
        num_sure = min(room - 1, sum(1 for s in decodes if s.request.lane < lane))
        sure, others = decodes[:num_sure], decodes[num_sure:]
        start = self._turn % len(others)
        self._turn = start + room - num_sure
        return sure + others[start:] + others[:start]

    def _plan_decodes(self, plan: StepPlan, decodes: list[Sequence]) -> None:
        """Plans one token of each: what `_plan_chunk` does, to which those are left for which there is no room."""
        grow, chunks = self.memory.grow, plan.chunks
        for sequence in self._in_turn(decodes, self._tokens_left):
            start, copies = sequence.num_computed, None
            if self._tokens_left > 0 and sequence.block_table:
                copies = grow(sequence, start + 1)
            if copies is None:
                self._plan_chunk(plan, sequence, 1)
                continue
            if copies:
                plan.copies += copies
            chunks.append(Chunk(sequence, start, 1, True, sequence.num_preemptions))
            sequence.num_computed = start + 1
            sequence.num_pending += 1
            plan.num_tokens += 1
            self._tokens_left -= 1

    def _plan_prefills(self, plan: StepPlan, chunked: list[Sequence], now: float) -> None:
        """Plans chunks of running sequences, the most urgent first, and in a lane the one that is done soonest.

        Queued requests that are more urgent, or due sooner than the first of a lane, go before them.
        """
        chunked.sort(key=lambda s: (s.request.lane, s.num_remaining, s.order))
        for lane, group in groupby(chunked, key=lambda s: s.request.lane):
            sequences = list(group)
            self._resume_waiting(plan, now, above=lane)
            self._admit_queued(plan, now, above=lane, before=sequences[0].request)
            for sequence in sequences:
                self._plan_chunk(plan, sequence, sequence.num_remaining)

    def _plan_chunk(self, plan: StepPlan, sequence: Sequence, num_remaining: int) -> None:
        num_tokens = 1 if num_remaining == 1 else self._most_of(sequence, num_remaining)
        # Without a block table, it was preempted a moment ago.
        if not self._has_room or num_tokens <= 0 or not sequence.block_table:
            return
        start = sequence.num_computed
        copies = self.memory.grow(sequence, start + num_tokens)
        if copies is None:
            copies = self._make_room(plan, sequence, start + num_tokens)
            if copies is None:
                return
        if copies:
            plan.copies.extend(copies)
        samples = num_tokens == num_remaining
        plan.chunks.append(Chunk(sequence, start, num_tokens, samples, sequence.num_preemptions))
        sequence.num_computed = start + num_tokens
        sequence.num_pending += samples
        plan.num_tokens += num_tokens
        self._tokens_left -= num_tokens
        self._work_left -= self._allowance.work(start - sequence.num_dropped, num_tokens)
        if num_remaining > 1 and sequence.is_scored:
            self._scored_left -= num_tokens

    @property
    def _has_room(self) -> bool:
        """Whether the step being planned may have another chunk: a token takes a work of 1 at least."""
        return self._tokens_left > 0 and self._work_left >= 1

    def _most_of(self, sequence: Sequence, num_remaining: int) -> int:
        """Returns how many tokens of a longer chunk the step has room for."""
        allowance, start = self._allowance, sequence.num_computed
        is_first = self._work_left == allowance.prefill_work
        depth = start - sequence.num_dropped
        within = max(allowance.tokens_within(self._work_left, depth), allowance.least if is_first else 0)
        longest = min(self.memory.max_chunk, sequence.segment_end - start)
        most = min(num_remaining, self._tokens_left, longest, within)
        return (
            min(most, self._scored_left) if sequence.is_scored and len(self.sequences.running) > 1 else most
        )

    def _make_room(self, plan: StepPlan, sequence: Sequence, num_tokens: int) -> list[tuple[int, int]] | None:
        """Grows the sequence's table, preempting as the queue says; None if it gave way itself, or has to wait.

        It waits for blocks that were given back while steps in flight still use them; then nobody gives way for it.
        """
        while (copies := self.memory.grow(sequence, num_tokens)) is None:
            if self.memory.will_have_room(sequence, num_tokens):
                return None
            running = self.memory.beside(sequence, self.sequences.running)
            self._tokens_left += self.sequences.preempt_planned(
                plan, self.queue.victim(running, sequence) or sequence
            )
            if not sequence.block_table:
                return None
        return copies

    # Admitting waiting sequences and queued requests

    def _resume_waiting(self, plan: StepPlan, now: float, above: int = _BELOW_ALL_LANES) -> None:
        """Starts waiting sequences of lanes more urgent than `above`, until one has no room; deferred ones are passed.

        Nobody resumes in a step for which somebody gave way: the two would take the same blocks in turn.
        """
        if self.sequences.counters.num_preemptions != self._num_preemptions_before:
            return
        waiting = deque(sorted(self.sequences.waiting, key=urgency))
        while waiting:
            sequence = waiting.popleft()
            if sequence.request.lane >= above or not self._has_room:
                return
            if self._is_deferred(sequence):
                continue
            if sequence.num_pending:
                return
            if self._defer(sequence):
                continue
            if max(self._shortage(sequence)) > 0:
                return
            self.sequences.waiting.remove(sequence)
            if sequence.followers:
                waiting.appendleft(self._results.follow(sequence))
            self._start(plan, sequence, now)

    def _admit_queued(
        self, plan: StepPlan, now: float, above: int | None = None, before: Request | None = None
    ) -> None:
        """Starts requests from the queue; with `above` and `before`, only those that may go before: see `RequestQueue`.

        A waiting sequence goes before requests of its lane and below, unless it is deferred for the first time.
        """
        lanes = [
            s.request.lane for s in self.sequences.waiting if s.num_preemptions or not self._is_deferred(s)
        ]
        above = min(lanes if above is None else [above, *lanes], default=None)
        way_was_made = False
        while self._has_room and self._num_deferred() < self.limits.max_num_seqs:
            self._refused = None
            request = self.queue.take(self._fits, above, before)
            if request is not None:
                self._begin(plan, request, now)
            elif self._refused is None or way_was_made or not self._make_way(plan, self._refused):
                return
            else:
                way_was_made = True

    def _begin(self, plan: StepPlan, request: Request, now: float) -> None:
        sequence = self._candidate_for(request)
        del self._candidates[id(request)]
        sequence.order = self._num_started
        self._num_started += 1
        if isinstance(sequence, BeamSequence):
            self.sequences.searches.append(sequence.beams)
        if self._defer(sequence):
            self.sequences.enqueue(sequence)
        else:
            self._start(plan, sequence, now)

    def _make_way(self, plan: StepPlan, request: Request) -> bool:
        """Preempts for a request whose turn it is if that is enough to start it; else changes nothing.

        What steps in flight still use counts as room: the request starts with the next step.
        """
        sequence = self._candidate_for(request)
        seats, blocks = self._shortage(sequence)
        memory = self.memory.part_of(sequence)
        blocks -= memory.num_returning
        victims: list[Sequence] = []
        running = self.memory.beside(sequence, self.sequences.running)
        candidates = iter(self.queue.giving_way(request, running))
        while seats > 0 or blocks > 0:
            victim = next(candidates, None)
            if victim is None:
                return False
            victims.append(victim)
            seats, blocks = seats - 1, blocks - memory.num_held_alone(victim)
        for chosen in victims:
            self._tokens_left += self.sequences.preempt_planned(plan, chosen)
        self._queue_goes_first = self.memory.num_in_flight > 0
        return bool(victims)

    def _defer(self, sequence: Sequence) -> bool:
        """Notes the block that the sequence has to wait for, and returns whether there is one."""
        sequence.awaited_hash = self.memory.awaited_hash(sequence)
        return bool(sequence.awaited_hash)

    def _is_deferred(self, sequence: Sequence) -> bool:
        """Returns whether another sequence is still computing the block that this one waits for."""
        return self.memory.is_awaited(sequence)

    def _num_deferred(self) -> int:
        return sum(1 for s in self.sequences.waiting if not s.num_preemptions)

    def _shortage(self, sequence: Sequence) -> tuple[int, int]:
        """Returns how many seats and free blocks a sequence lacks to start, those included that it leaves free."""
        memory = self.memory.part_of(sequence)
        num_running = len(self.memory.beside(sequence, self.sequences.running))
        seats_left, blocks_left = (
            self._left_free(sequence, memory, num_running) if self.sequences.running else (0, 0)
        )
        seats = self.sequences.num_seats_taken + sequence.num_seats + seats_left - self.limits.max_num_seqs
        return seats, memory.num_free_needed(sequence) + blocks_left - memory.pool.num_free

    def _left_free(self, sequence: Sequence, memory: SequenceMemory, num_running: int) -> tuple[int, int]:
        """Returns the seats and blocks that a sequence leaves to others when it starts.

        Each running sequence may need a block next, and a lane may not use all of the pool. Who was passed over for too
        long is not bound by the latter, and others leave it a seat and the blocks that it needs; lanes that are more
        urgent than its own leave it half of the pool at most.

        Args:
            memory: the one that it will start in, which so many of the running sequences share.
        """
        lane, num_blocks, passed_over = sequence.request.lane, memory.num_blocks, self._passed_over
        for_running = 1 + num_running // 4 if num_running else 0
        if self._is_passed_over(sequence.request):
            return 0, for_running
        shares = self.limits.kv_shares
        share = shares[lane] if lane < len(shares) else 1.0
        not_its_own = int((1.0 - share) * num_blocks) if num_running else 0
        if passed_over is None:
            return 0, max(for_running, not_its_own)
        kept = memory.num_free_needed(passed_over) if self.memory.part_of(passed_over) is memory else 0
        if lane < passed_over.request.lane:
            kept = min(kept, num_blocks // 2)
        return passed_over.num_seats, max(for_running + kept, not_its_own)

    def _note_passed_over(self) -> None:
        request = self.queue.passed_over()
        if request is None:
            self._passed_over = None
        elif not self._is_passed_over(request):
            self._passed_over = self._made_of(request)

    def _is_passed_over(self, request: Request | None) -> bool:
        return self._passed_over is not None and self._passed_over.request is request

    def _fits(self, request: Request) -> bool:
        """Says whether the request could start now, and remembers the first one that could not."""
        sequence = self._candidate_for(request)
        if max(self._shortage(sequence)) <= 0:
            return True
        # Who was passed over may be tried before its turn: then nobody gives way for it if it is another's.
        if self._refused is None or self._is_passed_over(self._refused):
            self._refused = request
        return False

    def _candidate_for(self, request: Request) -> Sequence:
        key = id(request)
        if key not in self._candidates:
            self._candidates[key] = self._candidates_before.get(key) or self._made_of(request)
        return self._candidates[key]

    def _made_of(self, request: Request) -> Sequence:
        if request.beams is not None:
            return Beams(request, request.beams, self.max_len).members[0]
        return Sequence(request, request.index, max_len=self.longest(request.keeping))

    def _start(self, plan: StepPlan, sequence: Sequence, now: float) -> None:
        self.memory.start(sequence)
        self.sequences.running.append(sequence)
        if self._is_passed_over(sequence.request):
            self._passed_over = None
        timings = sequence.timings
        if timings.num_cached_tokens < 0:  # it starts for the first time
            timings.scheduled_s = now
            timings.num_cached_tokens = sequence.num_computed
            self.sequences.counters.num_prefix_query_tokens += sequence.num_prompt_tokens
            self.sequences.counters.num_prefix_hit_tokens += sequence.num_computed
        elif sequence.num_preemptions:
            timings.resumed_s.append(now)
        self._plan_chunk(plan, sequence, sequence.num_remaining)
