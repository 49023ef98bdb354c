"""`penstock simulate --splits`: how many replicas of each role a traffic wants, by trying."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from penstock.app.errors import OperatorError
from penstock.app.simulate.inputs import Traffic
from penstock.app.simulate.replicas import Cell, Fleet, run_cell
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.simulator.run import Machine
from penstock.priority.simulator.trace import Arrival

_COARSE = 8
"""Of more replicas than this only every so manieth number is tried first, then those around the best."""


def check_splits(numbers: Sequence[int], routers: Sequence[str] | None, num_prefill: int | None) -> None:
    """Raises OperatorError for arguments that --splits leaves no choice."""
    for flag, given in (("--router", routers), ("--prefill-replicas", num_prefill)):
        if given is not None:
            raise OperatorError(f"{flag} does not go with --splits, which tries them")
    if min(numbers) < 2:
        raise OperatorError("--splits needs at least 2 --replicas, one of each role")


def try_splits(
    fleet: Fleet, traffic: Traffic, rate: float | None, machine: Machine, lanes: Mapping[Lane, LanePolicy]
) -> list[Cell]:
    """Returns the splits that were tried of each number of replicas, the best first; `rate` is as in `compare`."""
    cells = []
    for replicas in fleet.numbers:
        arrivals = traffic.arrivals if rate is None else traffic.at_rate(rate * replicas)

        def run(num_prefill: int, replicas: int = replicas, arrivals: list[Arrival] = arrivals) -> Cell:
            router, num = ("disaggregated", num_prefill) if num_prefill else ("prefix", None)
            return run_cell(arrivals, router, replicas, num, fleet.wires, machine, lanes)

        cells += sorted([run(0), *search(run, replicas)], key=_merit, reverse=True)
    return cells


def search(run: Callable[[int], Cell], num_replicas: int) -> list[Cell]:
    """Tries numbers of replicas that compute prompts: some over the whole range, then those beside the best."""
    step = max(1, num_replicas // _COARSE)
    tried = {number: run(number) for number in range(step, num_replicas, step)}
    while step > 1:
        step //= 2
        best = max(tried, key=lambda number: _merit(tried[number]))
        for number in (best - step, best + step):
            if 0 < number < num_replicas and number not in tried:
                tried[number] = run(number)
    return list(tried.values())


def print_advice(cells: Sequence[Cell]) -> None:
    """Says of each number of replicas which roles were best."""
    for replicas in dict.fromkeys(cell.num_replicas for cell in cells):
        best = next(cell for cell in cells if cell.num_replicas == replicas)
        roles = "all of them with --role both"
        if best.num_prefill is not None:
            roles = (
                f"{best.num_prefill} with --role prefill, {replicas - best.num_prefill} with --role decode"
            )
        print(f"Best of those tried for {replicas} replicas: {roles}.")


def _merit(cell: Cell) -> tuple[float, float, float]:
    """The promises kept decide, then the goodput, then the time to the first token."""
    summary = cell.summary
    return summary.total.attainment or 0.0, summary.goodput, -(summary.total.ttft_s.p50 or 0.0)
