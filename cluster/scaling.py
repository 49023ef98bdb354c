"""The number of replicas that are wanted, by promises missed or refused, and KV in use; not by the length of a queue.

Ray Serve pickles this module into its controller, which may have no Penstock: nothing but the standard library is
imported here.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

TARGET = 0.7
"""The part of what a replica can promise, or of its KV, that should be taken."""
SLACK = 0.1
"""The distance from the target within which a fleet stays as it is."""
MISSED = 0.01
"""The part of the promises that may be missed or refused without more replicas."""
MOST_AT_ONCE = 2.0
"""The factor by which a fleet grows at most in one decision; it shrinks by one replica."""


def wanted_replicas(figures: Sequence[Mapping[str, float]]) -> int:
    """Returns the number of replicas that the load wants.

    Args:
        figures: of each replica, `kv`, the part of its KV in use; `promise`, the part of the promised time to first
            token that its forecasts take on average; and, a second, the promises `kept` and those `missed`, which
            are broken or refused.
    """
    num = len(figures)
    if num == 0:
        return 1
    strain = max(_mean(figures, "kv"), _mean(figures, "promise")) / TARGET
    kept, missed = _sum(figures, "kept"), _sum(figures, "missed")
    if missed > MISSED * (kept + missed):
        # What these replicas kept is what they can carry. If they kept nothing, that says nothing of how far it is.
        strain = max(strain, (kept + missed) / kept if kept else MOST_AT_ONCE)
    elif abs(strain - 1) <= SLACK:
        return num
    if strain > 1:
        return math.ceil(num * min(strain, MOST_AT_ONCE))
    # One less must still be within the target.
    return num - 1 if num > 1 and strain * num / (num - 1) <= 1 else num


def policy(ctx: Any) -> tuple[int, dict[str, Any]]:
    """An autoscaling policy of Ray Serve (`ray.serve.config.AutoscalingContext`); bounds and delays are Serve's."""
    by_name: Mapping[str, Mapping[Any, float]] = ctx.aggregated_metrics or {}
    replicas = {replica for values in by_name.values() for replica in values}
    figures = [
        {name: float(values[replica]) for name, values in by_name.items() if replica in values}
        for replica in replicas
    ]
    if len(figures) < len(ctx.running_replicas) or not figures:
        return ctx.target_num_replicas, {}  # some are too young to have said anything
    return wanted_replicas(figures), {}


def _mean(figures: Sequence[Mapping[str, float]], name: str) -> float:
    return _sum(figures, name) / len(figures)


def _sum(figures: Sequence[Mapping[str, float]], name: str) -> float:
    return sum(each.get(name, 0.0) for each in figures)
