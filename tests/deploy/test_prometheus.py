"""The queries of dashboard, alerts and autoscaler, asked of a real Prometheus that scrapes a real server at work."""

from __future__ import annotations

import json
import math
import time
import urllib.request
from collections.abc import Iterator

import pytest
import yaml

from deploy.grafana.make import PANELS, runnable
from deploy.scraping import Prometheus
from tests.deploy.files import KUBERNETES

WAIT_S = 60.0
QUERIES = {f"{panel.title}, {name}": expression for panel in PANELS for expression, name in panel.queries}
NEVER_WELL = {"Trouble, Redis, {{kind}}"}
"""Panels that have no lines until a call to Redis fails."""


@pytest.fixture(scope="module")
def prometheus(live_server: str) -> Iterator[Prometheus]:
    with Prometheus(live_server) as prometheus:
        yield prometheus


def answers(prometheus: Prometheus, expression: str) -> list[float]:
    found = prometheus.ask("query", query=runnable(expression, "1m"))
    return [float(line["value"][1]) for line in found["result"]]


def ask(url: str, tier: str) -> None:
    body = {"model": "penstock-demo", "prompt": "Once upon a time there was a small house " * 3}
    sent = json.dumps(body | {"max_tokens": 24, "service_tier": tier}).encode()
    request = urllib.request.Request(f"{url}/v1/completions", sent, {"content-type": "application/json"})
    with urllib.request.urlopen(request, timeout=60) as reply:
        assert reply.status == 200


def test_every_panel_has_data_from_a_server_at_work(prometheus: Prometheus, live_server: str) -> None:
    silent, end_s = QUERIES.keys() - NEVER_WELL, time.monotonic() + WAIT_S
    while silent and time.monotonic() < end_s:
        for tier in ("priority", "default", "flex"):
            ask(live_server, tier)
        silent = {name for name in silent if not any(map(math.isfinite, answers(prometheus, QUERIES[name])))}
    assert not silent
    assert sum(answers(prometheus, QUERIES["Tokens, to clients"])) > 0
    assert {name for name in NEVER_WELL if answers(prometheus, QUERIES[name])} == set()
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]
    query = rule["metricsQuery"].replace("<<.GroupBy>>", "instance").replace("{<<.LabelMatchers>>}", "")
    (used,) = answers(prometheus, query)
    assert 0 < used < 1, "the autoscaler sees the promise in use"


def test_every_rule_can_be_evaluated_and_none_fires_on_a_server_that_is_well(prometheus: Prometheus) -> None:
    """Nor is one pending, for longer than it takes until the next scrape: on a busy machine one may come too late."""
    health = ("PenstockDown", "PenstockStepsFail", "PenstockStoreGone")
    end_s = time.monotonic() + WAIT_S
    while time.monotonic() < end_s:
        rules = [rule for group in prometheus.ask("rules")["groups"] for rule in group["rules"]]
        states = [rule["state"] for rule in rules if rule["name"] in health]
        if all(rule["health"] != "unknown" for rule in rules) and set(states) == {"inactive"}:
            break
    assert {rule["health"] for rule in rules} == {"ok"}, [rule.get("lastError") for rule in rules]
    assert states == ["inactive"] * len(health)


def test_a_query_that_makes_no_sense_is_found(prometheus: Prometheus) -> None:
    with pytest.raises(ValueError, match="parse error"):
        answers(prometheus, "sum(rate(penstock_streams)")
