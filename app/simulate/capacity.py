"""Capacity: the highest rate of some kind of traffic at which a number of machines still keep the promise."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from penstock.app.errors import OperatorError
from penstock.app.log import counter, log
from penstock.app.simulate.inputs import Traffic
from penstock.app.tables import percent
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.summary import is_kept

_PRECISION = 0.02
"""The search ends when the answer is known to this part of it."""
_LEAST = 1 / 256
"""Rates below this part of what a machine could compute are as good as none."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Capacity:
    num_machines: int
    rate: float
    """Requests per second, as in --rate; 0 if the promise cannot be kept at any."""
    attainment: float | None
    """The part of the interactive requests offered at that rate that had it kept; None if there is no such rate."""


class Search:
    """Bisection over the rate, for one number of machines after another."""

    def __init__(
        self, traffic: Traffic, machine: Machine, lanes: Mapping[Lane, LanePolicy], target: float
    ) -> None:
        """`target` is the part of the interactive requests whose promise is to be kept."""
        if not any(arrival.lane == Lane.INTERACTIVE for arrival in traffic.arrivals):
            raise OperatorError(f"--capacity: nothing of {traffic.name} is interactive")
        self._traffic = traffic
        self._machine = machine
        self._lanes = lanes
        self._target = target
        self._bound = 1 / _machine_seconds(traffic, machine)

    def run(self, num_machines: int, least_rate: float = 0.0) -> Capacity:
        """`least_rate` is known to be carried, by fewer machines."""
        low, attainment = least_rate, None
        high = max(self._bound * num_machines, 2 * least_rate)
        while (kept := self._attainment(high, num_machines)) >= self._target:
            low, attainment, high = high, kept, 2 * high
        while high - low > max(_PRECISION * low, _LEAST * self._bound):
            rate = (low + high) / 2
            kept = self._attainment(rate, num_machines)
            if kept >= self._target:
                low, attainment = rate, kept
            else:
                high = rate
        if low and attainment is None:
            attainment = self._attainment(low, num_machines)
        return Capacity(num_machines=num_machines, rate=low, attainment=attainment)

    def _attainment(self, rate: float, num_machines: int) -> float:
        arrivals = self._traffic.at_rate(rate)
        title = f"{machines_text(num_machines)} at {rate:.3g}/s"
        with counter(title, len(arrivals)) as update:
            result = simulate(
                arrivals, self._machine, lanes=self._lanes, num_machines=num_machines, progress=update
            )
        urgent = [one for one in result.served if one.lane == Lane.INTERACTIVE]
        # A rate at which nobody came proves nothing.
        kept = sum(1 for one in urgent if is_kept(one, self._lanes)) / max(1, len(urgent))
        log.info("%s: %s of the promises kept", title, percent(kept))
        return kept


def sentence(found: list[Capacity], traffic: Traffic, policy: LanePolicy, target: float) -> str:
    """The answer to the operator's question."""
    arrivals = traffic.arrivals
    num_prompt = sum(arrival.num_prompt for arrival in arrivals) / len(arrivals)
    num_output = sum(arrival.num_output for arrival in arrivals) / len(arrivals)
    parts = [_carried(one) + _compared(one, found[0]) for one in found]
    return (
        f"Of this traffic ({traffic.name}: {num_prompt:,.0f} prompt and {num_output:,.0f} output tokens a request)"
        f" {', '.join(parts)}, with {target * 100:g} % of the interactive requests getting their first token within"
        f" {policy.ttft_s:g} s and then one every {policy.tpot_s * 1000:g} ms."
    )


def machines_text(num_machines: int) -> str:
    return "1 machine" if num_machines == 1 else f"{num_machines} machines"


def _carried(one: Capacity) -> str:
    if not one.rate:
        return f"{machines_text(one.num_machines)} can promise nothing"
    return f"{machines_text(one.num_machines)} can promise {one.rate:.3g} requests per second"


def _compared(one: Capacity, first: Capacity) -> str:
    if one is first or not first.rate:
        return ""
    return f" ({one.rate / first.rate:.2f} times as many)"


def _machine_seconds(traffic: Traffic, machine: Machine) -> float:
    """Returns the least time of a machine for a request, on average, if no prompt is found in the prefix cache."""
    cost = machine.coefficients
    total_s = sum(
        cost["beta_s"] * arrival.num_prompt
        + arrival.num_output * (cost["gamma_s"] + cost["delta_s"] * arrival.num_prompt)
        + cost["alpha_s"] * arrival.num_output / machine.max_num_seqs
        for arrival in traffic.arrivals
    )
    return total_s / len(traffic.arrivals)
