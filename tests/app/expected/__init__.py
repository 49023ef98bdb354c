"""Whole outputs as they were last read by a person; `EXPECTED=write pytest FILE` writes them anew, to be read again."""

from __future__ import annotations

import os
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.colors import to_hex
from matplotlib.figure import Figure
from matplotlib.legend import Legend
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from matplotlib.text import Annotation, Text


def expected(name: str, text: str) -> str:
    """The text of a file here, after `text` is written to it where the environment asks for that."""
    path = Path(__file__).parent / name
    if os.environ.get("EXPECTED") == "write":
        path.write_text(text, encoding="utf-8")
    return path.read_text(encoding="utf-8")


def drawing(figure: Figure) -> str:
    """All that a figure shows: a line for each text, line and area, with its place, its size and its colour."""
    figure.draw_without_rendering()
    shown = [artist for artist in figure.findobj() if artist.get_visible()]
    lines = dict.fromkeys(line for artist in shown if (line := _line(artist)))
    return "".join(f"{line}\n" for line in lines)


def _line(artist: object) -> str:
    match artist:
        case Axes():
            box = _numbers(artist.get_position().bounds, artist.get_xlim(), artist.get_ylim())
            return f"axes {box} {artist.get_xscale()} {artist.get_yscale()} {artist.axison}"
        case Text() if text := artist.get_text():
            place = _numbers(artist.get_position(), artist.xy if isinstance(artist, Annotation) else ())
            align = f"{artist.get_horizontalalignment()} {artist.get_verticalalignment()}"
            size = f"{artist.get_fontsize():g} {artist.get_fontweight()} {align}"
            return f"text {place} {size} {to_hex(artist.get_color())} {artist.zorder:g} {text!r}"
        case Line2D():
            dashes, mark = artist.is_dashed(), artist.get_marker()
            style = _numbers([artist.get_linewidth(), artist.get_markersize(), artist.zorder])
            points = _numbers(artist.get_xdata(), artist.get_ydata())
            return (
                f"line {style} {to_hex(artist.get_color())} {dashes} {mark} {artist.get_markevery()} {points}"
            )
        case Legend():
            return f"legend {_numbers(artist.get_bbox_to_anchor().bounds)}"
        case Patch():
            box = _numbers(artist.get_path().transformed(artist.get_patch_transform()).get_extents().bounds)
            return f"area {box} {to_hex(artist.get_facecolor())} {to_hex(artist.get_edgecolor())}"
    return ""


def _numbers(*groups: object) -> str:
    return " ".join(f"{value:.5g}" for group in groups for value in group)  # type: ignore[attr-defined]
