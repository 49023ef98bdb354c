"""The sequences that the engine holds: running, waiting, preempted, ended."""

from __future__ import annotations

from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass

from penstock.engine.planning.beams import Beams, BeamSequence
from penstock.engine.planning.chunks import withdraw
from penstock.engine.planning.ranked_memory import Memory
from penstock.engine.planning.request import FinishReason, Output, Request, Sequence
from penstock.engine.planning.request_queue import RequestQueue
from penstock.engine.planning.step import StepPlan
from penstock.engine.planning.timings import NO_EXPERTS, ExpertSums, Timings


@dataclass(slots=True)
class Counters:
    """Counts that only grow; readers take differences."""

    num_preemptions: int = 0
    num_prefix_query_tokens: int = 0
    num_prefix_hit_tokens: int = 0


class Sequences:
    """Keeps the sequences from their start to their end. A sequence gives its blocks back when it leaves `running`."""

    def __init__(self, queue: RequestQueue, memory: Memory) -> None:
        self.queue = queue
        self.memory = memory
        self.counters = Counters()
        self.experts: ExpertSums = NO_EXPERTS
        """The experts of all steps that came back."""
        self.planned_s = 0.0
        """The time at which the planning of the newest step began."""
        self.running: list[Sequence] = []
        self.waiting: deque[Sequence] = deque()
        """Sequences that hold no blocks, in order of arrival: preempted ones, choices that found all seats taken, and
        deferred ones, which wait for a prefix that another sequence computes."""
        self.searches: list[Beams] = []
        """The searches over beams that have begun and not ended."""
        self._ended: list[tuple[Request, Sequence | None]] = []
        """The ended choices that the queue has not settled yet."""
        self._departed: list[Sequence] = []

    @property
    def is_idle(self) -> bool:
        return not self.running and not self.waiting and not self.memory.num_in_flight

    @property
    def num_seats_taken(self) -> int:
        """The seats of the running sequences, and those that are kept for beams which are still to fork."""
        return len(self.running) + sum(beams.num_seats_kept for beams in self.searches)

    @property
    def preempted(self) -> list[tuple[int, int]]:
        """Lane and known tokens of each sequence that gave way and waits to go on."""
        return [(s.request.lane, len(s.token_ids)) for s in self.waiting if s.num_preemptions]

    def take_departed(self) -> list[Sequence]:
        """Returns the sequences that ended or were preempted since the last call, each once for every time it was.

        Whoever drives the scheduler takes them after each step: nothing else in here keeps a sequence that has ended.
        """
        departed, self._departed = self._departed, []
        return departed

    def note_departed(self, sequence: Sequence) -> None:
        """Counts a sequence among those that departed: what the device knows of it is wrong."""
        self._departed.append(sequence)

    def cancel(self, request_id: str, now: float) -> list[Output]:
        """Ends all choices of a request; an id that is not here brings nothing."""
        found = [s for s in self._all() if s.request.request_id == request_id]
        outputs = [output for s in found for output in self.abort(s, FinishReason.CANCELLED, None, now)]
        self.settle(now)
        return outputs

    def fail(self, sequences: list[Sequence], error: str, now: float) -> list[Output]:
        """Ends these sequences with an error; those that ended already are passed over."""
        alive = [s for s in sequences if s.finish_reason is None]
        outputs = [output for s in alive for output in self.abort(s, FinishReason.FAILED, error, now)]
        self.settle(now)
        return outputs

    def fail_all(self, error: str, now: float) -> list[Output]:
        return self.fail(self._all(), error, now)

    def preempt(self, sequence: Sequence) -> None:
        """Takes all blocks of a running sequence back; it keeps its place and is computed again later.

        Its blocks stay in the prefix cache until they are reused, so that it mostly finds them again. Beams of one
        search give way together, and one sequence waits for all of them: what they have in common.
        """
        for member in sequence.together:
            self.running.remove(member)
            self._release(member)
        sequence = sequence.give_way()
        sequence.num_preemptions += 1
        sequence.timings.preempted_s.append(self.planned_s)
        self.counters.num_preemptions += 1
        self.enqueue(sequence)

    def preempt_planned(self, plan: StepPlan, victim: Sequence) -> int:
        """Preempts a sequence that may already be in a step that is planned, and returns its tokens there."""
        if not victim.block_table:  # it gave way with another beam of its search
            return 0
        num_tokens = sum(withdraw(plan, sequence) for sequence in victim.together)
        self.preempt(victim)
        return num_tokens

    def preempt_torn(self, plan: StepPlan) -> None:
        """Preempts the sequences for which a step was to copy blocks, and never did; it may have had nothing else of
        them."""
        targets = {target for _, target in plan.copies}
        for sequence in self.running[:] if targets else ():
            if sequence in self.running and not targets.isdisjoint(sequence.block_table):
                self.preempt(sequence)

    def check(self) -> None:
        """Compares the pool with all sequences.

        Raises:
            PoolViolation: if a block is unaccounted for.
        """
        self.memory.check(self._all())

    # Leaving

    def abort(
        self, sequence: Sequence, reason: FinishReason, error: str | None, now: float
    ) -> Iterator[Output]:
        """Ends a sequence, and with it the choices that were to fork from it, and the other beams of its search."""
        if sequence.finish_reason is not None:  # another beam has ended it
            return
        if isinstance(sequence, BeamSequence):
            yield from self._abort_search(sequence.beams, reason, error, now)
            return
        unbegun = list(sequence.unbegun)
        yield self.finish(sequence, reason, error, now)
        for index in unbegun:
            yield self._finish_unbegun(sequence.request, index, reason, error, now)

    def _abort_search(
        self, beams: Beams, reason: FinishReason, error: str | None, now: float
    ) -> Iterator[Output]:
        self.leave(beams)
        for index in range(beams.width):
            yield self.finish(beams.answer(index), reason, error, now)

    def leave(self, beams: Beams) -> None:
        """Takes all sequences of a search that is over."""
        self.searches.remove(beams)
        for member in beams.members:
            self.replace(member)

    def replace(self, member: Sequence) -> None:
        """Takes the sequence of a beam that is no more; what a step in flight brings for it is dropped."""
        member.finish_reason = FinishReason.CANCELLED
        self._remove(member)

    def finish(
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
        output.stop = sequence.stop
        output.timings = sequence.timings
        output.timings.note_end(sequence.num_output_tokens, now, self.experts)
        self._remove(sequence)
        self._ended.append((sequence.request, sequence))
        return output

    def _finish_unbegun(
        self, request: Request, index: int, reason: FinishReason, error: str | None, now: float
    ) -> Output:
        """Ends a choice that there is no sequence of."""
        timings = Timings(arrival_s=request.arrival_s, num_prompt_tokens=len(request.prompt_token_ids))
        timings.note_end(0, now)
        self._ended.append((request, None))
        return Output(request.request_id, index, finish_reason=reason, error=error, timings=timings)

    def settle(self, now: float) -> None:
        """Settles ended choices with the queue, which has been charged for their work by then."""
        ended, self._ended = self._ended, []
        for request, sequence in ended:
            self.queue.settle(request, now, sequence)

    def _remove(self, sequence: Sequence) -> None:
        self._release(sequence)
        if sequence in self.running:
            self.running.remove(sequence)
        elif sequence in self.waiting:
            self.waiting.remove(sequence)

    def _release(self, sequence: Sequence) -> None:
        if sequence.block_table or sequence.finish_reason is not None:
            self._departed.append(sequence)
        self.memory.release(sequence)

    def _all(self) -> list[Sequence]:
        return [*self.running, *self.waiting]

    def enqueue(self, sequence: Sequence) -> None:
        """Keeps `waiting` in order of arrival: a preempted sequence goes before those that came after it."""
        insort(self.waiting, sequence, key=lambda s: s.order)
