"""`penstock bench`: what is measured, in which order, and how it is reported."""

from __future__ import annotations

import argparse
from pathlib import Path

from penstock.app.arguments import count, listed, not_negative, one_of
from penstock.app.bench.workloads import USUAL, WORKLOADS
from penstock.app.errors import OperatorError
from penstock.app.kernels import check_level
from penstock.app.outputs import check_output, write_figures
from penstock.app.settings import choices

PARTS = ("generate", "http", "prefix", "promise")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    add_model_arguments(parser)
    parser.add_argument(
        "--only",
        type=listed(one_of(PARTS)),
        default=list(PARTS),
        metavar="PART,PART",
        help=f"some of {','.join(PARTS)}; by default, all of them",
    )
    parser.add_argument(
        "--workload",
        type=_workloads,
        action="extend",
        metavar="NAME,NAME",
        help=f"only these workloads, some of {','.join(WORKLOADS)}; all are {','.join(USUAL)}",
    )
    parser.add_argument(
        "--url",
        metavar="URL",
        help="with --workload: a running server that speaks OpenAI's API, with a vocabulary of "
        "16,384 tokens or more",
    )
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="only the ladder: generate, batching, prefix cache, 8 bits and drafts, each added to the one before",
    )
    parser.add_argument(
        "--drafts",
        action="store_true",
        help="only drafts: alternate runs with and without, and say which is better for each --workload (W1,W2,W3,W5)",
    )
    parser.add_argument(
        "--price",
        type=not_negative,
        default=1.0,
        metavar="N",
        help="with --ladder: price of an hour of the machine, in dollars (1)",
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --ladder: draw it as a PNG")
    parser.add_argument(
        "--cost",
        type=Path,
        metavar="FILE",
        help="with the part promise: write the measured step times, for `penstock simulate --cost`",
    )


def add_model_arguments(parser: argparse.ArgumentParser) -> None:
    """The arguments that say which models are measured, in which types, and how long."""
    parser.add_argument(
        "--model",
        metavar="MODEL",
        action="append",
        help="model to measure, as for `penstock serve`; repeatable, but not with --workload, --drafts or --cost. "
        "By default the demo model and a random 135 M Llama; with these three, the Llama alone",
    )
    parser.add_argument(
        "--streams",
        type=listed(count),
        default=[1, 16, 64],
        metavar="N,N",
        help="numbers of simultaneous streams (1,16,64)",
    )
    parser.add_argument(
        "--dtype",
        type=listed(one_of(choices("dtype"))),
        default=["auto", "float32"],
        metavar="DTYPE,DTYPE",
        help=f"some of {','.join(choices('dtype'))} (auto,float32)",
    )
    parser.add_argument("--quantize", choices=choices("quantize"), help="like that of `penstock serve`")
    parser.add_argument("--kv-dtype", choices=choices("kv_dtype"), help="like that of `penstock serve`")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, in a single run")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures to this file")


def run(options: argparse.Namespace) -> int:
    from penstock.app.bench.runs import run_drafts, run_ladder, run_parts, run_workloads

    check_level()
    for flag, path in (("--json", options.json), ("--cost", options.cost), ("--plot", options.plot)):
        check_output(flag, path)
    if options.workload and options.ladder:
        raise OperatorError("--workload and --ladder are separate runs; give one of them")
    if options.drafts and (options.ladder or options.url is not None):
        raise OperatorError(
            "--drafts starts servers of its own, and no other part goes with it but --workload"
        )
    if len(options.model or ()) > 1 and (options.workload or options.drafts or options.cost):
        raise OperatorError("--workload, --drafts and --cost are of one model; give one --model")
    is_whole = options.workload or options.ladder or options.drafts
    if options.plot is not None and not options.ladder:
        raise OperatorError("--plot goes with --ladder")
    if options.cost is not None and (is_whole or "promise" not in options.only):
        raise OperatorError("--cost needs the part promise")
    if options.url is not None and not options.workload:
        raise OperatorError("--url goes with --workload")
    if options.ladder:
        results = run_ladder(options)
    elif options.drafts:
        results = run_drafts(options)
    else:
        results = run_workloads(options) if options.workload else run_parts(options)
    if options.cost is not None:
        write_figures(options.cost, results["promise"]["replay"]["machine"])
    write_figures(options.json, results)
    rungs = [row for rows in results.get("ladder", {}).values() for row in rows]
    compared = [row[name] for row in results.get("drafts", []) for name in ("with", "without")]
    return 1 if any(row["failed"] for row in [*rungs, *compared, *results.get("http", [])]) else 0


def _workloads(text: str) -> list[str]:
    return list(USUAL) if text == "all" else listed(one_of([*WORKLOADS, "all"]))(text)
