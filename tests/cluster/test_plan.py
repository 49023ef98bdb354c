"""The plan of a cluster's deployment."""

from __future__ import annotations

from typing import Any

import pytest

from penstock.app.settings import FrontSettings, Settings
from penstock.cluster.plan import DRAIN_S, OF_SWITCH, OWN_SETTINGS, UNENCRYPTED, Plan, PlanError


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"replicas": "x"}, "replicas: must be like 3, or 2-8 for as many as the load wants"),
        ({"replicas": "8-2"}, "replicas: 2 is less than 8"),
        ({"replicas": 0}, r"replicas\.least: Input should be greater than or equal to 1"),
        ({"name": "Big Name"}, "name: String should match pattern"),
        ({"cpu": 1}, "cpu: Extra inputs are not permitted"),
        ({"listen": "everywhere"}, "listen: Input should be 'loopback' or 'node'"),
        ({"settings": {"replica": "a"}}, r"settings\.replica: replicas cannot have it in common"),
        ({"settings": {"port": 80}}, r"settings\.port: port stands outside the settings"),
        ({"settings": {"log_level": "error"}}, r"settings\.log_level: must be info or debug"),
        ({"settings": {"drain_timeout": "soon"}}, r"settings\.drain_timeout: must be a number of seconds"),
        ({"settings": {"ssl_certfile": "a.pem"}}, r"settings\.ssl_certfile: a cluster speaks plain HTTP"),
        ("penstock", "plan: Input should be a valid dictionary"),
    ],
)
def test_a_mistake_is_told_by_its_field(values: Any, message: str) -> None:
    with pytest.raises(PlanError, match=message):
        Plan.parse(values)


def test_names_are_those_of_settings() -> None:
    assert OF_SWITCH | UNENCRYPTED | {"host", "port", "cluster_secret"} == FrontSettings.model_fields.keys()
    assert Settings.model_fields.keys() >= OWN_SETTINGS
    assert Settings.model_fields["drain_timeout"].default == DRAIN_S


def test_a_number_is_a_size_and_so_are_two() -> None:
    assert str(Plan.parse({"replicas": 3}).replicas) == "3"
    assert str(Plan.parse({"replicas": "2-8"}).replicas) == "2-8"
    assert Plan.parse({"replicas": "3"}).replicas.is_fixed
    assert not Plan.parse({"replicas": "2-8"}).replicas.is_fixed


def test_settings_become_variables_as_a_server_reads_them() -> None:
    plan = Plan.parse({"settings": {"max_num_seqs": 8, "access_log": True, "model": "m", "drain_timeout": 5}})
    assert plan.environment() == {
        "PENSTOCK_ACCESS_LOG": "true",
        "PENSTOCK_DRAIN_TIMEOUT": "5",
        "PENSTOCK_MAX_NUM_SEQS": "8",
        "PENSTOCK_MODEL": "m",
    }
    assert "PENSTOCK_MAX_NUM_SEQS" not in plan.environment(OF_SWITCH)
    assert plan.stop_s > plan.drain_s == 5


def test_only_what_a_process_is_started_with_makes_it_start_anew() -> None:
    plan = Plan.parse({"settings": {"model": "m"}})
    scaled = plan.model_copy(update={"replicas": Plan.parse({"replicas": "2-8"}).replicas})
    assert scaled.replica_version() == plan.replica_version()
    # With replicas for prompts the others have another role; how many there are is all the same.
    apart, more = (Plan.parse({"settings": {"model": "m"}, "prefill_replicas": num}) for num in (1, 2))
    assert apart.replica_version() == more.replica_version() != plan.replica_version()
    tuned = Plan.parse({"settings": {"model": "m", "max_num_seqs": "8"}})
    assert tuned.replica_version() != plan.replica_version()
    assert tuned.switch_version() == plan.switch_version()
    assert Plan.parse({"settings": {"model": "m"}, "port": 9}).switch_version() != plan.switch_version()


def test_a_plan_that_was_sent_is_the_same() -> None:
    plan = Plan.parse({"replicas": "2-8", "settings": {"model": "m"}, "switches": 2, "surge": True})
    assert Plan.parse(plan.model_dump(mode="json")) == plan
