"""Drafts: tokens that may come next, computed in one step with the token before them and kept as far as they are right.

Every position is sampled as it would be without drafts: a token depends on its number, its logits and its request's
seed alone. So drafts never change an answer, only how many of its tokens one step brings.

Drafts come from up to three proposers: two that cost nothing, a lookup and what a grammar forces, and one that costs
time, a draft model. What the sequence's grammar rules out is never a draft. Which of them drafts for a sequence, and
how many tokens, is decided anew in every step, for all sequences together: what brings the most tokens a second, by how
often each proposer was right for the sequence lately, by what such steps take, and by what the model takes.
Under load, where each token of a step costs, the number of drafts fades to 0 by itself, and the model is not run at
all. And whether drafts pay is measured (`pace.py`): steps without them are taken now and then where they do, and steps
with them where they do not.

Planning knows nothing of the draft model but that there is one. Its drafts are planned as a number, and are OPEN until
the runner has made them.

The choice follows DSpark's rule (most expected tokens for a step's time, over all sequences); see also Liu et al.,
"Optimizing speculative decoding for serving large language models using goodput", 2024.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Iterator
from heapq import merge
from itertools import accumulate
from operator import mul
from typing import Protocol

from engine.planning.block_tables import BlockTables
from engine.planning.chunks import set_drafts
from engine.planning.guesses import Guess, Record
from engine.planning.pace import Pace
from engine.planning.request import NO_LIMIT, Sequence
from engine.planning.step import OPEN, Chunk, Plan, StepSeconds

log = logging.getLogger("penstock.engine")

DRAFT_MODEL = "draft"
"""The draft model's name as a proposer."""

_FIRST_RATE = 0.6
"""The share of drafts that are supposed to be right while nothing is known of a proposer."""
_LEARNING, _LEARNING_OF_ALL = 0.15, 0.02
"""The weights of the latest draft in the shares of its sequence, and of new ones."""
_LOWEST_RATE = 0.2
"""A model is not asked for drafts of a sequence for which fewer are right."""
_PROBE_STEPS = 32
"""A model whose drafts do not pay is asked for one, of one sequence, after so many steps: that may have changed."""
_REST_STEPS, _MOST_REST_STEPS = 256, 65_536
"""A proposer that failed is asked again after so many steps, and after twice as many each time that it fails again."""
_LEARNING_OF_COSTS = 0.1
"""The weight of the latest drafts in what the draft model takes."""
_SPREAD = 16
"""The tokens that the draft model has yet to read of a sequence are taken to serve so many steps."""


class Proposer(Protocol):
    """Guesses what comes next in sequences, at no cost."""

    name: str
    is_behind: bool
    """Whether it had no time, when it was asked last, to read all that it proposes from."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        """The tokens that may follow those of each sequence, which are all known; at most `lengths` of them."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended."""


