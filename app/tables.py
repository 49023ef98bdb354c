"""Figures as text, in tables that people read."""

from __future__ import annotations

import math
from collections.abc import Sequence


def number(value: float | None, factor: float = 1.0) -> str:
    """Three significant digits are all that a run on a shared machine can promise."""
    if value is None or math.isnan(value):
        return "-"
    value *= factor
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def percent(value: float | None) -> str:
    """Formats whole percents, with tenths near the ends: 99.6 % is not 100 %."""
    if value is None or math.isnan(value):
        return "-"
    return f"{value:.0%}" if value in (0, 1) or 0.1 < value < 0.9 else f"{value:.1%}"


def table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Text in columns: the first to the left, figures to the right."""
    widths = [max(len(row[i]) for row in [head, *rows]) for i in range(len(head))]

    def line(row: Sequence[str]) -> str:
        cells = [
            text.ljust(w) if i == 0 else text.rjust(w)
            for i, (text, w) in enumerate(zip(row, widths, strict=True))
        ]
        return "  ".join(cells).rstrip()

    return "\n".join([line(head), line(["-" * w for w in widths]), *map(line, rows)])
