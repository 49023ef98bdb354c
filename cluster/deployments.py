"""Replicas and switches as deployments of Ray Serve, which starts them, looks after them, replaces and scales them.

Serve carries none of their traffic: each is a process that listens itself, the very one of a single machine. What Ray
runs beside it is its keeper, which starts it, tells the directory of it, and ends with it.
"""

from __future__ import annotations

import asyncio
import contextlib
import http.client
import json
import os
import secrets
import socket
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from time import monotonic
from typing import Any
from urllib.request import ProxyHandler, Request, build_opener

import ray
from ray import serve
from ray.exceptions import RayError
from ray.serve.config import AutoscalingConfig, AutoscalingPolicy

from penstock.cluster import scaling
from penstock.cluster.child import Child, ChildFailed
from penstock.cluster.directory import BEAT_S, BeatReply, Directory, ModelMismatch, Report
from penstock.cluster.figures import LoadRates
from penstock.cluster.plan import OF_SWITCH, Plan, PlanError
from penstock.gateway.endpoints.state import PATH, SECRET_HEADER
from penstock.priority.routing.state import Role

NAMESPACE = "penstock"
"""The namespace of Ray that the directory's name is in."""
_ASK_S = 5.0
_HEALTH_S = 1.0
_MEET_S = 10.0
"""The longest that a new replica waits for switches: one of another model will never know it."""
_LOOK_S = 0.1
_NUM_PORTS = 100
"""The number of ports that are tried, from the first one on."""
_OPENER = build_opener(ProxyHandler({}))
"""A client that never asks a proxy: all that it asks is on this machine, or in the cluster."""


def find_directory(plan: Plan) -> Any | None:
    """Returns the handle of a cluster's directory; None if there is no such cluster."""
    try:
        return ray.get_actor(plan.directory, NAMESPACE)
    except ValueError:
        return None


def open_directory(plan: Plan, secret: str | None = None) -> Any:
    """Returns the handle of a cluster's directory, which is started if there is none, with this secret or a new one."""
    directory = find_directory(plan)
    if directory is not None:
        return directory
    options = {
        "name": plan.directory,
        "namespace": NAMESPACE,
        "lifetime": "detached",
        "get_if_exists": True,
        "max_restarts": -1,
        "num_cpus": 0,
    }
    return ray.remote(Directory).options(**options).remote(secret or secrets.token_hex(16))


def replicas(args: dict[str, Any]) -> Any:
    """Returns the application of the replicas, which Serve's config files name; `args` make a `cluster.plan.Plan`."""
    plan = _reachable(args)
    options: dict[str, Any] = {"num_replicas": plan.replicas.least}
    if not plan.replicas.is_fixed:
        policy = AutoscalingPolicy(policy_function=scaling.policy)
        bounds = {"min_replicas": plan.replicas.least, "max_replicas": plan.replicas.most}
        options = {"autoscaling_config": AutoscalingConfig(policy=policy, **bounds)}
    return _replicas(ReplicaKeeper, plan, options)


def prefill(args: dict[str, Any]) -> Any:
    """Returns the application of the replicas that are for prompts alone, like `replicas`."""
    plan = _reachable(args)
    return _replicas(PrefillKeeper, plan, {"num_replicas": plan.prefill_replicas})


def _reachable(args: dict[str, Any]) -> Plan:
    """Returns the plan of replicas that switches can reach; raises PlanError."""
    plan = Plan.parse(args)
    num_machines = len(machines())
    if num_machines > 1 and plan.listen == "loopback":
        raise PlanError(
            f"replicas on {num_machines} machines cannot be reached at their loopback addresses; let them listen on "
            "those of their machines (--listen node, or listen: node), in a network that only you can reach"
        )
    open_directory(plan)
    return plan


def _replicas(keeper: type[Keeper], plan: Plan, options: dict[str, Any]) -> Any:
    if plan.surge:
        # Processes that replace others need room beside them: without it they would be waited for in vain.
        options["max_surge_percent"] = 100
    resources = {"num_cpus": plan.cpus, "num_gpus": plan.gpus}
    return _application(keeper, plan, plan.replica_version(), resources, **options)


