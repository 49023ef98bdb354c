"""The cores that a process may use, by files of control groups as Kubernetes, Docker and systemd lay them."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from penstock.engine.cores import num_cores, num_nodes, stay_on_node


@pytest.fixture(autouse=True)
def _a_node_of_64_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        os, "sched_getaffinity", lambda pid: {*range(64)} if pid == 0 else set(), raising=False
    )


def proc(tmp_path: Path, cgroup: str, mounts: str, quotas: dict[str, str]) -> Path:
    """A folder as /proc/self; `mounts` are lines of mountinfo with {} for the folder that has the control groups."""
    for name, text in quotas.items():
        file = tmp_path / "sys" / name
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text + "\n")
    (tmp_path / "cgroup").write_text(cgroup)
    (tmp_path / "mountinfo").write_text(mounts.format(tmp_path / "sys"))
    return tmp_path


V2 = "31 24 0:27 / {} ro,nosuid shared:9 - cgroup2 cgroup rw,nsdelegate\n"
ROOT = "27 1 254:0 / / rw - ext4 /dev/vda rw\n"


@pytest.mark.parametrize(
    ("quotas", "cores"),
    [
        ({"cpu.max": "400000 100000"}, 4),
        ({"cpu.max": "max 100000"}, 64),
        ({"cpu.max": "250000 100000"}, 2),  # the half is left to other threads
        ({"cpu.max": "50000 100000"}, 1),
        ({"cpu.max": "9900000 100000"}, 64),
        ({}, 64),
    ],
)
def test_a_container_has_its_quota_of_version_2(tmp_path: Path, quotas: dict[str, str], cores: int) -> None:
    assert num_cores(proc(tmp_path, "0::/\n", ROOT + V2, quotas)) == cores


def test_a_group_may_have_colons_in_its_name(tmp_path: Path) -> None:
    group = "/kubepods.slice/pod1.slice:cri-containerd:0123"
    quotas = {f"{group[1:]}/cpu.max": "400000 100000"}
    assert num_cores(proc(tmp_path, f"0::{group}\n", V2, quotas)) == 4


def test_the_tightest_of_a_service_and_the_slices_around_it_counts(tmp_path: Path) -> None:
    quotas = {
        "cpu.max": "100000 100000",  # of the root, which has none on a real machine: read all the same
        "system.slice/cpu.max": "300000 100000",
        "system.slice/penstock.service/cpu.max": "800000 100000",
    }
    group = "0::/system.slice/penstock.service\n"
    assert num_cores(proc(tmp_path, group, V2, quotas)) == 1
    quotas["cpu.max"] = "max 100000"
    assert num_cores(proc(tmp_path, group, V2, quotas)) == 3


@pytest.mark.parametrize(("quota", "cores"), [("400000", 4), ("-1", 64)])
def test_a_container_has_its_quota_of_version_1(tmp_path: Path, quota: str, cores: int) -> None:
    group = "/docker/0123"
    cgroup = (
        f"5:cpuset:{group}\n4:cpu,cpuacct:{group}\n1:name=systemd:{group}\n0::/system.slice/docker.service\n"
    )
    mounts = (
        f"33 30 0:29 {group} {{0}}/cpuset ro - cgroup cgroup rw,cpuset\n"
        f"34 30 0:30 {group} {{0}}/cpu,cpuacct ro - cgroup cgroup rw,cpu,cpuacct\n"
    )
    quotas = {"cpu,cpuacct/cpu.cfs_quota_us": quota, "cpu,cpuacct/cpu.cfs_period_us": "100000"}
    assert num_cores(proc(tmp_path, cgroup, mounts, quotas)) == cores


def test_a_group_outside_of_what_is_mounted_is_the_one_that_is_mounted(tmp_path: Path) -> None:
    assert num_cores(proc(tmp_path, "0::/../other\n", V2, {"cpu.max": "200000 100000"})) == 2


def test_an_affinity_below_the_quota_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: {3, 5})
    assert num_cores(proc(tmp_path, "0::/\n", V2, {"cpu.max": "400000 100000"})) == 2


def test_where_there_is_no_proc_all_cores_count(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert num_cores(tmp_path / "none") == 64
    monkeypatch.delattr(os, "sched_getaffinity")
    for known, cores in ((8, 8), (None, 1)):
        monkeypatch.setattr(os, "cpu_count", lambda known=known: known)
        assert num_cores(tmp_path / "none") == cores


# Nodes of memory


def nodes(tmp_path: Path, *lists: str) -> Path:
    """A folder as /sys/devices/system/node."""
    for number, listed in enumerate(lists):
        folder = tmp_path / f"node{number}"
        folder.mkdir()
        (folder / "cpulist").write_text(listed + "\n")
    (tmp_path / "possible").write_text("0-1\n")
    return tmp_path


@pytest.mark.parametrize(
    ("lists", "num"),
    [((), 1), (("0-63",), 1), (("0-31", "32-63"), 2), (("0-63", ""), 1), (("0", "64-127"), 1)],
)
def test_a_node_counts_if_a_core_of_it_may_be_used(tmp_path: Path, lists: tuple[str, ...], num: int) -> None:
    """Nodes without cores are memory alone; the last of these machines has cores that the process may not use."""
    assert num_nodes(nodes(tmp_path, *lists)) == num


def test_a_thread_stays_on_those_cores_of_a_node_that_it_may_use(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    kept: list[set[int]] = []
    monkeypatch.setattr(os, "sched_setaffinity", lambda _, cores: kept.append(cores), raising=False)
    folder = nodes(tmp_path, "0-15,32-47", "16-31,48-79", "90")
    for number in range(4):
        stay_on_node(number, folder)
    assert kept == [{*range(16), *range(32, 48)}, {*range(16, 32), *range(48, 64)}, set(), set()]


def test_a_machine_has_its_nodes() -> None:
    assert num_nodes() >= 1


def test_no_thread_can_be_kept_on_no_core(tmp_path: Path) -> None:
    before = os.sched_getaffinity(0)
    with pytest.raises(OSError, match="Invalid argument"):
        stay_on_node(5, tmp_path)
    assert os.sched_getaffinity(0) == before
