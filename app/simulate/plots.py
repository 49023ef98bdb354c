"""Two pictures: whose promise was kept under which policy, and how long people waited as time went on."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.simulator.result import Result, Served
from penstock.priority.simulator.summary import Summary, percentiles

SIZE = (1280, 640)
"""Pixels of every picture."""
DPI = 160
INK, FAINT, GRID = "#1f2933", "#5f6c7b", "#dde2e8"
OURS, OTHER, _REFUSED, _LATE = "#0072b2", "#9fa9b5", "#d9dfe6", "#f1f3f6"
_COLOURS = {"fcfs": "#d55e00", "strict": "#cc79a7", "fair": "#009e73", "penstock": OURS}
"""Okabe and Ito's, which colour-blind people tell apart."""
_MARKS = {"fcfs": "s", "strict": "^", "fair": "D", "penstock": "o"}
_ROUTERS = {
    "prefix": (OURS, "o"), "least": ("#009e73", "D"), "random": ("#d55e00", "s"),
    "round-robin": ("#cc79a7", "^"), "disaggregated": ("#e69f00", "v"),
}  # fmt: skip
_WINDOWS = 48
_LEAST_TTFT_S = 0.01


def draw(
    folder: Path, name: str, results: Sequence[Result], summaries: Sequence[Summary], policy: LanePolicy
) -> list[Path]:
    """Writes promise.png and ttft.png; `policy` is that of the interactive lane."""
    traffic = f"{name}, {summaries[0].total.offered:,} requests in {summaries[0].span_s:,.0f} s"
    return [
        save(_promise(traffic, summaries, policy), folder / "promise.png"),
        save(_ttft(traffic, results, policy), folder / "ttft.png"),
    ]


def _promise(traffic: str, summaries: Sequence[Summary], policy: LanePolicy) -> Figure:
    """A bar per policy: the part of the interactive requests whose promise was kept; goodput beside it."""
    promise = f"first token within {policy.ttft_s:g} s, then one every {policy.tpot_s * 1000:g} ms"
    figure = new_figure(
        "Interactive requests whose promise was kept", f"Promise: {promise}. Of all that were offered."
    )
    axes = figure.add_axes((0.15, 0.12, 0.66, 0.6))
    for place, summary in enumerate(summaries):
        _bar(axes, place, summary)
    axes.set(xlim=(0, 100), ylim=(len(summaries) - 0.5, -0.5))
    axes.axis("off")
    figure.text(0.91, 0.735, "goodput,\nrequests/s", ha="center", fontsize=10, color=FAINT)
    figure.text(0.03, 0.045, f"Traffic: {traffic}.", fontsize=9, color=FAINT)
    return figure


def _bar(axes: Any, place: int, summary: Summary) -> None:
    lane = summary.lanes.get(Lane.INTERACTIVE.label, summary.total)
    kept, refused = 100 * (lane.attainment or 0.0), 100 * lane.refused / lane.offered
    ours = summary.policy == "penstock"
    style: dict[str, Any] = {"va": "center", "fontsize": 13, "weight": "bold" if ours else "normal"}
    axes.barh(place, 100, height=0.66, color=_LATE)
    axes.barh(place, refused, left=kept, height=0.66, color=_REFUSED)
    axes.barh(place, kept, height=0.66, color=OURS if ours else OTHER)
    axes.text(-2, place, summary.policy, ha="right", color=INK, **style)
    axes.text(115.2, place, f"{summary.goodput:.1f}", ha="center", color=INK, **style)
    if kept > 14:
        axes.text(kept - 1.5, place, f"{kept:.0f} %", ha="right", color="white" if ours else INK, **style)
    else:
        axes.text(kept + 1.5, place, f"{kept:.0f} %", ha="left", color=INK, **style)
    for start, width, text in (
        (kept, refused, "refused"),
        (kept + refused, 100 - kept - refused, "too late"),
    ):
        if width > 12:
            axes.text(start + width / 2, place, text, ha="center", va="center", fontsize=10, color=FAINT)


def _ttft(traffic: str, results: Sequence[Result], policy: LanePolicy) -> Figure:
    """For each policy the P90 of the time to first token, by when the requests came."""
    figure = new_figure(
        "Nine in ten interactive requests had their first token within …",
        f"Of those let in, by the time at which they came. Traffic: {traffic}.",
    )
    axes = figure.add_axes((0.075, 0.12, 0.785, 0.66))
    first_s = results[0].served[0].arrival.at_s
    width_s = max(results[0].served[-1].arrival.at_s - first_s, 1e-3) / _WINDOWS
    ends = []
    for result in results:
        at_s, ttft_s = _windows(result, first_s, width_s)
        if not at_s:
            continue
        ours = result.policy == "penstock"
        axes.plot(
            at_s, ttft_s, color=_COLOURS[result.policy], linewidth=2.6 if ours else 1.6, zorder=3 if ours else 2,
            marker=_MARKS[result.policy], markersize=3.5, markevery=4,
        )  # fmt: skip
        ends.append((ttft_s[-1], result.policy))
    axes.axhline(policy.ttft_s, color=INK, linewidth=1.6, linestyle=(0, (5, 3)), zorder=4)
    axes.set_yscale("log")
    axes.set_xlim(0, width_s * _WINDOWS)
    axes.set_ylim(*_limits(axes.get_ylim(), policy.ttft_s))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g} s")
    plain_axes(axes, "seconds since the start")
    axes.annotate(
        f"promise, {policy.ttft_s:g} s", (0, policy.ttft_s), (5, 5), textcoords="offset points", fontsize=10,
        color=INK,
    )  # fmt: skip
    _label_ends(axes, ends)
    return figure


