"""The report says what was measured, what the goal was, and what is missing."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace

import pytest

from loadtests.gpu import figures
from loadtests.gpu.figures import GOALS, Figure
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
    limits = {
        goal["name"]: (goal["limit"], goal["at_most"]) for goal in json.loads(as_json("t", made))["goals"]
    }
    assert limits == {name: (goal.limit, goal.at_most) for name, goal in GOALS.items()}
    assert set(goals.values()) == {None}


def test_without_figures_only_goals_are_told() -> None:
    text = as_markdown("t", [])
    assert text.startswith("# t\n\n## Goals\n\n| figure ")
    assert all(f"\n| {name} | not measured | {goal} |  |\n" in text for name, goal in GOALS.items())
    assert as_markdown("t", [], with_goals=False) == "# t\n"


def test_both_files_are_written_anew(tmp_path: Path) -> None:
    first = write(tmp_path / "reports", "a-card", "t", [outcome("kernels", speed=1)])
    second = write(tmp_path / "reports", "a-card", "t", [outcome("kernels", speed=2)])
    assert first == second == tmp_path / "reports" / "a-card.md"
    assert row(second.read_text(), "speed")[1] == "2 u"
    assert json.loads(second.with_suffix(".json").read_text())["parts"][0]["figures"][0]["value"] == 2


def test_a_file_is_named_after_device_and_day() -> None:
    assert file_stem("NVIDIA H100 80GB HBM3", "2026-01-02") == "nvidia-h100-80gb-hbm3-2026-01-02"


def test_a_whole_report() -> None:
    made = [
        Outcome("environment", facts={"device": "A Card", "host": "x, 8 cores"}, seconds=1.4),
        outcome("llama-8b", **{TPOT: 6.25, "llama-8b: KV slope of a step": 0.0000489}),
        Outcome("qwen3-0.6b", skipped=[("the rest of it", "late")], figures=[
            Figure(name=REQUESTS, value=12_345.6, unit="output tokens/s", how="all at once"),
            Figure(name="a | b", value=-0.0004, unit="s"),
            Figure(name="none", value=0.0, unit="s"),
            Figure(name="one in a thousand", value=0.001, unit="s"),
        ], seconds=99.6),
        Outcome("kernels", failure="it ended with status 3"),
    ]  # fmt: skip
    assert as_markdown("Penstock on A Card", made) == WHOLE


WHOLE = """\
# Penstock on A Card

| machine |  |
| --- | --- |
| device | A Card |
| host | x, 8 cores |

## Goals

| figure | measured | goal |  |
| --- | --- | --- | --- |
| llama-8b: TPOT, batch 1 | 6.25 u | at most 6.2 ms | missed |
| llama-8b-fp8: TPOT, batch 1 | not measured | at most 3.8 ms |  |
| llama-8b-int4: TPOT, batch 1 | not measured | at most 3 ms |  |
| llama-8b: KV slope of a step | 4.89e-05 u | at most 4.9e-05 ms per token | met |
| llama-8b: attention, KV slope of all layers | not measured | at most 4.9e-05 ms per token |  |
| llama-8b: prefill of 8,192 tokens | not measured | at least 600 TFLOP/s |  |
| llama-8b: host's share of a step, 64 streams | not measured | at most 5 % |  |
| qwen3-0.6b: TPOT, batch 1 | not measured | at most 1.2 ms |  |
| qwen3-0.6b: 500 requests of 512 in, 128 out | 12,346 output tokens/s | at least 12,000 output tokens/s | met |
| qwen3-0.6b: host's share of a step, 64 streams | not measured | at most 5 % |  |
| qwen3-0.6b: TPOT with 256 clients, above none | not measured | at most 10 % |  |

## llama-8b, 0 s

| figure | measured | how |
| --- | --- | --- |
| llama-8b: TPOT, batch 1 | 6.25 u |  |
| llama-8b: KV slope of a step | 4.89e-05 u |  |

## qwen3-0.6b, 100 s

| figure | measured | how |
| --- | --- | --- |
| qwen3-0.6b: 500 requests of 512 in, 128 out | 12,346 output tokens/s | all at once |
| a / b | -4.00e-04 s |  |
| none | 0 s |  |
| one in a thousand | 0.001 s |  |

## Not measured

- the rest of it: late
- kernels: it ended with status 3
"""


def test_progress_is_told_with_the_seconds_since_the_start(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(figures, "_STARTED_S", 100.0)
    monkeypatch.setattr(figures, "time", SimpleNamespace(monotonic=lambda: 112.34))
    figures.say("kernels: decode")
    assert capsys.readouterr() == ("", "gpu:  12.3 s  kernels: decode\n")
