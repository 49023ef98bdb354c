"""The ladder as a picture: tokens a second of each rung, and the time to first token beside it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.app.simulate.plots import FAINT, INK, OTHER, OURS, new_figure, save
from penstock.app.tables import number


def draw_ladder(path: Path, ladders: Mapping[str, Sequence[dict[str, Any]]]) -> None:
    """Writes a picture with a column of bars for each model."""
    figure = new_figure(
        "What each idea brings, one on top of the other",
        "Output tokens per second, many users at once; in brackets, how long half of them wait for the first token.",
    )
    width = 0.96 / len(ladders)
    for column, (model, rows) in enumerate(ladders.items()):
        axes = figure.add_axes((0.03 + column * width, 0.06, width - 0.03, 0.68))
        axes.set_title(model, loc="left", fontsize=12, color=INK)
        most = max(row["tokens_per_s"] for row in rows)
        for place, row in enumerate(rows):
            _bar(axes, place, row, row["tokens_per_s"] / rows[0]["tokens_per_s"], most)
        axes.set(xlim=(0, 1.75 * most), ylim=(len(rows) - 0.5, -0.7))
        axes.axis("off")
    save(figure, path)


def _bar(axes: Any, place: int, row: dict[str, Any], times: float, most: float) -> None:
    rate = row["tokens_per_s"]
    axes.barh(place + 0.12, rate, height=0.4, color=OTHER if place == 0 else OURS)
    axes.text(0, place - 0.27, row["rung"], va="center", fontsize=10, color=FAINT)
    text = f"{number(rate)}, {number(times)}x  ({number(row['ttft_p50_ms'])} ms)"
    axes.text(rate + 0.02 * most, place + 0.12, text, va="center", fontsize=10, color=INK)