def draw_routers(
    path: Path, lines: Mapping[str, Sequence[tuple[int, Summary]]], traffic: str, policy: LanePolicy
) -> Path:
    """Plots the promises kept by each router and the goodput per replica, by number of replicas."""
    figure = new_figure(
        "Promises kept, and requests that kept them per replica, by router",
        f"First token within {policy.ttft_s:g} s, then one every {policy.tpot_s * 1000:g} ms. Traffic: {traffic}.",
    )
    kept = figure.add_axes((0.07, 0.14, 0.32, 0.6))
    good = figure.add_axes((0.47, 0.14, 0.32, 0.6))
    for axes, title in ((kept, "kept, % of all offered"), (good, "goodput, requests/s of a replica")):
        axes.set_xscale("log", base=2)
        axes.xaxis.set_major_formatter(lambda value, _: f"{value:g}")
        plain_axes(axes, "replicas", title)
    for router, cells in lines.items():
        colour, mark = _ROUTERS[router]
        numbers = [number for number, _ in cells]
        style: dict[str, Any] = {"color": colour, "marker": mark, "linewidth": 2, "markersize": 5}
        kept.plot(numbers, [100 * (one.total.attainment or 0) for _, one in cells], label=router, **style)
        good.plot(numbers, [one.goodput / number for number, one in cells], label=router, **style)
    good.set_ylim(bottom=0)
    good.legend(loc="center left", bbox_to_anchor=(1.02, 0.5), frameon=False, fontsize=10)
    return save(figure, path)


def new_figure(title: str, subtitle: str) -> Figure:
    figure = Figure(figsize=(SIZE[0] / DPI, SIZE[1] / DPI))
    figure.text(0.03, 0.925, title, fontsize=15, weight="bold", color=INK)
    figure.text(0.03, 0.862, subtitle, fontsize=10, color=FAINT)
    return figure


def plain_axes(axes: Any, label: str, title: str = "") -> None:
    """Lines across at the ticks, and nothing else that is not needed."""
    axes.set_title(title, fontsize=11, loc="left", color=INK)
    axes.set_xlabel(label, fontsize=10, color=FAINT)
    axes.grid(axis="y", color=GRID, linewidth=0.8)
    axes.tick_params(which="both", colors=FAINT, labelsize=10, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    axes.spines["bottom"].set_color(GRID)


def save(figure: Figure, path: Path) -> Path:
    figure.savefig(path, dpi=DPI, facecolor="white")
    return path


def _windows(result: Result, first_s: float, width_s: float) -> tuple[list[float], list[float]]:
    """The middle of each window in which somebody came, and the P90 of their time to first token."""
    windows: dict[int, list[float]] = {}
    for served in filter(_is_shown, result.served):
        number = min(int((served.arrival.at_s - first_s) / width_s), _WINDOWS - 1)
        windows.setdefault(number, []).append(served.ttft_s or 0.0)
    numbers = sorted(windows)
    middles = [(number + 0.5) * width_s for number in numbers]
    return middles, [max(percentiles(windows[number]).p90 or 0.0, _LEAST_TTFT_S) for number in numbers]


def _is_shown(served: Served) -> bool:
    return served.lane == Lane.INTERACTIVE and served.ttft_s is not None


def _limits(found: tuple[float, float], promise_s: float) -> tuple[float, float]:
    """The promise is always in view, with room around it."""
    return min(found[0], promise_s / 3), max(found[1], promise_s * 3)


def _label_ends(axes: Any, ends: list[tuple[float, str]]) -> None:
    """Names at the right ends of the lines, moved apart where these are close."""
    low, high = axes.transData.transform([(0, value) for value in axes.get_ylim()])[:, 1]
    least = 0.075 * (high - low)
    bottom = low
    for value, name in sorted(ends):
        place = max(axes.transData.transform((0, value))[1], bottom)
        bottom = place + least
        axes.annotate(
            name, (1, (place - low) / (high - low)), (6, 0), xycoords="axes fraction",
            textcoords="offset points", va="center", fontsize=11, color=_COLOURS[name],
            weight="bold" if name == "penstock" else "normal", annotation_clip=False,
        )  # fmt: skip
