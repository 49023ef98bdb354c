"""From answers to figures, from figures to tables, and to a file and back: nothing is lost or made up on the way."""

from __future__ import annotations

import argparse
import json
import math
import re
import statistics
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.app.bench import command, runs
from penstock.app.bench.arithmetic import Arithmetic
from penstock.app.bench.ceilings import Ceilings, Sizes, most_tokens_per_s
from penstock.app.bench.report import print_report, print_workloads
from penstock.app.bench.statistics import Figures, percentile, summarise
from penstock.app.bench.workloads import WORKLOADS
from penstock.app.cli import main
from penstock.app.errors import OperatorError
from penstock.app.reader import Answer
from penstock.app.tables import number, table

CEILINGS: dict[str, Any] = {"memory_gb_per_s": 20.0, "peaks": {"fma8": 100.0, "tile_bf16": 2000.0}}
ARITHMETIC = Arithmetic(body=200_000_000, head=20_000_000, vocabulary=16_384, kv=11_520)

seconds = st.floats(0, 100, allow_nan=False)
cells = st.text(st.characters(codec="ascii", categories=("L", "N", "P")), max_size=9)


@st.composite
def answers(draw: st.DrawFn) -> Answer:
    started_s = draw(seconds)
    steps = draw(st.lists(st.floats(1e-3, 2), min_size=1, max_size=6))
    times_s = [started_s + float(total) for total in np.cumsum(steps)]
    return Answer(
        started_s,
        times_s[-1],
        times_s,
        num_prompt_tokens=draw(st.integers(0, 99)),
        num_cached_tokens=draw(st.integers(0, 9)),
        num_output_tokens=draw(st.integers(0, 99)),
        error=draw(st.none() | st.just("cut")),
    )


@given(st.lists(answers(), min_size=1, max_size=8))
def test_every_answer_is_counted_once(some: list[Answer]) -> None:
    figures = summarise(some, 1)
    whole = [answer for answer in some if answer.error is None]
    assert (figures.requests, figures.failed) == (len(some), len(some) - len(whole))
    assert figures.output_tokens == sum(answer.num_output_tokens for answer in whole)
    assert figures.prompt_tokens == sum(answer.num_prompt_tokens for answer in whole)
    assert figures.first_error == ("cut" if figures.failed else None)


@given(st.lists(answers(), min_size=1, max_size=8))
def test_figures_are_those_of_numpy(some: list[Answer]) -> None:
    figures = summarise(some, 1)
    whole = [answer.token_times_s for answer in some if answer.error is None]
    first_ms = [(a.token_times_s[0] - a.started_s) * 1000 for a in some if a.error is None]
    gaps_ms = [float(gap) * 1000 for times in whole for gap in np.diff(times)]
    for name, values in (("ttft", first_ms), ("itl", gaps_ms)):
        for percent in (50, 99):
            wanted = np.percentile(values, percent) if values else math.nan
            assert getattr(figures, f"{name}_p{percent}_ms") == pytest.approx(wanted, nan_ok=True)


@given(st.lists(answers(), min_size=1, max_size=8), st.floats(-50, 50))
def test_it_does_not_matter_when_the_clock_began(some: list[Answer], shift_s: float) -> None:
    moved = [
        Answer(
            answer.started_s + shift_s,
            answer.ended_s + shift_s,
            [time_s + shift_s for time_s in answer.token_times_s],
            answer.num_prompt_tokens,
            answer.num_cached_tokens,
            answer.num_output_tokens,
            answer.error,
        )
        for answer in some
    ]
    assert asdict(summarise(moved, 1)) == pytest.approx(asdict(summarise(some, 1)), abs=1e-6, nan_ok=True)


@given(st.lists(st.floats(-1e6, 1e6), min_size=2), st.integers(1, 99))
def test_percentiles_are_those_of_statistics(values: list[float], percent: int) -> None:
    cuts = statistics.quantiles(values, n=100, method="inclusive")
    assert percentile(values, percent) == pytest.approx(cuts[percent - 1], rel=1e-9, abs=1e-6)


@given(st.lists(st.floats(-1e6, 1e6), min_size=1), st.floats(0, 100), st.floats(0, 100))
def test_percentiles_rise_and_stay_within(values: list[float], one: float, other: float) -> None:
    low, high = sorted((one, other))
    assert min(values) <= percentile(values, low) <= percentile(values, high) + 1e-6
    assert percentile(values, high) <= max(values) + 1e-6
    assert (percentile(values, 0), percentile(values, 100)) == (min(values), max(values))


@given(st.floats(1e-6, 1e9))
def test_a_number_as_text_is_off_by_half_a_percent_at_most(value: float) -> None:
    text = number(value).replace(",", "")
    assert float(text) == pytest.approx(value, rel=5.1e-3)
    assert number(-value) == f"-{number(value)}"


@given(st.integers(1, 5).flatmap(lambda n: st.lists(st.lists(cells, min_size=n, max_size=n), min_size=1)))
def test_columns_of_a_table_line_up(rows: list[list[str]]) -> None:
    head = [f"column {i}" for i in range(len(rows[0]))]
    lines = table(head, rows).split("\n")
    widths = [len(dashes) for dashes in lines[1].split("  ")]
    assert len(lines) == len(rows) + 2
    assert widths == [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]
    assert max(map(len, lines)) == sum(widths) + 2 * (len(widths) - 1)
    for line, row in zip([lines[0], *lines[2:]], [head, *rows], strict=True):
        start = 0
        for i, width in enumerate(widths):
            cell = line[start : start + width].ljust(width)
            assert cell == (row[i].ljust(width) if i == 0 else row[i].rjust(width))
            start += width + 2


