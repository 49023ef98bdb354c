"""The memory that a process may take, by files of a machine and of its control groups."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.engine import free_memory
from penstock.engine.free_memory import available_bytes


def write(folder: Path, files: dict[str, str]) -> None:
    for name, content in files.items():
        (folder / name).parent.mkdir(exist_ok=True, parents=True)
        (folder / name).write_text(content)


@pytest.mark.parametrize(
    ("files", "expected"),
    [
        ({}, 8 << 20),
        ({"memory.max": "max\n", "memory.current": "5\n", "memory.stat": ""}, 8 << 20),
        (
            {"memory.max": "1000\n", "memory.current": "700\n", "memory.stat": "anon 1\ninactive_file 50\n"},
            350,
        ),
        ({"memory.max": f"{1 << 40}", "memory.current": "0", "memory.stat": ""}, 8 << 20),
        (
            {
                "memory/memory.limit_in_bytes": "1000",
                "memory/memory.usage_in_bytes": "900",
                "memory/memory.stat": "total_inactive_file 30\n",
            },
            130,
        ),
    ],
)
def test_the_container_has_its_say(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, files: dict[str, str], expected: int
) -> None:
    write(tmp_path, {"meminfo": "MemTotal: 16384 kB\nMemAvailable:    8192 kB\n", **files})
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    assert available_bytes() == expected


def test_without_proc_the_whole_machine_counts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(free_memory, "_CGROUP", tmp_path)
    monkeypatch.setattr(free_memory, "_MEMINFO", tmp_path / "meminfo")
    assert available_bytes() > 1 << 26


def test_this_machine_has_some() -> None:
    assert 1 << 26 < available_bytes() < 1 << 50
