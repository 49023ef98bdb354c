"""`penstock cluster`: what it asks of Ray and what it says, with a stand-in for the cluster."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.app import cluster
from penstock.app.errors import OperatorError
from penstock.app.settings import Settings
from penstock.cluster.directory import ClusterView, Report
from penstock.cluster.plan import Plan, PlanError


class Cluster:
    """Stands for the module of deployments, for Ray, for Serve and for the directory: all that is asked is noted."""

    def __init__(self) -> None:
        self.Plan, self.PlanError = Plan, PlanError
        self.ray = self.serve = self.view = self
        self.seen = ClusterView(replicas=(), switches=(), failures=())
        self.resources: dict[str, float] = {}
        self.applications: dict[str, Any] = {}
        self.fault: Exception | None = None
        self.known = {"a"}
        self.asked: list[object] = []
        self.drain = SimpleNamespace(remote=lambda name: name in self.known)
        self.forget_failures = SimpleNamespace(remote=lambda: self.asked.append("forget"))
        self.is_open = True

    def remote(self) -> ClusterView:
        return self.seen

    def cluster_resources(self) -> Mapping[str, float]:
        return self.resources

    def replicas(self, plan: Mapping[str, Any]) -> str:
        return f"{plan['replicas']['least']} replicas"

    def switches(self, _: object) -> str:
        return "switches"

    def find_directory(self, _: Plan) -> Cluster | None:
        return self if self.is_open else None

    def open_directory(self, _: Plan, secret: str | None) -> Cluster:
        self.asked.append(("open", secret))
        self.is_open = True
        return self

    def start(self, *, proxy_location: str) -> None:
        self.asked.append(proxy_location)

    def run(self, built: str, *, name: str, route_prefix: None) -> None:
        self.asked.append((built, name, route_prefix))
        if self.fault is not None:
            raise self.fault

    def status(self) -> Cluster:
        return self

    def delete(self, name: str) -> None:
        self.asked.append(f"delete {name}")
        fault, self.fault = self.fault, None
        if fault is not None:
            raise fault
        del self.applications[name]

    def kill(self, _: object) -> None:
        self.asked.append("kill")

    def shutdown(self) -> None:
        self.asked.append("shutdown")


@pytest.fixture
def there(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    there = Cluster()
    monkeypatch.setattr(cluster, "_get", lambda found: found)
    monkeypatch.setattr(cluster, "_ray", lambda address: nullcontext(there) if address == "ray:1" else None)
    return there


@pytest.fixture
def slept(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Nobody waits: each sleep takes as long as it is told, on a clock that the module alone has."""
    slept: list[float] = []
    monkeypatch.setattr(cluster, "time", SimpleNamespace(monotonic=lambda: sum(slept), sleep=slept.append))
    return slept


def report(
    name: str, *, is_draining: bool = False, plan: Mapping[str, Any] | None = None, **figures: float
) -> Report:
    return Report(
        kind="switch" if name.startswith("s") else "replica",
        name=name,
        url=f"http://{name}",
        node="node",
        pid=7,
        is_draining=is_draining,
        figures=figures,
        plan=plan or {},
    )


def view(*reports: Report, failures: tuple[str, ...] = ()) -> ClusterView:
    return ClusterView(
        replicas=tuple(one for one in reports if one.kind == "replica"),
        switches=tuple(one for one in reports if one.kind == "switch"),
        failures=failures,
    )


def told(call: Callable[[], object]) -> str:
    with pytest.raises(OperatorError) as caught:
        call()
    return str(caught.value)


# What is given


def test_replicas_are_given_flags_over_variables_without_what_is_a_switch_s_own(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in (("MODEL", "m"), ("THREADS", "1"), ("HOST", "::1"), ("CLUSTER_SECRET", "s" * 16)):
        monkeypatch.setenv(f"PENSTOCK_{name}", value)
    monkeypatch.setenv("ANOTHER_MODEL", "n")
    flags = {"threads": "2", "port": "81", "log_level": "debug"}
    given = cluster._given(flags, Settings.load(flags))
    assert given == {"model": "m", "threads": "2", "log_level": "debug", "drain_timeout": "30"}


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        ({"replica": "a"}, "--replica: replicas cannot have it in common"),
        ({"metrics_port": "9"}, "--metrics-port: replicas cannot have it in common"),
        (
            {"log_level": "error"},
            "--log-level: must be info or debug, since where a replica listens is read in its log",
        ),
    ],
)
def test_what_replicas_cannot_be_given_is_told(flags: dict[str, str], said: str) -> None:
    assert told(lambda: cluster._given(flags, Settings.load(flags))) == said


