"""Rates of load are read from the metrics of a replica and of a switch."""

from __future__ import annotations

import pytest

from penstock.cluster import figures
from penstock.cluster.figures import LoadRates
from penstock.cluster.metrics import SwitchMetrics
from penstock.gateway.metrics import Metrics
from penstock.priority.coverage import Coverage, Margin
from penstock.priority.lanes import Lane
from tests.clock import Clock


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(figures, "monotonic", clock)
    return clock


def test_of_a_replica(clock: Clock) -> None:
    metrics, read, standard = Metrics(), LoadRates(), Coverage()
    standard.note(Margin(), is_kept=False)
    metrics.note_coverage({Lane.STANDARD: standard})
    first = read.of_replica(metrics.render().decode())
    assert first == {
        "kv": 0.0,
        "switches": 0.0,
        "promise": 0.0,
        "kept": 0.0,
        "missed": 0.0,
    }  # it may be years old
    metrics.kv_usage.set(0.25)
    metrics.switches.set(2)
    metrics.note_forecast(Lane.STANDARD, 0.5, 1.0)
    metrics.note_forecast(Lane.INTERACTIVE, 0.1, 1.0)
    for is_kept in (True, True, False):
        standard.note(Margin(), is_kept=is_kept)
    metrics.note_coverage({Lane.STANDARD: standard})
    metrics.note_refused(Lane.STANDARD, "promise_out_of_reach")
    metrics.note_refused(Lane.STANDARD, "queue_timeout")
    metrics.note_refused(Lane.STANDARD, "tenant_queue_full")
    clock.now += 2
    second = read.of_replica(metrics.render().decode())
    assert second == pytest.approx({"kv": 0.25, "switches": 2.0, "promise": 0.3, "kept": 1.0, "missed": 1.5})
    clock.now += 2
    third = read.of_replica(metrics.render().decode())
    assert third == {"kv": 0.25, "switches": 2.0, "promise": 0.0, "kept": 0.0, "missed": 0.0}


def test_of_a_switch(clock: Clock) -> None:
    metrics, read = SwitchMetrics(), LoadRates()
    metrics.replicas.set(3)
    read.of_switch(metrics.render().decode())
    metrics.streams.set(2)
    for reason in ("promise_out_of_reach", "promise_out_of_reach", "no_replica"):
        metrics.refused(reason).inc()
    clock.now += 4
    assert read.of_switch(metrics.render().decode()) == {"replicas": 3, "streams": 2, "refused": 0.5}
