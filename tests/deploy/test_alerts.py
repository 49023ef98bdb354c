"""Alerts and dashboard: promtool proves each alert, and what they ask for is there."""

from __future__ import annotations

import json
import re
import subprocess
from pathlib import Path

import pytest
import yaml

from deploy.grafana.make import PANELS, PATH, dashboard
from tests import tools
from tests.deploy.files import ALERTS, COMPOSE, KUBERNETES, ROOT, alert_rules

ADAPTER = KUBERNETES / "prometheus-adapter.yaml"
MANAGER = ALERTS.with_name("alertmanager.yml")
PROOF = Path(__file__).with_name("alerts.yml")


def promtool(*arguments: str | Path) -> None:
    done = subprocess.run([tools.find("promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_rules_are_valid() -> None:
    promtool("check", "rules", ALERTS)


def test_the_configuration_names_the_documentation_and_an_alertmanager_with_a_receiver_for_each_severity(
    tmp_path: Path,
) -> None:
    config = yaml.safe_load((ALERTS.parent / "prometheus.yml").read_text())
    assert config["global"]["external_labels"]["docs"].startswith("https://")
    (manager,) = config["alerting"]["alertmanagers"]
    services = yaml.safe_load(COMPOSE.read_text())["services"]
    ((host, port),) = (target.split(":") for target in manager["static_configs"][0]["targets"])
    assert services[host]["ports"] == [f"127.0.0.1:{port}:{port}"]
    path = tmp_path / "prometheus.yml"
    path.write_text(
        (ALERTS.parent / "prometheus.yml").read_text().replace("/etc/prometheus", str(ALERTS.parent))
    )
    promtool("check", "config", path)
    manager = yaml.safe_load(MANAGER.read_text())
    assert {one["name"] for one in manager["receivers"]} == {"page", "ticket"}
    done = subprocess.run(
        [tools.find("amtool"), "check-config", MANAGER], capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


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
        url, _, anchor = alert["annotations"]["runbook_url"].partition("#")
        assert url == "{{ $externalLabels.docs }}/guide/deploy.html"
        headings = re.findall(r"^#+ (.*)$", (ROOT / "docs/guide/deploy.md").read_text(), re.MULTILINE)
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


def test_every_query_is_about_the_instances_that_the_reader_chose() -> None:
    for panel in PANELS:
        for expression, _ in panel.queries:
            selectors = re.findall(r"\bpenstock_\w+(\{[^}]*\})?", expression)
            assert all('instance=~"$instance"' in selector for selector in selectors), expression


def test_the_dashboard_imports_anywhere() -> None:
    """Every panel takes the data source that its reader chooses; none is wired in."""
    variable, instance = json.loads(PATH.read_text())["templating"]["list"]
    assert (instance["name"], instance["type"]) == ("instance", "query")
    assert (variable["type"], variable["query"]) == ("datasource", "prometheus")
    sources = set(re.findall(r'"uid": "([^"]*)"', PATH.read_text())) - {"penstock"}
    assert sources == {"${%s}" % variable["name"]}  # noqa: UP031
