"""The config of Ray Serve names applications and settings that there are."""

from __future__ import annotations

import yaml

from penstock.app.settings import Settings
from penstock.cluster.plan import Plan
from tests.deploy.files import DEPLOY


def test_replicas_and_switches_have_the_same_plan() -> None:
    config = yaml.safe_load((DEPLOY / "ray-serve.yaml").read_text())
    assert config["proxy_location"] == "Disabled"
    replicas, switches = config["applications"]
    assert [replicas["import_path"], switches["import_path"]] == ["penstock:replicas", "penstock:switches"]
    assert replicas["route_prefix"] is switches["route_prefix"] is None
    assert replicas["args"] == switches["args"]
    plan = Plan.parse(replicas["args"])
    assert (replicas["name"], switches["name"]) == (plan.replicas_app, plan.switches_app)
    assert plan.settings.keys() <= Settings.model_fields.keys()