@pytest.mark.parametrize(
    ("flags", "planned", "num_gpus", "cpus", "gpus"),
    [
        ({}, {}, 0, 1, 0),
        ({"threads": "2"}, {}, 8, 2, 1),
        ({"tensor_parallel": "4"}, {"cpus": "3"}, 8, 3, 4),
        ({"tensor_parallel": "2", "pipeline_parallel": "3"}, {"cpus": "3"}, 8, 3, 6),
        ({"device": "cpu"}, {}, 8, 1, 0),
        ({}, {"gpus": "0.5"}, 8, 1, 0.5),
    ],
)
def test_a_replica_has_the_cores_and_gpus_that_it_uses(
    there: Cluster, flags: dict[str, str], planned: dict[str, str], num_gpus: int, cpus: float, gpus: float
) -> None:
    there.resources = {"GPU": num_gpus}
    settings = Settings.load(flags | {"host": "0.0.0.0", "port": "81"})
    assert cluster._plan(planned | {"replicas": "2-3"}, {"drain_timeout": "5"}, settings, there) == Plan.parse(
        {
            "settings": {"drain_timeout": "5"}, "replicas": "2-3", "cpus": cpus, "gpus": gpus, "host": "0.0.0.0",
            "port": 81, "by_command": True,
        }
    )  # fmt: skip


def test_a_plan_that_cannot_be_is_told_by_its_flag(there: Cluster) -> None:
    said = told(lambda: cluster._parse({"replica_port": -1}, there))
    assert said == "--replica-port: Input should be greater than or equal to 0"


# Waiting


@pytest.mark.parametrize(
    ("found", "is_met"),
    [
        (view(report("a"), report("b"), report("s", replicas=2)), True),
        (view(report("a"), report("b"), report("c"), report("s", replicas=3)), True),
        (view(report("a"), report("b"), report("s", replicas=3), report("s2", replicas=2)), True),
        (view(report("a"), report("b"), report("s", replicas=2), report("s2", replicas=1)), False),
        (view(report("a"), report("b"), report("s")), False),
        (view(report("a"), report("b")), False),
        (view(report("a"), report("s", replicas=1)), False),
        (view(*map(report, "abcd"), report("s", replicas=4)), False),
        (view(report("a"), report("b"), report("c", is_draining=True), report("s", replicas=2)), False),
    ],
)
def test_it_is_met_when_every_switch_knows_all_replicas(found: ClusterView, is_met: bool) -> None:
    assert cluster._is_met(found, Plan.parse({"replicas": "2-3"})) is is_met


# The actions


def test_replicas_are_started_before_switches_and_waited_for(there: Cluster, slept: list[float]) -> None:
    plan = Plan.parse({"replicas": 2, "settings": {"drain_timeout": "5"}})
    cluster._run(plan, there, there, with_switches=True)
    assert there.asked == [("2 replicas", "penstock-replicas", None), ("switches", "penstock-switches", None)]
    assert sum(slept) == pytest.approx(30 + 5 + 15, abs=0.3)
    there.asked.clear()
    there.seen = view(report("a"), report("b"), report("s", replicas=2))
    cluster._run(plan, there, there, with_switches=False)
    assert there.asked == [("2 replicas", "penstock-replicas", None)]


