"""What drafts cost and bring, of steps that take a known time."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.gpu import drafts, figures, sizes
from loadtests.gpu.drafts import Forced, ForcedModel
from loadtests.gpu.parts import Outcome
from penstock.engine.planning.step import OPEN, Chunk, Plan


def run(mode: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[int, Outcome]:
    outcome = Outcome("drafts")
    monkeypatch.setattr(drafts, "parse_arguments", lambda: sizes.Arguments(mode, folder, ()))
    monkeypatch.setattr(figures, "_tell", lambda said: outcome.take(json.dumps(said)))
    return drafts.main(), outcome


def test_drafts_are_right_as_often_as_is_wanted() -> None:
    forced = Forced(7, 0.8)
    first, second = forced.propose([], [1000, 3])
    assert (set(first), len(first), len(second)) == ({7, 8}, 1000, 3)
    assert first.count(7) == pytest.approx(800, abs=50)
    assert Forced(7, 0.8).propose([], [1000])[0] == first, "the same drafts in every run"
    assert set(Forced(7, 0.0).propose([], [100])[0]) == {8}


def test_as_many_are_forced_as_the_draft_model_made() -> None:
    sequences: list[Any] = [SimpleNamespace(num_computed=9, num_preemptions=0) for _ in range(2)]
    chunks = [Chunk(sequence, 4, 5, samples=True, drafts=[OPEN] * 4) for sequence in sequences]
    plan = Plan(chunks, num_tokens=10)
    ForcedModel(Forced(7, 1.0), 4).fill(plan, [[1, 2, 3, 4], [5]], 0.0)
    assert [chunk.drafts for chunk in plan.chunks] == [[7] * 4, [7]]
    assert plan.num_tokens == 7
