"""Tiles are measured and written without a card: by a clock of the test's own, and by the command's dry run."""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from dataclasses import asdict, fields, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from loadtests.gpu import tiling_tasks, tuning
from loadtests.gpu.command import NoDevice, tune
from loadtests.gpu.packages import ROOT
from loadtests.gpu.tiling_tasks import ExpertTask, LinearTask, Task, tasks
from loadtests.gpu.tuning import candidates, search, write
from penstock.engine.kernels.packed import Code
from penstock.engine.kernels.triton import tiles
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from penstock.engine.kernels.triton.tiles import Card, ProductTiling, by_rule, expert_rule, shared_bytes

TASK = LinearTask(Code.INT4, torch.bfloat16, 16, 128)
EXPERTS = ExpertTask(Code.INT4, torch.bfloat16, 16, 128)
CARD = Card(Chip(132, TensorCores.WGMMA, 227 << 10), "a card")
RULE = TASK.rule(CARD.chip)
WEIGHTS: Any = [("gate_up", ["one row", "16 rows"]), ("down", ["one row", "16 rows"])]
LONG = time.monotonic() + 3600


@pytest.mark.long("dry runs of the card's measurements")
def test_a_dry_run_says_what_it_would_write_and_writes_nothing() -> None:
    before = tiles.FILE.read_bytes()
    done = subprocess.run(
        [sys.executable, str(ROOT / "loadtests/gpu/tune"), "--dry-run", "--only", "uint4 x"],
        capture_output=True,
        text=True,
        check=False,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    assert "[1/6] uint4 x bfloat16, up to 16 rows: " in done.stderr
    assert "[6/6] experts, uint4 x bfloat16, up to 255 rows: " in done.stderr
    (entries,) = json.loads(done.stdout).values()
    for of_rows in entries.values():
        for tiling in of_rows.values():
            assert ProductTiling(**tiling)
    assert tiles.FILE.read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sees no CUDA device" in line


def test_nothing_is_measured_beside_a_server() -> None:
    tuning._check_alone(76 << 30, 80 << 30)
    with pytest.raises(NoDevice, match=r"^others use 60\.0 GiB .* stop it first$"):
        tuning._check_alone(20 << 30, 80 << 30)


def test_candidates_fit_the_card_and_are_as_many_kinds_as_there_is_time_for() -> None:
    every = list(candidates(TASK, CARD))
    assert every == list(candidates(TASK, CARD)), "the same order in every run"
    assert len(set(every)) == len(every) > 100
    for tiling in every:
        assert shared_bytes(tiling, TASK.code, TASK.dtype, CARD.chip.tensor_cores) <= CARD.chip.shared_bytes
        assert tiling.block_m == 16
    values = {
        field.name: {getattr(tiling, field.name) for tiling in every} for field in fields(ProductTiling)
    }
    assert values == {
        "block_m": {16}, "block_n": {32, 64, 128}, "block_k": {64, 128, 256}, "num_warps": {4, 8},
        "num_stages": {2, 3, 4, 5, 6}, "programs_per_sm": {1, 2, 3, 4, 6},
    }  # fmt: skip
    of_more = list(candidates(replace(TASK, most_rows=64), CARD))
    assert {tiling.block_m for tiling in of_more} == {32, 64, 128}
    assert {tiling.programs_per_sm for tiling in of_more} == {1, 2}
    for field in ("block_n", "block_k", "num_stages", "programs_per_sm"):
        assert len({getattr(tiling, field) for tiling in every[:20]}) > 1, field


@pytest.mark.parametrize("code", [None, Code.INT4])
def test_candidates_of_experts_have_the_steps_and_instructions_of_the_rule(code: Code | None) -> None:
    """Sums of a row are added in one order, whatever its class."""
    for rows in (16, 64, 255):
        every = list(candidates(replace(EXPERTS, code=code, most_rows=rows), CARD))
        rule = expert_rule(code, torch.bfloat16, rows, CARD.chip)
        assert {(tiling.block_k, tiling.programs_per_sm) for tiling in every} == {
            (rule.block_k, rule.programs_per_sm)
        }
        assert rule in every
        assert {tiling.block_n for tiling in every} == {64, 128}
        assert len(every) > 10


def run(
    times: dict[ProductTiling, float], until_s: float = LONG
) -> tuple[ProductTiling, float, int, list[ProductTiling]]:
    measured: list[ProductTiling] = []

    def seconds(_: object, tiling: ProductTiling, *__: object) -> float:
        measured.append(tiling)
        return times.get(tiling, 2.0)

    tried = [tiling for tiling in times if tiling != RULE]
    found = search(TASK, RULE, iter(tried), WEIGHTS, seconds, until_s)
    return *found, measured


def some(count: int) -> list[ProductTiling]:
    return [tiling for tiling in candidates(TASK, CARD) if tiling != RULE][:count]


def test_the_fastest_is_found_and_the_hopeless_are_given_up_after_one_map() -> None:
    slow, fast, faster, broken = some(4)
    best, gain, count, measured = run({RULE: 1.0, slow: 1.9, fast: 0.8, faster: 0.5, broken: float("inf")})
    assert (best, gain, count) == (faster, 2.0, 5)
    assert [measured.count(tiling) for tiling in (RULE, slow, fast, faster, broken)] == [4, 1, 4, 4, 1]


def test_what_may_be_noise_is_not_written() -> None:
    (near,) = some(1)
    assert run({RULE: 1.0, near: 0.98})[:2] == (RULE, 1.0)
    assert run({RULE: 1.0, near: 0.96})[0] == near


def test_after_its_time_no_more_is_begun() -> None:
    best, _, count, measured = run(dict.fromkeys([RULE, *some(9)], 1.0), until_s=time.monotonic())
    assert (best, count, len(measured)) == (RULE, 1, 4)


def test_entries_are_added_to_those_of_others_and_are_read_back(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "tiles.json"
    first, second, third = some(3)
    write(path, CARD.name, {"experts, int4 x bfloat16": {"16": asdict(third)}})
    write(path, "another card", {"int4 x bfloat16": {"16": asdict(second)}})
    write(path, CARD.name, {"int4 x bfloat16": {"64": asdict(second)}})
    write(path, CARD.name, {"int4 x bfloat16": {"16": asdict(first)}})
    assert [each.name for each in tmp_path.iterdir()] == ["tiles.json"]
    monkeypatch.setattr(tiles, "FILE", path)
    tiles._table.cache_clear()
    try:
        assert CARD.tiling(Code.INT4, torch.bfloat16, 16) == first
        assert CARD.tiling(Code.INT4, torch.bfloat16, 64) == second
        assert Card(CARD.chip, "another card").tiling(Code.INT4, torch.bfloat16, 16) == second
        assert CARD.tiling(Code.INT8, torch.int8, 16) == by_rule(Code.INT8, torch.int8, 16, CARD.chip)
        assert CARD.expert_tiling(Code.INT4, torch.bfloat16, 16) == third
        assert CARD.expert_tiling(None, torch.bfloat16, 16) == expert_rule(
            None, torch.bfloat16, 16, CARD.chip
        )
    finally:
        tiles._table.cache_clear()
    assert {field.name for field in fields(ProductTiling)} == set(asdict(first))


def test_every_class_of_code_is_tuned_the_fewest_rows_first() -> None:
    kinds = [
        (Code.INT4, torch.bfloat16, 128, False),
        (Code.FLOAT8, torch.bfloat16, None, False),
        (Code.INT8, torch.int8, None, False),
        (Code.UINT4, torch.bfloat16, 128, True),
        (Code.INT8, torch.bfloat16, 128, False),
    ]
    of_experts = [
        (Code.INT4, 128), (None, None), (Code.FLOAT8, 128), (Code.FLOAT4, 32), (Code.UINT4, 128), (Code.INT8, 128)
    ]  # fmt: skip
    expected: list[Task] = []
    for rows in (16, 64, 255):
        expected += [
            LinearTask(code, dtype, rows, group_size, zero) for code, dtype, group_size, zero in kinds
        ]
        expected += [ExpertTask(code, torch.bfloat16, rows, group_size) for code, group_size in of_experts]
    assert tasks() == expected
    assert [replace(TASK, most_rows=rows).rows for rows in (16, 64, 255)] == [(1, 16), (64,), (255,)]
    for rows in (16, 64, 255):
        for measured in replace(EXPERTS, most_rows=rows).rows:
            assert tiles.expert_rows(8 * measured, 128) == rows


def test_weights_are_the_maps_of_a_layer_the_largest_first() -> None:
    """So many of each that 256 MiB are read in turn."""
    device = torch.device("meta")
    maps = TASK.weights(device, is_dry=False)
    sizes = [(28_672, 4096), (6144, 4096), (4096, 14_336), (4096, 4096)]
    assert [(copies[0].out_features, copies[0].in_features) for copies, _ in maps] == sizes
    assert [len(copies) for copies, _ in maps] == [
        (256 << 20) // (outputs * inputs // 2 + outputs * inputs // 128 * 2) for outputs, inputs in sizes
    ]
    assert [[x.shape for x in inputs] for _, inputs in maps] == [[(1, n), (16, n)] for _, n in sizes]
    assert all(x.dtype == torch.bfloat16 for _, inputs in maps for x in inputs)
    dry = replace(TASK, dtype=torch.int8, most_rows=64).weights(torch.device("cpu"), is_dry=True)
    assert [(len(copies), copies[0].out_features, copies[0].in_features) for copies, _ in dry] == [
        (1, outputs // 64, inputs // 32) for outputs, inputs in sizes
    ]
    for _, (x,) in dry:
        assert x.dtype == torch.int8
        assert x.float().std().item() == pytest.approx(30, rel=0.1)
        assert x.min() >= -127


class FakeTimes:
    """A tiling takes what it is given, else 2 s; the measured ones are kept."""

    def __init__(self, faster: ProductTiling | None) -> None:
        self.faster = faster
        self.measured: list[tuple[Task, ProductTiling]] = []

    def __call__(self, task: Task, tiling: ProductTiling, *_: object) -> float:
        if (task, tiling) not in self.measured:
            self.measured.append((task, tiling))
        return 1.0 if tiling == self.faster else 2.0


@pytest.mark.parametrize("is_dry", [True, False])
def test_the_best_is_printed_or_written(
    is_dry: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (faster,) = some(1)
    times = FakeTimes(faster)
    path = tmp_path / "tiles.json"
    clock = iter([100.0] + [0.0] * 100_000)
    monkeypatch.setattr(tuning, "tasks", lambda: [TASK, LinearTask(Code.FLOAT8, torch.bfloat16, 64, None)])
    monkeypatch.setattr(LinearTask, "weights", lambda *_, **__: WEIGHTS)
    monkeypatch.setattr(tuning, "_by_torch", times)
    monkeypatch.setattr(tuning, "_on_card", lambda _: times)
    monkeypatch.setattr(torch, "set_num_threads", lambda number: threads.append(number))
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda _: (80 << 30, 80 << 30))
    monkeypatch.setattr(Card, "of", lambda _: CARD)
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: next(clock)))
    threads: list[int] = []
    options = argparse.Namespace(dry_run=is_dry, only="int4 x", out=path)
    assert tuning.tune(options, 160.0) == 0
    name = "a card that is not there" if is_dry else "a card"
    expected = {name: {"int4 x bfloat16": {"16": asdict(faster)}}}
    printed = capsys.readouterr()
    said = [line.partition(" s  ")[2] for line in printed.err.splitlines()]
    count = 4 if is_dry else 1 + len(list(candidates(TASK, CARD)))
    assert said[:2] == [
        "[1/1] int4 x bfloat16, up to 16 rows: at most 60 s",
        f"[1/1] int4 x bfloat16, up to 16 rows: {count} tilings, 2.00 times as fast as the rule's: {faster}",
    ]
    if is_dry:
        assert json.loads(printed.out) == expected
        assert (path.exists(), threads) == (False, [1])
    else:
        assert path.read_text() == json.dumps(expected, indent=1) + "\n"
        assert said[2:] == [f"1 entries for a card in {path}"]
        assert path.stat().st_mode & 0o777 == 0o644
        assert threads == []


def test_a_rule_that_is_the_best_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(tuning, "tasks", lambda: [TASK, replace(TASK, most_rows=64)])
    monkeypatch.setattr(LinearTask, "weights", lambda *_, **__: WEIGHTS)
    monkeypatch.setattr(tuning, "_by_torch", FakeTimes(None))
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    options = argparse.Namespace(dry_run=True, only="", out=tmp_path / "tiles.json")
    monkeypatch.setattr(tuning, "time", SimpleNamespace(monotonic=lambda: 100.0))
    assert tuning.tune(options, 3700.0) == 0
    printed = capsys.readouterr()
    assert json.loads(printed.out) == {"a card that is not there": {}}
    said = [line.partition(" s  ")[2] for line in printed.err.splitlines()]
    assert [line.partition(":")[0] for line in said] == [
        f"[{number}/2] int4 x bfloat16, up to {rows} rows"
        for number, rows in ((1, 16), (1, 16), (2, 64), (2, 64))
    ]
    assert said[1].endswith(": 4 tilings, it stays")
    assert said[0].endswith(": at most 1800 s")
    assert said[2].endswith(": at most 3600 s")


def test_a_product_on_the_card_is_one_of_its_copies_by_that_tiling_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    calls: list[tuple[Any, ...]] = []

    def timed(device: torch.device, run: Any) -> float:
        assert device == torch.device("cpu")
        run()
        return 6.0

    monkeypatch.setattr(tiling_tasks, "multiply", lambda *arguments: calls.append(arguments))
    monkeypatch.setattr(tuning, "timed", timed)
    monkeypatch.setattr(Card, "of", lambda _: CARD)
    measure = tuning._on_card(torch.device("cpu"))
    copies: Any = ["one", "two", "three"]
    (tiling,) = some(1)
    assert measure(TASK, tiling, copies, torch.ones(2, 4)) == 2.0
    assert [(weight, scale, bias, dtype) for _, weight, scale, bias, dtype, _ in calls] == [
        (weight, None, None, torch.bfloat16) for weight in copies
    ]
    card = calls[0][-1]
    assert (card.chip, card.tiling(Code.INT8, torch.int8, 64)) == (CARD.chip, tiling)
    measure(replace(TASK, dtype=torch.int8), tiling, copies, torch.ones(2, 4))
    assert calls[-1][2].tolist() == [1.0, 1.0]
    monkeypatch.setattr(tuning, "timed", None)
    assert measure(TASK, tiling, copies, torch.ones(2, 4)) == float("inf")


def test_experts_on_the_card_are_run_by_that_tiling_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """All experts of a layer in turn, a few at a time."""
    cards: list[Any] = []

    class Experts:
        def __init__(self, card: Card) -> None:
            cards.append(card)

        def __call__(self, *arguments: Any) -> None:
            chosen.append(arguments[1].flatten().tolist())

    def timed(_: torch.device, run: Any) -> float:
        run()
        return 6.0

    chosen: list[list[int]] = []
    monkeypatch.setattr(tiling_tasks, "TritonExperts", Experts)
    monkeypatch.setattr(tuning, "timed", timed)
    ((layer, (x,)),) = EXPERTS.weights(torch.device("cpu"), is_dry=True)
    assert x.shape == (1, layer.spec.hidden_size)
    (tiling,) = some(1)
    assert tuning._on_card(torch.device("cpu"))(EXPERTS, tiling, layer, x) == 6.0 / 4
    assert cards[0].expert_tiling(None, torch.float32, 64) == tiling
    assert [len(ids) for ids in chosen] == [2] * 4
    assert sorted(expert for ids in chosen for expert in ids) == list(range(8))
