"""Measures whether drafts pay: one load to a server with drafts and to one without, in turns, on to a verdict."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from enum import StrEnum
from statistics import median
from typing import Any

from penstock.app.bench.report import print_failures, print_machine
from penstock.app.bench.statistics import StreamFigures
from penstock.app.bench.workloads import Workload
from penstock.app.tables import number, table

TURNS = 2
"""Times that either server gets a workload: A B A B."""
SERVICE_TIER = "default"
"""Requests are of the standard lane, which promises a time per token."""
LANE = ["--lane-standard", "ttft=600"]
"""Nobody is refused: both servers do the same work."""
_CLEAR = 0.03
"""A smaller difference is noise, whatever the turns say."""
_KEYS = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "itl_p50_ms", "itl_p99_ms")

Row = dict[str, Any]
WorkloadRunner = Callable[[Workload], tuple[StreamFigures, StreamFigures]]
"""Sends one workload, the same prompts, to both servers: the figures with drafts, and those without."""


class Verdict(StrEnum):
    ON = "on"
    OFF = "off"
    EITHER = "either way"


@dataclass(frozen=True, slots=True)
class Comparison:
    """The turns of one workload."""

    workload: str
    drafted: Sequence[StreamFigures]
    plain: Sequence[StreamFigures]

    @property
    def ratios(self) -> list[float]:
        """By turn: the tokens a second with drafts, in units of the ones without."""
        pairs = zip(self.drafted, self.plain, strict=True)
        return [with_drafts.tokens_per_s / without.tokens_per_s for with_drafts, without in pairs]

    @property
    def verdict(self) -> Verdict:
        """The server that is clearly better: by more than noise in the median, and in every turn."""
        ratios = self.ratios
        if median(ratios) >= 1 + _CLEAR and min(ratios) > 1:
            return Verdict.ON
        if median(ratios) <= 1 - _CLEAR and max(ratios) < 1:
            return Verdict.OFF
        return Verdict.EITHER

    def row(self) -> Row:
        return {
            "workload": self.workload,
            "verdict": self.verdict.value,
            "ratios": self.ratios,
            "with": _medians(self.drafted),
            "without": _medians(self.plain),
        }


def _medians(turns: Sequence[StreamFigures]) -> Row:
    """Returns the medians of the figures, and the sums of the failures."""
    found: Row = {key: median(getattr(figures, key) for figures in turns) for key in _KEYS}
    found["requests"] = sum(figures.requests for figures in turns)
    found["refused"] = sum(figures.refused for figures in turns)
    found["failed"] = sum(figures.failed for figures in turns) - found["refused"]
    found["first_error"] = next((f.first_error for f in turns if f.first_error), None)
    return found


def compare(workloads: Sequence[Workload], ask: WorkloadRunner, num_turns: int) -> list[Row]:
    """All workloads in turns; the figures of each."""
    rows = []
    for workload in workloads:
        turns = [ask(replace(workload, service_tier=SERVICE_TIER)) for _ in range(num_turns)]
        drafted, plain = zip(*turns, strict=True)
        rows.append(Comparison(workload.name, drafted, plain).row())
    return rows


def print_compared(results: Row) -> None:
    print_machine(results["machine"])
    head = ["workload, drafts", "tok/s", "TTFT P50", "P99 ms", "ITL P50", "P99 ms", "refused"]
    sides = [
        (f"{row['workload']}, {name}", row[name]) for row in results["drafts"] for name in ("with", "without")
    ]
    lines = [
        [name, *(number(side[key]) for key in _KEYS), f"{side['refused']} of {side['requests']}"]
        for name, side in sides
    ]
    print(table(head, lines), end="\n\n")
    for row in results["drafts"]:
        ratios = ", ".join(f"{ratio:.2f}" for ratio in row["ratios"])
        print(f"{row['workload']}: {row['verdict']} ({ratios} times the tokens a second with drafts)")
    print(f"ITL: between pieces of text; promised are {results['promised_ms']:g} ms a token")
    print_failures(sides)
