"""The machine and the tests of a card are told, of a card that is not there."""

from __future__ import annotations

import json
import os
import platform
import shutil
import subprocess
import sys
import sysconfig
from io import TextIOWrapper
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch

from loadtests.gpu import cuda_tests, environment, figures, sizes
from loadtests.gpu.packages import ROOT
from loadtests.gpu.parts import Outcome
from penstock.engine.cores import num_cores

ANSWER = "570.1, 1980 MHz, 1980 MHz, 2619 MHz, 700.00 W, 31, Disabled\nof another card"


@pytest.fixture
def outcome(monkeypatch: pytest.MonkeyPatch) -> Outcome:
    found = Outcome("environment")
    monkeypatch.setattr(figures, "_tell", lambda said: found.take(json.dumps(said)))
    return found


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    """What commands answer: a status and a text, or an error."""
    answers: dict[str, Any] = {"git": (0, "abc1234\n"), "nvidia-smi": (0, f"{ANSWER}\n")}

    def run(command: list[str], **options: object) -> subprocess.CompletedProcess[str]:
        assert options == {"capture_output": True, "text": True, "check": False, "timeout": 10}
        answer = answers[command[0]]
        if isinstance(answer, Exception):
            raise answer
        return subprocess.CompletedProcess(command, *answer)

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setattr(shutil, "which", lambda name: f"/bin/{name}" if name in answers else None)
    monkeypatch.setattr(environment, "num_cores", lambda: 16)
    monkeypatch.setattr(environment, "version", {"triton": "3.5", "transformers": "5.0"}.__getitem__)
    monkeypatch.setattr(sysconfig, "get_path", lambda _: "/nowhere/include")
    monkeypatch.setenv("CC", "")
    return answers


def tell(mode: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(environment, "parse_arguments", lambda: sizes.Arguments(mode, Path("/nowhere"), ()))
    environment.main()


def test_a_cpu_is_told_with_its_versions(
    outcome: Outcome, commands: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    tell("dry", monkeypatch)
    missing = "but /nowhere/include/Python.h is missing"
    known = {
        "device": "a CPU",
        "python": platform.python_version(),
        "torch": f"{torch.__version__}, CUDA {torch.version.cuda}",
        "triton": "3.5",
        "transformers": "5.0",
        "host": f"{platform.machine()}, 16 cores",
        "C compiler, which Triton needs": f"none, {missing}",
        "commit": "abc1234",
    }
    assert outcome.facts == known
    assert outcome.figures == []
    commands |= {"git": (128, "no repository"), "clang": None}
    outcome.facts.clear()
    tell("dry", monkeypatch)
    del known["commit"]
    assert outcome.facts == known | {"C compiler, which Triton needs": f"/bin/clang, {missing}"}


def test_a_compiler_is_the_one_that_is_wanted_or_found(
    commands: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "Python.h").touch()
    monkeypatch.setattr(sysconfig, "get_path", lambda _: str(tmp_path))
    commands |= {"gcc": None, "clang": None}
    assert environment._compiler() == "/bin/gcc"
    monkeypatch.setenv("CC", "/opt/cc")
    assert environment._compiler() == "/opt/cc"


def test_a_package_that_is_not_there_has_no_version() -> None:
    assert environment._version("nowhere-at-all") == "none"


@pytest.mark.parametrize(
    "answer", [(0, " \n"), (1, "text"), OSError("no"), subprocess.TimeoutExpired("git", 10)]
)
def test_a_command_that_says_nothing_is_let_be(commands: dict[str, Any], answer: object) -> None:
    commands["git"] = answer
    assert environment._output(["git"]) is None
    assert environment._output(["nowhere"]) is None


def test_a_card_is_told_with_its_clocks_and_memory(
    outcome: Outcome,
    commands: dict[str, Any],
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    properties = SimpleNamespace(major=9, minor=0, multi_processor_count=132)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda _: "A Card")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: properties)
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (79 << 30, 80 << 30))
    tell("quick", monkeypatch)
    card = {
        "compute capability": "9.0",
        "multiprocessors": "132",
        "memory": "80.0 GiB, 79.0 GiB free",
    }
    clocks = {
        "driver": "570.1",
        "SM clock": "1980 MHz",
        "SM clock, most": "1980 MHz",
        "memory clock": "2619 MHz",
        "power limit": "700.00 W",
        "temperature, C": "31",
        "MIG": "Disabled",
    }
    assert outcome.facts["device"] == "A Card"
    assert dict(list(outcome.facts.items())[8:]) == card | clocks
    assert [(figure.name, figure.value, figure.unit) for figure in outcome.figures] == [
        ("free memory", 79, "GiB")
    ]
    del commands["nvidia-smi"]
    outcome.facts.clear()
    tell("full", monkeypatch)
    assert dict(list(outcome.facts.items())[8:]) == card
    assert capsys.readouterr().err.endswith("  nvidia-smi says nothing: no clocks in the report\n")


