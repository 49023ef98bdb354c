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
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.planning.step import OPEN, Chunk, StepPlan


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
    sequences: list[Any] = [
        SimpleNamespace(num_computed=9, num_preemptions=0, num_pending=5, num_unsure=4) for _ in range(2)
    ]
    chunks = [Chunk(sequence, 4, 5, samples=True, drafts=[OPEN] * 4) for sequence in sequences]
    plan = StepPlan(chunks, num_tokens=10)
    ForcedModel(Forced(7, 1.0), 4).fill(plan, [[1, 2, 3, 4], [5]], 0.0)
    assert [chunk.drafts for chunk in plan.chunks] == [[7] * 4, [7]]
    assert plan.num_tokens == 7


def test_a_dry_run_measures_every_drafter_beside_steps_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    status, outcome = run("dry", tmp_path, monkeypatch)
    assert (status, outcome.skipped) == (0, [])
    kinds = (
        "llama-8b: TPOT, batch {}, no drafts",
        "llama-8b: TPOT, batch {}, 4 drafts, 80% right",
        "llama-8b: TPOT, batch {}, 4 drafts of a draft model, 80% right",
        "llama-8b: TPOT, batch {}, 4 drafts of a draft model, all right",
        "llama-8b: TPOT, batch {}, no drafts, beside an EAGLE-3 head",
        "llama-8b: TPOT, batch {}, 4 drafts of an EAGLE-3 head, 80% right",
        "llama-8b: TPOT, batch {}, 4 drafts of an EAGLE-3 head, all right",
        "qwen3.5-8b: TPOT, batch {}, no drafts, beside its own layer",
        "qwen3.5-8b: TPOT, batch {}, 4 drafts of its own layer, 80% right",
        "qwen3.5-8b: TPOT, batch {}, 4 drafts of its own layer, all right",
    )
    figures = {figure.name: figure for figure in outcome.figures}
    assert figures.keys() == {kind.format(streams) for kind in kinds for streams in (1, 3)}
    for name, figure in figures.items():
        tokens = float(figure.how.partition(" tokens a step")[0])
        assert (tokens == 1) == ("no drafts" in name), figure
        assert figure.value > 0
    assert list(tmp_path.iterdir()) == []


def test_a_drafter_that_fails_is_told_of_and_the_others_are_measured(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Steps that go on without its drafts are none of its figures."""
    draft = ModelRunner.draft

    def broken(runner: ModelRunner, plan: StepPlan, *, may_stay: bool) -> list[list[int]] | None:
        own = runner.model.draft
        assert own is not None
        if own.reads_target:
            raise ValueError("no kernel")
        return draft(runner, plan, may_stay=may_stay)

    monkeypatch.setattr(ModelRunner, "draft", broken)
    status, outcome = run("dry", tmp_path, monkeypatch)
    assert status == 1
    assert outcome.skipped == [
        ("drafts, llama-8b and an EAGLE-3 head", "ValueError: no kernel"),
        ("drafts, qwen3.5-8b and its own layer", "ValueError: no kernel"),
    ]
    names = [figure.name for figure in outcome.figures]
    assert "llama-8b: TPOT, batch 3, 4 drafts of a draft model, 80% right" in names
    assert not any("of an EAGLE-3 head" in name or "of its own layer" in name for name in names)
    assert list(tmp_path.iterdir()) == []
