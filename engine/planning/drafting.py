"""Drafts: tokens that may come next, computed in one step with the token before them and kept as far as they are right.

Every position is sampled as it would be without drafts: a token depends on its number, its logits and its request's
seed alone. So drafts never change an answer, only how many of its tokens one step brings.

Drafts come from up to three proposers: two that cost nothing, a lookup and what a grammar forces, and one that costs
time, a draft model. What the sequence's grammar rules out is never a draft. Which of them drafts for a sequence, and
how many tokens, is decided anew in every step, for all sequences together: what brings the most tokens a second, by how
often each proposer was right for the sequence lately, by what such steps take (`price.py`), and by what the model
takes. Under load, where each token of a step costs, the number of drafts fades to 0 by itself, and the model is not run
at all. No step gets so many that it would break a promise on the time per token. And whether drafts pay is measured
(`pace.py`): where they do, there is a step without them now and then; where they do not, somebody looks now and then
what they would bring.

Planning knows nothing of the draft model but that there is one. Its drafts are planned as a number, and are OPEN until
the runner has made them. Where the runner needs no tokens from the host for them, the next step is planned before the
one with drafts has come back: it follows as if all of them were right. The other proposers read tokens that the host
knows, so that a step now and then waits for the one before and hears them all.

The choice follows DSpark's rule (most expected tokens for a step's time, over all sequences); see also Liu et al.,
"Optimizing speculative decoding for serving large language models using goodput", 2024.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable
from collections.abc import Sequence as ListLike
from heapq import merge
from math import inf
from typing import Protocol

from penstock.engine.planning.chunks import set_drafts
from penstock.engine.planning.guesses import Guess, Record
from penstock.engine.planning.pace import Pace
from penstock.engine.planning.price import Price, value
from penstock.engine.planning.ranked_memory import Memory
from penstock.engine.planning.request import NO_LIMIT, Sequence
from penstock.engine.planning.request_queue import StepSeconds
from penstock.engine.planning.shares import Shares
from penstock.engine.planning.step import OPEN, Chunk, StepPlan, before_open
from penstock.engine.planning.timings import NO_SECONDS, DraftSeconds

log = logging.getLogger("penstock.engine")

DRAFT_MODEL = "draft"
"""The draft model's name as a proposer."""

_LOWEST_RATE = 0.2
"""A model is not asked for drafts of a sequence for which fewer are right."""
_PROBE_STEPS = 32
"""A model whose drafts do not pay is asked for one, of one sequence, after so many steps: that may have changed."""
_REST_STEPS, _MOST_REST_STEPS = 256, 65_536
"""A proposer that failed is asked again after so many steps, and after twice as many each time that it fails again."""
_LEARNING_OF_COSTS = 0.1
"""The weight of the latest drafts in what the draft model takes."""
_BLOCK = 3
"""Steps of one kind in a row, while drafts are tried, where steps without them are launched ahead."""
_MOST_FOLLOWING = 16
"""Steps that follow one with drafts before it has come back, until all proposers are asked again."""
_SPREAD = 16
"""The tokens that the draft model has yet to read of a sequence are taken to serve so many steps."""


class Proposer(Protocol):
    """Guesses the next tokens of sequences at no cost."""

    name: str
    is_behind: bool
    """Whether it had no time, when it was asked last, to read all that it proposes from."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """The tokens that may follow those of each sequence, which are all known; at most `lengths` of them."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended."""


