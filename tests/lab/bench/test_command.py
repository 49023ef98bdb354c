"""Figures of `python -m lab.bench` as tables, and the command on a model small enough for it to take seconds."""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import pytest

from lab.bench.__main__ import main
from lab.bench.parts import CASES
from lab.bench.report import print_parts, print_store
from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint

CEILINGS: dict[str, Any] = {"memory_gb_per_s": 20.0, "peaks": {"fma8": 100.0, "tile_bf16": 2000.0}}


def bench(monkeypatch: pytest.MonkeyPatch, *arguments: str) -> int:
    monkeypatch.setattr(sys, "argv", ["lab.bench", *arguments])
    return main()


def store_part(**first: object) -> dict[str, Any]:
    """The figures of the part store; `first` goes into those of the first model."""
    row = {"requests": 200, "failed": 0, "first_error": None}
    streams = {
        "model": "m",
        "streams": 64,
        "tokens_per_s": {"without": 1000.0, "plain": 995.0, "resumable": 984.0},
        "ratio": {"without": 1.0, "plain": 0.995, "resumable": 0.984},
        **row,
        **first,
    }
    states = [{"redis": state, "ttft_p50_ms": 5.0, "ttft_p99_ms": 9.0, **row} for state in ("well", "gone")]
    return {"streams": [streams], "trouble": states}


def test_what_redis_costs_stands_beside_what_becomes_of_the_first_token(
    capsys: pytest.CaptureFixture[str],
) -> None:
    print_store(store_part())
    lines = [line for line in capsys.readouterr().out.splitlines() if line]
    assert lines[2].split() == ["m", "1,000", "995", "0.995", "984", "0.984"]
    assert [line.split() for line in lines[5:]] == [["well", "200", "5", "9"], ["gone", "200", "5", "9"]]


def test_what_failed_while_redis_was_in_trouble_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    part = store_part(failed=2, first_error="cut")
    part["trouble"][1] |= {"failed": 1, "first_error": "refused"}
    print_store(part)
    assert capsys.readouterr().out.splitlines()[-2:] == [
        "m, 64 streams: 2 of 200 requests failed: cut",
        "Redis: gone: 1 of 200 requests failed: refused",
    ]


def parts_row(*parts: dict[str, Any]) -> dict[str, Any]:
    return {"model": "m", "dtype": "auto", "case": "c", "ms": 10.0, "untimed_ms": 9.5, "parts": parts}


def test_parts_stand_beside_the_time_in_which_the_machine_could_do_them(
    capsys: pytest.CaptureFixture[str],
) -> None:
    work = {"flop": 8e9, "bytes": 40e6, "factor_bytes": 2}
    product = {"part": "qkv", "ms": 8.0, "waiting": 0.25, "work": work}
    host = {"part": "host", "ms": 2.0, "waiting": None, "work": None}
    results = {
        "ceilings": CEILINGS,
        "parts": [parts_row(host, product)],
    }
    print_parts(results)
    lines = capsys.readouterr().out.splitlines()
    at = lines.index(next(line for line in lines if line.startswith("m, auto: c")))
    assert [line.split() for line in lines[at + 2 : at + 5]] == [
        ["qkv", "8", "80.0%", "25%", "1,000", "5", "4", "50%"],  # the larger of 8 / 2000 and 0.04 / 20 s
        ["host", "2", "20.0%", "-", "-", "-", "-", "-"],
        ["all", "10", "4", "40%"],
    ]
    assert lines[at + 5] == "a whole step that is not timed: 9.5 ms"


def test_without_redis_server_the_part_store_measures_nothing(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench(monkeypatch, "store") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == "lab.bench: the part store needs redis-server, which is not on the PATH"


@pytest.mark.long("benches")
def test_the_parts_of_a_step_stand_beside_the_ceilings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = ensure_checkpoint(LLAMA_TINY, tmp_path), tmp_path / "figures.json"
    options = ["--model", str(model), "--dtype", "float32", "--quick", "--json", str(path)]
    assert bench(monkeypatch, "parts", *options) == 0
    figures = json.loads(path.read_text())["parts"]
    assert [row["case"] for row in figures["parts"]] == [case.name for case in CASES]
    assert figures["ceilings"]["memory_gb_per_s"] > 0
    assert "llama-tiny, float32: prefill, 512 tokens" in capsys.readouterr().out


def test_linear_operators_and_planning_have_figures(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model, path = ensure_checkpoint(LLAMA_TINY, tmp_path), tmp_path / "figures.json"
    options = ["--model", str(model), "--dtype", "float32", "--streams", "1,3", "--json", str(path)]
    assert bench(monkeypatch, "linear", *options) == 0
    assert [row["streams"] for row in json.loads(path.read_text())["linear"]] == [1, 3]
    assert bench(monkeypatch, "plan", "--quick", "--json", str(path)) == 0
    assert json.loads(path.read_text())["plan"]["sequences"] == 256
    assert "llama-tiny, float32, 3" in capsys.readouterr().out


def test_a_plot_of_what_has_none_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert bench(monkeypatch, "plan", "--plot", str(tmp_path / "p.png")) == 2
    assert capsys.readouterr().err == "lab.bench: --plot goes with the part drafts\n"
