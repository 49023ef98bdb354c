"""What is deployed fits together: times, names of settings and metrics, runbooks, the dashboard and what writes it."""

from __future__ import annotations

import json
import re
import tomllib
import urllib.request
from pathlib import Path
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from app.settings import ENV_PREFIX, Settings
from cluster.plan import Plan
from deploy import lock
from deploy.grafana.make import PATH, dashboard
from engine.kernels.cpu import prebuilt

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "deploy"
COMPOSE = ROOT / "docker-compose.yml"
KUBERNETES = DEPLOY / "kubernetes" / "penstock.yaml"
ALERTS = DEPLOY / "prometheus" / "alerts.yml"
ADAPTER = DEPLOY / "kubernetes" / "adapter.yaml"
SERVICE = DEPLOY / "penstock.service"
NGINX = DEPLOY / "nginx.conf"
DOCKERFILE = DEPLOY / "Dockerfile"
SUFFIXES = ("", "_total", "_bucket", "_count", "_sum")


def manifest(kind: str) -> Any:
    return next(one for one in yaml.safe_load_all(KUBERNETES.read_text()) if one["kind"] == kind)


def container() -> Any:
    (found,) = manifest("Deployment")["spec"]["template"]["spec"]["containers"]
    return found


def rules() -> list[dict[str, Any]]:
    return [rule for group in yaml.safe_load(ALERTS.read_text())["groups"] for rule in group["rules"]]


@pytest.fixture(scope="module")
def known_metrics(live_server: str) -> set[str]:
    """Of a real server, and those that it has only beside a Redis."""
    with urllib.request.urlopen(f"{live_server}/metrics") as reply:
        families = text_string_to_metric_families(reply.read().decode())
    return {family.name.removesuffix("_total") + suffix for family in families for suffix in SUFFIXES}


@pytest.mark.parametrize(
    "path", [PATH, ALERTS, ADAPTER, ROOT / "docs" / "operating.md"], ids=lambda path: path.name
)
def test_metrics_that_are_asked_for_are_there(path: Path, known_metrics: set[str]) -> None:
    own = {rule["record"] for rule in rules() if "record" in rule} | {"penstock_promise_use_p90"}
    named = set(re.findall(r"\bpenstock_[a-z0-9_]+", path.read_text()))
    assert named - own - known_metrics == set()
    assert named


def test_the_dashboard_is_the_one_that_is_written() -> None:
    assert json.loads(PATH.read_text()) == dashboard()


def test_every_alert_says_what_happened_and_where_to_read_on() -> None:
    text = (ROOT / "docs" / "operating.md").read_text()
    headings = re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    anchors = {re.sub(r"[^a-z0-9 -]", "", heading.lower()).replace(" ", "-") for heading in headings}
    alerts = [rule for rule in rules() if "alert" in rule]
    assert len(alerts) > 5
    for alert in alerts:
        page, _, anchor = alert["annotations"]["runbook"].partition("#")
        assert page == "docs/operating.md"
        assert anchor in anchors
        assert alert["labels"]["severity"] in ("page", "ticket")
        assert alert["annotations"]["summary"].endswith(".")


def test_recorded_names_are_those_that_alerts_use() -> None:
    recorded = {rule["record"] for rule in rules() if "record" in rule}
    used = set(re.findall(r"\bpenstock:[a-z_:]+", " ".join(rule["expr"] for rule in rules())))
    assert used == recorded


@pytest.mark.parametrize("path", [DOCKERFILE, COMPOSE, KUBERNETES], ids=lambda path: path.name)
def test_variables_are_settings(path: Path) -> None:
    known = {(ENV_PREFIX + name).upper() for name in Settings.model_fields} | {prebuilt.VARIABLE}
    assert set(re.findall(r"\bPENSTOCK_[A-Z_]+", path.read_text())) - known == set()


