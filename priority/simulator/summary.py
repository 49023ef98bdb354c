"""Summaries of simulated runs: promises kept, times, fairness, and refusals.

Lanes without a promise (batch) count neither into goodput nor into attainment: they have nothing to keep. Their part
shows as work done. Times are in seconds, rates per second.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import floor, isfinite
from typing import TypeVar

from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from penstock.priority.shares import cost_of
from penstock.priority.simulator.result import Result, Served

Promises = Mapping[Lane, LanePolicy]
KeyT = TypeVar("KeyT")

SHORT_PART = 4
"""A prompt is short if it has no more than this part of the longest one's tokens."""
_LEAST_SPAN_S = 1.0
"""A trace of a single instant counts as this long."""


@dataclass(frozen=True, slots=True)
class Percentiles:
    """Percentiles; None of nothing."""

    p50: float | None
    p90: float | None
    p99: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Figures:
    """The outcomes of a group of requests."""

    offered: int
    refused: int
    kept: int
    """Had both promises of their lane kept; those of lanes without a promise never count."""
    attainment: float | None
    """The share of promises kept, of requests offered to lanes that promise something."""
    attainment_of_admitted: float | None
    ttft_s: Percentiles
    """The times to the first token of served requests."""
    tpot_s: Percentiles
    """Mean time per token after the first, of requests that had more than one."""
    work: int
    """The work that they were served, in 2048ths of a prompt token."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Summary:
    """One policy on one trace."""

    policy: str
    span_s: float
    """The time from the first arrival to the last."""
    duration_s: float
    """The time from the first arrival to the end of the last request."""
    goodput: float
    """Requests that kept their promises, per second of `span_s`."""
    jain: float | None
    """Jain's index of work over weight among tenants: 1 if all had the same, 1/n if one had everything."""
    batch_share: float | None
    """Part of all work that was batch."""
    output_tokens_per_s: float
    """Per second of `duration_s`."""
    tokens_per_s: float
    """The prompts of served requests included."""
    hit_rate: float | None
    """The share of served requests' prompt tokens that were found in the prefix cache."""
    read_share: float | None
    """The share of all prompt tokens whose KV came back from a tier."""
    pulled_share: float | None
    """The share of all prompt tokens whose KV came from another replica, in place of being computed."""
    busy_share: float
    """Part of the machines' time that was spent in steps."""
    num_steps: int
    num_preemptions: int
    refused: dict[str, int]
    """The refusals by reason."""
    total: Figures
    lanes: dict[str, Figures]
    tenants: dict[str, Figures]
    """Percentiles are those of requests with a promise, where the tenant sent any."""
    lengths: dict[str, Figures]
    """By the length of the prompt: up to a fourth of the longest, and longer."""


def summarise(
    result: Result,
    lanes: Promises = DEFAULT_POLICIES,
    weights: Mapping[str, int] | None = None,
    num_machines: int = 1,
) -> Summary:
    """`weights` of tenants, 1 where missing."""
    served = result.served
    first_s, last_s = served[0].arrival.at_s, served[-1].arrival.at_s
    duration_s = max(result.duration_s - first_s, 1e-9)
    span_s = max(last_s - first_s, _LEAST_SPAN_S)
    total = figures(served, lanes)
    by_lane = _grouped(served, lambda one: one.lane.label)
    by_tenant = _grouped(served, lambda one: one.arrival.tenant)
    tenants = {tenant: figures(some, lanes, of_promised=True) for tenant, some in sorted(by_tenant.items())}
    num_output = sum(one.num_tokens for one in served)
    num_prompt = sum(one.arrival.num_prompt for one in served if one.first_token_s is not None)
    num_offered = sum(one.arrival.num_prompt for one in served)
    return Summary(
        policy=result.policy,
        span_s=span_s,
        duration_s=duration_s,
        goodput=total.kept / span_s,
        jain=jain([some.work / (weights or {}).get(tenant, 1) for tenant, some in tenants.items()]),
        batch_share=ratio(sum(map(work, by_lane.get(Lane.BATCH.label, []))), total.work),
        output_tokens_per_s=num_output / duration_s,
        tokens_per_s=(num_output + num_prompt) / duration_s,
        hit_rate=ratio(sum(one.num_cached for one in served if one.first_token_s is not None), num_prompt),
        read_share=ratio(result.num_read, num_offered),
        pulled_share=ratio(result.num_pulled, num_offered),
        busy_share=result.busy_s / duration_s / num_machines,
        num_steps=result.num_steps,
        num_preemptions=result.num_preemptions,
        refused=dict(Counter(one.refused for one in served if one.refused).most_common()),
        total=total,
        lanes={lane.label: figures(by_lane[lane.label], lanes) for lane in Lane if lane.label in by_lane},
        tenants=tenants,
        lengths=_by_length(served, lanes),
    )


