"""A failure on a GPU is reported, and leaves the rest to be measured."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from loadtests.gpu import kernels
from loadtests.gpu.packages import ROOT
from loadtests.gpu.parts import Outcome

DRY = ["--mode", "dry", "--scratch", "/nowhere"]


def test_a_kernel_that_fails_leaves_the_others_to_another_process(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its own may have a device that serves it no more."""
    started: list[list[str]] = []

    def broken(_: object) -> None:
        raise KeyError("no kernel")

    broken.__name__ = "decode"
    monkeypatch.setattr(kernels, "decode", broken)
    monkeypatch.setattr(subprocess, "run", lambda command, **_: started.append(command))
    monkeypatch.setattr(sys, "argv", ["kernels", "ceilings", "decode", "slope", "sampler", *DRY])
    assert kernels.main() == 1
    assert started == [[sys.executable, "-m", "loadtests.gpu.kernels", "slope", "sampler", *DRY]]
    outcome = Outcome("kernels")
    printed = capsys.readouterr()
    assert "Traceback" in printed.err
    for line in printed.out.splitlines():
        outcome.take(line)
    assert [figure.name for figure in outcome.figures] == ["matmul rate", "copy bandwidth"]
    assert outcome.skipped == [("kernels: decode", "KeyError: 'no kernel'")]


@pytest.mark.long("dry runs of the card's measurements")
def test_tests_are_told_one_by_one(tmp_path: Path) -> None:
    (tmp_path / "test_some.py").write_text(
        "import pytest\n"
        "def test_good(): pass\n"
        "def test_bad(): assert 1 == 2\n"
        "@pytest.mark.skip(reason='not here')\n"
        "def test_skipped(): pass\n",
        encoding="utf-8",
    )
    command = [sys.executable, "-m", "loadtests.gpu.cuda_tests", str(tmp_path), *DRY]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    outcome = Outcome("tests")
    for line in done.stdout.splitlines():
        json.loads(line)
        outcome.take(line)
    assert {figure.name.split(": ")[1]: figure.value for figure in outcome.figures} == {
        "passed": 1,
        "failed": 1,
    }
    told = dict(outcome.skipped)
    assert told[f"1 of {tmp_path}"] == "not here"
    assert any(what.endswith("test_bad") and "assert 1 == 2" in why for what, why in told.items())
    assert "1 failed" in done.stderr
