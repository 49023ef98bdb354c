"""Drafts: tokens that may come next, computed in one step with the token before them and kept as far as they are right.

Every position is sampled as it would be without drafts: a token depends on its number, its logits and its request's
seed alone. So drafts never change an answer, only how many of its tokens one step brings.

How many drafts a sequence gets is decided anew in every step, for all of them together: as many as bring the most
tokens a second, by how often the sequence's drafts were right lately and by what steps of that size took. Under load,
where each token of a step costs, that number fades to 0 by itself. And whether they pay at all is measured: steps
without drafts are taken now and then where they do, and steps with drafts where they do not.

The choice follows DSpark's rule (most expected tokens for a step's time, over all sequences); see also Liu et al.,
"Optimizing speculative decoding for serving large language models using goodput", 2024.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from heapq import merge
from itertools import accumulate, pairwise
from operator import mul
from typing import Protocol

from engine.planning.block_tables import BlockTables
from engine.planning.request import Sequence
from engine.planning.step import Chunk, Plan

log = logging.getLogger("penstock.engine")

_FIRST_RATE = 0.6
"""The share of drafts that are supposed to be right while nothing is known of any sequence."""
_LEARNING, _LEARNING_OF_ALL = 0.15, 0.02
"""The weights of the latest draft in the shares of its sequence, and of new ones."""
_PROBE_STEPS = 32
"""A sequence whose drafts do not pay has one drafted after so many steps, to see whether that has changed."""
_FALLING, _RISING = 0.3, 0.03
"""The weights of a step that was quicker, or slower, than those before it."""
_STALE_STEPS = 256
"""After so many steps of other sizes, what a size took is forgotten."""
_TRIAL_STEPS = 16
"""Steps over which tokens a second are measured."""
_LONGEST_KEPT = 16
"""Trials in a row with drafts, while they pay, before there is one without."""
_SHORTEST_REST, _LONGEST_REST = 8, 64
"""Trials without drafts after one in which they did not pay."""
_GAIN = 1.03
"""Less than this is noise."""
_FREE_TOKENS = 32.0
"""Before it is measured, so many tokens more are supposed to take as long again."""


class Proposer(Protocol):
    """Guesses what comes next in a sequence."""

    name: str

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        """At most `most` tokens that may follow those of a sequence, which are all known."""

    def forget(self, sequence: Sequence) -> None:
        """The sequence ended."""


@dataclass(slots=True)
class _Cost:
    """Steps of about the same number of tokens."""

    num_tokens: float
    seconds: float
    seen: int
    """The number of the last one."""


class StepCosts:
    """What steps take by their number of tokens: an estimate for each power of two, and straight lines between.

    Whatever disturbs a step makes it longer, so an estimate falls quickly and rises slowly. One that is old is given
    up: what is supposed in its place is cheap enough to be tried again.
    """

    def __init__(self) -> None:
        self._costs: dict[int, _Cost] = {}
        """By bit length of the number of tokens."""
        self._num_steps = 0
        self._line: list[tuple[float, float]] = []

    def observe(self, num_tokens: int, seconds: float) -> None:
        self._num_steps += 1
        self._line = []
        cost = self._costs.get(num_tokens.bit_length())
        if cost is None or self._num_steps - cost.seen > _STALE_STEPS:
            self._costs[num_tokens.bit_length()] = _Cost(num_tokens, seconds, self._num_steps)
            return
        cost.seen = self._num_steps
        weight = _FALLING if seconds < cost.seconds else _RISING
        cost.seconds += weight * (seconds - cost.seconds)
        cost.num_tokens += weight * (num_tokens - cost.num_tokens)

    def seconds(self, num_tokens: int) -> float:
        """An estimate that never falls as the number grows; 0 while nothing is known."""
        line = self._line = self._line or self._monotone()
        if not line:
            return 0.0
        for (below, low), (above, high) in pairwise(line):
            if num_tokens <= above:
                share = max(0.0, (num_tokens - below) / (above - below))
                return low + share * (high - low)
        tokens, seconds = line[-1]
        return seconds * (1 + max(0.0, num_tokens - tokens) / max(_FREE_TOKENS, tokens))

    def _monotone(self) -> list[tuple[float, float]]:
        fresh = [
            cost for _, cost in sorted(self._costs.items()) if self._num_steps - cost.seen <= _STALE_STEPS
        ]
        highest = accumulate((cost.seconds for cost in fresh), max)
        return [(cost.num_tokens, seconds) for cost, seconds in zip(fresh, highest, strict=True)]


class _Pace:
    """Whether drafts make steps of about so many sequences bring more tokens a second, as measured in turns.

    Steps without drafts and steps with them take turns. What is measured is all that drafts cost: looking for them,
    computing and verifying them. As long as they pay, the turns with them become longer, and else those without.
    """

    __slots__ = ("_kept", "_left", "_num_steps", "_num_tokens", "_plain_rate", "_rest", "_seconds", "drafts")

    def __init__(self) -> None:
        self.drafts = False
        """Whether the next step may have drafts."""
        self._left = 1
        """Trials, of _TRIAL_STEPS each, of this turn."""
        self._kept, self._rest = 1, _SHORTEST_REST
        """Trials of the next turn with drafts, and of the next one without if that does not pay."""
        self._plain_rate = 0.0
        """Tokens a second without drafts."""
        self._num_steps, self._num_tokens, self._seconds = 0, 0, 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step brought so many tokens."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._seconds += seconds
        if self._num_steps < _TRIAL_STEPS:
            return
        rate = self._num_tokens / max(self._seconds, 1e-9)
        self._num_steps, self._num_tokens, self._seconds = 0, 0, 0.0
        if not self.drafts:
            self._plain_rate = (self._plain_rate + rate) / 2 if self._plain_rate else rate
        elif rate < _GAIN * self._plain_rate:
            self.drafts, self._left, self._kept = False, self._rest, 1
            self._rest = min(2 * self._rest, _LONGEST_REST)
            return
        self._left -= 1
        if self._left:
            return
        if self.drafts:
            self._left, self._kept, self._rest = 1, min(2 * self._kept, _LONGEST_KEPT), _SHORTEST_REST
        else:
            self._left = self._kept
        self.drafts = not self.drafts


@dataclass(slots=True)
class _Record:
    """How the drafts of a sequence went."""

    rate: float
    num_idle_steps: int = 0
    """Steps since it last had drafts."""


class Drafting:
    """Adds drafts to planned steps, and learns from what became of them.

    A proposer that fails is switched off; sequences go on without it.
    """

    def __init__(self, proposer: Proposer, most: int) -> None:
        """`most`: drafts of one sequence in a step."""
        self.most = most
        self.costs = StepCosts()
        self._proposer: Proposer | None = proposer
        self._rate = _FIRST_RATE
        """Of all sequences."""
        self._records: dict[Sequence, _Record] = {}
        self._paces: dict[int, _Pace] = {}
        """By bit length of the number of sequences that sample."""

    def extend(self, plan: Plan, tables: BlockTables, num_tokens: int) -> None:
        """Adds drafts to a plan that is otherwise complete.

        Args:
            num_tokens: the most that the whole step may have.
        """
        if self._proposer is None or plan.num_tokens >= num_tokens:
            return
        num_sampling = sum(chunk.samples for chunk in plan.chunks)
        if not self._pace(num_sampling).drafts or not self._may_pay(plan, num_sampling):
            return
        chunks = (chunk for chunk in plan.chunks if chunk.samples and chunk.num_tokens == 1)
        proposed = [(chunk, drafts) for chunk in chunks if (drafts := self._propose(chunk))]
        counts = self._choose(plan, num_sampling, proposed, num_tokens - plan.num_tokens)
        for (chunk, drafts), count in zip(proposed, counts, strict=True):
            if count:
                _add(plan, chunk, drafts[:count], tables)

    def note(self, chunk: Chunk, num_brought: int) -> None:
        """Learns what a step brought for a chunk with drafts: the right ones among these, and one more."""
        sequence = chunk.sequence
        record = self._record(sequence)
        num_right = num_brought - 1
        for number in range(min(num_right + 1, len(chunk.drafts))):
            record.rate += _LEARNING * ((number < num_right) - record.rate)
            self._rate += _LEARNING_OF_ALL * ((number < num_right) - self._rate)
        sequence.num_draft_tokens += len(chunk.drafts)
        sequence.num_accepted_tokens += num_right

    def observe(self, plan: Plan, num_accepted: int, seconds: float) -> None:
        """Learns what a step took, and how many drafts were right in it."""
        self.costs.observe(plan.num_tokens, seconds)
        if all(chunk.samples and chunk.num_tokens == 1 + len(chunk.drafts) for chunk in plan.chunks):
            self._pace(len(plan.chunks)).observe(len(plan.chunks) + num_accepted, seconds)

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Those of the sequences that ended are remembered no longer."""
        for sequence in sequences:
            if sequence.finish_reason is None:
                continue
            self._records.pop(sequence, None)
            if self._proposer is None:
                continue
            try:
                self._proposer.forget(sequence)
            except Exception:
                self._switch_off()

    def _pace(self, num_sampling: int) -> _Pace:
        key = num_sampling.bit_length()
        pace = self._paces.get(key)
        if pace is None:
            pace = self._paces[key] = _Pace()
        return pace

    def _record(self, sequence: Sequence) -> _Record:
        record = self._records.get(sequence)
        if record is None:
            record = self._records[sequence] = _Record(self._rate)
        return record

    def _may_pay(self, plan: Plan, num_sampling: int) -> bool:
        """Whether one draft that is certainly right would be worth its place; also if nothing is known yet."""
        now, more = self.costs.seconds(plan.num_tokens), self.costs.seconds(plan.num_tokens + 1)
        return (num_sampling + 1) * now >= num_sampling * more

    def _propose(self, chunk: Chunk) -> list[int]:
        sequence = chunk.sequence
        most = min(self.most, sequence.max_len - 1 - len(sequence.token_ids))
        if sequence.num_pending != 1 or most <= 0:  # a token before the drafts is not known on the host
            return []
        if self._proposer is None:
            return []
        try:
            return self._proposer.propose(sequence, most)
        except Exception:
            self._switch_off()
            return []

    def _choose(
        self, plan: Plan, num_sampling: int, proposed: list[tuple[Chunk, list[int]]], room: int
    ) -> list[int]:
        """How many drafts each chunk gets: those that are most likely kept, as many as make the step worth most."""
        likely = []
        for place, (chunk, drafts) in enumerate(proposed):
            rate = self._record(chunk.sequence).rate
            kept = accumulate([rate] * len(drafts), mul)
            likely.append([(-share, place) for share in kept])
        counts = [0] * len(proposed)
        ordered = list(merge(*likely))[:room]
        expected = float(num_sampling)
        best, best_value = 0, expected / max(self.costs.seconds(plan.num_tokens), 1e-9)
        for number, (share, _) in enumerate(ordered, 1):
            expected -= share
            value = expected / max(self.costs.seconds(plan.num_tokens + number), 1e-9)
            if value > best_value:
                best, best_value = number, value
        for _, place in ordered[:best]:
            counts[place] += 1
        self._probe(proposed, counts, room - best)
        return counts

    def _probe(self, proposed: list[tuple[Chunk, list[int]]], counts: list[int], room: int) -> None:
        """Has a draft now and then for those that have not had any for long."""
        for place, (chunk, _) in enumerate(proposed):
            record = self._records[chunk.sequence]
            record.num_idle_steps = 0 if counts[place] else record.num_idle_steps + 1
            if record.num_idle_steps >= _PROBE_STEPS and room > 0:
                counts[place], record.num_idle_steps, room = 1, 0, room - 1

    def _switch_off(self) -> None:
        assert self._proposer is not None
        log.exception("drafting by %s failed and is off from now on", self._proposer.name)
        self._proposer = None


def _add(plan: Plan, chunk: Chunk, drafts: list[int], tables: BlockTables) -> None:
    """Adds drafts to a chunk, if there are free blocks for them: nobody gives way for a guess."""
    sequence = chunk.sequence
    copies = tables.grow(sequence, sequence.num_computed + len(drafts))
    if copies is None:
        return
    plan.copies.extend(copies)
    chunk.drafts = drafts
    chunk.num_tokens += len(drafts)
    sequence.num_computed += len(drafts)
    plan.num_tokens += len(drafts)
