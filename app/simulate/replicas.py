"""`penstock simulate --replicas`: routers compared, on numbers of replicas with as much traffic each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from penstock.app.errors import OperatorError
from penstock.app.log import counter, log
from penstock.app.simulate.inputs import Traffic
from penstock.app.simulate.report import promise_text
from penstock.app.tables import number, percent, table
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.simulator.cluster import ROUTERS, Wires, simulate_cluster
from penstock.priority.simulator.run import Machine
from penstock.priority.simulator.summary import Summary, summarise
from penstock.priority.simulator.trace import Arrival

_TIMES = ("TTFT P50", "P90 s", "TPOT P99 ms")
DEFAULT_ROUTERS = ("prefix", "least", "random", "disaggregated")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cell:
    """One router on one number of replicas."""

    num_replicas: int
    router: str
    num_prefill: int | None
    """Replicas that compute prompts alone."""
    summary: Summary


@dataclass(frozen=True, slots=True, kw_only=True)
class Fleet:
    """The routers that are compared, and the numbers of replicas."""

    numbers: Sequence[int]
    routers: Sequence[str]
    num_prefill: int | None
    """With `disaggregated`; half of the replicas, if not given."""
    wires: Wires

    def check(self, *, is_asked: bool) -> None:
        """Raises OperatorError for replicas that cannot be divided; `is_asked` if the routers were named."""
        if "disaggregated" not in self.routers:
            if self.num_prefill is not None:
                raise OperatorError("--prefill-replicas only goes with --router disaggregated")
            return
        if is_asked and min(self.numbers) < 2:
            raise OperatorError("--router disaggregated needs at least 2 --replicas, one of each sort")
        for replicas in self.numbers:
            if self.num_prefill is not None and 1 < replicas <= self.num_prefill:
                raise OperatorError(
                    f"--prefill-replicas {self.num_prefill} leaves none of {replicas} --replicas for the other tokens"
                )

    def cells(self) -> list[tuple[int, str]]:
        """Numbers and routers; a single replica cannot be disaggregated."""
        return [
            (replicas, router)
            for replicas in self.numbers
            for router in self.routers
            if replicas > 1 or router != "disaggregated"
        ]


def compare(
    fleet: Fleet, traffic: Traffic, rate: float | None, machine: Machine, lanes: Mapping[Lane, LanePolicy]
) -> list[Cell]:
    """Runs all cells; `rate` is that of a replica. Without it, all have the whole trace as it stands."""
    cells = []
    for replicas, router in fleet.cells():
        arrivals = traffic.arrivals if rate is None else traffic.at_rate(rate * replicas)
        num_prefill = None
        if router == "disaggregated":
            num_prefill = fleet.num_prefill or replicas // 2
        cells.append(run_cell(arrivals, router, replicas, num_prefill, fleet.wires, machine, lanes))
    return cells


def run_cell(
    arrivals: list[Arrival],
    router: str,
    num_replicas: int,
    num_prefill: int | None,
    wires: Wires,
    machine: Machine,
    lanes: Mapping[Lane, LanePolicy],
) -> Cell:
    """Runs one router on one number of replicas."""
    name = router if num_prefill is None else f"{router} {num_prefill}"
    with counter(f"{name}, {num_replicas}", len(arrivals)) as update:
        result = simulate_cluster(
            arrivals, machine, router, num_replicas, wires=wires, num_prefill=num_prefill, lanes=lanes,
            progress=update,
        )  # fmt: skip
    summary = summarise(result, lanes, num_machines=num_replicas)
    log.info("%s, %d: %s of the promises kept", name, num_replicas, percent(summary.total.attainment))
    return Cell(num_replicas=num_replicas, router=router, num_prefill=num_prefill, summary=summary)


def print_cells(cells: Sequence[Cell], policy: LanePolicy) -> None:
    """`policy` is that of the interactive lane."""
    moves = any(cell.summary.read_share or cell.summary.pulled_share for cell in cells)
    head = ["replicas", "router", "goodput/s", "kept"]
    head += (
        ["refused", *_TIMES, "hits", "read", "pulled"]
        if moves
        else ["admitted", "refused", *_TIMES, "hits", "Jain"]
    )
    head.append("busy")
    print(f"\n{table(head, [_row(cell, moves=moves) for cell in cells])}\n")
    print(f"{promise_text(policy)}. All figures are of all lanes.")
    print("hits: prompt tokens found in a prefix cache. busy: of the replicas' time, what steps took.")
    if moves:
        print("Among the hits, read: prompt tokens that came from a tier; pulled: from another replica.")


def draw_cells(folder: Path, cells: Sequence[Cell], traffic: str, policy: LanePolicy) -> Path:
    """Writes scale.png."""
    from penstock.app.simulate.plots import draw_routers

    shown = [router for router in ROUTERS if any(cell.router == router for cell in cells)]
    lines = {
        router: [(cell.num_replicas, cell.summary) for cell in cells if cell.router == router]
        for router in shown
    }
    return draw_routers(folder / "scale.png", lines, traffic, policy)


def _row(cell: Cell, *, moves: bool) -> list[str]:
    """With `moves`, other columns leave their place to the shares that came from elsewhere."""
    summary, total = cell.summary, cell.summary.total
    router = cell.router if cell.num_prefill is None else f"{cell.router} {cell.num_prefill}"
    jain = "-" if summary.jain is None else f"{summary.jain:.2f}"
    return [
        str(cell.num_replicas),
        router,
        f"{summary.goodput:.2f}",
        percent(total.attainment),
        *(() if moves else (percent(total.attainment_of_admitted),)),
        percent(total.refused / total.offered),
        number(total.ttft_s.p50),
        number(total.ttft_s.p90),
        number(total.tpot_s.p99, 1000),
        percent(summary.hit_rate),
        *((percent(summary.read_share), percent(summary.pulled_share)) if moves else (jain,)),
        percent(summary.busy_share),
    ]
