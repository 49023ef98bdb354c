"""`penstock simulate --replicas`: routers compared, the picture, and what is refused."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from penstock.app.simulate import command
from penstock.app.simulate.plots import SIZE
from penstock.app.simulate.replicas import DEFAULT_ROUTERS, Fleet
from penstock.app.simulate.splits import search
from penstock.priority.simulator.cluster import Wires
from tests.app.test_simulate import GOOD_LINE, Simulate, parse, penstock, png_size, refusal

__all__ = ["penstock"]  # the fixture

SMALL = ("--replicas", "1,2", "--rate", "3", "--duration", "10", "--scale", "0.2")


def test_every_router_is_in_the_table_the_figures_and_the_picture(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "f.json"
    assert penstock(*SMALL, "--json", path, "--plots", tmp_path, "--transfer-gbps", "50") == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 110
    rows = [line.split() for line in lines[3:10]]
    expected = ["prefix", "least", "random", "prefix", "least", "random", "disaggregated"]
    assert [row[1] for row in rows] == expected
    assert [row[0] for row in rows] == ["1", "1", "1", "2", "2", "2", "2"]
    cells = json.loads(path.read_text())["replicas"]
    assert [(cell["num_replicas"], cell["router"]) for cell in cells][-2:] == [
        (2, "random"),
        (2, "disaggregated"),
    ]
    assert cells[-1]["num_prefill"] == 1
    # As many requests for each replica, and a single one leaves no choice.
    offered = [cell["summary"]["total"]["offered"] for cell in cells]
    assert 1.3 * offered[0] < offered[-1]
    assert cells[0]["summary"]["total"] == cells[1]["summary"]["total"]
    assert 0 < cells[3]["summary"]["hit_rate"] < 1
    assert png_size(tmp_path / "scale.png") == SIZE


def test_a_trace_keeps_its_pace_unless_another_is_asked_for(penstock: Simulate, tmp_path: Path) -> None:
    trace, path = tmp_path / "t.jsonl", tmp_path / "f.json"
    trace.write_text("".join(GOOD_LINE.replace(": 0", f": {i * 1000}") for i in range(10)))
    spans = []
    for rate in ((), ("--rate", "5")):
        arguments = ("--trace", trace, "--replicas", "2", "--router", "prefix,round-robin", "--push-ms", "0")
        assert penstock(*arguments, *rate, "--json", path) == 0
        cells = json.loads(path.read_text())["replicas"]
        spans += [cell["summary"]["span_s"] for cell in cells]
    assert spans == pytest.approx([9.0, 9.0, 1.0, 1.0])  # 5/s for each of two: a gap of 100 ms


def test_splits_are_listed_best_first_with_the_roles_to_run(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "f.json"
    small = ("--replicas", "3", "--rate", "3", "--duration", "10", "--scale", "0.2", "--beta-s", "0.001")
    assert penstock(*small, "--splits", "--pull", "--tier-tokens", "9000", "--json", path) == 0
    lines = capsys.readouterr().out.splitlines()
    assert max(map(len, lines)) <= 110
    cells = json.loads(path.read_text())["replicas"]
    assert sorted(cell["num_prefill"] or 0 for cell in cells) == [0, 1, 2]
    merits = [
        (one["total"]["attainment"], one["goodput"], -one["total"]["ttft_s"]["p50"])
        for one in (cell["summary"] for cell in cells)
    ]
    assert merits == sorted(merits, reverse=True)
    assert len(set(merits)) == 3
    best = cells[0]["num_prefill"]
    roles = (
        f"{best} with --role prefill, {3 - best} with --role decode"
        if best
        else "all of them with --role both"
    )
    assert lines[-1] == f"Best of those tried for 3 replicas: {roles}."


def test_the_search_of_a_split_narrows_around_the_best() -> None:
    tried: list[int] = []

    def run(number: int) -> Any:
        tried.append(number)
        total = SimpleNamespace(attainment=1 - abs(number - 27) / 64, ttft_s=SimpleNamespace(p50=1.0))
        return SimpleNamespace(num_prefill=number, summary=SimpleNamespace(total=total, goodput=1.0))

    found = search(run, 64)
    assert [cell.num_prefill for cell in found] == tried
    assert len(tried) == len(set(tried)) < 16
    assert 27 in tried
    assert min(tried) > 0
    assert max(tried) < 64


def test_the_wires_and_numbers_of_a_fleet() -> None:
    given = ["--push-ms", "20", "--transfer-gbps", "50", "--prefill-replicas", "2", "--router", "least"]
    given += ["--tier-tokens", "900", "--tier-gbps", "40", "--pull"]
    assert command._fleet(parse("--replicas", "1000,1", *given)) == Fleet(
        numbers=[1, 1000],
        routers=["least"],
        num_prefill=2,
        wires=Wires(push_delay_s=0.02, transfer_gbps=50.0, pulls=True, tier_tokens=900, tier_gbps=40.0),
    )
    plain = Fleet(numbers=[2], routers=DEFAULT_ROUTERS, num_prefill=None, wires=Wires())
    assert command._fleet(parse("--replicas", "2")) == plain


@pytest.mark.parametrize(
    "options", [{"numbers": [1, 3], "num_prefill": 2}, {"numbers": [2], "num_prefill": 1}]
)
def test_fleets_that_can_be_divided(options: dict[str, Any]) -> None:
    Fleet(**options, routers=["disaggregated"], wires=Wires()).check(is_asked=False)


def test_a_single_replica_is_not_divided_although_it_cannot_be() -> None:
    fleet = Fleet(numbers=[1, 4], routers=DEFAULT_ROUTERS, num_prefill=1, wires=Wires())
    fleet.check(is_asked=False)
    assert fleet.cells() == [(1, name) for name in DEFAULT_ROUTERS[:3]] + [
        (4, name) for name in DEFAULT_ROUTERS
    ]


@pytest.mark.parametrize(
    ("arguments", "named"),
    [
        (["--replicas", "0"], "--replicas: must be at least 1"),
        (["--replicas", "many"], "--replicas: 'many' is not a whole number"),
        (["--replicas", "1001"], "--replicas: must be at most 1,000, not 1001"),
        (
            ["--replicas", "2", "--router", "lottery"],
            "'lottery' is none of prefix, least, random, round-robin",
        ),
        (["--replicas", "1,2", "--router", "disaggregated"], "--router disaggregated needs at least 2"),
        (
            ["--replicas", "2,4", "--prefill-replicas", "2"],
            "--prefill-replicas 2 leaves none of 2 --replicas",
        ),
        (
            ["--replicas", "2", "--router", "least", "--prefill-replicas", "1"],
            "only goes with --router disag",
        ),
        (["--replicas", "2", "--transfer-gbps", "0"], "--transfer-gbps: must be greater than 0"),
        (["--replicas", "2", "--push-ms", "-1"], "--push-ms: must be at least 0"),
        (["--replicas", "2", "--push-ms", "10000.5"], "--push-ms: must be at most 10,000"),
        (["--replicas", "2", "--policies", "fcfs"], "--policies does not go with --replicas"),
        (["--replicas", "2", "--capacity"], "--capacity does not go with --replicas"),
        (["--router", "prefix"], "--router only goes with --replicas"),
        (["--push-ms", "20"], "--push-ms only goes with --replicas"),
        (["--transfer-gbps", "20"], "--transfer-gbps only goes with --replicas"),
        (["--prefill-replicas", "1"], "--prefill-replicas only goes with --replicas"),
        (["--splits"], "--splits only goes with --replicas"),
        (["--replicas", "1,4", "--splits"], "--splits needs at least 2 --replicas"),
        (["--replicas", "4", "--splits", "--router", "least"], "--router does not go with --splits"),
        (["--replicas", "2", "--tier-tokens", "0"], "--tier-tokens: must be at least 1"),
        (["--pull"], "--pull only goes with --replicas"),
    ],
)
def test_a_mistake_is_one_line(
    penstock: Simulate, capsys: pytest.CaptureFixture[str], arguments: list[str], named: str
) -> None:
    assert named in refusal(penstock, capsys, *arguments)
