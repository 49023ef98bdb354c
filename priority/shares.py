"""Fair shares by virtual time: whoever has had least, for its weight, goes next.

The virtual token counter of Sheng et al. (OSDI 2024), used twice: between lanes, and between the tenants of a lane. All
integers: costs are sixteenths of a prompt token, clocks are costs divided by weights.
"""

from __future__ import annotations

COST_PREFILL = 16
"""Of a prompt token that is computed."""
COST_HIT = 1
"""Of a prompt token that is found in the prefix cache: sharing pays, but the memory is not free."""
COST_OUTPUT = 32
"""Of an output token."""
DEBT_HALF_LIFE_US = 60_000_000

_PRECISION = 1 << 12


class Share:
    """The account of one contender: a lane, or a tenant within a lane."""

    __slots__ = ("charged", "clock", "idle_since_us", "weight")

    def __init__(self, weight: int) -> None:
        self.weight = weight
        self.clock = 0
        self.charged = 0
        """The sum of all costs, refunds taken off."""
        self.idle_since_us = 0

    def charge(self, cost: int) -> None:
        """A negative cost is a refund."""
        self.charged += cost
        self.clock += cost * _PRECISION // self.weight

    def join(self, floor: int, now_us: int) -> None:
        """Comes back from idling, to contenders whose least clock is `floor`.

        Credit is never hoarded: nobody comes back behind the others. Debt halves with every minute of idling.
        """
        if self.clock > floor:
            periods = max(0, now_us - self.idle_since_us) // DEBT_HALF_LIFE_US
            self.clock = floor + ((self.clock - floor) >> min(periods, 62))
        else:
            self.clock = floor


def virtual(cost: int) -> int:
    """The distance that a cost moves a clock of weight 1."""
    return cost * _PRECISION