def switches(args: dict[str, Any]) -> Any:
    """Returns the application of the switches, like `replicas`."""
    plan = Plan.parse(args)
    open_directory(plan)
    num_machines = len(machines())
    num = plan.switches or num_machines
    options = {"num_replicas": num, "max_replicas_per_node": -(-num // num_machines)}
    return _application(SwitchKeeper, plan, plan.switch_version(), {"num_cpus": 0}, **options)


def machines() -> list[str]:
    """Returns the addresses of the nodes of this Ray cluster that are alive."""
    return [node["NodeManagerAddress"] for node in ray.nodes() if node["Alive"]]


def _application(
    keeper: type[Keeper], plan: Plan, version: str, resources: dict[str, Any], **options: Any
) -> Any:
    deployment = serve.deployment(
        keeper,
        ray_actor_options=resources,
        health_check_period_s=_HEALTH_S,
        graceful_shutdown_wait_loop_s=0.1,  # there are no requests of Serve's that it could wait for
        graceful_shutdown_timeout_s=plan.stop_s,
        max_constructor_retry_count=2,
        **options,
    )
    # Without a version Serve replaces all processes whenever the application is deployed.
    return deployment.options(version=version, _internal=True).bind(plan.model_dump(mode="json"))


class Keeper:
    """The actor that Ray runs for each process of Penstock's."""

    _kind: Any
    _child: Child | None = None

    async def __init__(self, plan: dict[str, Any]) -> None:  # type: ignore[misc]  # Serve awaits it
        """Starts the process, and returns when it is ready.

        Raises:
            ChildFailed, ModelMismatch: the process does not start, or does not fit; the directory has been told why.
        """
        self._plan = Plan.parse(plan)
        self._directory = ray.get_actor(self._plan.directory, NAMESPACE)
        self._secret = await self._directory.secret.remote()
        self._name = f"{self._plan.name}-{serve.get_replica_context().replica_id.unique_id}"
        self._node: str = ray.util.get_node_ip_address()
        self._figures = LoadRates()
        self._numbers: dict[str, float] = defaultdict(float)
        self._identity = ""
        self._is_stopping = False
        """Serve is ending this actor."""
        self._is_draining = False
        """The operator is ending the process, and Serve is to replace it."""
        self._tasks: list[asyncio.Task[None]] = []
        try:
            self._child = await self._start()
            await self._join()
        except (ChildFailed, ModelMismatch) as error:
            if self._child is not None:
                await self._child.stop(self._plan.stop_s)
            await self._leave()
            reason = getattr(error, "cause", error)  # what an actor raises comes with its traceback
            await self._directory.note_failure.remote(f"{self._name} on {self._node}: {reason}")
            raise
        self._tasks = [
            asyncio.create_task(self._report_always()),
            asyncio.create_task(self._end_with_child()),
        ]

    async def __del__(self) -> None:
        """Ends the process; Serve awaits this for as long as `graceful_shutdown_timeout_s`."""
        await self.stop()

    async def stop(self) -> None:
        self._is_stopping = True
        if self._child is not None:
            await self._child.stop(self._plan.stop_s)
            await self._leave()
        for task in self._tasks:
            task.cancel()

    async def check_health(self) -> None:
        """Raises if the process is not well; Serve replaces it after the third time."""
        assert self._child is not None
        if not self._is_stopping and self._child.is_running:
            await asyncio.to_thread(_get, f"{self._child.url}/health")

    async def record_autoscaling_stats(self) -> dict[str, float]:
        return self._numbers

    async def _start(self) -> Child:
        raise NotImplementedError

    async def _join(self) -> None:
        """Tells the directory for the first time."""
        await self._beat()

    async def _start_on(
        self, host: str, first: int, command: str, variables: Mapping[str, str], *arguments: str
    ) -> Child:
        """Starts a process on the first port that it can have."""
        common = {"PENSTOCK_CLUSTER_SECRET": self._secret, "PENSTOCK_HOST": host}
        failure = ChildFailed(f"no port of {host} from {first} to {first + _NUM_PORTS - 1} is free")
        for port in _free_ports(host, first):
            try:
                return await Child.start(
                    [command, *arguments], {**variables, **common, "PENSTOCK_PORT": str(port)}
                )
            except ChildFailed as error:
                failure = error
                if "listens there already" not in str(error):  # somebody else was quicker
                    break
        raise failure

    async def _beat(self) -> BeatReply:
        assert self._child is not None
        report = Report(
            kind=self._kind,
            name=self._name,
            url=self._child.url,
            node=self._node,
            pid=self._child.pid,
            identity=self._identity,
            plan=self._plan.model_dump(mode="json") if self._kind == "replica" else {},
            figures=self._numbers,
            is_draining=self._is_draining or self._is_stopping,
        )
        answer: BeatReply = await self._directory.beat.remote(report)
        return answer

    async def _report_always(self) -> None:
        """Tells the directory every second that the process is there; nothing changes while the directory is gone."""
        assert self._child is not None
        while True:
            await asyncio.sleep(BEAT_S)
            with contextlib.suppress(OSError, http.client.HTTPException, RayError):
                text = await asyncio.to_thread(_get, f"{self._child.url}/metrics")
                self._numbers = self._read(text.decode())
                self._take(await self._beat())

    def _read(self, metrics: str) -> dict[str, float]:
        raise NotImplementedError

    def _take(self, answer: BeatReply) -> None:
        raise NotImplementedError

    async def _end_with_child(self) -> None:
        """Ends this actor when its process has ended, so that Serve starts another one at once."""
        assert self._child is not None
        status = await self._child.ended()
        if self._is_stopping:
            return
        if not self._is_draining:
            how = f"was killed by signal {-status}" if status < 0 else f"ended: {self._child.last_line}"
            line = f"{self._name} on {self._node} {how}"
            with contextlib.suppress(RayError):
                await self._directory.note_failure.remote(line)
        await self._leave()
        sys.stderr.flush()
        os._exit(0)

    async def _leave(self) -> None:
        with contextlib.suppress(RayError):
            await self._directory.leave.remote(self._name)


class ReplicaKeeper(Keeper):
    """Keeps a `penstock serve`."""

    _kind = "replica"

    @property
    def _role(self) -> Role:
        return Role.DECODE if self._plan.prefill_replicas else Role.BOTH

    async def _start(self) -> Child:
        plan = self._plan
        host = self._node if plan.listen == "node" else "127.0.0.1"
        variables = plan.environment() | {"PENSTOCK_REPLICA": self._name, "PENSTOCK_ROLE": self._role}
        return await self._start_on(host, plan.replica_port, "serve", variables)

    async def _join(self) -> None:
        assert self._child is not None
        state = await asyncio.to_thread(_get, self._child.url + PATH, {SECRET_HEADER: self._secret})
        self._identity = json.loads(state)["model"]
        # Serve may end another replica as soon as this one is there: by then the switches must know it.
        end_s = monotonic() + _MEET_S
        while (await self._beat()).num_switches > self._numbers["switches"] and monotonic() < end_s:
            await asyncio.sleep(_LOOK_S)
            self._numbers = self._read((await asyncio.to_thread(_get, f"{self._child.url}/metrics")).decode())

    def _read(self, metrics: str) -> dict[str, float]:
        return self._figures.of_replica(metrics)

    def _take(self, answer: BeatReply) -> None:
        self._numbers["missed"] += answer.refused
        if answer.drain and not self._is_draining:
            assert self._child is not None
            self._is_draining = True
            self._child.ask_to_end()


class PrefillKeeper(ReplicaKeeper):
    """Keeps a `penstock serve` for prompts alone."""

    @property
    def _role(self) -> Role:
        return Role.PREFILL


class SwitchKeeper(Keeper):
    """Keeps a `penstock switch`, and the file that it reads the replicas from."""

    _kind = "switch"

    async def _start(self) -> Child:
        plan = self._plan
        self._folder = tempfile.TemporaryDirectory(prefix="penstock-switch-")
        self._file = Path(self._folder.name, "replicas")
        self._file.touch()
        variables = plan.environment(OF_SWITCH)
        return await self._start_on(
            plan.host, plan.port, "switch", variables, "--replicas-file", str(self._file)
        )

    async def _join(self) -> None:
        self._take(await self._beat())

    async def _leave(self) -> None:
        self._folder.cleanup()
        await super()._leave()

    def _read(self, metrics: str) -> dict[str, float]:
        return self._figures.of_switch(metrics)

    def _take(self, answer: BeatReply) -> None:
        text = "".join(f"{url}\n" for url in sorted(answer.replicas))
        if text != self._file.read_text():
            new = self._file.with_suffix(".new")
            new.write_text(text)
            new.replace(self._file)


def _get(url: str, headers: Mapping[str, str] | None = None) -> bytes:
    """Returns the body; raises OSError or HTTPException without an answer, or for one that is an error."""
    with _OPENER.open(Request(url, headers=dict(headers or {})), timeout=_ASK_S) as reply:
        body: bytes = reply.read()
        return body


def _free_ports(host: str, first: int) -> Iterator[int]:
    """Yields the ports from the first one on that nobody listens on, or 0, for which the system finds one."""
    if first == 0:
        yield 0
        return
    for port in range(first, min(first + _NUM_PORTS, 65536)):
        family, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, socket.SOCK_STREAM) as tried:
            tried.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                tried.bind(address)
            except OSError:
                continue
        yield port
