"""`python -m lab.bench PART`: measures one part of Penstock, beside the limits of the machine where they are known."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from lab.bench import report, runs
from lab.bench.tiers import measure_tiers, print_tiers
from penstock.app.arguments import count
from penstock.app.bench.checkpoint import HALF_B, LLAMA_135M, ensure_checkpoint
from penstock.app.bench.command import add_model_arguments
from penstock.app.bench.report import print_machine
from penstock.app.bench.runs import machine, say
from penstock.app.errors import OperatorError
from penstock.app.outputs import check_output, write_figures

Figures = Any
"""The figures of a part as they are written to --json."""


def _plan(options: argparse.Namespace) -> Figures:
    from lab.bench.planning import measure_planning

    num, context = options.sequences, options.context
    say(f"planning of {num} running sequences of {context} tokens")
    return measure_planning(num, 50 if options.quick else 200, context)


def _routing(options: argparse.Namespace) -> Figures:
    from lab.bench.routing import measure_routing

    num_sessions = 20_000 if options.quick else 1_000_000
    say(f"choices among 1,000 replicas for {num_sessions:,} sessions")
    return measure_routing(num_sessions=num_sessions)


def _tiers(options: argparse.Namespace) -> Figures:
    shapes = [LLAMA_135M] if options.quick else [LLAMA_135M, HALF_B]
    folders = [
        ensure_checkpoint(replace(shape, name=f"{shape.name}-long", max_length=16_384)) for shape in shapes
    ]
    num_tokens, num_rounds = (2_000, 1) if options.quick else (8_000, 3)
    return [measure_tiers(folder, "auto", num_tokens, num_rounds) for folder in folders]


PARTS: dict[str, tuple[str, Callable[[argparse.Namespace], Figures], Callable[[Figures], None]]] = {
    "parts": ("the parts of a step on the CPU", runs.measure_parts, report.print_parts),
    "linear": ("the linear operators alone", runs.measure_linear, report.print_linear),
    "plan": ("host time of a step, by --sequences and --context", _plan, report.print_planning),
    "drafts": ("speculation, with and without", runs.measure_drafts, report.print_drafts),
    "formats": (
        "quantized checkpoints of each format; writes 3 GB",
        runs.measure_formats,
        report.print_formats,
    ),
    "store": (
        "the cost of Redis, well and in trouble; needs redis-server",
        runs.measure_store,
        report.print_store,
    ),
    "scraping": (
        "a picker that scrapes /metrics 20 times a second",
        runs.measure_scraping,
        report.print_scraping,
    ),
    "decisions": (
        "decisions beside chat completions with log probabilities",
        runs.measure_decisions,
        report.print_decisions,
    ),
    "routing": ("the choice of a replica", _routing, report.print_routing),
    "tiers": ("a long prompt's KV, computed and read back, of two shapes", _tiers, print_tiers),
}


def main() -> int:
    parser = argparse.ArgumentParser(
        prog="python -m lab.bench",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        epilog="parts:\n" + "\n".join(f"  {name:<8} {text}" for name, (text, *_) in PARTS.items()),
    )
    parser.add_argument("part", choices=PARTS, metavar="PART")
    add_model_arguments(parser)
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with drafts: draw them, as PNG")
    parser.add_argument(
        "--sequences", type=count, default=256, metavar="N", help="with plan: running sequences (256)"
    )
    parser.add_argument(
        "--context", type=count, default=32, metavar="N", help="with plan: prompt tokens of each (32)"
    )
    options = parser.parse_args()
    try:
        return _run(options)
    except OperatorError as error:
        print(f"lab.bench: {error}", file=sys.stderr)
        return 2


def _run(options: argparse.Namespace) -> int:
    check_output("--json", options.json)
    check_output("--plot", options.plot)
    if options.plot is not None and options.part != "drafts":
        raise OperatorError("--plot goes with the part drafts")
    _, measure, show = PARTS[options.part]
    about, figures = machine(), measure(options)
    print_machine(about)
    show(figures)
    if options.plot is not None:
        from lab.bench.depth_plot import draw_depths

        draw_depths(options.plot, figures["depths"])
    write_figures(options.json, {"machine": about, options.part: figures})
    return 0


if __name__ == "__main__":
    sys.exit(main())
