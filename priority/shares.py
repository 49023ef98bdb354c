"""Fair shares by virtual time: the contender with the least work for its weight goes next.

The virtual token counter of Sheng et al. (OSDI 2024), used twice: between lanes, and between the tenants of a lane. All
integers: costs are 2048ths of a prompt token, clocks are costs divided by weights. A token costs more the more
tokens it attends to, in the proportions of a large model on a GPU; those of a small one on a CPU are similar.
"""

from __future__ import annotations

COST_PREFILL = 2048
"""The cost of a computed prompt token, without the cost of attending."""
COST_HIT = 128
"""The cost of a prompt token that is found in the prefix cache: sharing pays, but the memory is not free."""
COST_OUTPUT = 4096
"""The cost of an output token, without the cost of attending."""
_TOGETHER = 16
"""Tokens of a prompt are computed together and read each KV once: attending costs them this much less than output."""
ATTENDED_EACH = 2 / (_TOGETHER * COST_PREFILL)
"""The cost of attending to one token, as a part of that of a prompt token."""
DEBT_HALF_LIFE_US = 60_000_000

_PRECISION = 1 << 5


class Share:
    """The costs of one contender: a lane, or a tenant within a lane."""

    __slots__ = ("charged", "clock", "idle_since_us", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.clock = 0
        self.charged = 0
        """The sum of all its costs, less refunds."""
        self.idle_since_us = 0

    def charge(self, cost: int) -> None:
        """Adds a cost; a negative one is a refund."""
        self.charged += cost
        self.clock += cost * _PRECISION // self.weight

    def join(self, floor: int, now_us: int) -> None:
        """Lets a share that was idle rejoin contenders whose least clock is `floor`.

        Credit is never hoarded: nobody comes back behind the others. Debt halves with every minute of idling.
        """
        if self.clock > floor:
            periods = max(0, now_us - self.idle_since_us) // DEBT_HALF_LIFE_US
            self.clock = floor + ((self.clock - floor) >> min(periods, 62))
        else:
            self.clock = floor


def prompt_cost(start: int, end: int) -> int:
    """Returns the cost of computing the prompt tokens `[start, end)`; costs of parts add up to that of the whole."""
    return COST_PREFILL * (end - start) + end * end // _TOGETHER - start * start // _TOGETHER


def output_cost(start: int, end: int) -> int:
    """Returns the cost of the tokens `[start, end)` of a sequence, which are output; costs of parts add up."""
    return (end - start) * (COST_OUTPUT + end + start)


def cost_of(num_prompt: int, num_cached: int, num_output: int, n: int = 1) -> int:
    """Returns the cost of a whole request whose `n` choices had so many output tokens each."""
    prompt = COST_HIT * num_cached + prompt_cost(num_cached, num_prompt)
    return prompt + n * output_cost(num_prompt, num_prompt + num_output)


def virtual(cost: int) -> int:
    """Returns the distance that a cost moves a clock of weight 1."""
    return cost * _PRECISION