class Drafting:
    """Adds drafts to planned steps, and learns from the results.

    A proposer that fails rests, for longer each time; sequences go on without it.
    """

    def __init__(
        self,
        lookup: Proposer | None,
        most: int,
        *,
        has_model: bool = False,
        forced: Proposer | None = None,
        clock: Callable[[], float] = lambda: 0.0,
        max_rows: int = NO_LIMIT,
        step_seconds: StepSeconds = lambda *_: 1.0,
        has_experts: bool = False,
        num_ahead: int = 0,
        may_follow: bool = False,
    ) -> None:
        """
        Args:
            most: drafts of one sequence in a step.
            has_model: whether the runner has a draft model.
            forced: proposes at no cost, too, and knows better than the lookup where it proposes anything.
            clock: seconds; without one, drafting seems to take no time.
            max_rows: chunks and drafts that a step with drafts may have.
            step_seconds: what steps take, without the time it takes to make drafts; there are none while it says 0.
            has_experts: whether the model has experts: then drafts do not all add the same time.
            num_ahead: steps without drafts that are launched before the one before has come back.
            may_follow: whether steps after one with drafts may be, too: then the draft model needs no tokens from the
                host.
        """
        self.most = most
        self.clock = clock
        self._max_rows = max_rows
        self._step_seconds = step_seconds
        self._has_experts = has_experts
        self._block = _BLOCK if num_ahead else 1
        self._may_follow = may_follow
        self.is_followed = False
        """Whether the next step may be planned before the one that was planned last, which has drafts, is back."""
        self._num_following = 0
        """Steps in a row that were planned before one with drafts was back."""
        self._price = Price(1.0, 1.0, lambda _: 0.0)
        """That of the step that is planned."""
        self._most_s = inf
        """The step that is planned may not take longer with drafts."""
        self.failed: list[str] = []
        """The names of proposers that failed and that nobody took notice of."""
        self._proposers = [proposer for proposer in (lookup, forced) if proposer is not None]
        self._has_model = has_model
        self._model_share = 0.0
        """The time of a pass of the model, in units of a step of the target with as many tokens."""
        self._num_steps = 0
        self._rests: dict[str, int] = {}
        """The length of the last rest, in steps, by failed proposer."""
        self._rests_until: dict[str, int] = {}
        """The step from which a failed proposer is asked again."""
        names = [proposer.name for proposer in self._proposers] + [DRAFT_MODEL] * has_model
        self._shares = Shares(names, most)
        self._records: dict[Sequence, Record] = {}
        self._paces: dict[int, Pace] = {}
        """The paces by bit length of the number of sampling sequences."""
        self._num_idle_steps = 0
        """Steps since the model was asked last."""
        self._num_sampling = 0
        """Sequences that sample in the step that was planned last."""
        self._is_measured = False
        """Whether that step has nothing else."""
        self._max_tokens = 0
        """Tokens that that step might have."""

    @property
    def is_due(self) -> bool:
        """Whether the next step may have drafts, if it is like the last one.

        Then the last one is to come back before it is planned: drafts follow tokens that the host knows.
        """
        return not self.is_followed and self._is_active and self._num_sampling > 0 and self._may_draft

    def extend(self, plan: StepPlan, memory: Memory, num_tokens: int, most_s: float = inf) -> None:
        """Adds drafts to a plan that is otherwise complete; those of the draft model are OPEN.

        Args:
            num_tokens: the most that the whole step may have.
            most_s: the seconds that the whole step may take; what is longer without drafts gets none.
        """
        self._num_steps += 1
        follows, self.is_followed = self.is_followed, False
        self._max_tokens, self._most_s = num_tokens, most_s
        self._num_sampling = num_sampling = sum(chunk.samples for chunk in plan.chunks)
        self._is_measured = num_sampling == plan.num_tokens
        room = max(0, min(num_tokens - plan.num_tokens, self._max_rows - len(plan.chunks)))
        if not self._is_active or not num_sampling:
            return
        pace = self._pace(num_sampling)
        is_ahead = any(chunk.sequence.num_pending > 1 for chunk in plan.chunks)
        if pace.drafts and is_ahead and not follows:
            return  # a step before it has not come back, and this one says nothing of a turn with drafts
        self._num_following = self._num_following + 1 if is_ahead else 0
        price = self._price_of(plan, pace.overhead)
        if price is None:
            return
        plan.turn, plan.price, self._price = pace.turn, price, price
        if not self._may_draft:
            if pace.is_look_due():
                self._look(plan, pace, room)
        elif room > 0 and self._may_pay(num_sampling):
            self._draft(plan, memory, room, is_ahead=is_ahead)
            self.is_followed = self._is_to_be_followed(plan)

    def _is_to_be_followed(self, plan: StepPlan) -> bool:
        """Whether all drafts of a plan are the draft model's, and none is limited by what the host has to know."""
        if not self._may_follow or self._num_following >= _MOST_FOLLOWING or not plan.num_drafts:
            return False
        return all(chunk.is_open or not chunk.drafts for chunk in plan.chunks) and not self.must_know(plan)

    def _draft(self, plan: StepPlan, memory: Memory, room: int, *, is_ahead: bool) -> None:
        started = self.clock()
        guesses = self._guesses_ahead(plan) if is_ahead else self._guesses(plan, is_known=True)
        if self._has_model and not self._rests_now(DRAFT_MODEL):
            self._leave_to_model(guesses, plan, self._num_sampling)
        counts, _ = self._counts(guesses, self._num_sampling, room)
        for guess, count in zip(guesses, counts, strict=True):
            if count:
                guess.add(plan, count, memory)
        plan.drafting_s = self.clock() - started

    def _look(self, plan: StepPlan, pace: Pace, room: int) -> None:
        """Finds what drafts would bring, and adds none."""
        started = self.clock()
        counts, num_expected = self._counts(self._guesses(plan, is_known=False), self._num_sampling, room)
        plan.drafting_s = self.clock() - started
        gain = num_expected * self._price.plain_s / (self._num_sampling * self._price.seconds(sum(counts)))
        pace.note_outlook(gain, plan.drafting_s, self._price.plain_s)

    def fill(self, plan: StepPlan, made: list[list[int]], seconds: float) -> None:
        """Puts in the drafts that the draft model made, by open chunk; the places of those that it did not make go.

        Args:
            seconds: the time it took.
        """
        chunks = [chunk for chunk in plan.chunks if chunk.is_open]
        plan.drafting_s += seconds
        self._learn_costs(chunks, seconds)
        for chunk, drafts in zip(chunks, made, strict=True):
            guide = chunk.sequence.guide
            allowed = drafts if guide is None else guide.allowed(drafts)
            self._record(chunk, len(drafts), allowed)
            set_drafts(plan, chunk, allowed, DRAFT_MODEL)

    def must_know(self, plan: StepPlan) -> bool:
        """Whether drafts that are open have to be known before the plan is launched: a grammar may rule some out."""
        return any(chunk.is_open and chunk.sequence.request.sampling.is_guided for chunk in plan.chunks)

    def note_made(self, plan: StepPlan, made: ListLike[list[int]], seconds: float) -> None:
        """Notes the drafts of the chunks of a plan that were open when it was launched, once it has landed.

        Args:
            made: as many as were open, -1 where the draft model had none.
            seconds: the time it took.
        """
        chunks = [chunk for chunk in plan.chunks if chunk.is_open]
        plan.drafting_s += seconds
        known = [chunk for chunk in chunks if chunk.sequence in self._records]  # others have ended
        if known:
            self._learn_costs(known, seconds)
        for chunk, drafts in zip(chunks, made, strict=True):
            chunk.drafts = drafts
            if chunk.sequence in self._records:
                self._record(chunk, len(drafts), before_open(drafts))

    def _record(self, chunk: Chunk, num_read: int, proposed: list[int]) -> None:
        """Records what the draft model proposed for a chunk, and that it read so many tokens for it."""
        record = self._records[chunk.sequence]
        if num_read:
            record.num_read = len(chunk.sequence.token_ids) + num_read
        if proposed:
            record.proposed[DRAFT_MODEL] = proposed

    def give_up(self, plan: StepPlan) -> None:
        """The draft model failed: the step goes on without the drafts that are open. Called where that is handled."""
        for chunk in plan.chunks:
            if chunk.is_open:
                set_drafts(plan, chunk, ())
        self._let_rest(DRAFT_MODEL)

    def observe(self, plan: StepPlan, seconds: float) -> DraftSeconds:
        """Learns whether drafts pay from what a step took, and returns what its drafts cost and saved."""
        price = plan.price
        if price is None or not plan.chunks:  # nothing is left of a step that the device had no room for
            return NO_SECONDS
        pace, num_sequences = self._pace(sum(chunk.samples for chunk in plan.chunks)), len(plan.chunks)
        num_accepted = sum(chunk.num_accepted for chunk in plan.chunks)
        if plan.turn == pace.turn and all(
            chunk.samples and chunk.num_tokens == 1 + len(chunk.drafts) for chunk in plan.chunks
        ):
            pace.observe(
                num_sequences,
                num_sequences + num_accepted,
                plain_s=price.plain_s,
                modelled_s=price.modelled_s(plan.num_drafts),
                seconds=seconds,
                is_behind=plan.is_behind,
            )
        if not plan.num_drafts:
            return DraftSeconds(plan.drafting_s, 0.0)
        spent_s = max(0.0, seconds - pace.slowness * price.plain_s)
        return DraftSeconds(spent_s, num_accepted * pace.slowness * price.token_s)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Forgets those of the sequences that ended."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                continue
            self._records.pop(sequence, None)
            for proposer in self._proposers:  # also those that rest, lest they keep what ended meanwhile
                try:
                    proposer.forget(sequence)
                except Exception:
                    self._let_rest(proposer.name)

    @property
    def _is_active(self) -> bool:
        """Whether there is a proposer that does not rest."""
        return not all(map(self._rests_now, self._shares.rates))

    def _rests_now(self, name: str) -> bool:
        return self._num_steps < self._rests_until.get(name, 0)

    @property
    def _may_draft(self) -> bool:
        """Returns whether steps like the last planned one may have drafts; a trial next to prompts says nothing."""
        pace = self._pace(self._num_sampling)
        return pace.drafts if self._is_measured else pace.pays

    def _pace(self, num_sampling: int) -> Pace:
        key = num_sampling.bit_length()
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = Pace(block=self._block, is_watched=not self._has_model)
            if key + 1 in self._paces and self._paces[key + 1].pays:  # where it pays, it pays with fewer rows
                pace.begin_paying()
        return pace

    def _may_pay(self, num_sampling: int) -> bool:
        """Whether one draft that is certainly right would be worth its place; also if nothing is known yet."""
        plain_s, longer_s = self._price.plain_s, self._price.seconds(1)
        return longer_s <= self._most_s and value(num_sampling + 1, longer_s) >= value(num_sampling, plain_s)

    def _price_of(self, plan: StepPlan, overhead: float) -> Price | None:
        """Returns the price of a step without drafts and of adding drafts; None while too little was measured."""
        num_prefill, num_decode = plan.num_prefill, plan.num_tokens - plan.num_prefill
        rest = plan.num_context, plan.num_attended

        def added_s(num_drafts: int) -> float:
            return self._step_seconds(num_prefill, num_decode + num_drafts, *rest) - plain_s

        plain_s = self._step_seconds(num_prefill, num_decode, *rest)
        if plain_s <= 0:
            return None
        token_s = plain_s / self._num_sampling
        if not self._is_measured:
            context = sum(chunk.depth + chunk.num_tokens for chunk in plan.chunks if chunk.samples)
            token_s = self._step_seconds(0, self._num_sampling, context, 0) / self._num_sampling
        if self._has_experts:  # of which every draft adds fewer than the one before
            return Price(plain_s, token_s, added_s, overhead)
        each_s = added_s(1)
        return Price(plain_s, token_s, lambda num_drafts: num_drafts * each_s, overhead)

    # Guessing

    def _guesses(self, plan: StepPlan, *, is_known: bool) -> list[Guess]:
        """Returns the guesses of the free proposers for the plan's sequences.

        Args:
            is_known: whether the host has to know the token before the drafts.
        """
        guesses = [g for chunk in plan.chunks if (g := self._guess(chunk, is_known=is_known)) is not None]
        for proposer in self._proposers:
            self._ask(proposer, guesses)
        plan.is_behind = any(proposer.is_behind for proposer in self._proposers)
        return guesses

    def _guesses_ahead(self, plan: StepPlan) -> list[Guess]:
        """Places for the draft model's drafts in a step that is planned before the one before it is back."""
        chunks = [
            chunk
            for chunk in plan.chunks
            if not chunk.sequence.request.sampling.is_guided and not chunk.sequence.num_dropped
        ]
        return [g for chunk in chunks if (g := self._guess(chunk, is_known=False)) is not None]

    def _guess(self, chunk: Chunk, *, is_known: bool) -> Guess | None:
        """A place for the drafts of a chunk; None if it may not have any."""
        sequence, num_pending = chunk.sequence, chunk.sequence.num_pending
        if not chunk.samples or chunk.num_tokens != 1 or (is_known and num_pending != 1):
            return None
        length = min(self.most, sequence.horizon - len(sequence.token_ids) - num_pending)
        length = min(length, sequence.drop_at - sequence.num_computed)
        if length <= 0:
            return None
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = Record(dict(self._shares.rates))
        elif len(sequence.token_ids) > record.start:
            self._shares.learn(record, sequence)
        record.start = len(sequence.token_ids)
        return Guess(chunk, record, length)

    def _ask(self, proposer: Proposer, guesses: list[Guess]) -> None:
        """Takes the proposer's drafts where it has any."""
        name = proposer.name
        if not guesses or self._rests_now(name):
            return
        try:
            found = proposer.propose(
                [guess.chunk.sequence for guess in guesses], [guess.length for guess in guesses]
            )
        except Exception:
            self._let_rest(name)
            return
        for guess, proposed in zip(guesses, found, strict=True):
            guide = guess.chunk.sequence.guide
            drafts = proposed if guide is None else guide.allowed(proposed)
            if drafts:
                guess.take(name, drafts)
                guess.record.proposed[name] = drafts

    def _leave_to_model(self, guesses: list[Guess], plan: StepPlan, num_sampling: int) -> None:
        """Leaves to the draft model the sequences for which it is the better proposer, if that pays."""
        better = [
            guess
            for guess in guesses
            if (not guess.drafts or guess.rate < guess.record.rates[DRAFT_MODEL])
            and not guess.is_copied(plan)
            and not guess.chunk.sequence.num_dropped  # the model has its own keys and values in other places
        ]
        if not better:
            return
        asked = [guess for guess in better if guess.record.rates[DRAFT_MODEL] >= _LOWEST_RATE]
        length = self._best_length(asked, num_sampling) if asked else 0
        self._num_idle_steps = 0 if length else self._num_idle_steps + 1
        if length:
            for guess in asked:
                guess.take(DRAFT_MODEL, [OPEN] * min(length, guess.length))
        elif self._num_idle_steps % _PROBE_STEPS == 0:
            guess = better[self._num_idle_steps // _PROBE_STEPS % len(better)]
            guess.take(DRAFT_MODEL, [OPEN])
            guess.rate = 1.0  # for it to be tried

    def _best_length(self, asked: list[Guess], num_sampling: int) -> int:
        """Returns the number of tokens to draft for each sequence: the one that yields the most tokens a second.

        The time that the model takes is no longer there for verifying.
        """
        num = len(asked)
        rate = sum(guess.record.rates[DRAFT_MODEL] for guess in asked) / num
        shares = self._shares.chances(DRAFT_MODEL, rate, self.most)
        num_late = self._num_late(guess.chunk for guess in asked)
        price, most_s = self._price, self._most_s
        best, best_value, expected = 0, value(num_sampling, price.plain_s), float(num_sampling)
        for length, share in enumerate(shares, 1):
            expected += num * share
            model_s = self._model_seconds(num, length, num_late)
            seconds = price.seconds(num * length) + model_s
            if seconds <= most_s and value(expected, seconds) > best_value:
                best, best_value = length, value(expected, seconds)
                self._most_s = most_s - model_s
        return best

    # What the draft model takes

    def _model_seconds(self, num: int, length: int, num_late: int) -> float:
        """The time for so many drafts of `num` sequences, and a share of the time to catch up; 0 if it is unknown."""
        return self._model_share * self._target_seconds(num, length, num_late // _SPREAD)

    def _target_seconds(self, num: int, length: int, num_late: int) -> float:
        """The time of steps of the target that have the tokens of the model's passes.

        The host's work for all passes takes about as long as one more.
        """
        each_s, late_s = (self._step_seconds(late, num, 0, 0) for late in (0, num_late))
        return length * each_s + late_s

    def _learn_costs(self, chunks: list[Chunk], seconds: float) -> None:
        """Learns from the time that it took to make the drafts of these chunks, all of which are open."""
        length = max(len(chunk.drafts) for chunk in chunks)
        if target_s := self._target_seconds(len(chunks), length, self._num_late(chunks)):
            weight = _LEARNING_OF_COSTS if self._model_share else 1.0
            self._model_share += weight * (seconds / target_s - self._model_share)

    def _num_late(self, chunks: Iterable[Chunk]) -> int:
        """About how many tokens the model has to catch up before it drafts, as far as they fit into a pass."""
        known = ((len(chunk.sequence.token_ids), self._records[chunk.sequence]) for chunk in chunks)
        return min(self._max_tokens, sum(max(0, num - record.num_read - 2) for num, record in known))

    # Choosing

    def _counts(self, guesses: list[Guess], num_sampling: int, room: int) -> tuple[list[int], float]:
        """Returns the number of drafts for each chunk: the likeliest ones, as many as make the step most valuable.

        Returns:
            The drafts of each guess, and the tokens that the step is expected to bring with them.
        """
        likely = []
        for place, guess in enumerate(guesses):
            num = len(guess.drafts)
            kept = self._shares.chances(guess.proposer, guess.rate, num) if num else ()
            likely.append([(-share, place) for share in kept])
        counts = [0] * len(guesses)
        ordered = list(merge(*likely))[:room]
        expected = num_expected = float(num_sampling)
        best, best_value = 0, value(expected, self._price.plain_s)
        for number, (share, _) in enumerate(ordered, 1):
            expected -= share
            seconds = self._price.seconds(number)
            if seconds > self._most_s:
                break
            if value(expected, seconds) > best_value:
                best, best_value, num_expected = number, value(expected, seconds), expected
        for _, place in ordered[:best]:
            counts[place] += 1
        return counts, num_expected

    def _let_rest(self, name: str) -> None:
        """Lets a proposer rest that failed: the cause may pass, as a lack of memory does; if not, it rests longer."""
        steps = self._rests[name] = min(2 * self._rests.get(name, _REST_STEPS // 2), _MOST_REST_STEPS)
        self._rests_until[name] = self._num_steps + steps
        log.exception("drafting by %s failed, and rests for %d steps", name, steps)
        self.failed.append(name)
