"""Reads what the operator wants simulated: the trace, the machine and the promise, every mistake one line."""

from __future__ import annotations

import argparse
import difflib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields, replace
from math import isfinite
from pathlib import Path

from penstock.app.errors import OperatorError
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy
from penstock.priority.simulator.run import Machine
from penstock.priority.simulator.trace import SCENARIOS, Arrival, Demand, TraceError, read_trace
from penstock.priority.steptime import NAMES

GPU_COST: Mapping[str, float] = {
    "alpha_s": 0.007,
    "beta_s": 28e-6,
    "gamma_s": 20e-6,
    "delta_s": 40e-9,
    "epsilon_s": 1e-9,
}
"""A large model on a large GPU: seconds per step, prompt token, decoded token, token of KV that is read, and pair of a
prompt token and a token that it attends to."""
DEFAULTS: Mapping[str, str | float] = {
    "scenario": "mixed", "kind": "conversation", "rate": 12.0, "duration": 120.0, "scale": 1.0, "seed": 0,
}  # fmt: skip
_SIZES = tuple(field.name for field in fields(Machine) if field.name != "coefficients")
_OPTIONAL = {"epsilon_s": 0.0}
_ENOUGH_TIMES = 1.25
"""A trace of N requests is generated this much longer, and again, until it has them."""

_MOST_REQUESTS = 2_000_000
_MOST_S = 10_000_000


@dataclass(frozen=True, slots=True)
class Traffic:
    """A trace, and what it is called."""

    name: str
    arrivals: list[Arrival]
    at_rate: Callable[[float], list[Arrival]]
    """Gives this traffic at so many requests per second."""

    @property
    def rate(self) -> float:
        """Requests per second, from the first to the last."""
        span_s = self.arrivals[-1].at_s - self.arrivals[0].at_s
        return len(self.arrivals) / span_s if span_s > 0 else float(len(self.arrivals))


def read_traffic(options: argparse.Namespace) -> Traffic:
    """The trace of --trace, or of --scenario."""
    if options.trace is None:
        return _generated(options)
    for name in ("kind", "duration", "scale", "seed"):
        if getattr(options, name) is not None:
            raise OperatorError(f"--{name} does not go with --trace: what comes, and when, is in the file")
    arrivals = _read_file(options.trace)[: options.requests]
    traffic = Traffic(options.trace.name, arrivals, lambda rate: _replayed(arrivals, rate))
    return traffic if options.rate is None else replace(traffic, arrivals=traffic.at_rate(options.rate))


def read_machine(options: argparse.Namespace) -> Machine:
    """The default GPU, or that of --cost; single flags go before both."""
    given: dict[str, float] = dict(GPU_COST) if options.cost is None else _read_cost(options.cost)
    for name in NAMES:
        value = getattr(options, name)
        if value is not None:
            given[name] = value
    coefficients = {name: given[name] for name in NAMES}
    if not any(coefficients.values()):
        raise OperatorError(
            "steps that take no time cannot be simulated: one of alpha to epsilon must be above 0"
        )
    return Machine(coefficients=coefficients, **{name: int(given[name]) for name in _SIZES if name in given})


def read_lanes(options: argparse.Namespace) -> dict[Lane, LanePolicy]:
    """The server's lanes, with the promise of --ttft and --tpot for the interactive one."""
    policy = DEFAULT_POLICIES[Lane.INTERACTIVE]
    ttft_s = policy.ttft_s if options.ttft is None else options.ttft
    tpot_s = policy.tpot_s if options.tpot is None else options.tpot
    ttl_s = max(policy.ttl_s, 2 * ttft_s)
    return {**DEFAULT_POLICIES, Lane.INTERACTIVE: replace(policy, ttft_s=ttft_s, tpot_s=tpot_s, ttl_s=ttl_s)}


def check_can_run(traffic: Traffic, machine: Machine, options: argparse.Namespace) -> None:
    """Raises OperatorError for a request that the machine could never hold."""
    most = min(machine.max_model_len, machine.num_kv_tokens)
    for place, arrival in enumerate(traffic.arrivals):
        if arrival.num_prompt + arrival.num_output > most:
            where = f"a request of {traffic.name}"
            if options.trace is not None:
                where = f"--trace {options.trace}: line {_line_number(options.trace, place)}"
            raise OperatorError(
                f"{where} can never run: {arrival.num_prompt} prompt and {arrival.num_output} output tokens, and "
                f"the machine holds {most} (max_model_len and num_kv_tokens of --cost FILE)"
            )


