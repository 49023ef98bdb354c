"""A part is bounded in time, and what it said before its end counts."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from io import StringIO
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtests.gpu import parts
from loadtests.gpu.command import LIMIT_S
from loadtests.gpu.figures import Figure, emit, emit_fact, emit_skip
from loadtests.gpu.packages import ROOT
from loadtests.gpu.parts import Outcome, Part, run_part

FIGURE = json.dumps({"figure": {"name": "speed", "value": 2.5, "unit": "GB/s", "how": ""}})


Script = Callable[[str], list[str]]


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Script:
    """Makes a part of a text, and returns its command."""
    monkeypatch.syspath_prepend(tmp_path)

    def make(text: str) -> list[str]:
        (tmp_path / "a_part.py").write_text(text)
        return ["a_part"]

    return make


def test_figures_facts_and_what_is_left_out_are_taken(capsys: pytest.CaptureFixture[str]) -> None:
    emit("speed", 2.5, "GB/s", "twice")
    emit("nothing", float("nan"), "ms")
    emit_fact("device", "A Card")
    emit_skip("more", "no\n  time")
    outcome = Outcome("kernels")
    for line in ["a line of somebody else", "[1, 2]", "7", *capsys.readouterr().out.splitlines()]:
        outcome.take(line)
    assert outcome.figures == [Figure(name="speed", value=2.5, unit="GB/s", how="twice")]
    assert outcome.facts == {"device": "A Card"}
    assert outcome.skipped == [("nothing", "nothing came of which it could be taken"), ("more", "no time")]


def test_a_part_that_ends_well_has_no_failure(script: Script) -> None:
    outcome = run_part(Part("p", "", 60), script(f"print({FIGURE!r})"), 60)
    assert (len(outcome.figures), outcome.failure, outcome.skipped) == (1, None, [])


def test_a_part_that_fails_keeps_what_it_said(script: Script) -> None:
    outcome = run_part(Part("p", "", 60), script(f"print({FIGURE!r}); raise SystemExit(3)"), 60)
    assert len(outcome.figures) == 1
    assert outcome.failure == "it ended with status 3; its last lines are above"


def test_a_part_that_hangs_is_ended_with_all_that_it_started(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, script: Script
) -> None:
    monkeypatch.setattr(parts, "_LEAST_S", 0.0)
    pid = tmp_path / "pid"
    text = (
        "import subprocess, sys, time\n"
        f"print({FIGURE!r}, flush=True)\n"
        "child = subprocess.Popen([sys.executable, '-c', 'import time; time.sleep(600)'])\n"
        f"open({str(pid)!r}, 'w').write(str(child.pid))\n"
        "time.sleep(600)\n"
    )
    outcome = run_part(Part("p", "", 600), script(text), 5.0)
    assert len(outcome.figures) == 1
    assert outcome.failure is None
    assert outcome.skipped == [("the rest of p", "it was not done after 5 s")]
    assert outcome.seconds < 60
    assert ends(int(pid.read_text()))


def ends(pid: int) -> bool:
    """Within ten seconds: a process that was killed still has to go."""
    try:
        handle = os.pidfd_open(pid)
    except ProcessLookupError:
        return True
    try:
        return bool(select.select([handle], [], [], 10)[0])
    finally:
        os.close(handle)


@pytest.mark.parametrize(("bound_s", "left_s"), [(60, 9.9), (9.9, 60)])
def test_without_time_a_part_is_not_begun(bound_s: float, left_s: float) -> None:
    assert run_part(Part("p", "", bound_s), ["/nowhere"], left_s) == Outcome(
        "p", skipped=[("p", "no time was left")]
    )


class FakeProcess:
    """A part that is over at once; it was not part of a group any more."""

    pid = 1 << 30

    def __init__(self, *arguments: object) -> None:
        self.arguments = arguments
        self.pipe = StringIO(FIGURE)
        self.waits: list[float | None] = []
        self.kills = 0
        type(self).made = self

    made: FakeProcess

    def wait(self, timeout: float | None = None) -> int:
        self.waits.append(timeout)
        return 0

    def kill(self) -> None:
        self.kills += 1


@pytest.mark.parametrize(("bound_s", "left_s"), [(60, 10.0), (10, 60.0)])
def test_a_part_has_its_bound_and_no_more_than_is_left(
    bound_s: float, left_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = iter([7.0, 9.5])
    monkeypatch.setattr(parts, "ForkedProcess", FakeProcess)
    monkeypatch.setattr(parts, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    outcome = run_part(Part("p", "", bound_s), ["a_part"], left_s)
    assert outcome == Outcome("p", [Figure(name="speed", value=2.5, unit="GB/s")], seconds=2.5)
    process = FakeProcess.made
    assert process.arguments == (["a_part"], 1, {**os.environ, "HF_HUB_OFFLINE": "1"}, ROOT)
    assert (process.waits, process.kills) == ([10.0, None], 1)


def test_what_is_wanted_most_fits_the_ten_minutes() -> None:
    """The slower shape has its whole time, and the other one more than a minute."""
    assert LIMIT_S == 570
    assert [
        (part.name, part.module, part.bound_s, part.arguments, part.is_for_dry_runs) for part in parts.PARTS
    ] == [
        ("environment", "environment", 30, (), True),
        ("tests", "cuda_tests", 180, ("tests/gpu",), True),
        ("kernels", "kernels", 130, (), True),
        ("llama-8b", "serving", 190, ("llama-8b",), True),
        ("qwen3-0.6b", "serving", 150, ("qwen3-0.6b",), True),
        ("quantized", "quantized", 150, (), True),
        ("experts", "experts", 100, (), True),
        ("states", "states", 100, (), True),
        ("drafts", "drafts", 170, (), True),
        ("llama-8b-int4", "serving", 100, ("llama-8b-int4",), True),
        ("llama-8b-fp8", "serving", 100, ("llama-8b-fp8",), False),
        ("llama-8b-ranks", "ranks", 120, ("llama-8b",), False),
        ("kernel-tests", "cuda_tests", 150, ("tests/engine/kernels/triton",), False),
    ]


def test_a_figure_that_is_told_again_is_the_newer_one() -> None:
    outcome = Outcome("tests")
    for line in (FIGURE, FIGURE.replace("2.5", "3.5")):
        outcome.take(line)
    assert [figure.value for figure in outcome.figures] == [3.5]
