"""A part is bounded in time, and what it said before its end counts."""

from __future__ import annotations

import json
import os
import select
from collections.abc import Callable
from pathlib import Path

import pytest

from loadtests.gpu import parts
from loadtests.gpu.figures import Figure, emit, emit_fact, emit_skip, say
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


@pytest.mark.parametrize(("bound_s", "left_s"), [(60, 9.9), (9.9, 60)])
def test_without_time_a_part_is_not_begun(bound_s: float, left_s: float) -> None:
    assert run_part(Part("p", "", bound_s), ["/nowhere"], left_s) == Outcome(
        "p", skipped=[("p", "no time was left")]
    )


def test_progress_has_the_seconds_since_the_start(capsys: pytest.CaptureFixture[str]) -> None:
    say("kernels: decode")
    _, seconds, _, text = capsys.readouterr().err.split(maxsplit=3)
    assert 0 <= float(seconds) < 7200
    assert text == "kernels: decode\n"


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
