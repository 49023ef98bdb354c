"""Applies the result of a step to its sequences: tokens, text, ends, forks."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from penstock.engine.planning.beams import Beams, BeamSequence
from penstock.engine.planning.chunks import take_back
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.params import Branch, Pooling
from penstock.engine.planning.request import NO_LIMIT, FinishReason, Output, Request, Sequence, TokenLogprobs
from penstock.engine.planning.request_queue import RequestQueue
from penstock.engine.planning.sequences import Sequences
from penstock.engine.planning.step import Chunk, Sampled, StepPlan, StepResult
from penstock.engine.planning.timings import ExpertSums
from penstock.engine.text.thinking import Thinking

log = logging.getLogger("penstock.engine")

_CERTAIN = TokenLogprobs(0.0)
"""Reported for a token that was forced."""


class TokenSink(Protocol):
    """Turns the tokens of a sequence into text and decides where the sequence ends."""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:
        """Takes the token that was just appended to the sequence.

        Args:
            is_last: there is no room for another token, so that the sequence must end.

        Returns:
            Text that can be shown now, and why the sequence ends here, if it does.
        """

    def thinking(self, sequence: Sequence) -> Thinking:
        """Returns the reasoning of a sequence whose request bounds it, after its output tokens."""
        raise TypeError(f"{type(self).__name__} cannot read the reasoning of {sequence}")


@dataclass(frozen=True, slots=True, kw_only=True)
class SchedulerLimits:
    max_batch_tokens: int
    """Tokens in one step, prefill and decode together. In an engine, its runner may set a lower bound."""
    max_num_seqs: int
    """Sequences running at a time."""
    max_model_len: int
    """Prompt and output tokens of one sequence."""
    max_scored: int = NO_LIMIT
    """See `RunnerFacts.max_scored`."""
    num_stages: int = 1
    """See `RunnerFacts.num_stages`."""
    kv_shares: tuple[float, ...] = ()
    """The share of the pool by lane: a sequence starts only if the blocks in use, its own included, stay within it.

    A lane without an entry may use all of the pool.
    """


class StepResults:
    """Applies the results of steps to the sequences that they were planned of."""

    def __init__(
        self,
        sequences: Sequences,
        queue: RequestQueue,
        sink: TokenSink,
        max_num_seqs: int,
        longest: Callable[[Keeping | None], int],
    ) -> None:
        """`longest` says how many tokens a sequence may have of which so much is kept."""
        self._sequences = sequences
        self._queue = queue
        self._sink = sink
        self._max_num_seqs = max_num_seqs
        self._longest = longest

    def commit(
        self, plan: StepPlan, result: StepResult, now: float, later: StepPlan | None = None
    ) -> list[Output]:
        """Applies the result of a step: confirms KV, appends tokens, ends and forks sequences.

        Args:
            later: the step that was planned after it, and supposes that all of its drafts are right.
        """
        memory = self._sequences.memory
        memory.end_step(plan.number)
        if (use := result.experts) is not None:
            touched, layers = self._sequences.experts
            self._sequences.experts = ExpertSums(touched + use.num_touched, layers + use.num_layers)
        confirm, outputs = memory.commit, list[Output]()
        work: list[tuple[Request, int, int, int]] = []
        sampled, scored, pooled = iter(result.sampled), iter(result.scored), iter(result.pooled)
        has_more, wrong = bool(result.scored or result.pooled), dict[Sequence, int]()
        for chunk in plan.chunks:
            sequence, start, num_tokens = chunk.sequence, chunk.start, chunk.num_tokens
            brought = next(sampled) if chunk.samples else None
            if has_more and chunk.scored:
                _keep_scores(chunk, next(scored))
            if has_more and chunk.pooled:
                _keep_pooled(chunk, next(pooled))
            if sequence.finish_reason is not None:  # it ended while this step was in flight
                continue
            if brought is not None and not brought.is_finite:
                memory.distrust(sequence)
            elif not chunk.is_stale:
                confirm(sequence, start + num_tokens - len(chunk.drafts))
            num_prompt = num_output = 0
            if start < sequence.num_prompt_tokens:
                num_prompt = min(num_tokens, sequence.num_prompt_tokens - start)
                sequence.timings.note_prefill(num_prompt, now)
            request = sequence.request
            if brought is not None:
                sequence.num_pending -= 1
                if chunk.drafts:
                    sequence.num_pending -= len(chunk.drafts)
                    sequence.num_unsure -= len(chunk.drafts)
                is_later = sequence.timings.first_token_s >= 0
                if is_later and sequence.is_simple and not chunk.drafts and brought.error is None:
                    outputs.append(self._append_one(sequence, brought, now))
                    num_output = 1
                else:
                    brought_outputs = self._apply(chunk, brought, now)
                    outputs += brought_outputs
                    num_output = _num_charged(request, len(brought_outputs))
                if chunk.drafts:
                    wrong[sequence] = len(chunk.drafts) - chunk.num_accepted
            work.append((request, num_prompt, num_output, len(sequence.token_ids)))
        if later is not None and wrong:
            take_back(later, wrong)
        self._queue.charge(work, now)
        self._sequences.settle(now)
        return outputs

    def fail(self, plan: StepPlan, error: str, now: float) -> list[Output]:
        """Ends the sequences of a step that brought no result."""
        self._sequences.memory.end_step(plan.number, has_failed=True)
        outputs = self._sequences.fail([chunk.sequence for chunk in plan.chunks], error, now)
        self._sequences.preempt_torn(plan)
        return outputs

    def _apply(self, chunk: Chunk, sampled: Sampled, now: float) -> list[Output]:
        """Appends the tokens that a step brought for a sequence, and ends the sequence where its text ends.

        A fault in the text of one sequence ends that sequence, and no other.
        """
        sequence = chunk.sequence
        request = sequence.request
        if isinstance(sequence, BeamSequence):
            return self._apply_beam(sequence, sampled, now)
        if request.branches:
            return self._apply_branch(sequence, request.branches[sequence.index], sampled, now)
        if request.n > 1:
            self._fork_if_due(sequence)
        error = sampled.error if sequence.guide is None else sequence.guide.error or sampled.error
        if error is not None:
            return [self._sequences.finish(sequence, FinishReason.FAILED, error, now)]
        timings = sequence.timings
        is_first = timings.first_token_s < 0 and timings.note_first_token(now, self._sequences.experts)
        outputs: list[Output] = []
        try:
            reason = self._append(sequence, sampled, outputs)
        except Exception:
            return [*outputs, self._fail_text(sequence, now)]
        if is_first and sequence.is_scored:
            outputs[0].prompt_logprobs = sequence.prompt_logprobs
        if is_first and sequence.pooled:
            num = sequence.num_prompt_tokens if sequence.request.pooling is Pooling.MEAN else 1
            outputs[0].embedding = [value / num for value in sequence.pooled]
        if chunk.drafts:
            self._keep_accepted(chunk, min(len(outputs), len(sampled.token_ids)), now)
        if reason is not None:
            self._sequences.finish(sequence, reason, None, now, outputs[-1])
        return outputs

    def _append_one(self, sequence: Sequence, sampled: Sampled, now: float) -> Output:
        """Appends the one token of a simple sequence, as `_append` does, in half the time."""
        (token_id,), known = sampled.token_ids, sequence.token_ids
        known.append(token_id)
        try:
            text, reason = self._sink.accept(sequence, token_id, len(known) >= sequence.max_len)
        except Exception:
            return self._fail_text(sequence, now)
        request_id = sequence.request.request_id
        output = Output(request_id, sequence.index, sampled.token_ids, text, sampled.logprobs)
        if reason is not None:
            self._sequences.finish(sequence, reason, None, now, output)
        return output

    def _fail_text(self, sequence: Sequence, now: float) -> Output:
        """Ends a sequence whose text raised what is being handled."""
        log.exception("the text of %r failed; it ends with an error", sequence)
        return self._sequences.finish(sequence, FinishReason.FAILED, "the output could not be decoded", now)

    def _append(self, sequence: Sequence, sampled: Sampled, outputs: list[Output]) -> FinishReason | None:
        """Appends tokens up to the one with which the sequence ends, an output for each; returns why it ends."""
        known, max_len, request = sequence.token_ids, sequence.max_len, sequence.request
        token_ids, logprobs = sampled.token_ids, sampled.logprobs
        guide, is_complete = sequence.guide, False
        if not request.sampling.max_tokens:
            outputs.append(Output(request.request_id, sequence.index))
            return FinishReason.LENGTH
        if request.sampling.thinking is not None:
            token_ids, logprobs = self._within_budget(sequence, sampled)
        for number, token_id in enumerate(token_ids):
            known.append(token_id)
            if guide is not None:
                guide.advance(token_id)
                is_complete = guide.is_complete
            text, reason = self._sink.accept(sequence, token_id, is_complete or len(known) >= max_len)
            if is_complete and reason is FinishReason.LENGTH:
                reason = FinishReason.STOP
            told = None if logprobs is None else logprobs[number : number + 1]
            outputs.append(Output(request.request_id, sequence.index, [token_id], text, told))
            if reason is not None:
                return reason
        return None

    def _within_budget(
        self, sequence: Sequence, sampled: Sampled
    ) -> tuple[list[int], list[TokenLogprobs] | None]:
        """Returns the tokens that follow: those that end the reasoning take the place of the last, if it is spent."""
        thinking, chosen = self._sink.thinking(sequence), sampled.token_ids
        followed = thinking.follow(chosen)
        num_free, logprobs = thinking.num_free, sampled.logprobs
        sequence.horizon = sequence.max_len
        if num_free is not None:
            sequence.horizon = min(sequence.max_len, sequence.num_prompt_tokens + num_free + 1)
        if followed != chosen:
            self._sequences.note_departed(
                sequence
            )  # what the device knows of it has the token that was replaced
            if logprobs is not None:
                num_own = len(chosen) - 1
                logprobs = logprobs[:num_own] + [_CERTAIN] * (len(followed) - num_own)
        return followed, logprobs

    def _keep_accepted(self, chunk: Chunk, num_brought: int, now: float) -> None:
        """Keeps the KV of the drafts that were right; that of the others is overwritten by the steps to come."""
        sequence, num_tokens = chunk.sequence, 1 + len(chunk.drafts)
        if not chunk.is_stale:
            sequence.num_computed -= num_tokens - num_brought
            self._sequences.memory.commit(sequence, chunk.start + num_brought)
        chunk.num_accepted = num_brought - 1
        sequence.timings.note_drafts(chunk.proposer, len(chunk.drafts), chunk.num_accepted, now)

    def _fork_if_due(self, parent: Sequence) -> None:
        """Starts the other choices of a request, which share its blocks, once its prompt is computed."""
        if parent.index > 0 or parent.num_output_tokens > 0:
            return
        for index in range(1, parent.request.n):
            self._fork(parent, index)

    def _fork(self, parent: Sequence, index: int) -> Sequence:
        """Starts another choice of a request, which shares blocks with its parent; without a seat, it waits."""
        child = self._choice_after(parent, index)
        # Nothing is left to share of a parent that gave way while this step was in flight.
        if self._has_seat() and self._sequences.memory.fork(parent, child):
            self._sequences.running.append(child)
        else:
            self._sequences.enqueue(child)
        return child

    def _choice_after(self, other: Sequence, index: int) -> Sequence:
        """Another choice of a request, some of whose tokens were found in the cache when `other` began."""
        choice = Sequence(other.request, index, other.order, self._longest(other.request.keeping))
        choice.timings.scheduled_s = other.timings.scheduled_s
        choice.timings.num_cached_tokens = other.timings.num_cached_tokens
        return choice

    # Branches

    def _apply_branch(self, sequence: Sequence, branch: Branch, sampled: Sampled, now: float) -> list[Output]:
        """Ends a branch with its scores, and begins its children, as many as there are seats for."""
        if sampled.error is not None:
            return list(self._sequences.abort(sequence, FinishReason.FAILED, sampled.error, now))
        sequence.timings.note_first_token(now, self._sequences.experts)
        if sequence in self._sequences.running:  # else it gave way while this step was in flight
            self._sequences.running.remove(sequence)  # one of them has its seat
        for index in branch.children:
            child = self._fork(sequence, index)
            if not child.block_table:
                child.followers = range(index + 1, branch.children.stop)
                break
        output = Output(sequence.request.request_id, sequence.index, scores=sampled.scores)
        return [self._sequences.finish(sequence, FinishReason.LENGTH, None, now, output)]

    def follow(self, sequence: Sequence) -> Sequence:
        """Returns the branch that waits now that this one, which goes on from the same, has begun."""
        first, *_ = followers = sequence.followers
        follower = self._choice_after(sequence, first)
        sequence.followers, follower.followers = range(0), followers[1:]
        self._sequences.enqueue(follower)
        return follower

    def _has_seat(self) -> bool:
        return self._sequences.num_seats_taken < self._max_num_seqs

    # Beams

    def _apply_beam(self, sequence: BeamSequence, sampled: Sampled, now: float) -> list[Output]:
        """Keeps the continuations of a beam; once those of all beams are known, the search goes on, or ends."""
        if sampled.error is not None or sampled.logprobs is None:
            return list(self._sequences.abort(sequence, FinishReason.FAILED, sampled.error, now))
        sequence.timings.note_first_token(now, self._sequences.experts)
        beams = sequence.beams
        beams.note(sequence, sampled.logprobs[0])
        if not beams.is_due:
            return []
        before, heirs = beams.members, beams.advance()
        if beams.search.is_over:
            return self._conclude(beams, now)
        last = dict(heirs)
        for parent, heir in heirs:
            (self._sequences.memory.hand_over if last[parent] is heir else self._sequences.memory.fork)(
                parent, heir
            )
        for member in before:
            self._sequences.replace(member)
        self._sequences.running += beams.members
        return []

    def _conclude(self, beams: Beams, now: float) -> list[Output]:
        """Ends a search, and returns the outputs of the answers that it has found."""
        self._sequences.leave(beams)
        outputs: list[Output] = []
        for index, found in enumerate(beams.search.finished):
            answer, told = beams.answer(index), list[Output]()
            try:
                reason = self._append(answer, Sampled(list(found.token_ids), found.logprobs), told)
            except Exception:
                told.append(self._fail_text(answer, now))
            else:
                if answer.is_scored:
                    told[0].prompt_logprobs = answer.prompt_logprobs
                self._sequences.finish(answer, reason or FinishReason.STOP, None, now, told[-1])
            outputs += told
        for index in range(len(beams.search.finished), beams.width):
            error = "the search found fewer answers"
            outputs.append(self._sequences.finish(beams.answer(index), FinishReason.FAILED, error, now))
        return outputs


def _num_charged(request: Request, num_outputs: int) -> int:
    """The tokens that a request is charged for: with branches none, it is answered with the last one."""
    return 0 if request.branches else num_outputs if request.beams is None else 1


def _keep_scores(chunk: Chunk, scored: list[TokenLogprobs]) -> None:
    """Adds log probabilities of prompt tokens to those known; after a preemption, a chunk brings some of them again."""
    known = chunk.sequence.prompt_logprobs
    known += scored[len(known) + 1 - chunk.scored.start :]


def _keep_pooled(chunk: Chunk, pooled: list[float]) -> None:
    """Adds to the sequence's sum of hidden states, which begins anew if its first token is computed again."""
    sequence = chunk.sequence
    known = sequence.pooled if chunk.start else []
    sequence.pooled = [a + b for a, b in zip(known, pooled, strict=True)] if known else pooled
