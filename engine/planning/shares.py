"""How often drafts are right: by proposer, by sequence, and by position."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import accumulate
from operator import mul

from penstock.engine.planning.guesses import Record
from penstock.engine.planning.request import Sequence

_FIRST_RATE = 0.6
"""The share of drafts that are supposed to be right while nothing is known of a proposer."""
_LEARNING, _LEARNING_OF_ALL = 0.15, 0.02
"""The weights of the latest draft in the shares of its sequence, and of new ones."""


class Shares:
    """The shares of drafts that were right, learnt from what was proposed, computed or not."""

    def __init__(self, proposers: Iterable[str], most: int) -> None:
        """`most` drafts of one sequence are proposed at a time."""
        self.rates = dict.fromkeys(proposers, _FIRST_RATE)
        """By proposer: the share of drafts that were right, of all sequences."""
        self._most = most
        self._factors = {name: [1.0] * most for name in self.rates}
        """By proposer and position: how often drafts after right ones are right, in units of a sequence's rate."""

    def learn(self, record: Record, sequence: Sequence) -> None:
        """Compares what was proposed last with what came: that needs no draft to have been computed."""
        came = sequence.token_ids[record.start : record.start + self._most]
        for name, drafts in record.proposed.items():
            factors = self._factors[name]
            for position, (draft, token_id) in enumerate(zip(drafts, came, strict=False)):
                is_right = draft == token_id
                factors[position] += _LEARNING_OF_ALL * (
                    is_right - min(1.0, record.rates[name] * factors[position])
                )
                record.rates[name] += _LEARNING * (is_right - record.rates[name])
                self.rates[name] += _LEARNING_OF_ALL * (is_right - self.rates[name])
                if not is_right:
                    break
        record.proposed.clear()

    def chances(self, name: str, rate: float, num: int) -> Iterator[float]:
        """How likely each of so many drafts is kept, of a sequence for which a share of `rate` is right."""
        return accumulate((min(1.0, rate * factor) for factor in self._factors[name][:num]), mul)