def _line_number(path: Path, place: int) -> int:
    """Where the file has the request of that place, empty lines counted."""
    with path.open(encoding="utf-8") as lines:
        return [number for number, line in enumerate(lines, 1) if line.strip()][place]


def _generated(options: argparse.Namespace) -> Traffic:
    values = {name: default if getattr(options, name) is None else getattr(options, name)
              for name, default in DEFAULTS.items()}  # fmt: skip
    scenario, kind, num_requests = str(values["scenario"]), str(values["kind"]), options.requests

    def at_rate(rate: float) -> list[Arrival]:
        duration_s = float(values["duration"]) if num_requests is None else num_requests / rate
        _check_size(rate, duration_s)
        demand = Demand(rate, duration_s, int(values["seed"]), float(values["scale"]), kind)
        return _at_least(scenario, demand, num_requests)

    arrivals = at_rate(float(values["rate"]))
    if not arrivals:
        raise OperatorError("--duration is too short for a single request at this --rate")
    return Traffic(f"{scenario}, {kind}", arrivals, at_rate)


def _check_size(rate: float, duration_s: float) -> None:
    if rate * duration_s > _MOST_REQUESTS:
        raise OperatorError(f"--rate and --duration make more than {_MOST_REQUESTS:,} requests")
    if duration_s > _MOST_S:
        raise OperatorError(f"--rate and --duration make a trace of more than {_MOST_S:,} seconds")


def _at_least(scenario: str, demand: Demand, num_requests: int | None) -> list[Arrival]:
    """With `num_requests`, exactly so many, of a time long enough to have them."""
    arrivals = SCENARIOS[scenario](demand)
    while num_requests is not None and len(arrivals) < num_requests:
        demand = replace(demand, duration_s=demand.duration_s * _ENOUGH_TIMES)
        arrivals = SCENARIOS[scenario](demand)
    return arrivals[:num_requests]


def _replayed(arrivals: list[Arrival], rate: float) -> list[Arrival]:
    """From time 0 on, the gaps stretched or shrunk so that the rate comes out."""
    first_s = arrivals[0].at_s
    span_s = arrivals[-1].at_s - first_s
    factor = len(arrivals) / rate / span_s if span_s > 0 else 1.0
    return [replace(arrival, at_s=(arrival.at_s - first_s) * factor) for arrival in arrivals]


def _read_file(path: Path) -> list[Arrival]:
    try:
        with path.open(encoding="utf-8") as lines:
            return read_trace(lines)
    except TraceError as error:
        raise OperatorError(f"--trace {path}: {error}") from None
    except OSError as error:
        raise OperatorError(f"--trace {path}: {error.strerror or error}") from None
    except UnicodeDecodeError:
        raise OperatorError(f"--trace {path}: not a text file") from None


def _read_cost(path: Path) -> dict[str, float]:
    try:
        given = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise OperatorError(f"--cost {path}: {error.strerror or error}") from None
    except ValueError:
        raise OperatorError(f"--cost {path}: not JSON") from None
    if not isinstance(given, dict):
        raise OperatorError(f"--cost {path}: not a JSON object")
    for name in given:
        near = difflib.get_close_matches(name, (*NAMES, *_SIZES), n=1, cutoff=0.8)
        if near and name not in near:
            raise OperatorError(f"--cost {path}: there is no {name}; did you mean {near[0]}?")
    cost = {name: _coefficient(path, name, given.get(name, _OPTIONAL.get(name))) for name in NAMES}
    return cost | {name: _size(path, name, given[name]) for name in _SIZES if name in given}


def _coefficient(path: Path, name: str, value: object) -> float:
    if value is None:
        raise OperatorError(f"--cost {path}: {name} is missing")
    if isinstance(value, bool) or not isinstance(value, int | float) or not isfinite(value) or value < 0:
        raise OperatorError(f"--cost {path}: {name} must be a number of seconds, 0 or more, not {value!r}")
    return float(value)


def _size(path: Path, name: str, value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise OperatorError(f"--cost {path}: {name} must be a whole number of at least 1, not {value!r}")
    return value
