"""`penstock bench` from end to end, on a model small enough for it to take seconds."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import NoReturn

import pytest

from loadtests.forked import ForkedServer
from penstock.app.bench import runs
from penstock.app.bench.ceilings import Ceilings
from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from penstock.app.bench.workloads import Interactive, Workload
from penstock.app.cli import main
from penstock.app.errors import OperatorError
from tests.app.command import penstock


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(LLAMA_TINY, tmp_path_factory.mktemp("bench"))


@pytest.mark.long("benches")
def test_every_part_has_its_figures(model: Path, tmp_path: Path) -> None:
    figures = tmp_path / "figures.json"
    options = ["--model", str(model), "--streams", "1,3", "--dtype", "float32", "--json", str(figures)]
    options += ["--only", "generate,http,prefix"]  # the part promise takes minutes
    done = penstock("bench", "--quick", *options, COLUMNS="200")
    assert done.returncode == 0, done.stderr
    assert "llama-tiny, float32, 3" in done.stdout
    found = json.loads(figures.read_text())
    counts = [(row["streams"], row["requests"], row["output_tokens"]) for row in found["http"]]
    assert counts == [(1, 1, 32), (3, 3, 96)]
    for row in found["http"]:
        assert row["failed"] == 0
        assert 0 < row["ttft_p50_ms"] <= row["ttft_p99_ms"] <= row["duration_s"] * 1000
        assert row["loop_cpu_us_per_token"] > 0
    (prefix,) = found["prefix"]
    assert prefix["shared_tokens"] == 512
    assert prefix["cached_tokens"] >= 496
    assert found["generate"][0]["tokens_per_s"] > 0


def test_a_client_that_fails_leaves_no_server_behind(
    model: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    servers = []

    class Known(ForkedServer):
        def __init__(self, arguments: Sequence[str]) -> None:
            super().__init__(arguments)
            servers.append(self)

    def fail(module: str, _: object) -> NoReturn:
        raise OperatorError(f"{module} failed")

    monkeypatch.setattr(runs, "ServerProcess", Known)
    monkeypatch.setattr(runs, "run_module", fail)
    status = main(["bench", "--only", "http", "--dtype", "float32", "--model", str(model)])
    (server,) = servers
    had_ended = server.process.poll() is not None
    server.kill()
    assert had_ended
    assert (status, capsys.readouterr().err.splitlines()[-1]) == (
        2,
        "penstock: penstock.app.bench.client failed",
    )


@pytest.fixture(scope="module")
def url(model: Path) -> Iterator[str]:
    with ForkedServer(["--model", str(model), "--served-model-name", "tiny"]) as server:
        yield server.url
        assert server.process.poll() is None


@pytest.fixture
def workloads(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    beside = Interactive(every_s=0.25, prompt_tokens=8, output_tokens=3)
    full = Workload(
        name="W4",
        streams=2,
        prompt_tokens=40,
        output_tokens=4,
        rounds=1000,
        seconds=1.0,
        interactive=beside,
        alone_s=0.5,
    )
    short = Workload(name="W2", streams=3, prompt_tokens=9, output_tokens=5)
    monkeypatch.setattr(runs, "WORKLOADS", {"W4": full, "W2": short})
    monkeypatch.setattr(runs, "ensure_checkpoint", lambda _: model)
    monkeypatch.setattr(runs, "measure_ceilings", lambda: Ceilings(20.0, {"fma8": 100.0}))


@pytest.mark.usefixtures("workloads")
def test_workloads_go_to_a_server_that_runs_already(
    url: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "figures.json"
    assert main(["bench", "--workload", "W2,W4", "--url", url, "--json", str(path)]) == 0
    short, full = json.loads(path.read_text())["http"]
    assert (short["requests"], short["failed"], short["output_tokens"]) == (3, 0, 15)
    assert 1 <= full["requests"] < 2000
    assert full["output_tokens"] == 4 * full["requests"]
    assert 0 < full["tokens_per_s"] <= full["output_tokens"]  # in the first second
    beside = full["interactive"]
    assert 1 <= beside["requests"] <= 4  # on a busy machine, the last would begin after the end
    assert beside["output_tokens"] == 3 * (beside["requests"] - beside["refused"])
    assert full["alone"]["tokens_per_s"] > 0
    assert full["alone"]["interactive_ttft_p50_ms"] > 0
    assert "alone" not in short
    printed = capsys.readouterr().out
    assert f"W2, {url}" in printed
    assert f"W4, {url}: the interactive P99 is " in printed
    assert f"W4, {url}, interactive" in printed


@pytest.mark.usefixtures("workloads")
@pytest.mark.parametrize(
    "url", ["127.0.0.1:8000", "https://127.0.0.1", "http://127.0.0.1:x", "http://127.0.0.1:1"]
)
def test_an_address_without_a_server_is_said(url: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "--workload", "W2", "--url", url]) == 2
    assert f"--url {url}: " in capsys.readouterr().err
    assert main(["bench", "--url", url]) == 2
    assert "--url goes with --workload" in capsys.readouterr().err


def test_a_workload_longer_than_the_models_sequences_is_refused_before_a_server_starts(
    model: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "--workload", "W6", "--model", str(model)]) == 2
    assert "W6 needs 100,096 positions, and llama-tiny has 2,048" in capsys.readouterr().err
