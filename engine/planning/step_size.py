"""The size of steps on a device that may run short of memory: halved until they fit, and smaller for a while."""

from __future__ import annotations

from collections.abc import Sequence as ListLike

from penstock.engine.planning.chunks import cut, drop_drafts, withdraw
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.sequences import Sequences
from penstock.engine.planning.step import Chunk, StepPlan

_STEPS_TO_GROW, _MOST_STEPS_TO_GROW = 32, 4096
"""Steps that fitted the device before a larger one is tried: twice as many after each try."""


class StepSize:
    """The most tokens of a step: the configured number, or fewer for some time after a step that did not fit.

    Memory that was short may be free again, or may be what only larger steps need. So the limit is doubled now and then
    until it is what it was, and each time it takes longer.
    """

    def __init__(self, sequences: Sequences, max_tokens: int) -> None:
        self._sequences = sequences
        self.num_tokens = self._max_tokens = max_tokens
        self._num_fitted = 0
        """Steps that came back since `num_tokens` changed."""
        self._steps_to_grow = _STEPS_TO_GROW

    def note_fitted(self) -> None:
        """Counts a step that came back, and grows the limit when there were enough of them."""
        self._num_fitted += 1
        if self._num_fitted >= self._steps_to_grow and self.num_tokens < self._max_tokens:
            self.num_tokens = min(2 * self.num_tokens, self._max_tokens)
            self._num_fitted = 0
            self._steps_to_grow = min(2 * self._steps_to_grow, _MOST_STEPS_TO_GROW)

    def halve(self, plan: StepPlan) -> bool:
        """Halves a step that was just planned and that the device had no room for.

        Chunks of many tokens are cut first, then decodes, the least urgent ones first. A later step computes what is
        left out; nothing is computed again but for sequences with a state, which the step may have changed. Steps to
        come are as small, until many of them have come back.

        Returns:
            False, and nothing has changed, if the step has one token. Of a step of beams, or of sequences that ended
            while it waited for tokens in flight, nothing may be left.
        """
        num_left = plan.num_tokens - plan.num_tokens // 2
        if num_left == plan.num_tokens:
            return False
        if self.withdraw_ended(plan):
            return True
        for sequence in self._sequences.memory.take_back(plan):
            self._sequences.preempt_planned(plan, sequence)
        drop_drafts(plan)
        num_over = plan.num_tokens - num_left
        order = sorted(plan.chunks, key=lambda chunk: (chunk.num_tokens > 1, urgency(chunk.sequence)))
        while num_over > 0 and order:
            chunk = order.pop()
            if chunk.sequence.finish_reason is not None:  # it was left out with another beam of its search
                continue
            num_tokens = min(num_over, chunk.num_tokens)
            num_over -= num_tokens
            if num_tokens < chunk.num_tokens:
                cut(plan, chunk, num_tokens)
            else:
                self._leave_out(plan, chunk)
        self._limit(max(1, plan.num_tokens))
        self._sequences.memory.assign(plan)
        if not plan.chunks:
            self._sequences.preempt_torn(plan)
        return True

    def give_up(self, plans: ListLike[StepPlan]) -> None:
        """Ends steps without a result, the first for want of memory and the others because they followed it.

        Their sequences give way, and steps to come are half as large, until many of them have come back.

        Args:
            plans: all steps in flight, in the order in which they were made; the first has several tokens.
        """
        self._limit(plans[0].num_tokens // 2)
        sequences = {chunk.sequence: None for plan in plans for chunk in plan.chunks}
        for plan in reversed(plans):
            for chunk in plan.chunks[:]:
                if chunk.sequence not in self._sequences.running or chunk.is_stale:
                    withdraw(plan, chunk.sequence)
            self._sequences.memory.take_back(plan)
            for chunk in plan.chunks[:]:
                withdraw(plan, chunk.sequence)
        for plan in plans:
            self._sequences.memory.end_step(plan.number, has_failed=True)
        for sequence in sequences:
            if sequence in self._sequences.running:
                self._sequences.preempt(sequence)
        for plan in plans:
            self._sequences.preempt_torn(plan)

    def withdraw_ended(self, plan: StepPlan) -> bool:
        """Takes the sequences out of a plan that have ended since it was made.

        Returns:
            Whether it had no other. Then it will never be launched and is ended here, or what is given back would wait
            for it.
        """
        ended = [chunk.sequence for chunk in plan.chunks if chunk.sequence.finish_reason is not None]
        for sequence in ended:
            withdraw(plan, sequence)
        is_empty = bool(ended) and not plan.chunks
        if is_empty:
            self._sequences.memory.end_step(plan.number, has_failed=True)
        return is_empty

    def _limit(self, num_tokens: int) -> None:
        """Limits the steps to come to a size that may fit."""
        self.num_tokens, self._num_fitted = num_tokens, 0

    def _leave_out(self, plan: StepPlan, chunk: Chunk) -> None:
        """Leaves a whole chunk to a later step.

        The sequence keeps its blocks, unless some are to be copied first. Then it gives way: this step may yet fail,
        and the copies would never be made.
        """
        sequence = chunk.sequence
        awaits_copies = any(target in sequence.block_table for _, target in plan.copies)
        for leaving in sequence.together if awaits_copies else [sequence]:
            withdraw(plan, leaving)
        if awaits_copies:
            self._sequences.preempt(sequence)


def urgency(sequence: Sequence) -> tuple[int, int]:
    return sequence.request.lane, sequence.order
