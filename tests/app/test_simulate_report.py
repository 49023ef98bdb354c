"""What `penstock simulate` prints and draws of results, and which rates a search of the capacity tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
from matplotlib import image
from matplotlib.colors import to_rgba
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.text import Text

from penstock.app.simulate import capacity
from penstock.app.simulate.capacity import Search, sentence
from penstock.app.simulate.inputs import GPU_COST, Traffic
from penstock.app.simulate.plots import OTHER, OURS, draw
from penstock.app.simulate.replicas import Cell, draw_cells, print_cells
from penstock.app.simulate.report import print_report
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.simulator.cluster import ROUTERS
from penstock.priority.simulator.result import Result, Served
from penstock.priority.simulator.run import POLICIES, Machine
from penstock.priority.simulator.summary import summarise
from penstock.priority.simulator.trace import Arrival
from tests.app.expected import expected

PROMISE = replace(DEFAULT_POLICIES[Lane.INTERACTIVE], ttft_s=0.995, tpot_s=0.0995)
LANES = {**DEFAULT_POLICIES, Lane.INTERACTIVE: PROMISE}


def result(policy: str, place: int) -> Result:
    """The more of the promises are kept, and the fewer requests refused, the higher the place."""
    served = [one(number, (place + 1) / 5) for number in range(100)]
    return Result(policy, served, 60.0, busy_s=20.0 + place, num_steps=900, num_preemptions=place)


def one(number: int, ease: float) -> Served:
    lane = Lane.BATCH if number % 5 == 4 else Lane.INTERACTIVE
    arrival = Arrival(3.0 + number / 2, 100 + number, 20, lane, f"tenant {isqrt(number)}")
    if number % 10 > 8 * ease + 3:
        return Served(arrival, refused="deadline" if number % 20 < 10 else "queue")
    wait_s = 0.05 + (1 - ease) * (number % 7) * 1.5
    first_s = arrival.at_s + wait_s
    last_s = first_s + 0.515 + number % 3
    return Served(arrival, first_s, last_s, 20, last_token_s=last_s, num_cached=number % 40)


RESULTS = [result(policy, place) for place, policy in enumerate(POLICIES)]
SUMMARIES = [summarise(one, LANES) for one in RESULTS]
CELLS = [
    Cell(
        num_replicas=replicas,
        router=router,
        num_prefill=replicas // 2 if router == "disaggregated" else None,
        summary=summarise(result(router, place), num_machines=replicas, lanes=LANES),
    )
    for replicas in (2, 8)
    for place, router in enumerate(ROUTERS)
    if router != "least"
]


@pytest.fixture
def drawn(monkeypatch: pytest.MonkeyPatch) -> dict[str, Figure]:
    """The figures that are saved, by the names of their files."""
    drawn: dict[str, Figure] = {}
    save = Figure.savefig

    def keep(figure: Figure, path: Path, **options: Any) -> None:
        drawn[path.name] = figure
        save(figure, path, **options)

    monkeypatch.setattr(Figure, "savefig", keep)
    return drawn


def texts(figure: Figure) -> set[str]:
    return {text.get_text() for text in figure.findobj(Text)}


def widths(figure: Figure, colour: str) -> list[float]:
    """The widths of the bars of a colour."""
    bars = (one for one in figure.findobj(Rectangle) if one.get_facecolor() == to_rgba(colour))
    return [bar.get_width() for bar in bars]


def test_the_whole_report(capsys: pytest.CaptureFixture[str]) -> None:
    print_report(SUMMARIES, LANES)
    alone = [Served(Arrival(0.0, 9, 2, Lane.BATCH), 0.5, 1.0, 2, last_token_s=1.0)]
    print_report([summarise(Result("fcfs", alone, 1.0))], LANES)
    out = capsys.readouterr().out
    assert out == expected("simulate.txt", out)


def test_the_whole_table_of_routers(capsys: pytest.CaptureFixture[str]) -> None:
    print_cells(CELLS, PROMISE)
    out = capsys.readouterr().out
    assert out == expected("replicas.txt", out)


def test_the_pictures_of_policies(drawn: dict[str, Figure], tmp_path: Path) -> None:
    paths = draw(tmp_path, "made", RESULTS, SUMMARIES, PROMISE)
    assert paths == [tmp_path / name for name in drawn] == [tmp_path / "promise.png", tmp_path / "ttft.png"]
    assert {image.imread(path).shape[:2] for path in paths} == {(640, 1280)}
    promise, waits = drawn.values()
    assert texts(promise) >= {*POLICIES, "8 %", "15 %", "18 %", "39 %", "refused", "too late"}
    *others, ours = (100 * (summary.lanes["interactive"].attainment or 0.0) for summary in SUMMARIES)
    assert (widths(promise, OTHER), widths(promise, OURS)) == (others, [ours])
    assert len(
        [line for axes in waits.axes for line in axes.lines if len(np.asarray(line.get_xydata())) > 5]
    ) >= len(POLICIES)


def test_the_picture_of_routers(drawn: dict[str, Figure], tmp_path: Path) -> None:
    path = draw_cells(tmp_path, CELLS, "made", PROMISE)
    assert path == tmp_path / "scale.png"
    assert image.imread(path).shape[:2] == (640, 1280)
    axes = drawn["scale.png"].axes[0]
    lines = [np.asarray(line.get_xydata(), float).round(1).tolist() for line in axes.lines]
    kept = [
        round(100 * (cell.summary.total.attainment or 0.0), 1) for cell in CELLS if cell.num_replicas == 2
    ]
    assert [[[2, one], [8, one]] for one in kept] == lines[: len(kept)]


# Capacity

MACHINE = Machine(coefficients={**GPU_COST, "alpha_s": 1.92, "delta_s": 1e-6})
ARRIVALS = [Arrival(0.0, 1_000, 10), Arrival(1.0, 3_000, 30, Lane.BATCH)]
TRAFFIC = Traffic("made", ARRIVALS, lambda rate: [Arrival(i / rate, 1, 1) for i in range(200)])


def simulated(most_of_one: float) -> Callable[..., SimpleNamespace]:
    """In place of the simulator: so many machines keep 95 % of promises up to a rate, and beyond it half of them."""

    def simulate(arrivals: Sequence[Arrival], machine: Machine, *, num_machines: int, **_: object) -> object:
        assert machine is MACHINE
        num_kept = 190 if 1 / arrivals[1].at_s <= most_of_one * num_machines else 100
        served = [
            Served(arrival, arrival.at_s, arrival.at_s, 1, last_token_s=arrival.at_s)
            if number < num_kept
            else Served(arrival, refused="late")
            for number, arrival in enumerate(arrivals)
        ]
        return SimpleNamespace(served=served)

    return simulate  # type: ignore[return-value]


@pytest.mark.parametrize("most", [1.0, 3.0, 40.0])
def test_a_search_finds_the_highest_rate_to_a_fiftieth(most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "simulate", simulated(most))
    search = Search(TRAFFIC, MACHINE, DEFAULT_POLICIES, 0.95)
    first = search.run(1)
    found = [first, search.run(2, first.rate), search.run(2, 2 * most)]
    assert [one.attainment for one in found] == [0.95] * 3
    for one in found:
        highest = most * one.num_machines
        assert 0.98 * highest - 0.02 <= one.rate <= highest


def test_a_machine_that_keeps_no_promise_has_no_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(capacity, "simulate", simulated(0.0))
    found = [Search(TRAFFIC, MACHINE, DEFAULT_POLICIES, 0.95).run(1)]
    assert (found[0].rate, found[0].attainment) == (0.0, None)
    assert sentence(found, TRAFFIC, PROMISE, 0.95) == (
        "Of this traffic (made: 2,000 prompt and 20 output tokens a request) 1 machine can promise nothing, "
        "with 95 % of the interactive requests getting their first token within 0.995 s and then one every 99.5 ms."
    )
    two = [
        replace(found[0], rate=4.0, attainment=0.95),
        replace(found[0], num_machines=2, rate=9.0, attainment=0.95),
    ]
    said = "can promise 4 requests per second, 2 machines can promise 9 requests per second (2.25 times as many),"
    assert said in sentence(two, TRAFFIC, PROMISE, 0.95)
