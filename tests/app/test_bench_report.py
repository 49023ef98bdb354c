"""From answers to figures, from figures to tables, and to a file and back: nothing is lost or made up on the way."""

from __future__ import annotations

import argparse
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import strategies as st

from penstock.app.bench import command, runs
from penstock.app.bench.report import print_report
from penstock.app.bench.statistics import StreamFigures
from penstock.app.bench.workloads import WORKLOADS
from penstock.app.cli import main
from penstock.app.errors import OperatorError
from penstock.app.reader import TimedAnswer

seconds = st.floats(0, 100, allow_nan=False)


@st.composite
def answers(draw: st.DrawFn) -> TimedAnswer:
    started_s = draw(seconds)
    steps = draw(st.lists(st.floats(1e-3, 2), min_size=1, max_size=6))
    times_s = [started_s + float(total) for total in np.cumsum(steps)]
    return TimedAnswer(
        started_s,
        times_s[-1],
        times_s,
        num_prompt_tokens=draw(st.integers(0, 99)),
        num_cached_tokens=draw(st.integers(0, 9)),
        num_output_tokens=draw(st.integers(0, 99)),
        error=draw(st.none() | st.just("cut")),
    )


def http_row(**values: object) -> dict[str, Any]:
    figures = dict.fromkeys(StreamFigures.__dataclass_fields__, 1.0)
    own = {"model": "m", "dtype": "auto", "streams": 1, "workload": "", "failed": 0, "first_error": None}
    return {
        **figures,
        "gflop_per_s": 5.0,
        "loop_cpu_us_per_token": 2.0,
        "client_cpu_s": 0.1,
        "kv_unfilled": math.nan,
        **own,
        **values,
    }


def report_of(capsys: pytest.CaptureFixture[str], **parts: object) -> list[str]:
    machine = {"processor": "P", "cores": 2, "python": "3"}
    print_report({"machine": machine, "http": [], "generate": [], "prefix": [], **parts})
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_failures_are_told_below_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(capsys, http=[http_row(requests=16, failed=3, first_error="cut"), http_row()])
    assert lines[-1] == "m, auto, 1: 3 of 16 requests failed: cut"
    assert len([line for line in lines if "failed" in line]) == 1


def test_an_interactive_request_that_was_refused_has_not_failed() -> None:
    workload = WORKLOADS["W4"]
    whole = [TimedAnswer(0.0, 2.0, [1.0, 2.0], 5, 0, 2, stream=stream) for stream in range(9)]
    refused = TimedAnswer(0.0, 1.0, error="busy", status=503, stream=9)
    broken = TimedAnswer(0.0, 1.0, error="cut", status=200, stream=10)
    row = runs._figures([*whole, refused], workload)
    assert (row["requests"], row["output_tokens"], row["failed"]) == (8, 16, 0)
    assert row["tokens_per_s"] == pytest.approx(16 / 300)
    assert (row["interactive"]["requests"], row["interactive"]["refused"]) == (2, 1)
    row = runs._figures([*whole, refused, broken], workload)
    assert (row["failed"], row["first_error"]) == (1, "cut")
    failed_stream = TimedAnswer(0.0, 1.0, error="busy", status=503, stream=0)
    assert runs._figures([*whole, failed_stream], workload)["failed"] == 1


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_the_status_says_whether_requests_failed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "run_parts", lambda _: {"http": [http_row(), http_row(failed=1)]})
    monkeypatch.setattr(runs, "run_workloads", lambda _: {"http": [http_row()]})
    assert command.run(options()) == 1
    assert command.run(options("--workload", "W1")) == 0


def test_nothing_is_measured_when_the_figures_could_not_be_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    measured = list[object]()
    monkeypatch.setattr(runs, "run_parts", measured.append)
    with pytest.raises(OperatorError, match=r"--json .*/nowhere/figures\.json: there is no such folder"):
        command.run(options("--json", str(tmp_path / "nowhere" / "figures.json")))
    with pytest.raises(OperatorError, match=r"--cost .*: this is a folder"):
        command.run(options("--cost", str(tmp_path)))
    assert measured == []


def test_options_of_a_bench_are_lists_with_commas() -> None:
    chosen = options("--streams", "1,8", "--dtype", "float32", "--only", "http,prefix", "--workload", "W2")
    assert (chosen.streams, chosen.dtype, chosen.only) == ([1, 8], ["float32"], ["http", "prefix"])
    assert options("--workload", "W2,W4", "--workload", "W1").workload == ["W2", "W4", "W1"]
    assert options("--workload", "all").workload == ["W1", "W2", "W3", "W4", "W5"]
    assert options().only == list(command.PARTS)


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--only", "http,speed"], "'speed' is none of"),
        (["--workload", "W6"], "W6"),
        (["--workload", "W1,w2"], "'w2' is none of"),
        (["--workload", "W1", "--ladder"], "--ladder"),
        (["--ladder", "--cost", "here.json"], "--cost needs"),
        (["--workload", "W1", "--model", "a", "--model", "b"], "give one --model"),
        (["--drafts", "--model", "a", "--model", "b"], "give one --model"),
        (["--cost", "here.json", "--model", "a", "--model", "b"], "give one --model"),
        (["--only", "http", "--cost", "here.json"], "--cost needs"),
        (["--drafts", "--ladder"], "--drafts starts servers of its own"),
        (["--drafts", "--url", "http://here"], "--drafts starts servers of its own"),
        (["--dtype", "float32,bf17"], "'bf17' is none of"),
        (["--plot", "here.png"], "--plot goes with --ladder"),
        (["--streams", "1,,2"], "--streams"),
        (["--strems", "1"], "did you mean --streams?"),
        (["fast"], "fast"),
    ],
)
def test_a_mistake_in_the_options_is_one_line(
    capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert main(["bench", *arguments]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("penstock: ")
    assert named in line