@pytest.mark.parametrize(
    ("fault", "failures", "said"),
    [
        (PlanError("no room"), ("a", "b"), "no room"),
        (RuntimeError("x\nlast"), ("a", "b"), "b"),
        (RuntimeError("x\nlast"), (), "penstock-replicas: last"),
        (TimeoutError(), (), "penstock-replicas: TimeoutError"),
    ],
)
def test_what_does_not_start_is_told_with_its_own_words(
    there: Cluster, fault: Exception, failures: tuple[str, ...], said: str
) -> None:
    there.fault, there.seen = fault, view(failures=failures)
    assert told(lambda: cluster._run(Plan(), there, there, with_switches=True)) == said


def test_all_that_runs_is_a_line(there: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    there.seen = view(
        report("a", kv=0.5, kept=1.25, missed=0.5),
        report("b", is_draining=True),
        report("s", replicas=2, streams=3, refused=0.25),
        failures=("c: no memory",),
    )
    there.applications = {"penstock-switches": SimpleNamespace(status=SimpleNamespace(value="RUNNING"))}
    assert cluster._print_status(Plan(), there) == 1
    assert capsys.readouterr().out.splitlines() == [
        "penstock-switches: running",
        "  http://s  s  pid 7 on node  knows 2 replicas, 3 requests on their way, 0.2 refused a second",
        "penstock-replicas: not started",
        "  http://a  a  pid 7 on node  KV 50%, promises 1.2 kept and 0.5 missed a second",
        "  http://b  b  pid 7 on node  draining",
        "  failed: c: no memory",
    ]
    there.applications["penstock-replicas"] = there.applications["penstock-switches"]
    assert cluster._print_status(Plan(), there) == 0


def test_a_scaled_cluster_is_the_one_that_runs_with_another_number(
    there: Cluster, slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    there.seen = view(report("b"), report("a", plan=Plan(by_command=True).model_dump(mode="json")))
    assert cluster._scale(Plan(), there, "3", there) == 1
    assert there.asked == [("3 replicas", "penstock-replicas", None)]
    assert capsys.readouterr().out.startswith("penstock-switches: not started\n")
    assert slept


@pytest.mark.parametrize(
    ("plan", "said"),
    [
        ({}, "penstock has no replica that could be asked what it was deployed with; deploy it again"),
        (
            Plan().model_dump(mode="json"),
            "penstock was deployed from a Serve config file; change `replicas` there, and `serve deploy` it",
        ),
    ],
)
def test_what_cannot_be_scaled_is_told(there: Cluster, plan: dict[str, Any], said: str) -> None:
    there.seen = view(report("a", plan=plan))
    assert told(lambda: cluster._scale(Plan(), there, "3", there)) == said


def test_a_drained_replica_is_waited_for(
    there: Cluster, slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    drained = Plan(settings={"drain_timeout": "5"}).model_dump(mode="json")
    there.seen = view(report("a", plan=drained), report("b"))
    assert told(lambda: cluster._drain(Plan(), there, "a", there)) == (
        "a has not ended yet; `penstock cluster status` says how it does"
    )
    assert sum(slept) == pytest.approx(5 + 15 + 30, abs=0.3)
    assert told(lambda: cluster._drain(Plan(), there, "c", there)) == (
        "penstock has no replica c; there are a, b"
    )
    there.seen = view(report("b"))
    assert cluster._drain(Plan(), there, "a", there) == 0
    assert capsys.readouterr().out == "a is drained; Ray starts another one in its place\n"
    there.seen = view()
    assert told(lambda: cluster._drain(Plan(), there, "c", there)).endswith("; there are none")


def test_switches_end_before_replicas_and_serve_with_the_last(there: Cluster) -> None:
    there.applications = dict.fromkeys(("penstock-switches", "penstock-replicas"))
    there.fault = TimeoutError()
    cluster._delete(Plan(), there)
    ends = ["delete penstock-switches"] * 2 + ["delete penstock-replicas", "kill"]
    assert there.asked == [*ends, "shutdown"]
    there.asked.clear()
    there.applications = dict.fromkeys(("penstock-replicas", "others"))
    cluster._delete(Plan(), there)
    assert there.asked == ["delete penstock-replicas", "kill"]


def arguments(action: str, *given: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    cluster.add_arguments(parser, action)
    return parser.parse_args(["--address", "ray:1", *given])


def test_an_action_is_for_the_cluster_of_its_name(
    there: Cluster, slept: list[float], capsys: pytest.CaptureFixture[str]
) -> None:
    there.seen = view(report("a", plan=Plan(name="ours", by_command=True).model_dump(mode="json")))
    for action, given in (("status", []), ("scale", ["1"])):
        assert cluster.run(action, arguments(action, "--name", "ours", *given)) == 1
        assert capsys.readouterr().out.startswith("ours-switches: not started\n")
    there.known.clear()
    assert told(lambda: cluster.run("drain", arguments("drain", "b"))) == (
        "penstock has no replica b; there are a"
    )
    there.asked.clear()
    assert cluster.run("down", arguments("down")) == 0
    assert capsys.readouterr().out == "penstock is down\n"
    assert there.asked == ["kill", "shutdown"]
    there.is_open = False
    assert told(lambda: cluster.run("status", arguments("status"))) == (
        "no cluster called penstock runs here; `penstock cluster deploy` starts one"
    )
    assert slept


def test_a_new_cluster_is_opened_with_its_secret(there: Cluster, capsys: pytest.CaptureFixture[str]) -> None:
    there.is_open = False
    there.seen = view(report("a"), report("s", replicas=1))
    flags = {"address": "ray:1", "replicas": "1-2", "cluster_secret": "s" * 16}
    assert cluster.deploy(flags) == 1
    assert there.asked == [
        ("open", "s" * 16),
        "forget",
        "Disabled",
        ("1 replicas", "penstock-replicas", None),
        ("switches", "penstock-switches", None),
    ]
    out, err = capsys.readouterr()
    assert out.startswith("penstock-switches: not started\n")
    assert err.endswith("deploying 1-2 replicas; models take their time to load\n")


@pytest.mark.parametrize(("is_open", "ended"), [(False, ["kill", "shutdown"]), (True, [])])
def test_what_does_not_start_ends_if_it_is_new(there: Cluster, is_open: bool, ended: list[str]) -> None:
    there.is_open, there.fault = is_open, RuntimeError("broken")
    assert told(lambda: cluster.deploy({"address": "ray:1"})) == "penstock-replicas: broken"
    assert there.asked[there.asked.index(("1 replicas", "penstock-replicas", None)) + 1 :] == ended
    assert (("open", None) in there.asked) is not is_open


def test_a_cluster_of_another_model_is_not_changed(there: Cluster) -> None:
    there.seen = view(report("a", plan=Plan(settings={"model": "ours"}).model_dump(mode="json")))
    said = told(lambda: cluster.deploy({"address": "ray:1"}))
    assert said.startswith("penstock serves ours, and not the demo model; ")
    there.seen = view(report("a", plan=Plan().model_dump(mode="json")))
    said = told(lambda: cluster.deploy({"address": "ray:1", "model": "ours"}))
    assert said.startswith("penstock serves the demo model, and not ours; ")
    assert there.asked == []


@pytest.mark.parametrize(
    ("address", "fault", "said"),
    [
        (
            None,
            ConnectionError("x"),
            "no Ray runs here; start it with `ray start --head`, or say where it is with --address",
        ),
        ("ray:1", ConnectionError("x"), "--address ray:1: x"),
        ("ray:1", ValueError("y"), "--address ray:1: y"),
    ],
)
def test_a_ray_that_cannot_be_reached_is_told(
    monkeypatch: pytest.MonkeyPatch, address: str | None, fault: Exception, said: str
) -> None:
    asked = {}

    def init(**options: object) -> None:
        asked.update(options)
        raise fault

    ray = SimpleNamespace(init=init, serve=None)
    for name, module in (("ray", ray), ("ray.serve", SimpleNamespace())):
        monkeypatch.setitem(sys.modules, name, module)
    monkeypatch.setattr(cluster, "import_module", lambda _: SimpleNamespace(NAMESPACE="n"))
    assert told(lambda: cluster._ray(address).__enter__()) == said
    assert asked == {
        "address": address or "auto", "namespace": "n", "log_to_driver": False, "logging_level": 40,
        "configure_logging": False,
    }  # fmt: skip
