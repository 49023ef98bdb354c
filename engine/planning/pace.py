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
_GAIN = 1.03
"""Less than this is noise."""


class Pace:
    """Whether drafts make steps of about so many sequences bring more tokens a second, as measured in turns.

    Steps without drafts and steps with them take turns. What is measured is all that drafts cost: looking for them,
    computing and verifying them. As long as they pay, the turns with them become longer, and else those without.
    """

    __slots__ = (
        "_drafted_rate",
        "_kept",
        "_left",
        "_longest_rest",
        "_num_steps",
        "_num_tokens",
        "_plain_rate",
        "_rest",
        "_seconds",
        "_shortest_rest",
        "_trial_steps",
        "drafts",
    )

    def __init__(self, num_sequences: int = 1) -> None:
        self._trial_steps, rest_factor = _TRIAL_STEPS, 1
        if num_sequences >= _MANY:
            self._trial_steps, rest_factor = max(1, _TRIAL_STEPS // 4), 4
        self._shortest_rest, self._longest_rest = rest_factor * _SHORTEST_REST, rest_factor * _LONGEST_REST
        self.drafts = False
        """Whether the next step may have drafts."""
        self._left = 1
        """Trials of this turn."""
        self._kept, self._rest = 1, self._shortest_rest
        """Trials of the next turn with drafts, and of the next one without if that does not pay."""
        self._plain_rate = 0.0
        """Tokens a second without drafts."""
        self._drafted_rate = 0.0
        """And with them, since they were found to pay; 0 before their first trial."""
        self._num_steps, self._num_tokens, self._seconds = 0, 0, 0.0

    def observe(self, num_tokens: int, seconds: float) -> None:
        """A step brought so many tokens."""
        self._num_steps += 1
        self._num_tokens += num_tokens
        self._seconds += seconds
        if self._num_steps < self._trial_steps:
            return
        rate = self._num_tokens / max(self._seconds, 1e-9)
        self._num_steps, self._num_tokens, self._seconds = 0, 0, 0.0
        if not self.drafts:
            self._plain_rate = (self._plain_rate + rate) / 2 if self._plain_rate else rate
        else:
            self._drafted_rate = (self._drafted_rate + rate) / 2 if self._drafted_rate else rate
            if self._drafted_rate < _GAIN * self._plain_rate:
                self.drafts, self._left, self._kept = False, self._rest, 1
                self._rest, self._drafted_rate = min(2 * self._rest, self._longest_rest), 0.0
                return
        self._left -= 1
        if self._left:
            return
        if self.drafts:
            self._left, self._kept, self._rest = 1, min(2 * self._kept, _LONGEST_KEPT), self._shortest_rest
        else:
            self._left = self._kept
        self.drafts = not self.drafts
