"""`python deploy/grafana/make.py` writes dashboards/penstock.json from this list, which is easier to review."""

from __future__ import annotations

import json
from pathlib import Path

PATH = Path(__file__).with_name("dashboards") / "penstock.json"
_WIDTH, _HEIGHT, _COLUMNS = 8, 8, 3

Query = tuple[str, str]
"""An expression and the legend of its lines."""


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


PANELS: list[tuple[str, str, str, list[Query]]] = [
    (
        "Promises kept",
        "The share of admitted requests whose first token came in time.",
        "percentunit",
        [share('penstock_promises_total{outcome="kept"}', "penstock_promises_total", "{{lane}}", "lane")],
    ),
    (
        "Promise in use",
        "The share of the promised time that forecasts use up: at 1 requests are refused.",
        "percentunit",
        quantiles("penstock_promise_use_ratio", 90),
    ),
    (
        "Admitted and refused",
        "Requests a second, and why they were refused.",
        "reqps",
        [rate("penstock_admissions_total", "decision, reason", "{{decision}} {{reason}}")],
    ),
    ("Time to first token", "", "s", quantiles("penstock_time_to_first_token_seconds")),
    ("Time per output token", "", "s", quantiles("penstock_time_per_output_token_seconds")),
    ("Wait in the queue", "", "s", quantiles("penstock_queue_wait_seconds")),
    (
        "First token by its forecast",
        "Measured time by forecast time; 6 in 10 should be below 1, and 9 in 10 below 1.5.",
        "none",
        quantiles("penstock_ttft_forecast_ratio", 95),
    ),
    (
        "Tokens",
        "A second.",
        "none",
        [
            rate("penstock_output_tokens_total", name="to clients"),
            rate("penstock_prefill_tokens_total", name="prompt, computed"),
            rate("penstock_prefix_cache_hit_tokens_total", name="prompt, cached"),
        ],
    ),
    (
        "Requests",
        "",
        "none",
        [
            ("sum(penstock_streams)", "replies under way"),
            ("sum(penstock_running_sequences)", "in the batch"),
            ("sum by (lane) (penstock_queued_requests)", "queued, {{lane}}"),
        ],
    ),
    (
        "KV blocks",
        "The share in use, and preemptions a second.",
        "percentunit",
        [
            ("penstock_kv_usage_ratio", "in use"),
            rate("penstock_preemptions_total", name="preemptions a second"),
        ],
    ),
    (
        "Prefix cache",
        "The share of prompt tokens that was cached.",
        "percentunit",
        [
            share(
                "penstock_prefix_cache_hit_tokens_total", "penstock_prefix_cache_query_tokens_total", "cached"
            )
        ],
    ),
    (
        "Drafts",
        "The share of draft tokens that was accepted.",
        "percentunit",
        [share("penstock_accepted_tokens_total", "penstock_draft_tokens_total", "{{proposer}}", "proposer")],
    ),
    (
        "Time of drafts",
        "A second: what tokens that drafts brought would have taken without, and what drafts took.",
        "s",
        [
            rate("penstock_draft_saved_seconds_total", name="saved"),
            rate("penstock_draft_spent_seconds_total", name="spent"),
        ],
    ),
    ("Steps", "", "s", quantiles("penstock_step_seconds", by="")),
    (
        "Event loop",
        "How late it runs a timer: above some milliseconds streams stutter.",
        "s",
        [quantile(99, "penstock_event_loop_lag_seconds", "")],
    ),
    (
        "Trouble",
        "A second.",
        "none",
        [
            rate("penstock_failed_steps_total", name="failed steps"),
            rate("penstock_slow_reader_disconnects_total", name="slow readers disconnected"),
            rate("penstock_store_failures_total", "kind", "Redis, {{kind}}"),
            ("1 - min(penstock_store_up)", "Redis gone"),
        ],
    ),
]


def dashboard() -> dict[str, object]:
    return {
        "uid": "penstock",
        "title": "Penstock",
        "schemaVersion": 39,
        "refresh": "10s",
        "time": {"from": "now-30m", "to": "now"},
        "templating": {
            "list": [
                {"name": "datasource", "label": "Data source", "type": "datasource", "query": "prometheus"}
            ]
        },
        "panels": [_panel(place, *panel) for place, panel in enumerate(PANELS)],
    }


def _panel(place: int, title: str, text: str, unit: str, queries: list[Query]) -> dict[str, object]:
    row, column = divmod(place, _COLUMNS)
    source = {"type": "prometheus", "uid": "${datasource}"}
    return {
        "id": place + 1,
        "type": "timeseries",
        "title": title,
        "description": text,
        "datasource": source,
        "gridPos": {"x": column * _WIDTH, "y": row * _HEIGHT, "w": _WIDTH, "h": _HEIGHT},
        "fieldConfig": {"defaults": {"unit": unit, "min": 0}, "overrides": []},
        "targets": [
            {"refId": chr(ord("A") + i), "datasource": source, "expr": expression, "legendFormat": name}
            for i, (expression, name) in enumerate(queries)
        ],
    }


if __name__ == "__main__":
    PATH.write_text(json.dumps(dashboard(), indent=1) + "\n", encoding="utf-8")
