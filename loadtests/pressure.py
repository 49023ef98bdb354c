"""`python -m loadtests.pressure`: how near forecasts come while KV is short, on a real server.

The 135 M shape serves prompts of 128 to 8,000 tokens, every sixth with four choices and half without a limit of their
own, from a KV pool of half of what 16 of them hold, and more of them than it can serve. Told is the time to the first
token over its forecast. What is refused cannot be served as well: the simulator, with the step times of the server,
lets each of the requests that it refuses in after all, one at a time, and tells how many would have come in time, and
how many of those at the cost of others, more of whom then come late or are refused.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import replace
from math import exp
from pathlib import Path
from random import Random

from loadtests.keys import key_file
from penstock.app.bench.checkpoint import LLAMA_135M, ensure_checkpoint
from penstock.app.bench.job import run_module
from penstock.app.bench.replay import machine_of, send
from penstock.app.bench.runs import Subject, read_subject
from penstock.app.bench.server_process import ServerFailed, ServerProcess
from penstock.app.bench.statistics import percentile
from penstock.app.errors import OperatorError
from penstock.app.outputs import check_output, write_figures
from penstock.app.reader import TimedAnswer
from penstock.app.tables import number, table
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.simulator.result import Served
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.trace import Arrival

SHAPE = replace(LLAMA_135M, name="llama-135m-long", max_length=16_384)
_STREAMS = 16
_BLOCK = 16
_NO_LIMIT = 2_048
_LEARNING = 0.15
"""The part of the time in which the server learns and nothing is counted."""
_MOST_INSISTING = 24


def traffic(rate: float, seconds: float, seed: int = 0, tenants: int = 3) -> list[Arrival]:
    """Requests of the standard lane, at random times."""
    rng, at_s, arrivals = Random(seed), 0.0, list[Arrival]()
    while (at_s := at_s + rng.expovariate(rate)) < seconds:
        num_prompt = int(min(8_000, max(128, exp(rng.gauss(6.5, 1.0)))))
        num_output = max(8, min(800, int(150 * exp(rng.gauss(0, 0.6)))))
        n, max_tokens = (4 if rng.random() < 1 / 6 else 1), _NO_LIMIT * (rng.random() < 0.5)
        tenant = f"tenant-{rng.randrange(tenants)}"
        arrivals.append(
            Arrival(at_s, num_prompt, num_output, Lane.STANDARD, tenant, n=n, max_tokens=max_tokens)
        )
    return arrivals


def pool_blocks(arrivals: list[Arrival]) -> int:
    """Half of what so many streams of such requests hold."""
    each = sum(a.num_prompt + a.n * a.num_output for a in arrivals) / len(arrivals)
    return int(_STREAMS * each / 2 / _BLOCK)


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.pressure", description=__doc__)
    parser.add_argument("--rate", type=float, default=0.6, help="requests a second (0.6)")
    parser.add_argument("--duration", type=float, default=150.0, help="seconds of each run (150)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--no-drafts", action="store_true", help="only the run without drafts")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    options = parser.parse_args(arguments)
    try:
        check_output("--json", options.json)
        subject, arrivals = (
            read_subject(ensure_checkpoint(SHAPE)),
            traffic(options.rate, options.duration, options.seed),
        )
        drafts = [False] if options.no_drafts else [False, True]
        results = [_measure(subject, arrivals, has_drafts=each) for each in drafts]
        write_figures(options.json, results)
    except OperatorError as error:
        print(f"pressure: {error}", file=sys.stderr)
        return 2
    return 0


def _measure(subject: Subject, arrivals: list[Arrival], *, has_drafts: bool) -> dict[str, object]:
    arguments = ["--model", str(subject.path), "--served-model-name", "bench"]
    arguments += ["--num-blocks", str(pool_blocks(arrivals))]
    arguments += [] if has_drafts else ["--no-speculation"]
    tenants = sorted({arrival.tenant for arrival in arrivals})
    try:
        with (
            key_file(tenants) as (path, keys),
            ServerProcess([*arguments, "--api-keys-file", path]) as server,
        ):
            answers = send(server, run_module, arrivals, subject.token_ids, keys)
            machine = machine_of(server.url)
    except ServerFailed as error:
        raise OperatorError(f"the server did not start: {error}") from None
    found = figures(arrivals, answers) | {"simulated": simulated(arrivals, machine)}
    _print("with drafts" if has_drafts else "without drafts", found)
    return {"drafts": has_drafts, "machine": machine, **found}


def figures(arrivals: list[Arrival], answers: list[TimedAnswer]) -> dict[str, object]:
    """The ratios of real over forecast time, and what became of the requests."""
    since_s = _LEARNING * arrivals[-1].at_s
    told = [a for arrival, a in zip(arrivals, answers, strict=True) if arrival.at_s >= since_s]
    served = [answer for answer in told if answer.token_times_s and answer.predicted_ttft_s]
    ratios = [answer.ttft_s / (answer.predicted_ttft_s or 1.0) for answer in served]
    times_s = [answer.ttft_s for answer in served]
    promise_s = DEFAULT_POLICIES[Lane.STANDARD].ttft_s
    for error in [a.error for a in told if a.error and not a.was_refused][:3]:
        print(f"pressure: {error}", file=sys.stderr)
    return {
        "requests": len(told),
        "refused": sum(answer.was_refused for answer in told),
        "failed": sum(bool(a.error) and not a.was_refused for a in told),
        "late": sum(time_s > promise_s for time_s in times_s),
        **{f"ttft_p{p}_s": percentile(times_s, p) for p in (50, 90)},
        **{f"ratio_p{p}": percentile(ratios, p) for p in (10, 50, 90)},
    }


def simulated(arrivals: list[Arrival], machine: Machine) -> dict[str, object]:
    """The same trace in the simulator; some of what it refuses is let in after all, one at a time."""
    result = simulate(arrivals, machine)
    refused = [place for place, one in enumerate(result.served) if one.refused == "promise_out_of_reach"]
    tried = refused[:: max(1, len(refused) // _MOST_INSISTING)]
    tries = [(place, simulate(arrivals, machine, insisting=(place,))) for place in tried]
    in_time = [one for place, one in tries if _in_time(one.served[place])]
    num_served = sum(map(_in_time, result.served))
    ratios = [one.ttft_s / one.predicted_s for one in result.served if one.ttft_s and one.predicted_s]
    return {
        "refused": len(refused),
        "tried": len(tried),
        "in_time": len(in_time),
        "at_others_cost": sum(sum(map(_in_time, one.served)) <= num_served for one in in_time),
        **{f"ratio_p{p}": percentile(ratios, p) for p in (10, 50, 90)},
    }


def _in_time(one: Served) -> bool:
    return one.ttft_s is not None and one.ttft_s <= DEFAULT_POLICIES[Lane.STANDARD].ttft_s


def _print(name: str, found: dict[str, object]) -> None:
    head = [name, *found]
    values = [str(value) if isinstance(value, int | dict) else number(value) for value in found.values()]  # type: ignore[arg-type]
    print("\n" + table(head[:-1], [["", *values[:-1]]]))
    print(f"simulated: {found['simulated']}", flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
