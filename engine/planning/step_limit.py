"""The number of tokens that a step may have on a device that may run short of memory."""

from __future__ import annotations

_STEPS_TO_GROW, _MOST_STEPS_TO_GROW = 32, 4096
"""Steps that fitted the device before a larger one is tried: twice as many after each try."""


class StepLimit:
    """The token limit of a step: the configured one, or less for some time after a step that did not fit.

    Memory that was short may be free again, or may be what only larger steps need. So the limit is doubled now and then
    until it is what it was, and each time it takes longer.
    """

    def __init__(self, max_tokens: int) -> None:
        self.num_tokens = self._max_tokens = max_tokens
        self._num_fitted = 0
        """Steps that came back since `num_tokens` changed."""
        self._steps_to_grow = _STEPS_TO_GROW

    def shrink(self, num_tokens: int) -> None:
        """Limits the steps to come to a size that may fit."""
        self.num_tokens, self._num_fitted = num_tokens, 0

    def note_fitted(self) -> None:
        """Counts a step that came back, and grows the limit when there were enough of them."""
        self._num_fitted += 1
        if self._num_fitted >= self._steps_to_grow and self.num_tokens < self._max_tokens:
            self.num_tokens = min(2 * self.num_tokens, self._max_tokens)
            self._num_fitted = 0
            self._steps_to_grow = min(2 * self._steps_to_grow, _MOST_STEPS_TO_GROW)
