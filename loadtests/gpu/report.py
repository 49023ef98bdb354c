"""The report: JSON for machines, Markdown for people."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from loadtests import report
from loadtests.gpu.figures import GOALS, Figure
from loadtests.gpu.parts import Outcome
from loadtests.report import markdown
from penstock.app.tables import number


def as_json(title: str, outcomes: Sequence[Outcome]) -> str:
    goals = [
        {"name": name, "limit": goal.limit, "at_most": goal.at_most, "met": _met(name, outcomes)}
        for name, goal in GOALS.items()
    ]
    parts = [asdict(outcome) for outcome in outcomes]
    return json.dumps({"title": title, "goals": goals, "parts": parts}, indent=1) + "\n"


def as_markdown(title: str, outcomes: Sequence[Outcome], *, with_goals: bool = True) -> str:
    sections = [f"# {title}", _facts(outcomes)]
    if with_goals:
        sections += ["## Goals", _goals(outcomes)]
    for outcome in outcomes:
        if outcome.figures:
            sections += [f"## {outcome.name}, {outcome.seconds:.0f} s", _figures(outcome.figures)]
    if left_out := [f"- {what}: {why}" for outcome in outcomes for what, why in _left_out(outcome)]:
        sections += ["## Not measured", "\n".join(left_out)]
    return "\n\n".join(section for section in sections if section) + "\n"


def write(folder: Path, stem: str, title: str, outcomes: Sequence[Outcome]) -> Path:
    """Both files, over what an earlier call of the same run wrote; returns the Markdown's path."""
    texts = {f"{stem}.json": as_json(title, outcomes), f"{stem}.md": as_markdown(title, outcomes)}
    return report.write(folder, texts)[1]


def file_stem(device: str, date: str) -> str:
    return f"{re.sub(r'[^a-z0-9]+', '-', device.lower()).strip('-')}-{date}"


def find(name: str, outcomes: Sequence[Outcome]) -> Figure | None:
    return next((f for outcome in outcomes for f in outcome.figures if f.name == name), None)


def _met(name: str, outcomes: Sequence[Outcome]) -> bool | None:
    figure = find(name, outcomes)
    return None if figure is None else GOALS[name].is_met(figure.value)


def _facts(outcomes: Sequence[Outcome]) -> str:
    facts = [(name, value) for outcome in outcomes for name, value in outcome.facts.items()]
    return markdown(["machine", ""], facts) if facts else ""


def _goals(outcomes: Sequence[Outcome]) -> str:
    rows = []
    for name, goal in GOALS.items():
        figure = find(name, outcomes)
        measured = "not measured" if figure is None else f"{_value(figure.value)} {figure.unit}"
        verdict = "" if figure is None else "met" if goal.is_met(figure.value) else "missed"
        rows.append([name, measured, str(goal), verdict])
    return markdown(["figure", "measured", "goal", ""], rows)


def _figures(figures: Sequence[Figure]) -> str:
    rows = [[figure.name, f"{_value(figure.value)} {figure.unit}", figure.how] for figure in figures]
    return markdown(["figure", "measured", "how"], rows)


def _left_out(outcome: Outcome) -> list[tuple[str, str]]:
    failed = [(outcome.name, outcome.failure)] if outcome.failure else []
    return [*outcome.skipped, *failed]


def _value(value: float) -> str:
    return f"{value:.2e}" if 0 < abs(value) < 0.001 else number(value)
