"""`python deploy/grafana/make.py` writes dashboards/penstock.json from this list, which is easier to review."""

from __future__ import annotations

import json
import math
import re
from dataclasses import dataclass, replace
from pathlib import Path

PATH = Path(__file__).with_name("dashboards") / "penstock.json"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3

Query = tuple[str, str]
"""An expression and the legend of its lines."""


@dataclass(frozen=True)
class Panel:
    """A panel of lines over time."""

    title: str
    text: str
    unit: str
    queries: list[Query]
    limits: tuple[float, float] | None = None
    """Where its lines turn yellow and red; the second is smaller where less is worse."""


def runnable(expression: str, interval: str) -> str:
    """Fills in Grafana's variables: all instances, and rates over this interval."""
    return expression.replace("$__rate_interval", interval).replace("$instance", ".*")


def selected(expression: str) -> str:
    """Restricts every metric to the instances that the reader chose."""
    chosen = 'instance=~"$instance"'
    expression = re.sub(r"\b(penstock_\w+)\{", rf"\1{{{chosen},", expression)
    return re.sub(r"\b(penstock_\w+)(?![\w{])", rf"\1{{{chosen}}}", expression)


def quantile(percent: int, metric: str, by: str = "lane") -> Query:
    groups = ", ".join(["le", *([by] if by else [])])
    name = f"P{percent} {{{{{by}}}}}" if by else f"P{percent}"
    return (
        f"histogram_quantile({percent / 100}, sum by ({groups}) (rate({metric}_bucket[$__rate_interval])))",
        name,
    )


def quantiles(metric: str, most: int = 99, by: str = "lane") -> list[Query]:
    return [quantile(50, metric, by), quantile(most, metric, by)]


def share(part: str, whole: str, name: str, by: str = "") -> Query:
    """Returns an expression for the rate of one counter over that of another."""
    parts, _ = rate(part, by)
    wholes, _ = rate(whole, by)
    return f"{parts} / {wholes}", name


def rate(metric: str, by: str = "", name: str = "") -> Query:
    expression = f"rate({metric}[$__rate_interval])"
    return (f"sum by ({by}) ({expression})" if by else f"sum({expression})"), name or f"{{{{{by}}}}}"


SECTIONS: dict[str, list[Panel]] = {
    "Promises": [
        Panel(
            "Promises kept",
            "The share of admitted requests whose first token came in time.",
            "percentunit",
            [share('penstock_promises_total{outcome="kept"}', "penstock_promises_total", "{{lane}}", "lane")],
            (0.99, 0.95),
        ),
        Panel(
            "Coverage",
            "The 95 % interval of the share of promises kept, since the server's start.",
            "percentunit",
            [("min by (lane, bound) (penstock_promise_coverage_ratio)", "{{lane}}: {{bound}}")],
            (0.99, 0.95),
        ),
        Panel(
            "Needless refusals",
            "Refusals a second that would have been in time, as expected by what was let in near the border.",
            "reqps",
            [rate("penstock_needless_refusals_total", "lane")],
        ),
        Panel(
            "Promise in use",
            "The share of the promised time that forecasts use up: at 1 requests are refused.",
            "percentunit",
            quantiles("penstock_promise_use_ratio", 90),
            (0.8, 1),
        ),
        Panel(
            "Admitted and refused",
            "Requests a second, and why they were refused.",
            "reqps",
            [
                rate(
                    "penstock_admissions_total", "lane, decision, reason", "{{lane}}: {{decision}} {{reason}}"
                )
            ],
        ),
    ],
    "Times": [
        Panel("Time to first token", "", "s", quantiles("penstock_time_to_first_token_seconds")),
        Panel("Time per output token", "", "s", quantiles("penstock_time_per_output_token_seconds")),
        Panel("Wait in the queue", "", "s", quantiles("penstock_queue_wait_seconds")),
        Panel(
            "First token by its forecast",
            "Measured time by forecast time; 6 in 10 should be below 1, and 9 in 10 below 1.5.",
            "none",
            quantiles("penstock_ttft_forecast_ratio", 95),
            (1.5, 2),
        ),
        Panel("Steps", "", "s", quantiles("penstock_step_seconds", by="")),
        Panel(
            "Event loop",
            "How late it runs a timer: above some milliseconds streams stutter.",
            "s",
            [quantile(99, "penstock_event_loop_lag_seconds", "")],
            (0.02, 0.1),
        ),
    ],
    "Load": [
        Panel(
            "Tokens",
            "Tokens a second.",
            "none",
            [
                rate("penstock_output_tokens_total", name="to clients"),
                rate("penstock_prefill_tokens_total", name="prompt, computed"),
                rate("penstock_prefix_cache_hit_tokens_total", name="prompt, cached"),
            ],
        ),
        Panel(
            "Requests",
            "",
            "none",
            [
                ("sum(penstock_streams)", "replies under way"),
                ("sum(penstock_running_sequences)", "in the batch"),
                ("sum by (lane) (penstock_queued_requests)", "queued, {{lane}}"),
            ],
        ),
        Panel(
            "Prefix cache",
            "The share of prompt tokens that was cached.",
            "percentunit",
            [
                share(
                    "penstock_prefix_cache_hit_tokens_total",
                    "penstock_prefix_cache_query_tokens_total",
                    "cached",
                )
            ],
        ),
    ],
    "Memory and trouble": [
        Panel(
            "KV blocks",
            "The share in use.",
            "percentunit",
            [("penstock_kv_usage_ratio", "{{instance}}")],
            (0.9, 0.95),
        ),
        Panel(
            "Preemptions",
            "Sequences a second that gave way.",
            "ops",
            [rate("penstock_preemptions_total", "instance")],
            (0.1, 1),
        ),
        Panel(
            "Trouble",
            "Events a second; for Redis, the number of servers without it.",
            "none",
            [
                rate("penstock_failed_steps_total", name="failed steps"),
                rate("penstock_slow_reader_disconnects_total", name="slow readers disconnected"),
                rate("penstock_store_failures_total", "kind", "Redis, {{kind}}"),
                ("sum(1 - penstock_store_up)", "without Redis"),
            ],
        ),
    ],
    "Drafts": [
        Panel(
            "Drafts",
            "The share of draft tokens that was accepted.",
            "percentunit",
            [
                share(
                    "penstock_accepted_tokens_total",
                    "penstock_draft_tokens_total",
                    "{{proposer}}",
                    "proposer",
                )
            ],
        ),
        Panel(
            "Time of drafts",
            "Seconds a second: what their tokens would have taken without drafts, and what drafts took.",
            "none",
            [
                rate("penstock_draft_saved_seconds_total", name="saved"),
                rate("penstock_draft_spent_seconds_total", name="spent"),
            ],
        ),
    ],
}
PANELS = [
    replace(panel, queries=[(selected(expression), name) for expression, name in panel.queries])
    for panels in SECTIONS.values()
    for panel in panels
]


