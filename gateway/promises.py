"""The promises of the lanes: how many were kept, and how careful the queue has become."""

from __future__ import annotations

from collections.abc import Mapping

from penstock.gateway.instruments import Exposition
from penstock.priority.coverage import Coverage
from penstock.priority.lanes import Lane


class PromiseMetrics:
    """The metrics of the lanes' promises, which the queue counts."""

    def __init__(self, page: Exposition) -> None:
        self._promises = page.counters(
            "promises",
            "Requests let in with a promise on the first token, kept or broken.",
            ["lane", "outcome"],
        )
        self._needless = page.counters(
            "needless_refusals",
            "Expected number of late requests, refused or sent to the standard lane, that would have been in time, by "
            "those let in near the border.",
            ["lane"],
        )
        self._interval = page.gauges(
            "promise_coverage_ratio",
            "The 95 % interval of the share of promises kept, since the start.",
            ["lane", "bound"],
        )
        self._margin = page.gauges(
            "promise_margin_ratio",
            "The factor on forecasts before they are compared with the promise, learnt from broken and kept ones.",
            ["lane"],
        )

    def set(self, coverage: Mapping[Lane, Coverage]) -> None:
        for lane, one in coverage.items():
            self._promises(lane.label, "kept").set(one.num_kept)
            self._promises(lane.label, "broken").set(one.num - one.num_kept)
            self._needless(lane.label).set(one.num_needless)
            for bound, value in zip(("low", "high"), one.interval, strict=True):
                self._interval(lane.label, bound).set(value)
            self._margin(lane.label).set(one.margin.value)


def shown(coverage: Coverage | None) -> dict[str, object]:
    """Returns a lane's coverage for `/v1/events`."""
    if coverage is None or not coverage.num:
        return {"attainment": None, "coverage": None}
    low, high = coverage.interval
    return {
        "attainment": coverage.num_kept / coverage.num,
        "coverage": {"promised": coverage.num, "kept": coverage.num_kept, "low": low, "high": high},
    }