def cuda_run(
    mode: str, folder: str, monkeypatch: pytest.MonkeyPatch, *, has_xdist: bool = True
) -> tuple[int, list[str]]:
    """The status, and the options of pytest."""
    found: list[str] = []

    def main(options: list[str], plugins: list[cuda_tests.Tally]) -> int:
        assert plugins[0]._folder == folder
        assert sys.stdout is sys.stderr
        found.extend(options)
        plugins[0].pytest_sessionfinish()
        plugins[0]._report.close()
        return 1

    monkeypatch.setattr(
        cuda_tests, "parse_arguments", lambda: sizes.Arguments(mode, Path("/nowhere"), (folder,))
    )
    monkeypatch.setattr(
        cuda_tests, "find_spec", lambda name: "here" if has_xdist and name == "xdist" else None
    )
    monkeypatch.setattr(pytest, "main", main)
    monkeypatch.chdir("/")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    status = cuda_tests.main()
    assert Path.cwd() == ROOT
    return status, found


def test_tests_run_in_several_processes_with_kernels_that_are_compiled(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    options = ["-q", "-W", "default", "-p", "no:cacheprovider", "tests/gpu"]
    options += ["--ignore=tests/engine/kernels/triton/test_compiling.py"]
    at_once = ["-n", str(min(14, num_cores())), "--dist", "worksteal"]
    assert cuda_run("quick", "tests/gpu", monkeypatch) == (1, [*options, *at_once])
    assert os.environ["TRITON_INTERPRET"] == "0"
    assert len(capfd.readouterr().out.splitlines()) == 2, "counts are told past pytest's own output"
    assert cuda_run("full", "tests/gpu", monkeypatch, has_xdist=False) == (1, options)
    last = max(str(path.relative_to(ROOT)) for path in (ROOT / "tests/gpu").glob("test_*.py"))
    assert cuda_run("dry", "tests/gpu", monkeypatch)[1][5:-1] == [last]
    assert os.environ["TRITON_INTERPRET"] == "1"


def test_tests_are_counted_and_the_first_failed_ones_are_named(outcome: Outcome) -> None:
    tally = cuda_tests.Tally("tests/gpu")
    tally._report.close()
    tally._report = cast(TextIOWrapper, sys.stdout)

    def report(outcome: str, when: str = "call", longrepr: object = None, name: str = "a") -> None:
        tally.pytest_runtest_logreport(
            pytest.TestReport(name, (name, 0, ""), {}, outcome, longrepr, when)  # type: ignore[arg-type]
        )

    def counts() -> dict[str, float]:
        return {figure.name: figure.value for figure in outcome.figures}

    report("passed", "setup")
    assert counts() == {}
    report("passed")
    assert counts() == {"tests/gpu: passed": 1, "tests/gpu: failed": 0}
    report("failed", "setup", "x" * 301)
    crash = SimpleNamespace(path="a.py", lineno=3, message="wrong")
    report("failed", "call", SimpleNamespace(reprcrash=crash), "b")
    for number in range(19):
        report("failed", "call", "no", f"c{number}")
    for reason in ("Skipped: one card", "Skipped: no cards", "Skipped: one card"):
        report("skipped", "setup", ("a.py", 1, reason))
    assert counts() == {"tests/gpu: passed": 1, "tests/gpu: failed": 21}
    assert outcome.skipped == [
        ("a", "failed in setup: " + "x" * 300),
        ("b", "failed in call: a.py:3: wrong"),
        *((f"c{number}", "failed in call: no") for number in range(18)),
    ]
    outcome.figures.clear()
    tally.pytest_sessionfinish()
    assert counts() == {"tests/gpu: passed": 1, "tests/gpu: failed": 21}
    assert outcome.figures[0].unit == "tests"
    assert outcome.skipped[20:] == [("3 of tests/gpu", "no cards; one card")]
