"""What is said of models with experts before any of them is loaded: what they take and read, and what would fit."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NoReturn

import pytest
import torch

from penstock.app import fitting, read_rate
from penstock.app.cli import main
from penstock.app.doctor import Check, Severity
from penstock.app.read_rate import read_rate as measured_rate
from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import NotEnoughMemory
from penstock.engine.execution import loader, memory
from penstock.engine.execution.memory import expert_bytes, weight_bytes
from penstock.engine.kernels.cpu.native import NativeUnavailable, Team, load_library
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.parse import read_config
from tests.engine.checkpoints import make_checkpoint
from tests.engine.families import SPARSE

KERNELS = reference_kernels(torch.device("cpu"), torch.float32)
MIB = 1 << 20


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("sparse")
    SPARSE["Qwen 3 MoE"].make(
        folder, hidden_size=128, num_experts=32, intermediate_size=128, moe_intermediate_size=256
    )
    (folder / "tokenizer.json").write_text("{}")
    return folder


@pytest.fixture(autouse=True)
def _machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fitting, "check_compiler", lambda: Check(Severity.OK, "compiler", "c++"))
    monkeypatch.setattr(read_rate, "read_rate", lambda _, has_native: 2e9 if has_native else 0.0)


def dense_bytes(config: ModelConfig) -> int:
    """What a token reads beside experts: attention, routers, norms, the dense layer and the output head."""
    hidden, heads = 128, 4 * 24
    attention = 2 * hidden * heads + 2 * hidden * 48 + 2 * 24 + 2 * hidden
    return 4 * (3 * attention + 2 * 32 * hidden + 3 * hidden * 128 + hidden + config.vocab_size * hidden)


def test_the_bytes_of_experts_and_those_that_a_token_reads(folder: Path) -> None:
    config = read_config(folder)
    each = 4 * 3 * 128 * 256
    experts, read = expert_bytes(config, KERNELS)
    assert experts == 2 * 32 * each
    assert read == 2 * 3 * each + dense_bytes(config)
    assert experts + dense_bytes(config) + 4 * config.vocab_size * 128 == weight_bytes(config, KERNELS)


def test_doctor_says_what_experts_take_and_how_fast_a_stream_can_be(
    folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["doctor", str(folder), "--device", "cpu", "--dtype", "float32"]) == 0
    lines = capsys.readouterr().out.splitlines()
    said = (
        "32 experts in 2 of 3 layers, of which a token chooses 3; memory is read at 2.0 GB/s, as measured now"
    )
    rows = lines[lines.index(said) + 1 :]
    experts, read = expert_bytes(read_config(folder), KERNELS)
    row = next(line for line in rows if line.startswith("float32"))
    assert row.split("  ")[-1].strip() == f"{2e9 / read:,.1f}"
    assert f"{experts / MIB:.1f} MiB" in row
    assert f"{read / MIB:.1f} MiB" in row
    assert any(line.startswith("int4") for line in rows)


def test_a_dense_model_has_no_such_lines(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    folder = make_checkpoint("qwen3", tmp_path)
    main(["doctor", str(folder), "--device", "cpu"])
    assert " experts" not in capsys.readouterr().out


def load(folder: Path, available: int, monkeypatch: pytest.MonkeyPatch, quantize: str | None = None) -> str:
    """What is said of a model for which there is too little memory, of which no weight may be read."""
    monkeypatch.setattr(memory, "available_bytes", lambda: available)
    monkeypatch.setattr(loader, "load_weights", lambda *_: pytest.fail("weights are loaded"))
    options = LoadOptions(
        device="cpu", dtype="float32", max_batch_tokens=16, max_num_seqs=1, kv_bytes=1, quantize=quantize
    )
    with pytest.raises(NotEnoughMemory) as refused:
        loader.load_model(folder, options, lambda _: None, lambda *_: None)
    assert "\n" not in str(refused.value)
    return str(refused.value)


def test_a_model_that_does_not_fit_is_refused_with_what_would(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = load(folder, 14 * MIB, monkeypatch)
    assert re.fullmatch(r"not enough memory: weights .* of 14.0 MiB available; .*", said)
    found = re.findall(r"--quantize (int8|int4) would need ([\d.]+) MiB", said)
    assert found
    assert all(float(size) <= 14.0 for _, size in found)


def test_where_nothing_would_fit_the_least_is_said(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    said = load(folder, MIB, monkeypatch)
    assert re.search(r"; even --quantize int\d would need [\d.]+ MiB$", said)


def test_what_is_rounded_the_most_has_no_other_way(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert load(folder, MIB, monkeypatch, "int4").endswith("of 1.0 MiB available")


def test_the_read_rate_is_that_of_the_best_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(read_rate, "_CPU_BYTES", 1 << 12)
    times = iter((0.0, 0.5, 1.0, 1.25, 2.0, 4.0, 5.0, 6.0, 7.0, 8.0))
    assert measured_rate("cpu", has_native=False, clock=lambda: next(times)) == (1 << 12) / 0.25


def test_the_read_rate_of_native_kernels_is_what_they_measure(monkeypatch: pytest.MonkeyPatch) -> None:
    try:
        load_library(lambda _: None)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    teams = list[object]()

    def measured(team: object) -> float:
        teams.append(team)
        return 3.0

    monkeypatch.setattr(read_rate, "measure_memory", measured)
    assert measured_rate("cpu", has_native=True) == 3e9
    assert [type(team) for team in teams] == [Team]


def test_without_native_kernels_the_read_rate_is_that_of_sums(monkeypatch: pytest.MonkeyPatch) -> None:
    def unavailable(_: object) -> NoReturn:
        raise NativeUnavailable("no compiler")

    monkeypatch.setattr(read_rate, "_CPU_BYTES", 1 << 12)
    monkeypatch.setattr(read_rate, "load_library", unavailable)
    assert measured_rate("cpu", has_native=True) > 0
