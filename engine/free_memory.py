"""The memory that this process may take."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

_CGROUP = Path("/sys/fs/cgroup")
_MEMINFO = Path("/proc/meminfo")


def available_bytes() -> int:
    """Returns the bytes of this machine and this container that are free, or that the system can free without harm."""
    return min([_free_in_machine(), *_free_in_cgroups()])


def _free_in_machine() -> int:
    try:
        for line in _MEMINFO.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                return int(line.split()[1]) * 1024
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _free_in_cgroups() -> Iterator[int]:
    """Yields a container's limit less its use, by cgroup v2 and v1, without file cache that can be given up."""
    for folder, limit, used, cache in (
        (_CGROUP, "memory.max", "memory.current", "inactive_file"),
        (_CGROUP / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        try:
            bound = (folder / limit).read_text(encoding="ascii").strip()
            stat = (folder / "memory.stat").read_text(encoding="ascii").splitlines()
            reclaimable = next((int(line.split()[1]) for line in stat if line.startswith(cache + " ")), 0)
            if bound.isdigit():
                yield int(bound) - int((folder / used).read_text(encoding="ascii")) + reclaimable
        except OSError:
            continue
