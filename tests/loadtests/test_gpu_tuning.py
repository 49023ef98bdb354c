"""Tiles are measured and written without a card: by a clock of the test's own, and by the command's dry run."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from dataclasses import asdict, fields
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")

import torch

from engine.kernels.packed import Code
from engine.kernels.triton import tiles
from engine.kernels.triton.attention_tiling import Chip, TensorCores
from engine.kernels.triton.tiles import Card, Tiling, by_rule, shared_bytes
from loadtests.gpu import tuning
from loadtests.gpu.command import NoDevice, tune
from loadtests.gpu.packages import ROOT
from loadtests.gpu.tuning import Task, candidates, search, write

TASK = Task(Code.INT4, torch.bfloat16, 16, 128)
CARD = Card(Chip(132, TensorCores.WGMMA, 227 << 10), "a card")
RULE = by_rule(TASK.code, TASK.dtype, TASK.most_rows, CARD.chip)
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
    assert "[1/3] uint4 x bfloat16, up to 16 rows: " in done.stderr
    (entries,) = json.loads(done.stdout).values()
    for of_rows in entries.values():
        for tiling in of_rows.values():
            assert Tiling(**tiling)
    assert tiles.FILE.read_bytes() == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_card_it_says_so_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert tune([]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert "sees no CUDA device" in line


def test_nothing_is_measured_beside_a_server() -> None:
    tuning._check_alone(79 << 30, 80 << 30)
    with pytest.raises(NoDevice, match=r"^others use 60\.0 GiB .* stop it first$"):
        tuning._check_alone(20 << 30, 80 << 30)


def test_candidates_fit_the_card_and_are_as_many_kinds_as_there_is_time_for() -> None:
    every = list(candidates(TASK, CARD))
    assert len(set(every)) == len(every) > 100
    for tiling in every:
        assert shared_bytes(tiling, TASK.code, TASK.dtype, CARD.chip.tensor_cores) <= CARD.chip.shared_bytes
        assert tiling.block_m == 16
    for field in ("block_n", "block_k", "num_stages", "programs_per_sm"):
        assert len({getattr(tiling, field) for tiling in every[:20]}) > 1, field


def run(times: dict[Tiling, float], until_s: float = LONG) -> tuple[Tiling, float, int, list[Tiling]]:
    measured: list[Tiling] = []

    def seconds(_: object, tiling: Tiling, *__: object) -> float:
        measured.append(tiling)
        return times.get(tiling, 2.0)

    tried = [tiling for tiling in times if tiling != RULE]
    found = search(TASK, RULE, iter(tried), WEIGHTS, seconds, until_s)
    return *found, measured


def some(count: int) -> list[Tiling]:
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
    first, second = some(2)
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
    finally:
        tiles._table.cache_clear()
    assert {field.name for field in fields(Tiling)} == set(asdict(first))
