"""The promises of the lanes, read from the queue at each scrape."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from penstock.priority.coverage import Coverage
from penstock.priority.lanes import Lane


class PromiseMetrics(Collector):
    """How many promises were kept, and how careful the queue has become."""

    def __init__(self, coverage: Callable[[], Mapping[Lane, Coverage]]) -> None:
        self._coverage = coverage

    def collect(self) -> Iterator[Metric]:
        promises = CounterMetricFamily(
            "penstock_promises",
            "Requests let in with a promise on the first token, kept or broken.",
            labels=["lane", "outcome"],
        )
        needless = CounterMetricFamily(
            "penstock_needless_refusals",
            "Expected number of late requests refused that would have been in time, by those let in near the border.",
            labels=["lane"],
        )
        bounds = GaugeMetricFamily(
            "penstock_promise_coverage_ratio",
            "The 95 % interval of the share of promises kept, since the start.",
            labels=["lane", "bound"],
        )
        margin = GaugeMetricFamily(
            "penstock_promise_margin_ratio",
            "The factor on forecasts before they are compared with the promise, learnt from broken and kept ones.",
            labels=["lane"],
        )
        for lane, one in self._coverage().items():
            promises.add_metric([lane.label, "kept"], one.num_kept)
            promises.add_metric([lane.label, "broken"], one.num - one.num_kept)
            needless.add_metric([lane.label], one.num_needless)
            for bound, value in zip(("low", "high"), one.interval, strict=True):
                bounds.add_metric([lane.label, bound], value)
            margin.add_metric([lane.label], one.margin)
        yield from (promises, needless, bounds, margin)


def shown(coverage: Coverage | None) -> dict[str, object]:
    """Returns a lane's coverage for `/v1/events`."""
    if coverage is None or not coverage.num:
        return {"attainment": None, "coverage": None}
    low, high = coverage.interval
    return {
        "attainment": coverage.num_kept / coverage.num,
        "coverage": {"promised": coverage.num, "kept": coverage.num_kept, "low": low, "high": high},
    }
