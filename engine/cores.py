"""The cores that this process may use: how many, and on which nodes of memory."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_SYSTEM = Path("/sys/devices/system/node")


def num_cores(proc: Path = Path("/proc/self")) -> int:
    """The cores of the process's affinity, but no more than the CPU quota of its control groups.

    A container that is limited to 4 CPUs still sees all 64 cores of its node; 64 threads there would use up the quota
    early in each period and then all stand still. A part of a CPU is left to the other threads of the process.

    Args:
        proc: the process's folder in /proc.
    """
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, int(min([cores, *_quotas(proc)])))


def _quotas(proc: Path) -> Iterator[float]:
    """The CPU quotas of the process's control groups and of the groups around them, version 1 and 2."""
    for folder, mount in _groups(proc):
        for group in (folder, *folder.parents):
            if (quota := _quota(group)) is not None:
                yield quota
            if group == mount:
                break


def _groups(proc: Path) -> Iterator[tuple[Path, Path]]:
    """The folders of the process's control groups for CPU time, each with the place where its hierarchy is mounted."""
    try:
        groups = (proc / "cgroup").read_text(encoding="utf-8").splitlines()
        mounts = (proc / "mountinfo").read_text(encoding="utf-8").splitlines()
    except OSError:  # not Linux
        return
    paths: dict[str, str] = {}  # by controller; version 2 names none
    for line in groups:
        _, controllers, path = line.split(":", 2)
        paths |= dict.fromkeys(controllers.split(","), path)
    for line in mounts:
        before, _, after = line.partition(" - ")
        root, mount = before.split()[3:5]
        kind, _, options = after.split(" ", 2)
        is_cpu = kind == "cgroup" and "cpu" in options.split(",")
        if is_cpu or kind == "cgroup2":
            # Without a namespace of its own, a container sees its group's path on the host, and only its group mounted.
            group = Path(paths.get("cpu" if is_cpu else "", root))
            inside = group.relative_to(root) if group.is_relative_to(root) else Path()
            yield Path(mount) / inside, Path(mount)


def _quota(group: Path) -> float | None:
    """CPUs that a control group may use at once, None if it is not limited or does not exist."""
    try:
        if (group / "cpu.max").exists():
            quota, _, period = (group / "cpu.max").read_text(encoding="utf-8").partition(" ")
        else:
            quota = (group / "cpu.cfs_quota_us").read_text(encoding="utf-8")
            period = (group / "cpu.cfs_period_us").read_text(encoding="utf-8")
    except OSError:
        return None
    return int(quota) / int(period) if quota.strip() not in ("max", "-1") else None


def num_nodes(system: Path = _SYSTEM) -> int:
    """The NUMA nodes that have a core which this thread may use; 1 if the system does not say."""
    numbers = [int(folder.name.removeprefix("node")) for folder in system.glob("node[0-9]*")]
    return max(1, sum(bool(node_cores(number, system)) for number in numbers))


def node_cores(node: int, system: Path = _SYSTEM) -> set[int]:
    """The cores of a NUMA node that this thread may use; none if there is no such node.

    Args:
        system: the folder that has one for each node, whose cores it lists as 0-15,32-47.
    """
    if not hasattr(os, "sched_getaffinity"):
        return set()
    try:
        listed = (system / f"node{node}" / "cpulist").read_text(encoding="utf-8").strip()
    except OSError:
        return set()
    ranges = (part.partition("-") for part in listed.split(",") if part)
    cores = {core for first, _, last in ranges for core in range(int(first), int(last or first) + 1)}
    return cores & os.sched_getaffinity(0)


def stay_on_node(node: int, system: Path = _SYSTEM) -> None:
    """Keeps this thread, and those that it starts from now on, on the cores of a NUMA node.

    Linux gives memory on the node of the thread that touches it first, so that the data that they load lies there, too.

    Raises:
        OSError: no core of the node may be used.
    """
    os.sched_setaffinity(0, node_cores(node, system))
