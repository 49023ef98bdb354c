"""`penstock cluster`: replicas and switches on a Ray cluster that runs already.

Nothing of Ray is imported until a command needs it.
"""

from __future__ import annotations

import argparse
import logging
import os
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.app.errors import OperatorError
from penstock.app.log import configure_log, log
from penstock.app.settings import ENV_PREFIX, Settings

if TYPE_CHECKING:
    from penstock.cluster.directory import ClusterView, Report
    from penstock.cluster.plan import Plan

ACTIONS = {
    "deploy": "Starts replicas and switches, or changes the running ones to these arguments.",
    "status": "Shows the replicas and switches that run, their addresses and their health.",
    "scale": "Changes the number of replicas; surplus ones end after their last stream.",
    "drain": "Ends one replica after its last stream; Ray starts another in its place.",
    "down": "Ends all switches and replicas after their last streams.",
}
_PLANNED = {
    "replicas",
    "prefill_replicas",
    "cpus",
    "gpus",
    "listen",
    "replica_port",
    "surge",
    "switches",
    "name",
}
"""Flags of `deploy` that are not settings of a server."""
_LOOK_S = 0.2
_MEET_S = 30.0
"""The time within which all switches and replicas must know each other."""


def add_arguments(parser: argparse.ArgumentParser, action: str) -> None:
    parser.add_argument(
        "--address",
        metavar="HOST:PORT",
        help="address of Ray; by default RAY_ADDRESS, or the cluster that was started on this machine",
    )
    parser.add_argument(
        "--name", default=None, help="name of the cluster, if there are several. Default: penstock."
    )
    if action == "deploy":
        _add_deploy_arguments(parser)
    elif action == "scale":
        parser.add_argument("REPLICAS", help="number of replicas; 2-8 scales between the two with the load")
    elif action == "drain":
        parser.add_argument("REPLICA", help="name of the replica, from `penstock cluster status`")


def _add_deploy_arguments(parser: argparse.ArgumentParser) -> None:
    add = parser.add_argument
    add(
        "--replicas",
        metavar="N|N-M",
        help="number of replicas; 2-8 scales between the two with the load. Default: 1.",
    )
    add(
        "--prefill-replicas",
        metavar="N",
        help="replicas in addition that compute long prompts for the others. Default: 0.",
    )
    add("--switches", metavar="N", help="number of switches. Default: one on each machine.")
    add("--cpus", metavar="N", help="cores that Ray reserves per replica. Default: --threads, or 1.")
    add(
        "--gpus",
        metavar="N",
        help="GPUs that Ray reserves per replica. Default: --tensor-parallel times --pipeline-parallel if Ray has GPUs,"
        " unless --device is cpu.",
    )
    add(
        "--listen",
        metavar="loopback|node",
        help="where replicas listen: on loopback only, or on their node's address, which switches on other nodes reach."
        " Default: loopback.",
    )
    add("--replica-port", metavar="PORT", help="first port that a replica tries. Default: any free port.")
    add(
        "--surge",
        action="store_const",
        const="true",
        help="when replacing replicas, start new ones before stopping old ones; there must be room for both",
    )


def deploy(flags: dict[str, str]) -> int:
    """
    Raises:
        OperatorError: a setting is wrong, or what was deployed does not start.
    """
    address = flags.pop("address", None)
    planned = {name: flags.pop(name) for name in _PLANNED & flags.keys()}
    settings = Settings.load(flags)
    configure_log("info", "plain", access=False)
    given = _given(flags, settings)
    with _ray(address) as deployments:
        plan = _plan(planned, given, settings, deployments)
        directory = deployments.find_directory(plan)
        if directory is not None:
            _check_same_model(plan, _plan_of(_get(directory.view.remote()), deployments))
        is_new = directory is None
        directory = directory or deployments.open_directory(plan, settings.cluster_secret)
        _get(directory.forget_failures.remote())
        deployments.serve.start(proxy_location="Disabled")
        log.info("deploying %s replicas; models take their time to load", plan.replicas)
        try:
            _run(plan, directory, deployments, with_switches=True)
        except OperatorError:
            if is_new:
                _delete(plan, deployments)
            raise
        return _print_status(plan, deployments)


def run(action: str, options: argparse.Namespace) -> int:
    """
    Raises:
        OperatorError: there is no such cluster, or something is not as the action needs it.
    """
    configure_log("info", "plain", access=False)
    with _ray(options.address) as deployments:
        plan = _parse({} if options.name is None else {"name": options.name}, deployments)
        directory = deployments.find_directory(plan)
        if directory is None:
            raise OperatorError(
                f"no cluster called {plan.name} runs here; `penstock cluster deploy` starts one"
            )
        if action == "scale":
            return _scale(plan, directory, options.REPLICAS, deployments)
        if action == "drain":
            return _drain(plan, directory, options.REPLICA, deployments)
        if action == "down":
            _delete(plan, deployments)
            print(f"{plan.name} is down")
            return 0
        return _print_status(plan, deployments)


