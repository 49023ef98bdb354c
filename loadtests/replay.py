"""`python -m loadtests.replay`: a trace on a real server and in the simulator, side by side in one table.

It takes the traffic of `penstock simulate`: a scenario that is generated, or Mooncake's JSONL.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from loadtests.keys import key_file
from penstock.app.bench.checkpoint import LLAMA_135M, ensure_checkpoint
from penstock.app.bench.client import Job, ask
from penstock.app.bench.job import run_module
from penstock.app.bench.other_server import AnyServer, OtherServer
from penstock.app.bench.replay import compare, print_comparison, print_groups, print_promises, serve
from penstock.app.bench.runs import Subject, read_subject
from penstock.app.bench.server_process import ServerFailed, ServerProcess
from penstock.app.bench.workloads import Workload
from penstock.app.checkpoint import DEMO_MODEL
from penstock.app.errors import OperatorError
from penstock.app.outputs import check_output, write_figures
from penstock.app.simulate.command import add_traffic
from penstock.app.simulate.inputs import GPU_COST, check_can_run, read_traffic
from penstock.priority.simulator.run import Machine
from penstock.priority.simulator.trace import Arrival

DEFAULTS = {"scenario": "mixed", "kind": "chat", "rate": 4.0, "duration": 60.0}


def main(arguments: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="python -m loadtests.replay", description=__doc__)
    add_traffic(parser)
    parser.add_argument(
        "--model",
        metavar="DIR",
        default="demo",
        help="checkpoint; `demo`, or `135m` for a random Llama (demo)",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="a running server of that model that speaks OpenAI's API, which is not simulated",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")
    try:
        return run(parser.parse_args(arguments))
    except OperatorError as error:
        print(f"replay: {error}", file=sys.stderr)
        return 2


def run(options: argparse.Namespace) -> int:
    """0 unless a request failed."""
    check_output("--json", options.json)
    if options.trace is None:
        for name, default in DEFAULTS.items():
            if getattr(options, name) is None and not (name == "duration" and options.requests):
                setattr(options, name, default)
    traffic, subject = read_traffic(options), read_subject(_model(options.model))
    check_can_run(traffic, Machine(coefficients=GPU_COST, max_model_len=subject.max_length), options)
    tenants = sorted({arrival.tenant for arrival in traffic.arrivals})
    if options.url is not None:
        return _elsewhere(options, traffic.arrivals, subject)
    with key_file(tenants) as (path, keys), _server(subject, path) as server:
        _warm(server, subject, keys[tenants[0]])
        machine, served, simulated = compare(server, run_module, traffic.arrivals, subject.token_ids, keys)
        print_promises(server.url)
    print_comparison(f"{subject.name}: {traffic.name}, {traffic.rate:.3g}/s", served, simulated)
    print_groups([served, simulated])
    write_figures(options.json, {"machine": machine, "served": served, "simulated": simulated})
    return 0


def _elsewhere(options: argparse.Namespace, arrivals: list[Arrival], subject: Subject) -> int:
    server = OtherServer.at(options.url)
    _warm(server, subject, "")
    served = serve(server, run_module, arrivals, subject.token_ids, {}, seed=options.seed or 0)
    print_groups([served])
    write_figures(options.json, {"served": served})
    return 0


def _model(name: str) -> Path:
    return {"demo": DEMO_MODEL}.get(name) or (ensure_checkpoint(LLAMA_135M) if name == "135m" else Path(name))


@contextmanager
def _server(subject: Subject, keys: str) -> Iterator[ServerProcess]:
    """Without drafts, for the simulator has none: a step computes one token of each sequence."""
    arguments = ["--model", str(subject.path), "--served-model-name", "bench", "--no-speculation"]
    try:
        with ServerProcess([*arguments, "--api-keys-file", keys]) as server:
            yield server
    except ServerFailed as error:
        raise OperatorError(f"the server did not start: {error}") from None


def _warm(server: AnyServer, subject: Subject, key: str) -> None:
    """The server sees steps of many kinds, so that it knows how long they take."""
    workload = Workload(name="", streams=8, prompt_tokens=200, output_tokens=64, rounds=2)
    bodies = workload.bodies("bench", subject.token_ids, subject.seeds())
    starts_s = [0.2 * stream for stream in range(workload.streams)]
    job = Job(server.host, server.port, "/v1/completions", bodies, starts_s, keys=[key] * workload.streams)
    if failed := next((answer.error for answer in ask(run_module, job) if answer.error), None):
        raise OperatorError(f"the server answers with {failed}")


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
