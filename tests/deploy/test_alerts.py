"""Alerts and dashboard: promtool proves each alert, and what they ask for is there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana.make import PATH, dashboard
from tests import tools
from tests.deploy.files import ALERTS, KUBERNETES, ROOT, alert_rules

ADAPTER = KUBERNETES / "prometheus-adapter.yaml"
PROOF = Path(__file__).with_name("alerts.yml")


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([tools.find("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid() -> None:
    promtool("check", "rules", ALERTS)


def test_alerts_fire_when_they_should_and_only_then() -> None:
    promtool("test", "rules", PROOF)


def test_every_alert_is_proven_to_fire_and_to_stay_silent() -> None:
    proofs = [one for test in yaml.safe_load(PROOF.read_text())["tests"] for one in test["alert_rule_test"]]
    names = {rule["alert"] for rule in alert_rules() if "alert" in rule}
    assert {one["alertname"] for one in proofs if one["exp_alerts"]} == names
    assert {one["alertname"] for one in proofs if not one["exp_alerts"]} == names


@pytest.mark.parametrize(
    "path",
    [PATH, ALERTS, PROOF, ADAPTER, ROOT / "docs" / "guide" / "deploy.md"],
    ids=lambda path: path.name,
)
def test_metrics_that_are_asked_for_are_there(path: Path, known_metrics: set[str]) -> None:
    named = set(re.findall(r"\bpenstock_[a-z0-9_]+", path.read_text())) - {"penstock_promise_use_p90"}
    assert named - known_metrics == set()
    assert named


@pytest.mark.parametrize("path", [PATH, ALERTS, ADAPTER], ids=lambda path: path.name)
def test_rates_are_those_of_counters(path: Path) -> None:
    """A gauge may fall, which rate() and increase() take for a restart."""
    named = re.findall(r"\b(?:rate|increase)\((\w+)", path.read_text())
    assert named
    assert [name for name in named if not name.endswith(("_total", "_bucket"))] == []


def test_every_alert_says_what_happened_and_where_to_read_on() -> None:
    for alert in (rule for rule in alert_rules() if "alert" in rule):
        page, _, anchor = alert["annotations"]["runbook"].partition("#")
        headings = re.findall(r"^#+ (.*)$", (ROOT / page).read_text(), re.MULTILINE)
        assert anchor in {
            re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings
        }
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["annotations"]["summary"].endswith(".")


def test_recorded_names_are_those_that_alerts_use() -> None:
    recorded = {rule["record"] for rule in alert_rules() if "record" in rule}
    used = set(re.findall(r"\bpenstock:[a-z_:]+", " ".join(rule["expr"] for rule in alert_rules())))
    assert used == recorded


def test_the_dashboard_is_the_one_that_is_written() -> None:
    assert json.loads(PATH.read_text()) == dashboard()


def test_the_dashboard_imports_anywhere() -> None:
    """Every panel takes the data source that its reader chooses; none is wired in."""
    (variable,) = json.loads(PATH.read_text())["templating"]["list"]
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    sources = set(re.findall(r'"uid": "([^"]*)"', PATH.read_text())) - {"penstock"}
    assert sources == {"${%s}" % variable["name"]}  # noqa: UP031
