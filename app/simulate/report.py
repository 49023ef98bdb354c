"""The figures of simulated policies as tables of at most 110 columns, the most important one first."""

from __future__ import annotations

from collections.abc import Sequence

from penstock.app.tables import number, percent, table
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.simulator.summary import Figures, Summary

_MOST_TENANTS = 8
_GROUP_HEAD = [
    "offered",
    "refused",
    "kept",
    "admitted",
    "TTFT P50",
    "P90",
    "P99 s",
    "TPOT P50",
    "P90",
    "P99 ms",
]


def print_report(summaries: Sequence[Summary], lanes: dict[Lane, LanePolicy]) -> None:
    print(f"\n{_policies(summaries)}\n")
    print(f"{promise_text(lanes[Lane.INTERACTIVE])}. `kept` to `TPOT` are of the interactive lane.")
    print(
        "kept: both promises, of all requests offered; admitted: of those let in. goodput: requests of all lanes"
    )
    print(
        "with a promise that had it kept, per second. Jain: work among tenants, 1 is equal. batch: part of all work."
    )
    print(f"\n{_groups('lane, policy', [dict(s.lanes) for s in summaries], summaries)}\n")
    if len(summaries[0].lengths) > 1:
        print(f"{_groups('prompts, policy', [s.lengths for s in summaries], summaries)}\n")
    print(f"{_refusals(summaries)}\n")
    tenants = _largest_tenants(summaries)
    shown = [{tenant: s.tenants[tenant] for tenant in tenants} for s in summaries]
    print(_groups("tenant, policy", shown, summaries))
    if left := len(summaries[0].tenants) - len(tenants):
        print(f"... and {left} smaller tenants: --json FILE has them all")


def promise_text(policy: LanePolicy) -> str:
    return f"Promise: first token within {number(policy.ttft_s)} s, then one every {number(policy.tpot_s, 1000)} ms"


def _policies(summaries: Sequence[Summary]) -> str:
    head = ["policy", "goodput/s", "kept", "admitted", "refused", "TTFT P50", "P99 s", "TPOT P99 ms"]
    rows = [[s.policy, f"{s.goodput:.2f}", *_outcome(s), *_whole(s)] for s in summaries]
    return table([*head, "Jain", "batch", "out tok/s", "all tok/s"], rows)


def _outcome(summary: Summary) -> list[str]:
    """Returns the cells of the interactive lane, or of all lanes if there is nothing in it."""
    one = summary.lanes.get(Lane.INTERACTIVE.label, summary.total)
    return [
        percent(one.attainment),
        percent(one.attainment_of_admitted),
        percent(one.refused / one.offered),
        number(one.ttft_s.p50),
        number(one.ttft_s.p99),
        number(one.tpot_s.p99, 1000),
    ]


def _whole(summary: Summary) -> list[str]:
    jain = "-" if summary.jain is None else f"{summary.jain:.2f}"
    rates = (summary.output_tokens_per_s, summary.tokens_per_s)
    return [jain, percent(summary.batch_share), *(f"{rate:,.0f}" for rate in rates)]


def _groups(title: str, groups: Sequence[dict[str, Figures]], summaries: Sequence[Summary]) -> str:
    rows = [
        [f"{name}, {summary.policy}", *_group_row(some[name])]
        for name in groups[0]
        for some, summary in zip(groups, summaries, strict=True)
    ]
    return table([title, *_GROUP_HEAD], rows)


def _group_row(one: Figures) -> list[str]:
    times = [number(value) for value in (one.ttft_s.p50, one.ttft_s.p90, one.ttft_s.p99)]
    gaps = [number(value, 1000) for value in (one.tpot_s.p50, one.tpot_s.p90, one.tpot_s.p99)]
    counts = [f"{one.offered:,}", f"{one.refused:,}"]
    return [*counts, percent(one.attainment), percent(one.attainment_of_admitted), *times, *gaps]


def _refusals(summaries: Sequence[Summary]) -> str:
    reasons = sorted({reason for summary in summaries for reason in summary.refused})
    if not reasons:
        return "Nobody was refused."
    rows = [[s.policy, *(f"{s.refused.get(reason, 0):,}" for reason in reasons)] for s in summaries]
    return table(["refused, by reason", *reasons], rows)


def _largest_tenants(summaries: Sequence[Summary]) -> list[str]:
    tenants = summaries[0].tenants
    largest = sorted(tenants, key=lambda tenant: -tenants[tenant].offered)[:_MOST_TENANTS]
    return sorted(largest)
