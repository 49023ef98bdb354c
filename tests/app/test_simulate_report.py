"""What `penstock simulate` prints and draws of results, and which rates a search of the capacity tries."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import isqrt
from pathlib import Path
from types import SimpleNamespace

import pytest
from matplotlib.figure import Figure

from penstock.app.simulate import capacity
from penstock.app.simulate.capacity import Search, sentence
from penstock.app.simulate.inputs import GPU_COST, Traffic
from penstock.app.simulate.plots import DPI, draw
from penstock.app.simulate.replicas import Cell, draw_cells, print_cells
from penstock.app.simulate.report import print_report
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.simulator.cluster import ROUTERS
from penstock.priority.simulator.result import Result, Served
from penstock.priority.simulator.run import POLICIES, Machine
from penstock.priority.simulator.summary import summarise
from penstock.priority.simulator.trace import Arrival
from tests.app.expected import drawing, expected

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
def drawn(monkeypatch: pytest.MonkeyPatch) -> list[tuple[Path, str]]:
    """The files that are saved, and what is drawn in them."""
    drawn: list[tuple[Path, str]] = []

    def save(figure: Figure, path: Path, *, dpi: int, facecolor: str) -> None:
        assert (dpi, facecolor) == (DPI, "white")
        width, height = figure.get_size_inches() * dpi
        drawn.append((path, f"{path.name}, {width:g} x {height:g}\n{drawing(figure)}"))

    monkeypatch.setattr(Figure, "savefig", save)
    return drawn


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


def test_the_pictures_of_policies(drawn: list[tuple[Path, str]]) -> None:
    paths = draw(Path("folder"), "made", RESULTS, SUMMARIES, PROMISE)
    assert paths == [path for path, _ in drawn] == [Path("folder/promise.png"), Path("folder/ttft.png")]
    text = "\n".join(text for _, text in drawn)
    assert text == expected("policies.txt", text)


def test_the_picture_of_routers(drawn: list[tuple[Path, str]]) -> None:
    path = draw_cells(Path("folder"), CELLS, "made", PROMISE)
    ((saved, text),) = drawn
    assert saved == path == Path("folder/scale.png")
    assert text == expected("routers.txt", text)


# Capacity

MACHINE = Machine(coefficients={**GPU_COST, "alpha_s": 1.92, "delta_s": 1e-6})
ARRIVALS = [Arrival(0.0, 1_000, 10), Arrival(1.0, 3_000, 30, Lane.BATCH)]
TRAFFIC = Traffic("made", ARRIVALS, lambda rate: [Arrival(i / rate, 1, 1) for i in range(200)])


def simulated(most_of_one: float, tried: list[tuple[int, float]]) -> Callable[..., SimpleNamespace]:
    """In place of the simulator: so many machines keep 95 % of promises up to a rate, and beyond it half of them."""

    def simulate(arrivals: Sequence[Arrival], machine: Machine, *, num_machines: int, **_: object) -> object:
        assert machine is MACHINE
        rate = 1 / arrivals[1].at_s
        tried.append((num_machines, round(rate, 4)))
        num_kept = 190 if rate <= most_of_one * num_machines else 100
        served = [
            Served(arrival, arrival.at_s, arrival.at_s, 1, last_token_s=arrival.at_s)
            if number < num_kept
            else Served(arrival, refused="late")
            for number, arrival in enumerate(arrivals)
        ]
        return SimpleNamespace(served=served)

    return simulate  # type: ignore[return-value]


def test_the_rates_that_a_search_tries(monkeypatch: pytest.MonkeyPatch) -> None:
    lines: list[object] = []
    for most in (0.0, 1.0, 3.0, 40.0):
        tried: list[tuple[int, float]] = []
        monkeypatch.setattr(capacity, "simulate", simulated(most, tried))
        search = Search(TRAFFIC, MACHINE, DEFAULT_POLICIES, 0.95)
        first = search.run(1)
        found = [first, search.run(2, first.rate), search.run(2, 2 * most)]
        rates = [f"{one.num_machines} at {one.rate:.6g}, {one.attainment}" for one in found]
        lines += [*tried, *rates, sentence(found, TRAFFIC, PROMISE, 0.95)]
    text = "".join(f"{line}\n" for line in lines)
    assert text == expected("capacity.txt", text)
