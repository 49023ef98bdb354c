"""A run's figures as a table to look at, as JSON, and as a page of their own."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from html import escape
from pathlib import Path
from typing import Any

from penstock.app.tables import number, percent, table

_KINDS = ["requests", "refused", "left", "failed", "TTFT P50", "P99", "TPOT P50", "P99", "whole P99 ms"]
_PAGE = """<!doctype html>
<html lang="en"><meta charset="utf-8"><meta name="viewport" content="width=device-width">
<title>Penstock under load</title>
<style>
body {{ font: 16px/1.5 system-ui, sans-serif; color: #1f2933; max-width: 64rem; margin: 2rem auto; padding: 0 1rem }}
table {{ border-collapse: collapse; margin: 1.5rem 0; font-variant-numeric: tabular-nums }}
th, td {{ padding: .3rem .8rem; border-bottom: 1px solid #dde2e8; text-align: right }}
th:first-child, td:first-child {{ text-align: left }}
</style>
<h1>Penstock under load</h1>
{tables}
</html>
"""

Row = dict[str, Any]
Table = tuple[Sequence[str], Sequence[Sequence[str]]]


def print_report(found: Row) -> None:
    for head, rows in tables(found):
        print("\n" + table(head, rows))
    for error, times in list(found.get("errors", {}).items())[:5]:
        print(f"\nfailed {times} times: {error}")


def write_report(folder: Path, found: Row) -> list[Path]:
    """Writes report.json and report.html."""
    page = _PAGE.format(tables="\n".join(_html(*one) for one in tables(found)))
    return write(folder, {"report.json": json.dumps(found, indent=1) + "\n", "report.html": page})


def write(folder: Path, texts: Mapping[str, str]) -> list[Path]:
    """Writes files by name into a folder, which is made if it is not there."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in texts.items():
        (folder / name).write_text(text, encoding="utf-8")
    return [folder / name for name in texts]


def markdown(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join(f"| {' | '.join(cell.replace('|', '/') for cell in line)} |" for line in lines)


def tables(found: Row) -> list[Table]:
    """The whole, the kinds of users, and the lanes."""
    if "duration" not in found:
        return [(["requests", "number"], [["all", "0"]])]
    return [_whole(found), _kinds(found), _promises(found)]


def _whole(found: Row) -> Table:
    words = {
        "duration": "seconds",
        "completed": "completed",
        "failed": "failed",
        "rejected": "refused",
        "cancelled": "left",
        "request_throughput": "requests/s",
        "request_goodput": "of them with their promise kept/s",
        "output_throughput": "output tokens/s",
        "max_concurrent_requests": "most requests at once",
        "median_ttft_ms": "TTFT P50, ms",
        "p99_ttft_ms": "TTFT P99, ms",
        "median_itl_ms": "ITL P50, ms",
        "p99_itl_ms": "ITL P99, ms",
        "refused_p99_ms": "refusals took, P99, ms",
        "jain_index": "Jain's index of the tenants' work",
        "client_lag_p99_ms": "client late by, P99, ms",
    }
    return ["the whole run", ""], [[word, number(found.get(key))] for key, word in words.items()]


def _kinds(found: Row) -> Table:
    keys = ("requests", "refused", "left", "failed", "ttft_p50_ms", "ttft_p99_ms", "tpot_p50_ms", "tpot_p99_ms",
            "e2e_p99_ms")  # fmt: skip
    rows = [[name, *(number(kind[key]) for key in keys)] for name, kind in found["kinds"].items()]
    return ["users, lane", *_KINDS], rows


def _promises(found: Row) -> Table:
    rows = [
        [name, percent(kept), percent(found["slo_attainment_of_admitted"][name])]
        for name, kept in found.get("slo_attainment", {}).items()
    ]
    return ["promises kept", "of all offered", "of those let in"], rows


def _html(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [_row("th", head), *(_row("td", row) for row in rows)]
    return "<table>\n" + "\n".join(lines) + "\n</table>"


def _row(tag: str, cells: Sequence[str]) -> str:
    return "<tr>" + "".join(f"<{tag}>{escape(cell)}</{tag}>" for cell in cells) + "</tr>"
