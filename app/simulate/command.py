"""`penstock simulate`: the scheduler and the queue that serve, on a virtual clock, against a trace."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from dataclasses import replace
from math import isfinite
from pathlib import Path
from typing import Any

from penstock.app.arguments import count, listed, not_negative, one_of, positive, quantity, whole
from penstock.app.errors import OperatorError
from penstock.app.log import configure_log, counter, log
from penstock.app.outputs import check_output, write_figures
from penstock.app.simulate.inputs import (
    DEFAULTS,
    GPU_COST,
    Traffic,
    check_can_run,
    read_lanes,
    read_machine,
    read_traffic,
)
from penstock.app.simulate.replicas import DEFAULT_ROUTERS, Cell, Fleet, compare, draw_cells, print_cells
from penstock.app.simulate.report import print_report
from penstock.app.simulate.splits import check_splits, print_advice, try_splits
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.simulator.cluster import ROUTERS, Wires
from penstock.priority.simulator.result import Result
from penstock.priority.simulator.run import POLICIES, Machine, simulate
from penstock.priority.simulator.summary import Summary, summarise
from penstock.priority.simulator.trace import KINDS, SCENARIOS, write_trace
from penstock.priority.steptime import NAMES

_MACHINES = listed(quantity(int, least=1, most=1_000))
_MODES = {
    "capacity": ({"target", "machines"}, {"policies", "plots"}),
    "replicas": (
        {
            "router",
            "push_ms",
            "transfer_gbps",
            "prefill_replicas",
            "tier_tokens",
            "tier_gbps",
            "pull",
            "splits",
        },
        {"policies", "capacity"},
    ),
}
"""The arguments that go only with a mode, and those that do not go with it."""
_COST_HELP = (
    "per step",
    "per prompt token",
    "per decoded token",
    "per token of KV that is read",
    "per pair of a prompt token and a token that it attends to",
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_traffic(parser)
    _add_machine(parser)
    _add_replicas(parser)
    parser.add_argument(
        "--policies",
        type=listed(one_of(POLICIES)),
        metavar="NAME,NAME",
        help=f"policies to compare, some of {','.join(POLICIES)} (all)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")
    parser.add_argument(
        "--plots",
        type=Path,
        metavar="DIR",
        help="write promise.png and ttft.png, or scale.png, to this folder",
    )
    parser.add_argument(
        "--capacity",
        action="store_true",
        help="find the highest rate at which the interactive promise is kept, instead of comparing policies",
    )
    parser.add_argument(
        "--target",
        type=quantity(float, above=0, most=100),
        metavar="PERCENT",
        help="with --capacity: share of promises to keep (99)",
    )
    parser.add_argument(
        "--machines",
        type=_MACHINES,
        metavar="N,M",
        help="with --capacity: numbers of machines to try (1,2)",
    )


def run(options: argparse.Namespace) -> int:
    configure_log("info")
    _check(options)
    machine, lanes = read_machine(options), read_lanes(options)
    if options.replicas is not None and options.scenario is None and options.trace is None:
        options.scenario = "agents"
    traffic = read_traffic(options)
    check_can_run(traffic, machine, options)
    log.info("%s: %s requests, %.3g/s", traffic.name, f"{len(traffic.arrivals):,}", traffic.rate)
    if options.write_trace is not None:
        with options.write_trace.open("w", encoding="utf-8") as file:
            file.writelines(write_trace(traffic.arrivals))
    figures = _setup(traffic, machine, lanes)
    if options.capacity:
        figures["capacity"] = _capacity(options, traffic, machine, lanes)
    elif options.replicas is not None:
        figures["replicas"] = _replicas(options, traffic, machine, lanes)
    else:
        figures["policies"] = _compare(options, traffic, machine, lanes)
    write_figures(options.json, figures)
    return 0


def add_traffic(parser: argparse.ArgumentParser) -> None:
    source = parser.add_mutually_exclusive_group()
    source.add_argument(
        "--scenario", choices=SCENARIOS, help=f"who sends which requests, and when ({DEFAULTS['scenario']})"
    )
    source.add_argument(
        "--trace", type=Path, metavar="FILE", help="trace in Mooncake's JSONL instead of a scenario"
    )
    parser.add_argument("--kind", choices=KINDS, help=f"lengths and burstiness ({DEFAULTS['kind']})")
    parser.add_argument(
        "--rate", type=positive, metavar="N", help=f"requests per second ({DEFAULTS['rate']:g})"
    )
    size = parser.add_mutually_exclusive_group()
    size.add_argument(
        "--duration",
        type=positive,
        metavar="SECONDS",
        help=f"how long requests arrive ({DEFAULTS['duration']:g})",
    )
    size.add_argument("--requests", type=count, metavar="N", help="number of requests, instead of a duration")
    parser.add_argument("--scale", type=positive, metavar="N", help="multiply all lengths by N (1)")
    parser.add_argument("--seed", type=whole, metavar="N", help="the same seed gives the same trace (0)")
    parser.add_argument(
        "--write-trace", type=Path, metavar="FILE", help="write the trace to this file as JSONL"
    )


def _add_machine(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--cost", type=Path, metavar="FILE", help=f"JSON file with a machine's {', '.join(NAMES)}"
    )
    for name, what in zip(NAMES, _COST_HELP, strict=True):
        parser.add_argument(
            _flag(name),
            type=not_negative,
            metavar="S",
            help=f"seconds {what} ({GPU_COST[name]:g})",
        )
    parser.add_argument(
        "--ttft", type=positive, metavar="S", help="interactive promise to the first token (1)"
    )
    parser.add_argument("--tpot", type=positive, metavar="S", help="interactive promise per token (0.1)")


def _add_replicas(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--replicas",
        type=_MACHINES,
        metavar="N,M",
        help="compare routers on these numbers of replicas instead of policies; --rate is then per replica",
    )
    parser.add_argument(
        "--router",
        type=listed(one_of(ROUTERS)),
        metavar="NAME,NAME",
        help=f"with --replicas: routers to compare, some of {','.join(ROUTERS)} ({','.join(DEFAULT_ROUTERS)})",
    )
    parser.add_argument(
        "--push-ms",
        type=quantity(float, least=0, most=10_000),
        metavar="MS",
        help="milliseconds until a router knows the state that a replica pushed (30)",
    )
    parser.add_argument(
        "--transfer-gbps",
        type=positive,
        metavar="N",
        help="gigabits per second of the link that carries KV (100)",
    )
    parser.add_argument(
        "--prefill-replicas",
        type=count,
        metavar="N",
        help="replicas that compute prompts, when disaggregated (half)",
    )
    parser.add_argument(
        "--splits",
        action="store_true",
        help="try how many of the replicas should compute prompts alone, and list the best numbers first",
    )
    parser.add_argument(
        "--tier-tokens",
        type=count,
        metavar="N",
        help="tokens of KV that each replica keeps in memory or on disk after it evicted them (0)",
    )
    parser.add_argument(
        "--tier-gbps",
        type=positive,
        metavar="N",
        help="gigabits per second at which a replica reads them back (160)",
    )
    parser.add_argument(
        "--pull",
        action="store_true",
        help="replicas take KV from one another over their links where that is sooner than computing it",
    )


def _check(options: argparse.Namespace) -> None:
    """Checks what argparse cannot see: flags that need others, and folders that are not there."""
    given = {name for name, value in vars(options).items() if value not in (None, False)}
    for mode, (own, others) in _MODES.items():
        if mode not in given and (stray := own & given):
            raise OperatorError(f"{_flag(min(stray))} only goes with --{mode}")
        if mode in given and (stray := others & given):
            raise OperatorError(f"{_flag(min(stray))} does not go with --{mode}")
    for flag, path in (("--json", options.json), ("--write-trace", options.write_trace)):
        check_output(flag, path)
    if options.splits:
        check_splits(options.replicas, options.router, options.prefill_replicas)
    elif options.replicas is not None:
        _fleet(options).check(is_asked=options.router is not None)
    if options.plots is not None:
        _check_plots(options.plots)


def _flag(name: str) -> str:
    return f"--{name.replace('_', '-')}"


def _check_plots(folder: Path) -> None:
    from importlib.util import find_spec

    if find_spec("matplotlib") is None:
        raise OperatorError("--plots needs matplotlib: pip install 'penstock[simulate]'")
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise OperatorError(f"--plots {folder}: {error.strerror or error}") from None


def _setup(traffic: Traffic, machine: Machine, lanes: Mapping[Lane, LanePolicy]) -> dict[str, Any]:
    return {
        "traffic": {"name": traffic.name, "requests": len(traffic.arrivals), "rate": traffic.rate},
        "machine": machine,
        "promises": {
            lane.label: {"ttft_s": _finite(policy.ttft_s), "tpot_s": _finite(policy.tpot_s)}
            for lane, policy in lanes.items()
        },
    }


def _compare(
    options: argparse.Namespace, traffic: Traffic, machine: Machine, lanes: dict[Lane, LanePolicy]
) -> list[Summary]:
    results = [_simulate(policy, traffic, machine, lanes) for policy in options.policies or POLICIES]
    summaries = [summarise(result, lanes) for result in results]
    print_report(summaries, lanes)
    if options.plots is not None:
        from penstock.app.simulate.plots import draw

        for path in draw(options.plots, traffic.name, results, summaries, lanes[Lane.INTERACTIVE]):
            log.info("wrote %s", path)
    return summaries


def _simulate(policy: str, traffic: Traffic, machine: Machine, lanes: Mapping[Lane, LanePolicy]) -> Result:
    with counter(policy, len(traffic.arrivals)) as update:
        return simulate(traffic.arrivals, machine, policy, lanes=lanes, progress=update)


def _capacity(
    options: argparse.Namespace, traffic: Traffic, machine: Machine, lanes: dict[Lane, LanePolicy]
) -> dict[str, Any]:
    from penstock.app.simulate.capacity import Capacity, Search, sentence

    target = 0.99 if options.target is None else options.target / 100
    search = Search(traffic, machine, lanes, target)
    found: list[Capacity] = []
    for num_machines in sorted(options.machines or [1, 2]):
        found.append(search.run(num_machines, found[-1].rate if found else 0.0))
    print(sentence(found, traffic, lanes[Lane.INTERACTIVE], target))
    return {"target": target, "found": found}


def _replicas(
    options: argparse.Namespace, traffic: Traffic, machine: Machine, lanes: dict[Lane, LanePolicy]
) -> list[Cell]:
    fleet = _fleet(options)
    # A trace keeps its pace unless another is asked for.
    rate = float(DEFAULTS["rate"]) if options.rate is None and options.trace is None else options.rate
    if options.splits:
        cells = try_splits(fleet, traffic, rate, machine, lanes)
        print_cells(cells, lanes[Lane.INTERACTIVE])
        print_advice(cells)
    else:
        cells = compare(fleet, traffic, rate, machine, lanes)
        print_cells(cells, lanes[Lane.INTERACTIVE])
    if options.plots is not None:
        log.info("wrote %s", draw_cells(options.plots, cells, traffic.name, lanes[Lane.INTERACTIVE]))
    return cells


def _fleet(options: argparse.Namespace) -> Fleet:
    given = {name: getattr(options, name) for name in ("transfer_gbps", "tier_tokens", "tier_gbps")}
    wires = Wires(pulls=options.pull, **{name: value for name, value in given.items() if value is not None})
    if options.push_ms is not None:
        wires = replace(wires, push_delay_s=options.push_ms / 1000)
    return Fleet(
        numbers=sorted(options.replicas),
        routers=options.router or DEFAULT_ROUTERS,
        num_prefill=options.prefill_replicas,
        wires=wires,
    )


def _finite(value: float) -> float | None:
    return value if isfinite(value) else None
