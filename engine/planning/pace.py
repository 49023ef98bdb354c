"""Whether drafts pay: steps with them and without, compared by the tokens that they really brought."""

from __future__ import annotations

_TRIAL_STEPS = 16
"""Steps over which tokens a second are measured; a quarter of them where there are many sequences."""
_MANY = 8
"""Sequences whose steps bring so many tokens that few of them are enough to measure."""
_LONGEST_KEPT = 16
"""Trials in a row with drafts, while they pay, before there is one without."""
_SHORTEST_REST, _LONGEST_REST = 8, 64
"""Trials without drafts after one in which they did not pay, four times as many if they are short."""
_MOST_BEHIND = 256
"""Steps of a turn that are not measured because a proposer has yet to read what it proposes from."""
_LOSS = 0.01
"""The share of the time that drafts may lose: the more a trial lost, the longer the rest after it."""
_GAIN, _GAIN_OF_MANY = 1.03, 1.1
"""Less than this is noise; and where there are many sequences, those without drafts pay for the longer steps."""


class Pace:
    """Whether drafts make steps of about so many sequences bring more tokens a second, as measured in turns.

    Steps without drafts and steps with them take turns. What is measured is all that drafts cost: looking for them,
    computing and verifying them; on a device, also that it waits for the host, which has to know what drafts follow,
    where without drafts it is a step behind. As long as they pay, the turns with them become longer, and else those
    without.
    """

    def __init__(self, num_sequences: int = 1) -> None:
        self._trial_steps, rest_factor, self._gain = _TRIAL_STEPS, 1, _GAIN
        if num_sequences >= _MANY:
            self._trial_steps, rest_factor, self._gain = max(1, _TRIAL_STEPS // 4), 4, _GAIN_OF_MANY
        self._shortest_rest, self._longest_rest = rest_factor * _SHORTEST_REST, rest_factor * _LONGEST_REST
        self.drafts = False
        """Whether the next step may have drafts."""
        self.turn = 0
        """Turns are numbered. A step that was planned in one and ends in the next says nothing of either."""
        self._left = 1
        """Trials of this turn."""
        self._kept = 1
        """Trials of the next turn with drafts."""
        self._plain_rate = 0.0
        """Tokens a second without drafts."""
        self._plain_s = 0.0
        """What the last trial without drafts took."""
        self._drafted_rate = 0.0
        """Tokens a second with drafts, since they were found to pay; 0 before their first trial."""
        self._lost_s = 0.0
        """What the turn with drafts took longer than its tokens would have taken without."""
        self._is_first = False
        """The next step is the first of a turn, in which proposers catch up, or a device without drafts has nothing to
        do while the host plans: it says nothing of others."""
        self._num_behind = 0
        """More steps of this turn in which proposers caught up."""
        self._num_steps, self._num_tokens, self._seconds = 0, 0, 0.0

    @property
    def pays(self) -> bool:
        """Whether drafts are known to pay, and not only tried."""
        return self.drafts and self._drafted_rate > 0

    def observe(self, num_tokens: int, seconds: float, *, is_behind: bool = False) -> None:
        """A step brought so many tokens."""
        if self.drafts:
            self._lost_s += seconds - num_tokens / max(self._plain_rate, 1e-9)
        if self._is_first:
            self._is_first = False
            return
        if is_behind and self._num_behind < _MOST_BEHIND:
            self._num_behind += 1
            return
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._seconds += seconds
        if self._num_steps < self._trial_steps:
            return
        rate = self._num_tokens / max(self._seconds, 1e-9)
        taken_s = self._seconds
        self._num_steps, self._num_tokens, self._seconds = 0, 0, 0.0
        self._left -= 1
        if not self.drafts:
            self._plain_rate = (self._plain_rate + rate) / 2 if self._plain_rate else rate
            self._plain_s = taken_s
            if not self._left:
                self._begin_turn(drafts=True, num_trials=self._kept)
                self._lost_s = 0.0
            return
        self._drafted_rate = (self._drafted_rate + rate) / 2 if self._drafted_rate else rate
        if self._drafted_rate < self._gain * self._plain_rate:
            self._rest()
        elif not self._left:
            self._begin_turn(drafts=False, num_trials=1)
            self._kept = min(2 * self._kept, _LONGEST_KEPT)

    def _begin_turn(self, *, drafts: bool, num_trials: int) -> None:
        self.drafts, self._left = drafts, num_trials
        self._is_first, self._num_behind = True, 0
        self.turn += 1

    def _rest(self) -> None:
        """Goes without drafts for so long that what they lost is a small share of the time."""
        wanted = int(self._lost_s / (_LOSS * max(self._plain_s, 1e-9)))
        self._begin_turn(drafts=False, num_trials=min(max(wanted, self._shortest_rest), self._longest_rest))
        self._kept, self._drafted_rate = 1, 0.0
