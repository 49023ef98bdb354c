"""The commands that stand beside `python -m lab.bench`, on shapes so small that each takes a second."""

from __future__ import annotations

import re
import sys
from collections.abc import Callable

import pytest

from lab.bench import attention, experts, sampling, states
from lab.bench.checkpoints import A3B_30B
from lab.bench.planning import measure_planning
from lab.bench.random_states import QWEN_08B
from lab.bench.routing import measure_routing
from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library
from tests.lab.bench.test_checkpoints import EXPERTS, STATES

Run = Callable[..., list[list[str]]]


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Runs a main function with arguments; the cells of each line that it printed."""
    try:
        load_library(lambda _: None)
    except NativeUnavailable as error:
        pytest.skip(str(error))

    def call(main: Callable[[], None], *arguments: str) -> list[list[str]]:
        monkeypatch.setattr(sys, "argv", ["command", *arguments])
        main()
        return [re.split(r"  +", line.strip()) for line in capsys.readouterr().out.splitlines()]

    return call


def test_experts_of_each_type_stand_beside_memory_and_dense_products(
    run: Run, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in EXPERTS.items():
        if name != "quantization_config":
            monkeypatch.setitem(A3B_30B, name, value)
    memory, head, _, *rows = run(
        experts.main, "--types", "int8", "bfloat16", "--layers", "2", "--threads", "2", "--repeats", "2"
    )
    assert re.fullmatch(r"memory: [\d.]+ GB/s", memory[0])
    assert [row[0] for row in rows] == [f"{type}, {n}" for type in ("int8", "bfloat16") for n in (1, 16, 512)]
    for row in rows:
        found = dict(
            zip(head[1:], (float(cell.rstrip("%").replace(",", "")) for cell in row[1:]), strict=True)
        )
        parts = sum(value for name, value in found.items() if name.endswith(" ms"))
        assert parts == pytest.approx(found["ms a layer"], rel=0.05)
        assert found["experts"] == pytest.approx(2 if row[0].endswith(", 1") else 4, abs=0.1)
        assert min(found["GB/s"], found["GFLOP/s"]) > 0


def test_layers_with_a_state_stand_beside_dense_ones(run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (STATES | {"linear_num_key_heads": 4}).items():
        if name in QWEN_08B:
            monkeypatch.setitem(QWEN_08B, name, value)
    arguments = ["--types", "int8", "--layers", "4", "--threads", "2", "--repeats", "1"]
    _, head, _, row = run(states.main, *arguments)
    found = dict(zip(head[-8:], row[1:], strict=True))
    prompt_ms, dense_ms = (float(found[name].replace(",", "")) for name in (head[-8], "dense, ms"))
    assert float(found["tokens/s of dense"].rstrip("%")) == pytest.approx(
        100 * dense_ms / prompt_ms, rel=0.05
    )
    assert 0 < float(found["conv ms"]) + float(found["state ms"]) < prompt_ms
    assert 0 < float(found["a token, ms"]) < prompt_ms


def test_attention_is_measured_for_a_prompt_and_for_a_token(run: Run) -> None:
    shape = ["--shapes", "4x2x16", "--kv", "float16", "--contexts", "64,256", "--seconds", "0"]
    lines = run(attention.main, *shape)
    assert [line[1:3] for line in lines] == [
        ["float16", f"{what} at {context}"] for context in (64, 256) for what in ("prompt", "token")
    ]
    assert all(line[-1].endswith("%") for line in lines)


def test_choosing_is_measured_by_the_time_of_reading(run: Run) -> None:
    first, *lines = run(sampling.main, "--rows", "2", "--vocab", "30000", "--threads", "1", "--repeats", "2")
    assert first[0].endswith("2 rows of 30000:")
    assert [line[0] for line in lines] == [
        *sampling.SETTINGS, *sampling.MASKS, *(f"{num} most likely" for num in (0, 20))
    ]  # fmt: skip
    for line in lines:
        chosen_us, share, reading_us = (float(number) for number in re.findall(r"[\d.]+", " ".join(line[1:])))
        assert chosen_us > 0
        assert share == pytest.approx(chosen_us / reading_us, rel=0.5)


def test_planning_is_measured_by_the_step() -> None:
    figures = measure_planning(num_sequences=8, num_steps=4)
    assert figures["sequences"] == 8
    assert 0 < figures["host_p50_ms"] <= figures["host_p99_ms"]


def test_choices_among_replicas_find_what_sessions_left() -> None:
    figures = measure_routing(
        num_replicas=5, num_sessions=100, num_held=300, num_blocks=20_000, num_kept=2_000
    )
    assert 0 < figures["choice_p50_us"] <= figures["choice_p99_us"]
    assert figures["decisions"] >= 100
    assert 0.1 < figures["hit_rate"] < 1
    assert figures["blocks"] <= 5 * 300
    assert 60 < figures["block_bytes"] < 400
    assert 60 < figures["shared_block_bytes"] < 400
    assert figures["kept_blocks"] == 50 * 32 + 2_000 * 12
    assert 60 < figures["kept_bytes"] / figures["kept_blocks"] < 400