def test_streams_have_their_drain_time_before_the_process_is_killed() -> None:
    variables = {one["name"]: one["value"] for one in container()["env"]}
    drain_s = float(variables["PENSTOCK_DRAIN_TIMEOUT"])
    wait_s = float(container()["lifecycle"]["preStop"]["exec"]["command"][1])
    assert (
        wait_s + drain_s < manifest("Deployment")["spec"]["template"]["spec"]["terminationGracePeriodSeconds"]
    )
    service = yaml.safe_load(COMPOSE.read_text())["services"]["penstock"]
    assert float(service["environment"]["PENSTOCK_DRAIN_TIMEOUT"]) < float(
        service["stop_grace_period"].removesuffix("s")
    )
    stop = re.search(r"^TimeoutStopSec=(\d+)$", SERVICE.read_text(), re.MULTILINE)
    assert stop is not None
    assert float(stop[1]) > Settings.model_fields["drain_timeout"].default


def test_probes_ask_what_the_server_answers(live_server: str) -> None:
    for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
        path = container()[probe]["httpGet"]["path"]
        with urllib.request.urlopen(live_server + path) as reply:
            assert reply.status == 200


def test_the_autoscaler_reads_the_adapters_metric() -> None:
    (metric,) = manifest("HorizontalPodAutoscaler")["spec"]["metrics"]
    (rule,) = yaml.safe_load(ADAPTER.read_text())["rules"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]


def test_services_budgets_and_scalers_mean_the_deployment() -> None:
    labels = manifest("Deployment")["spec"]["template"]["metadata"]["labels"]
    selectors = [
        manifest("Deployment")["spec"]["selector"]["matchLabels"],
        manifest("Service")["spec"]["selector"],
        manifest("PodDisruptionBudget")["spec"]["selector"]["matchLabels"],
    ]
    assert all(selector.items() <= labels.items() for selector in selectors)
    assert (
        manifest("HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]["name"]
        == manifest("Deployment")["metadata"]["name"]
    )


def test_what_compose_mounts_and_builds_is_there() -> None:
    compose = yaml.safe_load(COMPOSE.read_text())
    stages = set(re.findall(r"^FROM .* AS (\S+)$", DOCKERFILE.read_text(), re.MULTILINE))
    for service in compose["services"].values():
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (ROOT / source).exists() if source.startswith(".") else source in compose["volumes"]
        if "build" in service:
            assert service["build"]["target"] in stages


def test_the_image_has_all_that_is_installed_and_runs_as_nobody_special() -> None:
    text = DOCKERFILE.read_text()
    let_in = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    built = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    others = {"pyproject.toml", "requirements.lock", "README.md", "LICENSE"}
    assert let_in == others | set(built["only-include"])
    assert text.count("USER 10001") == 2
    assert re.search(r"grep --only-matching 'torch==\[0-9.\]\*' pyproject.toml", text)
    assert len(re.findall(r"torch==[0-9.]+", (ROOT / "pyproject.toml").read_text())) == 1


def test_the_lock_has_a_version_of_all_that_is_wanted_and_nothing_of_this_machine() -> None:
    lines = [line for line in lock.PATH.read_text().splitlines() if not line.startswith("#")]
    assert all(re.fullmatch(r"[a-z0-9-]+==[0-9][a-z0-9.]*", line) for line in lines), lines
    assert lines == sorted(lines)
    versions = dict(line.split("==") for line in lines)
    wanted = [one for one in lock.wanted() if one.name != "torch"]
    assert "torch" not in versions
    for one in wanted:
        assert one.specifier.contains(versions[one.name]), one
    assert {line.split("==")[0] for line in lock.lock().splitlines() if line[0] != "#"} == set(versions)


def test_nginx_holds_nothing_back() -> None:
    text = NGINX.read_text()
    for line in ("proxy_buffering off;", "proxy_http_version 1.1;", "proxy_next_upstream off;"):
        assert line in text


def test_a_serve_config_has_settings_that_there_are_and_the_same_for_replicas_and_switches() -> None:
    config = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())
    assert config["proxy_location"] == "Disabled"
    replicas, switches = config["applications"]
    assert [replicas["import_path"], switches["import_path"]] == ["penstock:replicas", "penstock:switches"]
    assert replicas["route_prefix"] is switches["route_prefix"] is None
    assert replicas["args"] == switches["args"]
    plan = Plan.parse(replicas["args"])
    assert (replicas["name"], switches["name"]) == (plan.replicas_app, plan.switches_app)
    assert plan.settings.keys() <= Settings.model_fields.keys()
