"""Commands that run side by side: what one that fails, or a wait that ends, means for the others."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from penstock.engine.kernels.cpu import commands
from penstock.engine.kernels.cpu.commands import Commands

WAITING = "until [ -s {} ]; do sleep 0.01; done; "


@pytest.fixture
def two(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[Commands]:
    """Commands of which two run at a time, in an empty folder."""
    monkeypatch.setattr(commands, "num_cores", lambda: 2)
    monkeypatch.chdir(tmp_path)
    with Commands(tmp_path, timeout_s=300) as running:
        yield running


def shell(script: str) -> list[str]:
    return ["sh", "-c", script]


def has_ended(path: Path) -> bool:
    """Whether the process whose number a file has is no more, or waits for somebody to ask how it ended."""
    try:
        state = Path(f"/proc/{path.read_text().strip()}/stat").read_text().rpartition(")")[2].split()[0]
    except (FileNotFoundError, ProcessLookupError):
        return True
    return state == "Z"


@pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")
def test_one_that_fails_stops_the_others_and_what_these_started(two: Commands, tmp_path: Path) -> None:
    running = shell("sleep 1000 & echo $! > child; wait")
    failing = shell(WAITING.format("child") + "echo why >&2; exit 3")
    with pytest.raises(subprocess.CalledProcessError) as caught:
        two.run([running, failing])
    assert (caught.value.returncode, caught.value.stderr) == (3, "why\n")
    while not has_ended(tmp_path / "child"):  # it is killed, and may take a moment
        os.sched_yield()


def test_one_that_two_want_runs_once_and_is_not_stopped_for_one_of_them(
    two: Commands, tmp_path: Path
) -> None:
    both = shell("echo >> runs; " + WAITING.format("go"))
    with ThreadPoolExecutor() as threads:
        first = threads.submit(two.run, [both])
        with pytest.raises(subprocess.CalledProcessError):
            two.run([both, shell(WAITING.format("runs") + "exit 1")])
        (tmp_path / "go").write_text("now")
        first.result()
    two.run([both])
    assert (tmp_path / "runs").read_text() == "\n"


def test_one_that_was_stopped_can_run_again(two: Commands, tmp_path: Path) -> None:
    again = shell("echo >> runs; " + WAITING.format("go"))
    with pytest.raises(subprocess.CalledProcessError):
        two.run([again, shell(WAITING.format("runs") + "exit 1")])
    (tmp_path / "go").write_text("now")
    two.run([again])
    assert (tmp_path / "runs").read_text() == "\n\n"


def test_one_that_takes_too_long_or_does_not_start_is_an_error(tmp_path: Path) -> None:
    with Commands(tmp_path, timeout_s=0.1) as running:
        with pytest.raises(subprocess.TimeoutExpired):
            running.run([["sleep", "1000"]])
        with pytest.raises(FileNotFoundError):
            running.run([["/nowhere"]])
