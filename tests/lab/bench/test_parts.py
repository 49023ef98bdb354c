"""The parts of a step are all of it, and their work is that of the model."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from lab.bench import parts
from lab.bench.parts import CASES, Case, StepParts, make_batch
from penstock.app.bench.arithmetic import arithmetic_of
from penstock.app.bench.checkpoint import LLAMA_TINY, ensure_checkpoint
from penstock.engine.model.parse import read_config
from tests.engine.families import STATES

CASE = Case("c", sequences=3, queries=2, context=20)
DECODER = {"embed", "norm", "qkv", "place", "attention", "o", "gate_up", "down", "gather"}
BESIDE = {"head", "call", "choose"}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return ensure_checkpoint(LLAMA_TINY, tmp_path_factory.mktemp("parts"))


@pytest.fixture(scope="module")
def steps(model: Path) -> StepParts:
    steps = StepParts(parts.load(model, {}, 2))
    if steps.model.kernels.team is None:
        pytest.skip("there is no compiler for the native kernels")
    return steps


def test_every_part_of_a_step_is_there(steps: StepParts) -> None:
    times = steps.timed_step(make_batch(steps.model.config, CASE))
    assert times.keys() >= DECODER | BESIDE
    assert min(part.seconds for part in times.values()) > 0
    assert all(part.waiting is None or 0 <= part.waiting <= 1 for part in times.values())


def test_a_row_adds_up(steps: StepParts) -> None:
    row = steps.measure(CASE, 2)
    assert row["ms"] == pytest.approx(sum(part["ms"] for part in row["parts"]))
    assert row["untimed_ms"] > 0
    assert len({part["part"] for part in row["parts"]}) == len(row["parts"])


@pytest.mark.parametrize("case", [*CASES, CASE], ids=lambda case: case.name)
def test_the_work_of_the_products_is_that_of_the_model(steps: StepParts, model: Path, case: Case) -> None:
    arithmetic, work = arithmetic_of(read_config(model)), steps.work(case)
    tokens, rows = case.sequences * case.queries, case.sequences
    layers, last = LLAMA_TINY.num_layers, arithmetic.body / LLAMA_TINY.num_layers
    products = sum(work[name].flop for name in ("qkv", "o", "gate_up", "down"))
    # The last layer computes o and the feed-forward only where a token is sampled.
    qkv = work["qkv"].flop / layers
    assert products == pytest.approx((layers - 1) * last * tokens + qkv + (last - qkv / tokens) * rows)
    assert work["head"].flop == arithmetic.head * rows


def test_attention_counts_every_pair_of_tokens_once(steps: StepParts) -> None:
    config = steps.model.config
    seen = sum(21 + 22 for _ in range(CASE.sequences))
    pairs = (config.num_layers - 1) * seen + 22 * CASE.sequences
    work = steps.work(CASE)["attention"]
    assert work.flop == 4 * config.q_size * pairs
    assert (
        work.bytes == CASE.sequences * 22 * steps.model.kv.layout.block_bytes(steps.model.kv.data.dtype) / 16
    )


def test_quantized_weights_read_fewer_bytes_and_are_multiplied_as_int8(steps: StepParts, model: Path) -> None:
    whole = steps.work(CASE)
    quantized = StepParts(parts.load(model, {"quantize": "int8", "kv_dtype": "int8"}, 1)).work(CASE)
    for name, factor_bytes in (("qkv", 1), ("gate_up", 1), ("attention", 2)):  # no kernel attends in 8 bits
        assert quantized[name].flop == whole[name].flop
        assert quantized[name].bytes < whole[name].bytes
        assert quantized[name].factor_bytes == factor_bytes


@pytest.mark.usefixtures("steps")
@pytest.mark.parametrize("context", [0, 20])
def test_states_are_read_written_and_counted(tmp_path: Path, context: int) -> None:
    own = StepParts(parts.load(STATES["Qwen 3.5"].make(tmp_path), {}, 2))
    case, states = replace(CASE, context=context), own.model.states
    assert states is not None
    layer = states.layer(0)
    layer.state[:] = 1
    states.data[0] = 0  # nobody's
    times = own.timed_step(make_batch(own.model.config, case))
    assert times.keys() >= {"gates", "conv", "state"}
    is_changed = (layer.state != 1).flatten(1).any(1).tolist()
    assert is_changed == [True] * 4 + [False] * (states.num_slots - 4)
    work, layers = own.work(case), 3
    num_read = case.sequences if context else 0
    heads, keys, values = layer.state.shape[1:]
    history = layer.history[0].numel()
    assert work["conv"].bytes == 4 * layers * num_read * history
    numbers = heads * keys * values * (num_read + case.sequences) + history * case.sequences
    assert work["state"].bytes == 4 * layers * numbers
    assert work["state"].flop == layers * case.sequences * case.queries * 3 * 2 * heads * keys * values
    assert work["gates"].flop == layers * case.sequences * case.queries * 2 * 64 * 2 * heads


def test_plain_torch_has_parts_of_the_same_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "/nowhere/c++")
    steps = StepParts(parts.load(STATES["Qwen 3.5"].make(tmp_path), {}, 1))
    assert steps.model.kernels.team is None
    row = steps.measure(CASE, 2)
    names = {part["part"] for part in row["parts"]}
    assert names >= DECODER - {"norm", "place"} | BESIDE | {"state", "gates"}
    assert row["ms"] == pytest.approx(sum(part["ms"] for part in row["parts"]))
