"""The Kubernetes overlays, built by kubectl: they fit their schemas, each other, and what the server has."""

from __future__ import annotations

import shutil
import subprocess
import urllib.request
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml

from penstock.app.settings import Settings
from tests.deploy.files import KUBERNETES

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
VERSIONS = ("1.28", "1.34")

Resources = dict[tuple[str, str], Any]
"""Resources by kind and name."""


@pytest.fixture(scope="module", params=OVERLAYS)
def resources(request: pytest.FixtureRequest) -> Resources:
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / request.param)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}


def template(resources: Resources, kind: str = "Deployment", name: str = "penstock") -> Any:
    return resources[kind, name]["spec"]["template"]


def container(resources: Resources) -> Any:
    (found,) = template(resources)["spec"]["containers"]
    return found


def settings(resources: Resources) -> dict[str, str]:
    (source,) = container(resources)["envFrom"]
    found: dict[str, str] = resources["ConfigMap", source["configMapRef"]["name"]]["data"]
    return found


def of_kind(resources: Resources, *kinds: str) -> Iterator[Any]:
    return (one for (kind, _), one in resources.items() if kind in kinds)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_fits_its_schema(resources: Resources, version: str) -> None:
    for resource in resources.values():
        kubernetes_validate.validate(resource, version, strict=True)


def test_selectors_mean_the_pods_that_there_are(resources: Resources) -> None:
    pods = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(resources, "Deployment", "StatefulSet")
    ]
    selectors = [one["spec"]["selector"] for one in of_kind(resources, "Service")]
    selectors += [
        one["spec"]["selector"]["matchLabels"]
        for one in of_kind(resources, "Deployment", "StatefulSet", "PodDisruptionBudget")
    ]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(resources, "NetworkPolicy")]
    assert len(selectors) == 7
    for selector in selectors:
        assert len([labels for labels in pods if selector.items() <= labels.items()]) == 1, selector


def test_ports_are_named_by_those_who_listen(resources: Resources) -> None:
    for kind, name in (("Deployment", "penstock"), ("StatefulSet", "redis")):
        (own,) = template(resources, kind, name)["spec"]["containers"]
        (port,) = own["ports"]
        (served,) = resources["Service", name]["spec"]["ports"]
        (entry,) = resources["NetworkPolicy", name]["spec"]["ingress"]
        assert served["targetPort"] == port["name"] == entry["ports"][0]["port"]
    (port,) = container(resources)["ports"]
    assert port["containerPort"] == Settings.model_fields["port"].default
    url = settings(resources)["PENSTOCK_REDIS_URL"]
    assert url == f"redis://redis:{resources['Service', 'redis']['spec']['ports'][0]['port']}/0"


def test_volumes_are_claimed_and_writable_where_the_image_writes(resources: Resources) -> None:
    volumes = {one["name"]: one for one in template(resources)["spec"]["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container(resources)["volumeMounts"]}
    assert mounts.keys() == {"/cache", "/tmp", "/etc/penstock"}
    assert ("PersistentVolumeClaim", mounts["/cache"]["persistentVolumeClaim"]["claimName"]) in resources
    (item,) = mounts["/etc/penstock"]["secret"]["items"]
    assert settings(resources)["PENSTOCK_API_KEYS_FILE"] == f"/etc/penstock/{item['path']}"


def test_the_autoscaler_alone_says_how_many_and_reads_a_metric_that_there_is(
    resources: Resources, known_metrics: set[str]
) -> None:
    scaler = resources["HorizontalPodAutoscaler", "penstock"]["spec"]
    assert ("Deployment", scaler["scaleTargetRef"]["name"]) in resources
    assert "replicas" not in resources["Deployment", "penstock"]["spec"]
    (metric,) = scaler["metrics"]
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    series = rule["seriesQuery"].partition("{")[0]
    assert series in known_metrics
    assert f"rate({series}" in rule["metricsQuery"]


def test_a_cpu_limit_bounds_the_threads(resources: Resources) -> None:
    """Engine and torch take as many as the quota has whole CPUs; a request alone sets none."""
    own = container(resources)["resources"]
    assert int(own["limits"]["cpu"]) == int(own["requests"]["cpu"]) >= 2
    assert own["limits"]["memory"] == own["requests"]["memory"]


def test_images_are_those_that_the_dockerfile_makes(resources: Resources) -> None:
    has_gpu = "nvidia.com/gpu" in container(resources)["resources"]["limits"]
    assert container(resources)["image"] == ("penstock:cuda" if has_gpu else "penstock:cpu")


def test_streams_have_their_drain_time_before_the_pod_is_killed(resources: Resources) -> None:
    wait_s = float(container(resources)["lifecycle"]["preStop"]["exec"]["command"][1])
    drain_s = float(settings(resources)["PENSTOCK_DRAIN_TIMEOUT"])
    assert wait_s + drain_s < template(resources)["spec"]["terminationGracePeriodSeconds"]


def test_probes_ask_what_the_server_answers(resources: Resources, live_server: str) -> None:
    for probe, path in (
        ("startupProbe", "/health"),
        ("livenessProbe", "/health"),
        ("readinessProbe", "/ready"),
    ):
        assert container(resources)[probe]["httpGet"] == {"path": path, "port": "http"}
        with urllib.request.urlopen(live_server + path) as reply:
            assert reply.status == 200


def test_no_container_has_more_rights_than_it_needs(resources: Resources) -> None:
    for one in of_kind(resources, "Deployment", "StatefulSet"):
        pod = one["spec"]["template"]["spec"]
        assert pod["securityContext"]["runAsNonRoot"]
        assert pod["automountServiceAccountToken"] is False
        for each in pod["containers"]:
            rights = each["securityContext"]
            assert rights["readOnlyRootFilesystem"]
            assert rights["allowPrivilegeEscalation"] is False
            assert rights["capabilities"] == {"drop": ["ALL"]}
