"""Flows: work that keeps arriving at a rate of prompt tokens a second, for a machine with its own rate."""

from __future__ import annotations

from collections.abc import Iterable


def fair_part(rate: float, weight: int, others: Iterable[tuple[float, int]]) -> float:
    """Returns the part of a rate that is left for one contender, max-min fair.

    Args:
        others: what each other contender asks for, and its weight.
    """
    ordered = sorted(others, key=lambda other: other[0] / other[1])
    total = weight + sum(other for _, other in ordered)
    for demand, other in ordered:
        if demand > rate * other / total:
            break
        rate -= demand
        total -= other
    return rate * weight / total


def seconds_to_catch_up(work: float, rate: float, others: Iterable[tuple[float, float]]) -> float:
    """Returns the w that solves w = (work + sum of min(due, arrivals * w)) / rate.

    Args:
        others: for each contender that sends on: due, after which it sends no more, and arrivals; 0 of either is none.
    """
    ordered = sorted((due / arrivals, due, arrivals) for due, arrivals in others if due > 0 < arrivals)
    left = rate - sum(arrivals for _, _, arrivals in ordered)
    for until_s, due, arrivals in ordered:
        if left > 0 and work <= until_s * left:
            break
        work += due
        left += arrivals
    return work / left
