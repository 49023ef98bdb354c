"""Figures of how loaded a replica or a switch is, as differences between two readings of its metrics."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping
from time import monotonic

from prometheus_client.parser import text_string_to_metric_families

CURABLE = frozenset(("promise_out_of_reach", "queue_full", "queue_timeout"))
"""Reasons of refusals that another replica would help against; a tenant's own limits are none."""


class LoadRates:
    """Turns the counters of successive readings of `/metrics` into rates a second."""

    def __init__(self) -> None:
        self._totals: dict[str, float] | None = None
        self._read_s = 0.0

    def of_replica(self, text: str) -> dict[str, float]:
        """Returns `kv`, `promise`, `kept` and `missed` for `cluster.scaling.wanted_replicas`, and the number of
        `switches` that know the replica."""
        now = _read(text)
        new, seconds = self._since(now)
        num_forecasts = new["penstock_promise_use_ratio_count"]
        return {
            "kv": now["penstock_kv_usage_ratio"],
            "switches": now["penstock_switches"],
            "promise": new["penstock_promise_use_ratio_sum"] / num_forecasts if num_forecasts else 0.0,
            "kept": new["penstock_promises_total kept"] / seconds,
            "missed": (new["penstock_promises_total broken"] + new["refused"]) / seconds,
        }

    def of_switch(self, text: str) -> dict[str, float]:
        """Returns the `replicas` that a switch knows, its `streams`, and the requests `refused` for lack of others."""
        now = _read(text)
        new, seconds = self._since(now)
        return {
            "replicas": now["penstock_switch_replicas"],
            "streams": now["penstock_switch_streams"],
            "refused": new["refused"] / seconds,
        }

    def _since(self, now: Mapping[str, float]) -> tuple[Mapping[str, float], float]:
        """Returns what was counted since the last reading, and in how many seconds; nothing at the first reading."""
        before, read_s = self._totals, self._read_s
        self._totals, self._read_s = dict(now), monotonic()
        if before is None:
            return defaultdict(float), 1.0
        new = {name: max(0.0, value - before.get(name, 0.0)) for name, value in now.items()}
        return defaultdict(float, new), max(self._read_s - read_s, 1e-3)


def _read(text: str) -> Mapping[str, float]:
    """Returns the samples that are used, summed over all lanes."""
    sums: dict[str, float] = defaultdict(float)
    for family in text_string_to_metric_families(text):
        for name, labels, value, *_ in family.samples:
            if name in ("penstock_admissions_total", "penstock_switch_refused_total"):
                if labels.get("reason") in CURABLE:
                    sums["refused"] += value
            elif name == "penstock_promises_total":
                sums[f"{name} {labels['outcome']}"] += value
            else:
                sums[name] += value
    return sums
