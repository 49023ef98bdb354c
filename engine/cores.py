"""The number of cores that this process may use."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path


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