def dashboard() -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    instance = {
        "name": "instance",
        "label": "Instance",
        "type": "query",
        "datasource": source,
        "query": "label_values(penstock_engine_up, instance)",
        "refresh": 2,
        "multi": True,
        "includeAll": True,
        "allValue": ".*",
        "current": {"text": "All", "value": "$__all"},
    }
    return {
        "uid": "penstock",
        "title": "Penstock",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"},
                instance,
            ]
        },
        "panels": _places(),
    }


def _places() -> list[dict[str, object]]:
    """Rows of panels, from top to bottom."""
    made: list[dict[str, object]] = []
    rest, y = iter(PANELS), 0
    for title, panels in SECTIONS.items():
        place = {"x": 0, "y": y, "w": _WIDTH * _COLUMNS, "h": 1}
        made.append({"id": len(made) + 1, "type": "row", "title": title, "gridPos": place, "panels": []})
        for number in range(len(panels)):
            row, column = divmod(number, _COLUMNS)
            made.append(_panel(len(made) + 1, next(rest), column * _WIDTH, y + 1 + row * _HEIGHT))
        y += 1 + math.ceil(len(panels) / _COLUMNS) * _HEIGHT
    return made


def _panel(number: int, panel: Panel, x: int, y: int) -> dict[str, object]:
    source = {"type": "prometheus", "uid": "${datasource}"}
    defaults: dict[str, object] = {"unit": panel.unit, "min": 0}
    if panel.limits is not None:
        defaults |= {
            "thresholds": {"mode": "absolute", "steps": _steps(*panel.limits)},
            "custom": {"thresholdsStyle": {"mode": "line"}},
        }
    return {
        "id": number,
        "type": "timeseries",
        "title": panel.title,
        "description": panel.text,
        "datasource": source,
        "gridPos": {"x": x, "y": y, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": defaults, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expression, "legendFormat": name}
            for i, (expression, name) in enumerate(panel.queries)
        ],
    }


def _steps(yellow: float, red: float) -> list[dict[str, object]]:
    """Colours from the smallest value up."""
    colours = ["green", "yellow", "red"] if yellow < red else ["red", "yellow", "green"]
    values = [None, *sorted((yellow, red))]
    return [{"color": colour, "value": value} for colour, value in zip(colours, values, strict=True)]


if __name__ == "__main__":
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