def http_row(**values: object) -> dict[str, Any]:
    figures = dict.fromkeys(Figures.__dataclass_fields__, 1.0)
    own = {"model": "m", "dtype": "auto", "streams": 1, "workload": "", "failed": 0, "first_error": None}
    return {**figures, "gflop_per_s": 5.0, "loop_cpu_us_per_token": 2.0, "client_cpu_s": 0.1, **own, **values}


def report_of(capsys: pytest.CaptureFixture[str], **parts: object) -> list[str]:
    machine = {"processor": "P", "cores": 2, "python": "3"}
    print_report({"machine": machine, "http": [], "generate": [], "prefix": [], **parts})
    return [line for line in capsys.readouterr().out.splitlines() if line]


def test_a_report_of_nothing_is_the_machine(capsys: pytest.CaptureFixture[str]) -> None:
    assert report_of(capsys) == ["P, 2 cores"]


def test_failures_are_told_below_the_figures(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(capsys, http=[http_row(requests=16, failed=3, first_error="cut"), http_row()])
    assert lines[-1] == "m, auto, 1: 3 of 16 requests failed: cut"
    assert len([line for line in lines if "failed" in line]) == 1


def test_every_row_of_a_report_has_every_column(capsys: pytest.CaptureFixture[str]) -> None:
    lines = report_of(
        capsys,
        http=[http_row(), http_row(streams=16)],
        generate=[{"model": "m", "tokens_per_s": 3.0}],
        prefix=[{"model": "m", "shared_tokens": 512, "ttft_cold_p50_ms": 90.0, "ttft_hit_p50_ms": 9.0, "ratio": 10.0}],
    )  # fmt: skip
    at = next(i for i, line in enumerate(lines) if line.startswith("model, dtype, streams"))
    num_columns = len(re.split(r"  +", lines[at]))
    assert [len(re.split(r"  +", line)) for line in lines[at + 3 : at + 5]] == [num_columns] * 2
    assert lines[at + 2].split() == ["m,", "generate", "3"]
    assert lines[-1].split() == ["m", "512", "90", "9", "10"]


def workloads_report(capsys: pytest.CaptureFixture[str], *rows: dict[str, Any]) -> list[str]:
    print_workloads({"machine": {"processor": "P", "cores": 2}, "ceilings": CEILINGS, "http": rows})
    return capsys.readouterr().out.splitlines()


@pytest.mark.parametrize("name", sorted(WORKLOADS))
def test_a_workload_that_reaches_what_the_machine_can_do_reaches_all_of_it(
    capsys: pytest.CaptureFixture[str], name: str
) -> None:
    most = most_tokens_per_s(WORKLOADS[name], ARITHMETIC, Sizes(2, 2, 2), Ceilings(**CEILINGS))
    lines = workloads_report(capsys, http_row(workload=name, tokens_per_s=most, most_tokens_per_s=most))
    (line,) = (line for line in lines if line.startswith(f"{name}, auto"))
    assert line.endswith("100%")


def test_interactive_requests_have_a_line_of_their_own(capsys: pytest.CaptureFixture[str]) -> None:
    beside = dict.fromkeys(Figures.__dataclass_fields__, 7) | {"refused": 3, "requests": 45}
    row = http_row(workload="W4", tokens_per_s=50.0, most_tokens_per_s=100.0, interactive=beside)
    lines = [line for line in workloads_report(capsys, row) if line.startswith("W4, auto")]
    assert lines[0].split()[-1] == "50%"
    assert lines[1].split()[2:] == ["interactive", "7", "7", "7", "7", "7", "-", "3", "of", "45", "-", "-"]


def test_an_interactive_request_that_was_refused_has_not_failed() -> None:
    workload = WORKLOADS["W4"]
    whole = [Answer(0.0, 2.0, [1.0, 2.0], 5, 0, 2, stream=stream) for stream in range(9)]
    refused = Answer(0.0, 1.0, error="busy", status=503, stream=9)
    broken = Answer(0.0, 1.0, error="cut", status=200, stream=10)
    row = runs._figures([*whole, refused], workload)
    assert (row["requests"], row["output_tokens"], row["failed"]) == (8, 16, 0)
    assert row["tokens_per_s"] == pytest.approx(16 / 45)
    assert (row["interactive"]["requests"], row["interactive"]["refused"]) == (2, 1)
    row = runs._figures([*whole, refused, broken], workload)
    assert (row["failed"], row["first_error"]) == (1, "cut")
    failed_stream = Answer(0.0, 1.0, error="busy", status=503, stream=0)
    assert runs._figures([*whole, failed_stream], workload)["failed"] == 1


def options(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    return parser.parse_args(arguments)


def test_figures_survive_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    measured = {"machine": {"cores": 2}, "http": [http_row(streams=64, tokens_per_s=1 / 3, first_error="é")]}
    monkeypatch.setattr(runs, "run_parts", lambda _: measured)
    path = tmp_path / "figures.json"
    assert command.run(options("--json", str(path))) == 0
    assert json.loads(path.read_text(encoding="utf-8")) == measured


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


def test_the_types_of_a_run_go_to_its_server_and_into_its_label() -> None:
    parser = argparse.ArgumentParser()
    command.add_arguments(parser)
    plain = parser.parse_args([])
    assert (runs.type_arguments(plain), runs.types_label("auto", plain)) == ([], "auto")
    chosen = parser.parse_args(["--quantize", "int4", "--kv-dtype", "int8"])
    assert runs.type_arguments(chosen) == ["--quantize", "int4", "--kv-dtype", "int8"]
    assert runs.types_label("auto", chosen) == "auto --quantize int4 --kv-dtype int8"
