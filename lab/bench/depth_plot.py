"""The gain of k drafts in every step as a picture: tokens of a sequence in a step, and tokens a second."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from lab.bench.depth import gains
from penstock.app.simulate.plots import OTHER, OURS, new_figure, plain_axes, save
from penstock.engine.config import MAX_DRAFTS

_COLOURS = (OURS, "#009e73", "#d55e00")


def draw_depths(path: Path, rows: Sequence[dict[str, Any]]) -> None:
    """Writes a picture of the rows of a Depth bench: the tokens of a step, and for each temperature the gains."""
    figure = new_figure(
        "What drafts bring, by how many there are in every step",
        "Gain: tokens a second beside none, a line for each number of streams. Dashed: each draft right by itself.",
    )
    temperatures = sorted({row["temperature"] for row in rows})
    streams = max(row["streams"] for row in rows)
    left, *others = _columns(
        figure, ["tokens in a step", *(f"gain, temperature {one:g}" for one in temperatures)]
    )
    for axes, colour, temperature in zip(others, _COLOURS, temperatures, strict=False):
        some = [row for row in rows if row["temperature"] == temperature]
        _draw_tokens(left, [row for row in some if row["streams"] == streams], colour)
        axes.set_ylim(0, 1.1 * max(gains(rows)))
        axes.axhline(1.0, color=OTHER, linewidth=1)
        _draw_gains(axes, some)
    save(figure, path)


def _columns(figure: Figure, titles: Sequence[str]) -> list[Any]:
    width, found = 0.93 / len(titles), []
    for column, title in enumerate(titles):
        axes: Any = figure.add_axes((0.05 + column * width, 0.11, width - 0.05, 0.62))
        axes.set(xlim=(0, MAX_DRAFTS + 1.6), xticks=range(0, MAX_DRAFTS + 1, 2))
        plain_axes(axes, "drafts, k", title)
        found.append(axes)
    return found


def _draw_tokens(axes: Any, rows: Sequence[dict[str, Any]], colour: str) -> None:
    lengths = [row["length"] for row in rows]
    tokens = [row["num_tokens"] / max(1, row["num_steps"] * row["streams"]) for row in rows]
    axes.plot(lengths, [row["expected"] for row in rows], color=OTHER, linestyle="--")
    axes.plot(lengths, tokens, color=colour, marker="o", markersize=4)
    _name(axes, lengths[-1], tokens[-1], f"T {rows[0]['temperature']:g}", colour)


def _draw_gains(axes: Any, rows: Sequence[dict[str, Any]]) -> None:
    streams = sorted({row["streams"] for row in rows})
    found = list(zip(rows, gains(rows), strict=True))
    for colour, number in zip(_COLOURS, streams, strict=False):
        points = [(row["length"], gain) for row, gain in found if row["streams"] == number and gain]
        axes.plot(*zip(*points, strict=True), color=colour, marker="o", markersize=4)
        _name(axes, *points[-1], str(number), colour)


def _name(axes: Any, x: float, y: float, text: str, colour: str) -> None:
    axes.text(x + 0.25, y, text, va="center", fontsize=9, color=colour)
