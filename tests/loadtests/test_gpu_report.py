"""The report says what was measured, what the goal was, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.gpu.figures import GOALS, Figure
from loadtests.gpu.parts import Outcome
from loadtests.gpu.report import as_json, as_markdown, write

TPOT = "llama-8b: TPOT, batch 1"
REQUESTS = "qwen3-0.6b: 500 requests of 512 in, 128 out"


def outcome(name: str, **values: float) -> Outcome:
    return Outcome(name, figures=[Figure(name=key, value=value, unit="u") for key, value in values.items()])


def row(text: str, beginning: str) -> list[str]:
    line = next(line for line in text.splitlines() if line.startswith(f"| {beginning} |"))
    return [cell.strip() for cell in line.strip("|").split("|")]


@pytest.mark.parametrize(
    ("name", "value", "verdict"),
    [(TPOT, 6.2, "met"), (TPOT, 6.21, "missed"), (REQUESTS, 12_000, "met"), (REQUESTS, 11_999, "missed")],
)
def test_a_goal_is_met_or_missed(name: str, value: float, verdict: str) -> None:
    made = [outcome("llama-8b", **{name: value})]
    assert row(as_markdown("t", made), name)[3] == verdict
    goals = {goal["name"]: goal["met"] for goal in json.loads(as_json("t", made))["goals"]}
    assert goals.pop(name) is (verdict == "met")
    limits = {
        goal["name"]: (goal["limit"], goal["at_most"]) for goal in json.loads(as_json("t", made))["goals"]
    }
    assert limits == {name: (goal.limit, goal.at_most) for name, goal in GOALS.items()}
    assert set(goals.values()) == {None}


def test_both_files_are_written_anew(tmp_path: Path) -> None:
    first = write(tmp_path / "reports", "a-card", "t", [outcome("kernels", speed=1)])
    second = write(tmp_path / "reports", "a-card", "t", [outcome("kernels", speed=2)])
    assert first == second == tmp_path / "reports" / "a-card.md"
    assert row(second.read_text(), "speed")[1] == "2 u"
    assert json.loads(second.with_suffix(".json").read_text())["parts"][0]["figures"][0]["value"] == 2
