"""The report says what was measured, what the goal was, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from loadtests.gpu.figures import GOALS, Figure, Goal
from loadtests.gpu.parts import Outcome
from loadtests.gpu.report import as_json, as_markdown, file_stem, write

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
    assert set(goals.values()) == {None}


def test_a_goal_without_a_figure_says_so() -> None:
    text = as_markdown("t", [])
    assert row(text, TPOT) == [TPOT, "not measured", "at most 6.2 ms", ""]
    assert all(name in text for name in GOALS)


def test_a_goal_reads_like_the_promise() -> None:
    assert str(Goal(600, "TFLOP/s", at_most=False)) == "at least 600 TFLOP/s"
    assert str(Goal(4.9e-5, "ms per token")) == "at most 4.9e-05 ms per token"


def test_small_figures_keep_their_digits() -> None:
    text = as_markdown("t", [outcome("kernels", slope=0.0000437, speed=3012.4)], with_goals=False)
    assert row(text, "slope")[1] == "4.37e-05 u"
    assert row(text, "speed")[1] == "3,012 u"
    assert "## Goals" not in text


def test_what_is_missing_is_listed_with_its_reason() -> None:
    made = Outcome("tests", skipped=[("5 tests", "needs two cards")], failure="it ended with status 1")
    text = as_markdown("t", [made])
    assert "- 5 tests: needs two cards\n- tests: it ended with status 1" in text
    assert "## tests" not in text, "a part without figures has no table"


def test_facts_of_the_machine_come_first() -> None:
    made = Outcome("environment", facts={"device": "A Card | 80 GB"})
    text = as_markdown("t", [made])
    assert text.index("A Card / 80 GB") < text.index("## Goals")


def test_both_files_are_written_anew(tmp_path: Path) -> None:
    first = write(tmp_path / "reports", "a-card", "t", [outcome("kernels", speed=1)])
    second = write(tmp_path / "reports", "a-card", "t", [outcome("kernels", speed=2)])
    assert first == second == tmp_path / "reports" / "a-card.md"
    assert row(second.read_text(), "speed")[1] == "2 u"
    assert json.loads(second.with_suffix(".json").read_text())["parts"][0]["figures"][0]["value"] == 2


def test_a_file_is_named_after_device_and_day() -> None:
    assert file_stem("NVIDIA H100 80GB HBM3", "2026-01-02") == "nvidia-h100-80gb-hbm3-2026-01-02"
