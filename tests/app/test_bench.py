"""`penstock bench` from end to end, on a model small enough for it to take seconds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

import pytest

from penstock.app.bench import runs
from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from penstock.app.bench.report import print_report, print_workloads
from penstock.app.bench.server_process import ServerProcess
from penstock.app.bench.statistics import Figures
from penstock.app.bench.workloads import Interactive, Workload
from penstock.app.cli import main
from penstock.app.errors import OperatorError
from tests.app.command import penstock


@pytest.fixture(scope="module")
def results(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("bench")
    model = ensure_checkpoint(LLAMA_TINY, folder)
    figures = folder / "figures.json"
    options = ["--model", str(model), "--streams", "1,3", "--dtype", "float32", "--json", str(figures)]
    options += ["--only", "generate,http,prefix"]  # the part promise takes minutes
    done = penstock("bench", "--quick", *options, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "llama-tiny, float32, 3" in done.stdout
    loaded: dict[str, Any] = json.loads(figures.read_text())
    return loaded


@pytest.mark.long("benches")
def test_every_stream_brings_its_tokens(results: dict[str, Any]) -> None:
    counts = [(row["streams"], row["requests"], row["output_tokens"]) for row in results["http"]]
    assert counts == [(1, 1, 32), (3, 3, 96)]
    assert [row["failed"] for row in results["http"]] == [0, 0]


@pytest.mark.long("benches")
def test_figures_are_of_one_run(results: dict[str, Any]) -> None:
    for row in results["http"]:
        assert row["tokens_per_s"] == pytest.approx(row["output_tokens"] / row["duration_s"])
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["duration_s"] * 1000
        assert row["gflop_per_s"] > 0
        assert row["loop_cpu_us_per_token"] > 0


@pytest.mark.long("benches")
def test_the_shared_prefix_was_found(results: dict[str, Any]) -> None:
    (prefix,) = results["prefix"]
    assert prefix["shared_tokens"] == 512
    assert prefix["cached_tokens"] >= 496


@pytest.mark.long("benches")
def test_generate_is_beside_them(results: dict[str, Any]) -> None:
    assert results["generate"][0]["tokens_per_s"] > 0


def test_a_client_that_fails_leaves_no_server_behind(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = []

    class Known(ServerProcess):
        def __init__(self, arguments: Sequence[str]) -> None:
            super().__init__(arguments)
            servers.append(self)

    def fail(module: str, _: object) -> NoReturn:
        raise OperatorError(f"{module} failed")

    monkeypatch.setattr(runs, "ServerProcess", Known)
    monkeypatch.setattr(runs, "run_module", fail)
    model = ensure_checkpoint(LLAMA_TINY, tmp_path)
    status = main(["bench", "--only", "http", "--dtype", "float32", "--model", str(model)])
    (server,) = servers
    had_ended = server.process.poll() is not None
    server.kill()
    assert had_ended
    assert (status, capsys.readouterr().err.splitlines()[-1]) == (2, "penstock: app.bench.client failed")


def test_streams_are_kept_full_beside_interactive_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    workload = Workload(
        name="W4",
        streams=2,
        prompt_tokens=40,
        output_tokens=4,
        rounds=1000,
        seconds=1.0,
        interactive=Interactive(every_s=0.25, prompt_tokens=8, output_tokens=3),
    )
    monkeypatch.setattr(runs, "WORKLOADS", {"W4": workload})
    monkeypatch.setattr(runs, "ensure_checkpoint", lambda _: ensure_checkpoint(LLAMA_TINY, tmp_path))
    path = tmp_path / "figures.json"
    assert main(["bench", "--workload", "W4", "--dtype", "float32", "--json", str(path)]) == 0
    (figures,) = json.loads(path.read_text())["http"]
    beside = figures["interactive"]
    assert 2 <= figures["requests"] < 2000
    assert figures["output_tokens"] == 4 * figures["requests"]
    assert 0 < figures["tokens_per_s"] <= figures["output_tokens"]  # in the first second
    assert beside["requests"] == 4
    assert beside["output_tokens"] == 3 * (4 - beside["refused"])
    assert "W4, float32, interactive" in capsys.readouterr().out


def test_workloads_go_to_a_server_that_runs_already(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    model = ensure_checkpoint(LLAMA_TINY, tmp_path)
    workload = Workload(name="W2", streams=3, prompt_tokens=9, output_tokens=5)
    monkeypatch.setattr(runs, "WORKLOADS", {"W2": workload})
    monkeypatch.setattr(runs, "ensure_checkpoint", lambda _: model)
    path = tmp_path / "figures.json"
    with ServerProcess(["--model", str(model), "--served-model-name", "tiny"]) as server:
        assert main(["bench", "--workload", "W2", "--url", server.url, "--json", str(path)]) == 0
        assert server.process.poll() is None
        assert f"W2, {server.url}" in capsys.readouterr().out
    (figures,) = json.loads(path.read_text())["http"]
    assert (figures["requests"], figures["failed"], figures["output_tokens"]) == (3, 0, 15)


@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://127.0.0.1", "http://127.0.0.1:x", "http://127.0.0.1:1"]
)
def test_an_address_without_a_server_is_said(
    url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(runs, "ensure_checkpoint", lambda _: ensure_checkpoint(LLAMA_TINY, tmp_path))
    assert main(["bench", "--workload", "W1", "--url", url]) == 2
    assert f"--url {url}: " in capsys.readouterr().err
    assert main(["bench", "--url", url]) == 2
    assert "--url goes with --workload" in capsys.readouterr().err


def row(**values: object) -> dict[str, Any]:
    figures = dict.fromkeys(Figures.__dataclass_fields__, 1.0)
    rest = {"gflop_per_s": 50.0, "loop_cpu_us_per_token": 9.0, "failed": 0, "workload": ""}
    return {"model": "m", "dtype": "auto", **figures, **rest, "streams": 16, **values}


def test_a_report_sets_figures_against_their_measures(capsys: pytest.CaptureFixture[str]) -> None:
    results = {
        "machine": {"processor": "P", "cores": 2},
        "http": [row(tokens_per_s=60.0)],
        "generate": [{"model": "m", "tokens_per_s": 20.0}],
        "prefix": [],
    }
    print_report(results)
    line = next(line for line in capsys.readouterr().out.splitlines() if line.startswith("m, auto, 16"))
    assert line.split()[-4:] == ["1", "50", "3", "9"]


def test_what_was_not_measured_is_a_dash(capsys: pytest.CaptureFixture[str]) -> None:
    machine = {"processor": "P", "cores": 2}
    print_report({"machine": machine, "http": [row()], "generate": [], "prefix": []})
    assert capsys.readouterr().out.splitlines()[-2].split()[-2:] == ["-", "9"]


def test_a_workload_stands_beside_what_the_machine_could_do(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [row(workload="W2", tokens_per_s=308.0, most_tokens_per_s=1540.0, refused=2)]
    rows += [row(workload="W5", failed=1, first_error="e", most_tokens_per_s=2.0)]
    machine = {"processor": "P", "cores": 2}
    ceilings = {"memory_gb_per_s": 23.4, "peaks": {"fma8": 130.0, "fma16": 0.0, "tile_bf16": 2700.0}}
    print_workloads({"machine": machine, "ceilings": ceilings, "http": rows})
    lines = capsys.readouterr().out.splitlines()
    (line,) = (line for line in lines if line.startswith("W2, auto"))
    assert line.split()[-3:] == ["2", "1,540", "20%"]
    assert "1 of 1" in lines[-1]
    assert [line.split()[-2:] for line in lines if line.endswith("/s")] == [
        ["23.4", "GB/s"],
        ["130", "G/s"],
        ["2,700", "G/s"],
    ]
