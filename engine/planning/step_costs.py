"""What steps take by their number of tokens, learnt from those that ran."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import accumulate, pairwise

_FALLING, _RISING = 0.3, 0.03
"""The weights of a step that was quicker, or slower, than those before it."""
_STALE_STEPS = 256
"""After so many steps of other sizes, what a size took is forgotten."""
_SURE_STEPS = 3
"""So many steps of a size have to be seen; before, what is supposed of it is that it costs what its neighbours do."""
_FREE_TOKENS = 32.0
"""Before it is measured, so many tokens more are supposed to take as long again."""


@dataclass(slots=True)
class _Cost:
    """Steps of about the same number of tokens."""

    num_tokens: float
    seconds: float
    seen: int
    """The number of the last one."""
    count: int = 1


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
        cost.count += 1
        weight = _FALLING if seconds < cost.seconds else _RISING
        if cost.count <= _SURE_STEPS:  # the first ones are slow
            weight = float(seconds < cost.seconds)
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
            cost
            for _, cost in sorted(self._costs.items())
            if self._num_steps - cost.seen <= _STALE_STEPS and cost.count >= _SURE_STEPS
        ]
        highest = accumulate((cost.seconds for cost in fresh), max)
        return [(cost.num_tokens, seconds) for cost, seconds in zip(fresh, highest, strict=True)]