class Drafting:
    """Adds drafts to planned steps, and learns from what came.

    A proposer that fails rests, for longer each time; sequences go on without it.

    Attributes:
        failed: the names of proposers that failed and that nobody took notice of.
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
        step_seconds: StepSeconds = lambda *_: 0.0,
        has_experts: bool = False,
    ) -> None:
        """
        Args:
            most: drafts of one sequence in a step.
            has_model: whether the runner has a draft model.
            forced: proposes at no cost, too, and knows better than the lookup where it proposes anything.
            clock: seconds; without one, drafting seems to take no time.
            max_rows: chunks and drafts that a step with drafts may have.
            step_seconds: what steps take, without the time it takes to make drafts; 0 stands for no matter what.
            has_experts: whether the model has experts: then drafts do not all add the same time.
        """
        self.most = most
        self.clock = clock
        self._max_rows = max_rows
        self._step_seconds = step_seconds
        self._has_experts = has_experts
        self._seconds: Callable[[int], float] = lambda _: 0.0
        """What the step that is planned takes with so many tokens, drafts included."""
        self.failed: list[str] = []
        self._proposers = [proposer for proposer in (lookup, forced) if proposer is not None]
        self._has_model = has_model
        self._model_share = 0.0
        """The time of a pass of the model, in units of a step of the target with as many tokens."""
        self._num_steps = 0
        self._rests: dict[str, int] = {}
        """By proposer that failed: the steps that it rested for the last time."""
        self._rests_until: dict[str, int] = {}
        """By proposer that failed: the step from which on it is asked again."""
        names = [proposer.name for proposer in self._proposers] + [DRAFT_MODEL] * has_model
        self._rates = dict.fromkeys(names, _FIRST_RATE)
        """By proposer: the share of drafts that were right, of all sequences."""
        self._factors = {name: [1.0] * most for name in names}
        """By proposer and position: how often drafts after right ones are right, in units of a sequence's rate."""
        self._records: dict[Sequence, Record] = {}
        self._paces: dict[int, Pace] = {}
        """By bit length of the number of sequences that sample."""
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
        return self._is_active and self._num_sampling > 0 and self._may_draft

    def extend(self, plan: Plan, tables: BlockTables, num_tokens: int) -> None:
        """Adds drafts to a plan that is otherwise complete; those of the draft model are OPEN.

        Args:
            num_tokens: the most that the whole step may have.
        """
        self._num_steps += 1
        self._max_tokens = num_tokens
        self._num_sampling = num_sampling = sum(chunk.samples for chunk in plan.chunks)
        self._is_measured = num_sampling == plan.num_tokens
        room = min(num_tokens - plan.num_tokens, self._max_rows - len(plan.chunks))
        if not self._is_active or not num_sampling:
            return
        pace = self._pace(num_sampling)
        if pace.drafts and any(chunk.sequence.num_pending > 1 for chunk in plan.chunks):
            return  # a step before it has not come back, and this one says nothing of a turn with drafts
        plan.turn = pace.turn
        self._price(plan)
        if room <= 0 or not self._may_draft or not self._may_pay(plan, num_sampling):
            return
        started = self.clock()
        guesses = [guess for chunk in plan.chunks if (guess := self._guess(chunk)) is not None]
        for proposer in self._proposers:
            self._ask(proposer, guesses)
        plan.is_behind = any(proposer.is_behind for proposer in self._proposers)
        if self._has_model and not self._rests_now(DRAFT_MODEL):
            self._leave_to_model(guesses, plan, num_sampling)
        for guess, count in zip(guesses, self._counts(guesses, plan, num_sampling, room), strict=True):
            if count:
                guess.add(plan, count, tables)
        plan.drafting_s = self.clock() - started

    def fill(self, plan: Plan, made: list[list[int]], seconds: float) -> None:
        """Puts in the drafts that the draft model made, by open chunk; the places of those that it did not make go.

        Args:
            seconds: the time it took.
        """
        chunks = [chunk for chunk in plan.chunks if chunk.is_open]
        plan.drafting_s += seconds
        self._learn_costs(chunks, seconds)
        for chunk, drafts in zip(chunks, made, strict=True):
            record, guide = self._records[chunk.sequence], chunk.sequence.guide
            if drafts:
                record.num_read = len(chunk.sequence.token_ids) + len(drafts)
            allowed = drafts if guide is None else guide.allowed(drafts)
            if allowed:
                record.proposed[DRAFT_MODEL] = allowed
            set_drafts(plan, chunk, allowed, DRAFT_MODEL)

    def give_up(self, plan: Plan) -> None:
        """The draft model failed: the step goes on without the drafts that are open. Called where that is handled."""
        for chunk in plan.chunks:
            if chunk.is_open:
                set_drafts(plan, chunk, ())
        self._let_rest(DRAFT_MODEL)

    def observe(self, plan: Plan, seconds: float) -> None:
        """Learns whether drafts pay from what a step took, and what it brought."""
        pace = self._pace(len(plan.chunks))
        if plan.turn == pace.turn and all(
            chunk.samples and chunk.num_tokens == 1 + len(chunk.drafts) for chunk in plan.chunks
        ):
            num_accepted = sum(chunk.num_accepted for chunk in plan.chunks)
            pace.observe(len(plan.chunks) + num_accepted, seconds, is_behind=plan.is_behind)

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
        return not all(map(self._rests_now, self._rates))

    def _rests_now(self, name: str) -> bool:
        return self._num_steps < self._rests_until.get(name, 0)

    @property
    def _may_draft(self) -> bool:
        """Whether steps like the one that was planned last may have drafts; beside prompts a trial says nothing."""
        pace = self._pace(self._num_sampling)
        return pace.drafts if self._is_measured else pace.pays

    def _pace(self, num_sampling: int) -> Pace:
        key = num_sampling.bit_length()
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = Pace(num_sampling)
        return pace

    def _may_pay(self, plan: Plan, num_sampling: int) -> bool:
        """Whether one draft that is certainly right would be worth its place; also if nothing is known yet."""
        now, more = self._seconds(plan.num_tokens), self._seconds(plan.num_tokens + 1)
        return (num_sampling + 1) * now >= num_sampling * more

    def _price(self, plan: Plan) -> None:
        """Finds what the planned step takes without drafts, and what each of them adds."""
        num_prefill, num_plain = plan.num_prefill, plan.num_tokens
        rest = plan.num_context, plan.num_attended

        def seconds(num_tokens: int) -> float:
            return self._step_seconds(num_prefill, num_tokens - num_prefill, *rest)

        if self._has_experts:  # of which every draft adds fewer than the one before
            self._seconds = lambda num_tokens: max(seconds(num_tokens), 1e-9)
            return
        plain_s, longer_s = seconds(num_plain), seconds(num_plain + 1)
        least_s, draft_s = max(plain_s, 1e-9), longer_s - plain_s
        self._seconds = lambda num_tokens: least_s + (num_tokens - num_plain) * draft_s

    # Guessing

    def _guess(self, chunk: Chunk) -> Guess | None:
        """A place for the drafts of a chunk; None if it may not have any."""
        sequence = chunk.sequence
        if not chunk.samples or chunk.num_tokens != 1 or sequence.num_pending != 1:
            return None  # in a longer step than it is worth, or a token before the drafts is not known on the host
        length = min(self.most, sequence.max_len - 1 - len(sequence.token_ids))
        if length <= 0:
            return None
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = Record(dict(self._rates))
        else:
            self._learn(record, sequence)
        record.start = len(sequence.token_ids)
        return Guess(chunk, record, length)

    def _learn(self, record: Record, sequence: Sequence) -> None:
        """Compares what was proposed last with what came: that needs no draft to have been computed."""
        came = sequence.token_ids[record.start : record.start + self.most]
        for name, drafts in record.proposed.items():
            factors = self._factors[name]
            for position, (draft, token_id) in enumerate(zip(drafts, came, strict=False)):
                is_right = draft == token_id
                factors[position] += _LEARNING_OF_ALL * (
                    is_right - min(1.0, record.rates[name] * factors[position])
                )
                record.rates[name] += _LEARNING * (is_right - record.rates[name])
                self._rates[name] += _LEARNING_OF_ALL * (is_right - self._rates[name])
                if not is_right:
                    break
        record.proposed.clear()

    def _chances(self, name: str, rate: float, num: int) -> Iterator[float]:
        """How likely each of so many drafts is kept, of a sequence for which a share of `rate` is right."""
        return accumulate((min(1.0, rate * factor) for factor in self._factors[name][:num]), mul)

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

    def _leave_to_model(self, guesses: list[Guess], plan: Plan, num_sampling: int) -> None:
        """Leaves to the draft model the sequences for which it is the better proposer, if that pays."""
        better = [
            guess
            for guess in guesses
            if (not guess.drafts or guess.rate < guess.record.rates[DRAFT_MODEL])
            and not guess.is_copied(plan)
        ]
        if not better:
            return
        asked = [guess for guess in better if guess.record.rates[DRAFT_MODEL] >= _LOWEST_RATE]
        length = self._best_length(asked, plan, num_sampling) if asked else 0
        self._num_idle_steps = 0 if length else self._num_idle_steps + 1
        if length:
            for guess in asked:
                guess.take(DRAFT_MODEL, [OPEN] * min(length, guess.length))
        elif self._num_idle_steps % _PROBE_STEPS == 0:
            guess = better[self._num_idle_steps // _PROBE_STEPS % len(better)]
            guess.take(DRAFT_MODEL, [OPEN])
            guess.rate = 1.0  # for it to be tried

    def _best_length(self, asked: list[Guess], plan: Plan, num_sampling: int) -> int:
        """How many tokens the model is to draft for each: what brings the most tokens a second."""
        num = len(asked)
        rate = sum(guess.record.rates[DRAFT_MODEL] for guess in asked) / num
        shares = self._chances(DRAFT_MODEL, rate, self.most)
        num_late = self._num_late(guess.chunk for guess in asked)
        best, best_value, expected = 0, num_sampling / self._seconds(plan.num_tokens), float(num_sampling)
        for length, share in enumerate(shares, 1):
            expected += num * share
            seconds = self._seconds(plan.num_tokens + num * length)
            seconds += self._model_seconds(num, length, num_late)
            if expected / seconds > best_value:
                best, best_value = length, expected / seconds
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
        """Learns from what it took to make the drafts of these chunks, all of which are open."""
        length = max(len(chunk.drafts) for chunk in chunks)
        if target_s := self._target_seconds(len(chunks), length, self._num_late(chunks)):
            weight = _LEARNING_OF_COSTS if self._model_share else 1.0
            self._model_share += weight * (seconds / target_s - self._model_share)

    def _num_late(self, chunks: Iterable[Chunk]) -> int:
        """About how many tokens the model has to catch up before it drafts, as far as they fit into a pass."""
        known = ((len(chunk.sequence.token_ids), self._records[chunk.sequence]) for chunk in chunks)
        return min(self._max_tokens, sum(max(0, num - record.num_read - 2) for num, record in known))

    # Choosing

    def _counts(self, guesses: list[Guess], plan: Plan, num_sampling: int, room: int) -> list[int]:
        """How many drafts each chunk gets: those that are most likely kept, as many as make the step worth most."""
        likely = []
        for place, guess in enumerate(guesses):
            num = len(guess.drafts)
            kept = self._chances(guess.proposer, guess.rate, num) if num else ()
            likely.append([(-share, place) for share in kept])
        counts = [0] * len(guesses)
        ordered = list(merge(*likely))[:room]
        expected = float(num_sampling)
        best, best_value = 0, expected / self._seconds(plan.num_tokens)
        for number, (share, _) in enumerate(ordered, 1):
            expected -= share
            value = expected / self._seconds(plan.num_tokens + number)
            if value > best_value:
                best, best_value = number, value
        for _, place in ordered[:best]:
            counts[place] += 1
        return counts

    def _let_rest(self, name: str) -> None:
        """Lets a proposer rest that failed: the cause may pass, as a lack of memory does; if not, it rests longer."""
        steps = self._rests[name] = min(2 * self._rests.get(name, _REST_STEPS // 2), _MOST_REST_STEPS)
        self._rests_until[name] = self._num_steps + steps
        log.exception("drafting by %s failed, and rests for %d steps", name, steps)
        self.failed.append(name)