# What is given


def _given(flags: Mapping[str, str], settings: Settings) -> dict[str, str]:
    """The settings of the replicas as text: flags, and variables, which a flag goes before."""
    variables = {
        name.removeprefix(ENV_PREFIX).lower(): text
        for name, text in os.environ.items()
        if name.startswith(ENV_PREFIX)
    }
    given = {**variables, **flags, "drain_timeout": f"{settings.drain_timeout:g}"}
    given.pop("cluster_secret", None)
    for name in ("replica", "role", "metrics_port", "grpc_port"):
        if getattr(settings, name) != Settings.model_fields[name].default:
            raise OperatorError(f"--{name.replace('_', '-')}: replicas cannot have it in common")
    for name in ("host", "port"):
        given.pop(name, None)
    if settings.log_level not in ("debug", "info"):
        raise OperatorError(
            "--log-level: must be info or debug, since where a replica listens is read in its log"
        )
    return given


def _plan(planned: dict[str, str], given: dict[str, str], settings: Settings, deployments: Any) -> Plan:
    values: dict[str, Any] = {"cpus": settings.threads or 1}
    if settings.device != "cpu" and deployments.ray.cluster_resources().get("GPU"):
        values["gpus"] = settings.tensor_parallel * settings.pipeline_parallel
    values |= planned
    return _parse(
        {**values, "settings": given, "host": settings.host, "port": settings.port, "by_command": True},
        deployments,
    )


def _parse(values: Mapping[str, Any], deployments: Any) -> Plan:
    try:
        plan: Plan = deployments.Plan.parse(values)
        return plan
    except deployments.PlanError as error:
        field, _, reason = str(error).partition(": ")
        raise OperatorError(f"--{field.replace('_', '-')}: {reason}" if reason else str(error)) from None


def _check_same_model(plan: Plan, running: Plan | None) -> None:
    """Switches leave out replicas of another model: clients would find none between the first and the last."""
    for name in ("model", "served_model_name"):
        new = plan.settings.get(name)
        old = new if running is None else running.settings.get(name)
        if new != old:
            raise OperatorError(
                f"{plan.name} serves {old or 'the demo model'}, and not {new or 'the demo model'}; deploy this beside "
                "it by another --name and --port, or end that first by `penstock cluster down`"
            )


# Ray


@contextmanager
def _ray(address: str | None) -> Iterator[Any]:
    """Connects to Ray; gives the module `cluster.deployments`.

    Raises:
        OperatorError: Ray is not installed, or does not run.
    """
    try:
        import ray
        import ray.serve
    except ImportError:
        raise OperatorError("Ray is not installed; `pip install 'penstock[cluster]'` installs it") from None
    for name in ("ray", "ray.serve"):
        logging.getLogger(name).setLevel(logging.ERROR)
    deployments = import_module("penstock.cluster.deployments")
    try:
        ray.init(
            address=address or "auto",
            namespace=deployments.NAMESPACE,
            log_to_driver=False,
            logging_level=logging.ERROR,
            configure_logging=False,
        )
    except (ConnectionError, ValueError, RuntimeError) as error:
        if address is None and isinstance(error, ConnectionError):
            raise OperatorError(
                "no Ray runs here; start it with `ray start --head`, or say where it is with --address"
            ) from None
        raise OperatorError(f"--address {address}: {error}") from None
    try:
        logging.getLogger("ray.serve").setLevel(logging.ERROR)
        yield deployments
    finally:
        ray.shutdown()


def _get(reference: Any) -> Any:
    import ray

    return ray.get(reference, timeout=_MEET_S)


def _run(plan: Plan, directory: Any, deployments: Any, *, with_switches: bool) -> None:
    """Deploys, and returns when all that is wanted is there.

    Raises:
        OperatorError: something did not start.
    """
    apps = [(plan.replicas_app, deployments.replicas)]
    if plan.prefill_replicas:
        apps.append((plan.prefill_app, deployments.prefill))
    elif plan.prefill_app in deployments.serve.status().applications:
        deployments.serve.delete(plan.prefill_app)
    if with_switches:
        apps.append((plan.switches_app, deployments.switches))
    for name, build in apps:
        try:
            built = build(plan.model_dump(mode="json"))
            deployments.serve.run(built, name=name, route_prefix=None)
        except deployments.PlanError as error:
            raise OperatorError(str(error)) from None
        except (RuntimeError, TimeoutError) as error:
            failures = _get(directory.view.remote()).failures
            raise OperatorError(failures[-1] if failures else f"{name}: {_last_line(error)}") from None
    _wait_until(lambda: _is_met(_get(directory.view.remote()), plan), _MEET_S + plan.stop_s)