def _by_length(served: Sequence[Served], lanes: Promises) -> dict[str, Figures]:
    border = max(one.arrival.num_prompt for one in served) // SHORT_PART
    groups = _grouped(served, lambda one: one.arrival.num_prompt > border)
    return {
        name: figures(groups[is_long], lanes)
        for name, is_long in ((f"up to {border:,} tokens", False), ("longer prompts", True))
        if is_long in groups
    }


def figures(served: Sequence[Served], lanes: Promises, *, of_promised: bool = False) -> Figures:
    """With `of_promised`, percentiles leave out requests without a promise, if there are others."""
    promised = [one for one in served if is_promised(one, lanes)]
    admitted = sum(1 for one in promised if one.refused is None)
    kept = sum(1 for one in promised if is_kept(one, lanes))
    timed = (of_promised and promised) or served
    return Figures(
        offered=len(served),
        refused=sum(1 for one in served if one.refused),
        kept=kept,
        attainment=ratio(kept, len(promised)),
        attainment_of_admitted=ratio(kept, admitted),
        ttft_s=percentiles([one.ttft_s for one in timed if one.ttft_s is not None]),
        tpot_s=percentiles([one.tpot_s for one in timed if one.num_tokens > 1]),
        work=sum(map(work, served)),
    )


def is_promised(served: Served, lanes: Promises) -> bool:
    policy = lanes[served.lane]
    return isfinite(policy.ttft_s) or isfinite(policy.tpot_s)


def is_kept(served: Served, lanes: Promises) -> bool:
    """It was served whole, and both promises of its lane were kept."""
    policy = lanes[served.lane]
    if served.finished_s is None or served.ttft_s is None:
        return False
    return served.ttft_s <= policy.ttft_s and served.tpot_s <= policy.tpot_s


def work(served: Served) -> int:
    """Returns a request's cost in 2048ths of a prompt token, as the queue charges it; 0 without a first token."""
    if served.first_token_s is None:
        return 0
    arrival = served.arrival
    return cost_of(arrival.num_prompt, served.num_cached, served.num_tokens // arrival.n, arrival.n)


def percentiles(values: Iterable[float]) -> Percentiles:
    ordered = sorted(values)
    return Percentiles(percentile(ordered, 50), percentile(ordered, 90), percentile(ordered, 99))


def percentile(ordered: Sequence[float], percent: float) -> float | None:
    """Returns a quantile of sorted values, linear between the closest ranks."""
    if not ordered:
        return None
    place = (len(ordered) - 1) * percent / 100
    below = floor(place)
    above = min(below + 1, len(ordered) - 1)
    return ordered[below] + (ordered[above] - ordered[below]) * (place - below)


def jain(values: Sequence[float]) -> float | None:
    """(sum x)^2 / (n sum x^2), after Jain, Chiu and Hawe (1984); None if nobody had anything."""
    squares = sum(value * value for value in values)
    return sum(values) ** 2 / (len(values) * squares) if squares else None


def ratio(part: float, whole: float) -> float | None:
    return part / whole if whole else None


def _grouped(served: Iterable[Served], key: Callable[[Served], KeyT]) -> dict[KeyT, list[Served]]:
    groups: dict[KeyT, list[Served]] = {}
    for one in served:
        groups.setdefault(key(one), []).append(one)
    return groups
