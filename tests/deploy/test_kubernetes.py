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
from penstock.priority.routing.state import Role
from tests.deploy.files import KUBERNETES

pytestmark = pytest.mark.skipif(shutil.which("kubectl") is None, reason="needs kubectl")
OVERLAYS = sorted(path.name for path in (KUBERNETES / "overlays").iterdir())
VERSIONS = ("1.28", "1.34")
PREFILL = "penstock-prefill"

Resources = dict[tuple[str, str], Any]
"""Resources by kind and name."""


@pytest.fixture(scope="module", params=OVERLAYS)
def resources(request: pytest.FixtureRequest) -> Resources:
    command = ["kubectl", "kustomize", str(KUBERNETES / "overlays" / request.param)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {(one["kind"], one["metadata"]["name"]): one for one in yaml.safe_load_all(done.stdout)}


def template(resources: Resources, kind: str = "StatefulSet", name: str = "penstock") -> Any:
    return resources[kind, name]["spec"]["template"]


def container(resources: Resources) -> Any:
    (found,) = template(resources)["spec"]["containers"]
    return found


def settings(resources: Resources) -> dict[str, str]:
    (source,) = container(resources)["envFrom"]
    own = {one["name"]: one["value"] for one in container(resources)["env"] if "value" in one}
    return {**resources["ConfigMap", source["configMapRef"]["name"]]["data"], **own}


def is_cluster(resources: Resources) -> bool:
    return ("Deployment", "penstock-switch") in resources


def num_prefill(resources: Resources) -> int:
    """Replicas that compute prompts alone."""
    return resources["StatefulSet", PREFILL]["spec"]["replicas"] if has_roles(resources) else 0


def has_roles(resources: Resources) -> bool:
    return ("StatefulSet", PREFILL) in resources


def of_kind(resources: Resources, *kinds: str) -> Iterator[Any]:
    return (one for (kind, _), one in resources.items() if kind in kinds)


@pytest.mark.parametrize("version", VERSIONS)
def test_every_resource_fits_its_schema(resources: Resources, version: str) -> None:
    for resource in resources.values():
        if resource["apiVersion"].startswith("monitoring.coreos.com/"):
            continue  # an operator's own kind, for which Kubernetes has no schema
        kubernetes_validate.validate(resource, version, strict=True)


def test_selectors_mean_the_pods_that_there_are(resources: Resources) -> None:
    pods = [
        one["spec"]["template"]["metadata"]["labels"]
        for one in of_kind(resources, "Deployment", "StatefulSet")
    ]
    own = [one["spec"]["selector"]["matchLabels"] for one in of_kind(resources, "Deployment", "StatefulSet")]
    for selector in own:
        assert len([labels for labels in pods if selector.items() <= labels.items()]) == 1, selector
    selectors = [one["spec"]["selector"] for one in of_kind(resources, "Service")]
    selectors += [one["spec"]["selector"]["matchLabels"] for one in of_kind(resources, "PodDisruptionBudget")]
    selectors += [one["spec"]["podSelector"]["matchLabels"] for one in of_kind(resources, "NetworkPolicy")]
    assert len(selectors) == (8 if is_cluster(resources) else 6)
    for selector in selectors:
        names = {labels["app.kubernetes.io/name"] for labels in pods if selector.items() <= labels.items()}
        assert len(names) == 1, selector


def test_ports_are_named_by_those_who_listen(resources: Resources) -> None:
    for kind, name in (("StatefulSet", "penstock"), ("StatefulSet", "redis")):
        (own,) = template(resources, kind, name)["spec"]["containers"]
        (port,) = own["ports"]
        (served,) = resources["Service", name]["spec"]["ports"]
        (entry,) = resources["NetworkPolicy", name]["spec"]["ingress"]
        assert served["targetPort"] == port["name"] == entry["ports"][0]["port"]
    (port,) = container(resources)["ports"]
    assert port["containerPort"] == Settings.model_fields["port"].default
    url = settings(resources)["PENSTOCK_REDIS_URL"]
    port = resources["Service", "redis"]["spec"]["ports"][0]["port"]
    assert url == f"redis://:$(REDIS_PASSWORD)@redis:{port}/0"
    (redis,) = template(resources, name="redis")["spec"]["containers"]
    assert redis["args"][-2:] == ["--requirepass", "$(REDIS_PASSWORD)"]
    passwords = [one for one in redis["env"] + container(resources)["env"] if one["name"] == "REDIS_PASSWORD"]
    assert passwords[0] == passwords[1]


def test_a_switch_asks_every_replica_that_the_autoscaler_may_start(resources: Resources) -> None:
    """And shares their secret, keys and settings; clients and the Ingress reach it by the same service."""
    replicas = resources["Service", "penstock-replicas"]["spec"]
    assert replicas["clusterIP"] == "None"
    assert resources["StatefulSet", "penstock"]["spec"]["serviceName"] == "penstock-replicas"
    served = resources["Service", "penstock"]["spec"]["selector"]
    if not is_cluster(resources):
        assert served == replicas["selector"]
        return
    switch = template(resources, "Deployment", "penstock-switch")
    assert served.items() <= switch["metadata"]["labels"].items()
    (own,) = switch["spec"]["containers"]
    most = resources["HorizontalPodAutoscaler", "penstock"]["spec"]["maxReplicas"]
    (port,) = replicas["ports"]
    assert own["args"] == [
        "switch",
        *(f"http://penstock-{number}.penstock-replicas:{port['port']}" for number in range(most)),
        *(
            f"http://{PREFILL}-{number}.penstock-replicas:{port['port']}"
            for number in range(num_prefill(resources))
        ),
    ]
    assert own["envFrom"] == container(resources)["envFrom"]
    known = {one["name"]: one for one in container(resources)["env"]}
    assert known["PENSTOCK_REPLICA"]["valueFrom"] == {"fieldRef": {"fieldPath": "metadata.name"}}
    assert known["PENSTOCK_CLUSTER_SECRET"] in own["env"]
    backends = [
        path["backend"]["service"]
        for rule in resources["Ingress", "penstock"]["spec"]["rules"]
        for path in rule["http"]["paths"]
    ]
    assert all(backend == {"name": "penstock", "port": {"name": "http"}} for backend in backends)
    monitor = resources["PodMonitor", "penstock"]["spec"]
    (labels,) = monitor["selector"]["matchExpressions"]
    assert set(labels["values"]) == {"penstock", "penstock-switch"}
    assert monitor["jobLabel"] == labels["key"]
    assert monitor["podMetricsEndpoints"][0]["port"] == own["ports"][0]["name"]


def test_replicas_of_both_roles_differ_in_nothing_else(resources: Resources) -> None:
    if not has_roles(resources):
        assert "PENSTOCK_ROLE" not in settings(resources)
        return
    decode, prefill = (resources["StatefulSet", name]["spec"] for name in ("penstock", PREFILL))
    assert decode["serviceName"] == prefill["serviceName"]
    assert decode["volumeClaimTemplates"] == prefill["volumeClaimTemplates"]
    assert decode["template"]["metadata"]["annotations"] == prefill["template"]["metadata"]["annotations"]
    pods = [one["template"]["spec"] for one in (decode, prefill)]
    for pod, role in zip(pods, (Role.DECODE, Role.PREFILL), strict=True):
        assert pod["containers"][0]["env"].pop() == {"name": "PENSTOCK_ROLE", "value": role}
    assert pods[0] == pods[1]


def test_volumes_are_writable_where_the_image_writes_and_no_two_pods_share_one(resources: Resources) -> None:
    (claim,) = resources["StatefulSet", "penstock"]["spec"]["volumeClaimTemplates"]
    volumes = {claim["metadata"]["name"]: claim}
    volumes |= {one["name"]: one for one in template(resources)["spec"]["volumes"]}
    mounts = {one["mountPath"]: volumes[one["name"]] for one in container(resources)["volumeMounts"]}
    assert mounts.keys() == {"/cache", "/tmp", "/etc/penstock"}
    assert mounts["/cache"] is claim
    (item,) = mounts["/etc/penstock"]["secret"]["items"]
    assert settings(resources)["PENSTOCK_API_KEYS_FILE"] == f"/etc/penstock/{item['path']}"


def test_the_autoscaler_alone_says_how_many_and_reads_a_metric_that_there_is(
    resources: Resources, known_metrics: set[str]
) -> None:
    scaler = resources["HorizontalPodAutoscaler", "penstock"]["spec"]
    target = scaler["scaleTargetRef"]
    assert "replicas" not in resources[target["kind"], target["name"]]["spec"]
    (metric,) = scaler["metrics"]
    (rule,) = yaml.safe_load((KUBERNETES / "prometheus-adapter.yaml").read_text())["rules"]
    assert metric["pods"]["metric"]["name"] == rule["name"]["as"]
    series = rule["seriesQuery"].partition("{")[0]
    assert series in known_metrics
    assert f"rate({series}" in rule["metricsQuery"]


def test_the_event_loop_has_a_cpu_that_the_models_threads_leave(resources: Resources) -> None:
    """Unless told otherwise, engine and torch take as many threads as the quota has whole CPUs."""
    own = container(resources)["resources"]
    assert int(own["limits"]["cpu"]) == int(own["requests"]["cpu"]) >= 2
    assert "nvidia.com/gpu" in own["limits"] or int(settings(resources)["PENSTOCK_THREADS"]) < int(
        own["limits"]["cpu"]
    )
    assert own["limits"]["memory"] == own["requests"]["memory"]


def test_images_are_those_that_the_dockerfile_makes(resources: Resources) -> None:
    has_gpu = "nvidia.com/gpu" in container(resources)["resources"]["limits"]
    images = [
        each["image"]
        for one in of_kind(resources, "Deployment", "StatefulSet")
        for each in one["spec"]["template"]["spec"]["containers"]
    ]
    assert {image for image in images if "redis" not in image} == {
        "penstock:cuda" if has_gpu else "penstock:cpu"
    }


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
