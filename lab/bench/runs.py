"""The parts of `python -m lab.bench`: each starts what it needs, measures, and returns plain figures."""

from __future__ import annotations

import argparse
from dataclasses import asdict
from functools import partial
from pathlib import Path

from lab.bench.decisions import DecisionsBench
from lab.bench.drafts import DraftsBench
from lab.bench.redis_process import RedisProcess, find_redis
from lab.bench.scraping import ScrapeBench
from lab.bench.store import StoreBench
from penstock.app.bench.checkpoint import HALF_B, LLAMA_135M, Shape, ensure_checkpoint
from penstock.app.bench.job import run_module
from penstock.app.bench.runs import (
    Row,
    Subject,
    measure_ceilings,
    model_paths,
    read_subject,
    say,
    start_server,
    type_arguments,
    types_label,
)
from penstock.app.checkpoint import DEMO_DRAFT, DEMO_MODEL
from penstock.engine.cores import num_cores
from penstock.engine.model.parse import read_config


def measure_formats(options: argparse.Namespace) -> list[Row]:
    return [row for shape in (LLAMA_135M, HALF_B) for row in _formats(shape, options.quick)]


def _formats(shape: Shape, quick: bool) -> list[Row]:
    say(f"{shape.name}: quantized checkpoints beside --quantize of the same width")
    job = {"shape_name": shape.name, "seconds": 2 if quick else 8, "threads": num_cores()}
    return run_module("lab.bench.formats", job)  # type: ignore[no-any-return]


def measure_store(options: argparse.Namespace) -> Row:
    """The cost of Redis on each model, and the times to first token without it on the first."""
    find_redis()
    subjects, quick = _subjects(options), options.quick
    results: Row = {"streams": [], "trouble": []}
    for subject in subjects:
        start = partial(start_server, subject, "auto")
        with RedisProcess() as redis, start() as without, start(["--redis-url", redis.url]) as shared:
            bench = StoreBench(redis, without, shared, run_module, quick=quick)
            say(f"{subject.name}: streams with and without Redis, in turns")
            results["streams"].append({"model": subject.name, **bench.streams()})
            if subject is subjects[0]:
                say(f"{subject.name}: the first token while Redis is well, and while it is not")
                results["trouble"] = bench.trouble(start)
    return results


def measure_decisions(options: argparse.Namespace) -> list[Row]:
    """Decisions a second of each model, and of chats that ask the same."""
    rows: list[Row] = []
    for subject in _subjects(options):
        say(f"{subject.name}: decisions and chats, in turns")
        with start_server(subject, "auto") as server:
            bench = DecisionsBench(server, quick=options.quick)
            rows += ({"model": subject.name, **row} for row in bench.rows())
    return rows


def measure_scraping(options: argparse.Namespace) -> list[Row]:
    """The tokens a second of each model with and without a picker that scrapes."""
    rows: list[Row] = []
    for subject in _subjects(options):
        with start_server(subject, "auto", ["--metrics-compat", "vllm"]) as server:
            say(f"{subject.name}: streams, scraped in every other window")
            bench = ScrapeBench(server, subject.served_as, run_module, quick=options.quick)
            rows.append({"model": subject.name, **bench.row()})
    return rows


def measure_parts(options: argparse.Namespace) -> Row:
    """Where steps of each model and dtype spend their time, in a process of its own."""
    ceilings, parts = measure_ceilings(), list[Row]()
    for path in map(Path, options.model) if options.model else [ensure_checkpoint(LLAMA_135M)]:
        subject = read_subject(path)
        for dtype in options.dtype:
            parts += _step_parts(subject, dtype, options)
    ceilings = ceilings.or_better(measure_ceilings())
    return {"ceilings": asdict(ceilings), "parts": parts}


def _step_parts(subject: Subject, dtype: str, options: argparse.Namespace) -> list[Row]:
    label = types_label(dtype, options)
    say(f"{subject.name}, {label}: the parts of a step")
    job = {
        "model": str(subject.path),
        "types": {"dtype": dtype, "quantize": options.quantize, "kv_dtype": options.kv_dtype or "auto"},
        "threads": num_cores(),
        "most_repeats": 2 if options.quick else 100,
    }
    return [{"model": subject.name, "dtype": label, **row} for row in run_module("lab.bench.parts", job)]


def measure_linear(options: argparse.Namespace) -> list[Row]:
    """The rates of the linear operators alone, with as many rows as there are streams."""
    return [
        row
        for subject in _subjects(options)
        for dtype in options.dtype
        for row in _linear(subject, dtype, options)
    ]


def _linear(subject: Subject, dtype: str, options: argparse.Namespace) -> list[Row]:
    label = types_label(dtype, options)
    say(f"{subject.name}, {label}: the linear operators alone")
    job = {
        "model": str(subject.path),
        "dtype": dtype,
        "quantize": options.quantize,
        "rows": options.streams,
        "threads": num_cores(),
    }
    rates = run_module("lab.bench.linear", job)
    return [
        {"model": subject.name, "dtype": label, "streams": rows, "gflop_per_s": rate}
        for rows, rate in zip(options.streams, rates, strict=True)
    ]


def measure_drafts(options: argparse.Namespace) -> Row:
    """Sends the same requests with drafts and without, and measures each number of drafts by itself."""
    subjects = _subjects(options)
    return {
        "drafts": [row for subject in subjects for row in _drafts(subject, options)],
        "depths": [row for subject in subjects for row in _depths(subject, options)],
    }


def _drafts(subject: Subject, options: argparse.Namespace) -> list[Row]:
    """The demo model has its head, and some models a layer of their own; other models have the lookup alone."""
    types, is_demo = type_arguments(options), subject.path == DEMO_MODEL
    model = ["--draft", str(DEMO_DRAFT)] if is_demo else []
    with (
        start_server(subject, "auto", [*types, *model], drafts=True) as drafting,
        start_server(subject, "auto", types) as plain,
    ):
        say(f"{subject.name}: the same requests with drafts and without, in turns")
        bench = DraftsBench(
            drafting,
            plain,
            run_module,
            subject.token_ids,
            options.quick,
            tells_stories=is_demo or _predicts(subject),
        )
        rows = bench.measure()
    return [{"model": " ".join([subject.name, *types]), **row} for row in rows]


def _depths(subject: Subject, options: argparse.Namespace) -> list[Row]:
    """The gain of each number of drafts, for the demo model, and for models with a layer of their own that drafts."""
    if subject.path != DEMO_MODEL and not _predicts(subject):
        return []
    say(f"{subject.name}: as many drafts in every step, for each number of them")
    job = {
        "model": str(subject.path),
        "draft": str(DEMO_DRAFT) if subject.path == DEMO_MODEL else None,
        "quantize": options.quantize,
        "threads": num_cores(),
        "streams": [1] if options.quick else [1, 8, 32],
        "num_tokens": 32 if options.quick else 64,
        "rounds": 1 if options.quick else 3,
    }
    return run_module("lab.bench.depth", job)  # type: ignore[no-any-return]


def _predicts(subject: Subject) -> bool:
    return subject.path.is_dir() and read_config(subject.path).spec.prediction is not None


def _subjects(options: argparse.Namespace) -> list[Subject]:
    return [read_subject(path) for path in model_paths(options)]
