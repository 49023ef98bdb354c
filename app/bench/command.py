"""`penstock bench`: what is measured, in which order, and how it is reported."""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from app.bench.workloads import WORKLOADS
from app.errors import OperatorError
from app.outputs import check_output
from app.settings import choices

PARTS = (
    "generate",
    "http",
    "linear",
    "prefix",
    "loop",
    "plan",
    "promise",
    "drafts",
    "formats",
    "store",
    "routing",
)
BY_DEFAULT = tuple(part for part in PARTS if part not in ("formats", "store", "routing"))
"""What needs nothing beside this server, little room on the disk, and no replicas."""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--model",
        metavar="DIR",
        action="append",
        help="checkpoint to measure, more than once if wanted; without it, the demo model and a random 135 M Llama",
    )
    parser.add_argument(
        "--streams", type=_numbers, default=[1, 16, 64], metavar="N,N", help="streams at a time (1,16,64)"
    )
    parser.add_argument("--dtype", type=_names, default=["auto", "float32"], help="dtypes (auto,float32)")
    parser.add_argument(
        "--quantize",
        choices=choices("quantize"),
        help="as of `penstock serve`, for linear, http, prefix, loop, drafts, workloads and parts",
    )
    parser.add_argument(
        "--kv-dtype",
        choices=("auto", "float16", "bfloat16", "float32", "int8"),
        help="as of `penstock serve`, for http, prefix, loop, drafts, workloads and parts",
    )
    parser.add_argument(
        "--only",
        type=_parts,
        default=list(BY_DEFAULT),
        metavar="PART,PART",
        help=f"of {','.join(PARTS)}; without them all but store (it needs redis-server), "
        "formats (it writes 3 GB) and routing",
    )
    parser.add_argument(
        "--workload",
        type=_workloads,
        action="extend",
        metavar="NAME,NAME",
        help=f"fixed workloads of 135 M, of {','.join(WORKLOADS)}, or all; no other part",
    )
    parser.add_argument(
        "--parts",
        action="store_true",
        help="where a step of 135 M on the CPU spends its time, beside what the machine can do; no other part",
    )
    parser.add_argument(
        "--ladder",
        action="store_true",
        help="generate, batching, prefix cache, 8 bits and drafts, one on top of the other; no other part",
    )
    parser.add_argument(
        "--price", type=float, default=1.0, metavar="N", help="with --ladder: of the machine's hour (1)"
    )
    parser.add_argument("--plot", type=Path, metavar="FILE", help="with --ladder or drafts: draw it, as PNG")
    parser.add_argument("--quick", action="store_true", help="a quarter of the tokens, once")
    parser.add_argument(
        "--cost",
        type=Path,
        metavar="FILE",
        help="with the part promise: write the step times, for `penstock simulate --cost`",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all figures there")


def run(options: argparse.Namespace) -> int:
    from app.bench.runs import run_ladder, run_parts, run_step_parts, run_workloads

    for flag, path in (("--json", options.json), ("--cost", options.cost), ("--plot", options.plot)):
        check_output(flag, path)
    whole_runs = [flag for flag in ("workload", "parts", "ladder") if getattr(options, flag)]
    if len(whole_runs) > 1:
        raise OperatorError(f"--{' and --'.join(whole_runs)} are separate runs; give one of them")
    if options.plot is not None and not options.ladder and (whole_runs or "drafts" not in options.only):
        raise OperatorError("--plot goes with --ladder, or with the part drafts")
    if options.cost is not None and (whole_runs or "promise" not in options.only):
        raise OperatorError("--cost needs the part promise")
    if options.ladder:
        results = run_ladder(options)
    elif options.parts:
        results = run_step_parts(options)
    else:
        results = run_workloads(options) if options.workload else run_parts(options)
    if options.cost is not None:
        cost = results["promise"]["replay"]["machine"]
        options.cost.write_text(json.dumps(cost, indent=1) + "\n", encoding="utf-8")
    if options.json is not None:
        options.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    return 1 if any(row["failed"] for row in _rows_of_requests(results)) else 0


def _rows_of_requests(results: dict[str, Any]) -> list[dict[str, Any]]:
    store = results.get("store", {"streams": [], "trouble": []})
    rungs = [row for rows in results.get("ladder", {}).values() for row in rows]
    return [*rungs, *results.get("http", []), *store["streams"], *store["trouble"]]


def _numbers(text: str) -> list[int]:
    return [int(part) for part in text.split(",")]


def _names(text: str) -> list[str]:
    return text.split(",")


def _workloads(text: str) -> list[str]:
    names = list(WORKLOADS) if text == "all" else text.split(",")
    for name in names:
        if name not in WORKLOADS:
            raise argparse.ArgumentTypeError(f"{name!r} is none of {', '.join(WORKLOADS)}, all")
    return names


def _parts(text: str) -> list[str]:
    parts = text.split(",")
    for part in parts:
        if part not in PARTS:
            raise argparse.ArgumentTypeError(f"{part!r} is none of {', '.join(PARTS)}")
    return parts