def _last_line(error: Exception) -> str:
    return (str(error).strip() or type(error).__name__).splitlines()[-1]


def _is_met(view: ClusterView, plan: Plan) -> bool:
    """Returns whether there are as many replicas as wanted, and every switch knows them."""
    there = [one for one in view.replicas if not one.is_draining]
    return (
        plan.replicas.least <= len(there) - plan.prefill_replicas <= plan.replicas.most
        and len(there) == len(view.replicas)
        and bool(view.switches)
        and all(one.figures.get("replicas", 0) >= len(there) for one in view.switches)
    )


def _wait_until(is_so: Callable[[], bool], timeout_s: float) -> bool:
    end_s = time.monotonic() + timeout_s
    while not is_so():
        if time.monotonic() > end_s:
            return False
        time.sleep(_LOOK_S)
    return True


# The actions


def _plan_of(view: ClusterView, deployments: Any) -> Plan | None:
    """The plan that the replicas were deployed with."""
    plans = [one.plan for one in view.replicas if one.plan]
    return _parse(plans[-1], deployments) if plans else None


def _scale(plan: Plan, directory: Any, size: str, deployments: Any) -> int:
    running = _plan_of(_get(directory.view.remote()), deployments)
    if running is None:
        raise OperatorError(
            f"{plan.name} has no replica that could be asked what it was deployed with; deploy it again"
        )
    if not running.by_command:
        raise OperatorError(
            f"{plan.name} was deployed from a Serve config file; change `replicas` there, and `serve deploy` it"
        )
    changed = _parse({**running.model_dump(mode="json"), "replicas": size}, deployments)
    _run(changed, directory, deployments, with_switches=False)
    return _print_status(changed, deployments)


def _drain(plan: Plan, directory: Any, name: str, deployments: Any) -> int:
    view: ClusterView = _get(directory.view.remote())
    if not _get(directory.drain.remote(name)):
        names = ", ".join(one.name for one in view.replicas) or "none"
        raise OperatorError(f"{plan.name} has no replica {name}; there are {names}")
    running = _plan_of(view, deployments) or plan
    log.info("%s ends when its streams have, in at most %g s", name, running.drain_s)

    def is_gone() -> bool:
        return all(one.name != name for one in _get(directory.view.remote()).replicas)

    if not _wait_until(is_gone, running.stop_s + _MEET_S):
        raise OperatorError(f"{name} has not ended yet; `penstock cluster status` says how it does")
    print(f"{name} is drained; Ray starts another one in its place")
    return 0


def _delete(plan: Plan, deployments: Any) -> None:
    """Ends switches first, so that requests in progress finish while all replicas run."""
    serve = deployments.serve
    for name in (plan.switches_app, plan.replicas_app, plan.prefill_app):
        while name in serve.status().applications:
            try:
                serve.delete(name)
            except TimeoutError:
                log.info("%s: streams are still going on", name)
    directory = deployments.find_directory(plan)
    if directory is not None:
        deployments.ray.kill(directory)
    if not serve.status().applications:
        serve.shutdown()


def _print_status(plan: Plan, deployments: Any) -> int:
    """1 if not all is well."""
    view: ClusterView = _get(deployments.find_directory(plan).view.remote())
    applications = deployments.serve.status().applications
    is_well = True
    prefill_apps = [plan.prefill_app] if plan.prefill_app in applications else []
    for name in (plan.switches_app, *prefill_apps, plan.replicas_app):
        found = applications.get(name)
        state = found.status.value if found is not None else "NOT_STARTED"
        is_well = is_well and state == "RUNNING"
        print(f"{name}: {state.lower().replace('_', ' ')}")
        listed = {plan.switches_app: view.switches, plan.replicas_app: view.replicas}
        for one in listed.get(name, ()):
            print(f"  {one.url}  {one.name}  pid {one.pid} on {one.node}  {_doing(one)}")
    for failure in view.failures:
        print(f"  failed: {failure}")
    return 0 if is_well else 1


def _doing(report: Report) -> str:
    numbers = report.figures
    if report.is_draining:
        return "draining"
    if report.kind == "switch":
        return (
            f"knows {numbers.get('replicas', 0):.0f} replicas, {numbers.get('streams', 0):.0f} requests on their way, "
            f"{numbers.get('refused', 0):.1f} refused a second"
        )
    return (
        f"KV {numbers.get('kv', 0):.0%}, promises {numbers.get('kept', 0):.1f} kept and "
        f"{numbers.get('missed', 0):.1f} missed a second"
    )
