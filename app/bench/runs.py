"""The parts of the bench: each starts what it needs, measures, and returns plain figures."""

from __future__ import annotations

import argparse
import itertools
import math
import platform
import re
import sys
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from penstock.app.bench.arithmetic import Arithmetic, arithmetic_of, num_weights
from penstock.app.bench.ceilings import Ceilings, Sizes, most_tokens_per_s
from penstock.app.bench.checkpoint import LLAMA_135M, ensure_checkpoint
from penstock.app.bench.client import Job
from penstock.app.bench.drafts import LANE, TURNS, compare, print_compared
from penstock.app.bench.job import run_module
from penstock.app.bench.kv_watch import KVWatch
from penstock.app.bench.ladder import Ladder, print_ladder
from penstock.app.bench.other_server import AnyServer, OtherServer
from penstock.app.bench.promise import SECONDS, PromiseBench
from penstock.app.bench.report import print_report, print_workloads
from penstock.app.bench.server_process import ServerFailed, ServerProcess
from penstock.app.bench.statistics import StreamFigures, percentile, rate_until, summarise
from penstock.app.bench.workloads import WORKLOADS, Workload
from penstock.app.checkpoint import DEMO_DRAFT, DEMO_MODEL, asked_for, find_checkpoint, num_bytes
from penstock.app.errors import OperatorError
from penstock.app.reader import TimedAnswer
from penstock.app.tables import number
from penstock.engine.cores import num_cores
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config, read_tokenizer
from penstock.priority.lanes import DEFAULT_POLICIES, Lane

PROMPT_TOKENS, OUTPUT_TOKENS = 32, 128
PREFIX_TOKENS = 512
_WORD = re.compile(rb" ?[A-Za-z]{2,}")
_WARM_UP = Workload(name="", streams=4, prompt_tokens=100, output_tokens=40)

Row = dict[str, Any]


@dataclass(slots=True)
class Subject:
    """A model under measurement."""

    path: Path
    name: str
    arithmetic: Arithmetic
    max_length: int
    token_ids: list[int]
    stored: float = 2.0
    """The bytes of a weight in the checkpoint."""
    served_as: str = "bench"
    seeds: Callable[[], int] = field(default_factory=lambda: itertools.count(1).__next__)
    """Every run sends other prompts, so that nothing is found in a cache by accident."""


def run_parts(options: argparse.Namespace) -> Row:
    """All parts that were asked for, on all models; prints the tables."""
    results: Row = {"machine": machine(), "generate": [], "http": [], "prefix": []}
    for subject in map(read_subject, model_paths(options)):
        if "generate" in options.only:
            try:
                results["generate"].append(generate(subject, options.quick))
            except OperatorError as error:
                say(f"{subject.name}: transformers' generate is left out: {error}")
        for dtype in options.dtype:
            if {"http", "prefix"} & set(options.only):
                _serve_and_measure(subject, dtype, options, results)
    if "promise" in options.only:
        results["promise"] = _promise(options)
    print_report(results)
    return results


def _promise(options: argparse.Namespace) -> Row:
    subject = _one_subject(options)
    with start_server(subject, options.dtype[0], type_arguments(options)) as server:
        say(f"{subject.name}: promises, alone, beside batch work, overloaded, and simulated")
        seconds = SECONDS / 4 if options.quick else SECONDS
        return PromiseBench(server, run_module, subject.token_ids, seconds).measure()


def run_workloads(options: argparse.Namespace) -> Row:
    """The fixed workloads, each dtype on a server of its own, or on one that runs already."""
    subject = _one_subject(options)
    workloads = [WORKLOADS[name] for name in options.workload]
    other = None if options.url is None else OtherServer.at(options.url)
    if other is None:
        _check_positions(subject, workloads)
    else:
        subject = replace(subject, served_as=other.model)
    ceilings, rows = measure_ceilings(), list[Row]()
    for dtype in options.dtype if other is None else options.dtype[:1]:
        label = types_label(dtype, options) if other is None else options.url
        serving: AbstractContextManager[AnyServer] = (
            start_server(subject, dtype, type_arguments(options)) if other is None else nullcontext(other)
        )
        with serving as server:
            for workload in workloads:
                row = _http(server, subject, label, workload)
                sizes = Sizes.of(dtype, options.quantize, options.kv_dtype, subject.stored)
                rows.append(row | {"sizes": asdict(sizes)})
    ceilings = ceilings.or_better(measure_ceilings())
    for row in rows:
        row["most_tokens_per_s"] = most_tokens_per_s(
            WORKLOADS[row["workload"]], subject.arithmetic, Sizes(**row["sizes"]), ceilings
        )
    results: Row = {"machine": machine(), "ceilings": asdict(ceilings), "http": rows}
    print_workloads(results)
    return results


def _check_positions(subject: Subject, workloads: Sequence[Workload]) -> None:
    """Raises OperatorError for a workload whose sequences are longer than the model's."""
    for workload in workloads:
        if workload.num_positions > subject.max_length:
            raise OperatorError(
                f"{workload.name} needs {workload.num_positions:,} positions, and {subject.name} has "
                f"{subject.max_length:,}; give a --model with more"
            )


def run_ladder(options: argparse.Namespace) -> Row:
    """The rungs of each model; prints a table for each as soon as it is there."""
    ladders: dict[str, list[Row]] = {}
    for subject in [read_subject(path) for path in model_paths(options)]:
        is_demo = subject.path == DEMO_MODEL
        ladder = Ladder(
            start=partial(start_server, subject, "auto", drafts=True),
            run_module=run_module,
            encode=_encoder(subject.path) if is_demo else None,
            token_ids=subject.token_ids,
            model=str(subject.path),
            quantize=options.quantize or "int8",
            draft=["--draft", str(DEMO_DRAFT)] if is_demo else [],
            threads=num_cores(),
        )
        rows = ladders[subject.name] = []
        for row in ladder.measure():
            say(f"{subject.name}: {row['rung']}, {number(row['tokens_per_s'])} tokens/s")
            rows.append(row)
        print_ladder(subject.name, rows, options.price)
    if options.plot is not None:
        from penstock.app.bench.ladder_plot import draw_ladder

        draw_ladder(options.plot, ladders)
    return {"machine": machine(), "price_per_hour": options.price, "ladder": ladders}


def run_drafts(options: argparse.Namespace) -> Row:
    """Workloads with drafts and without, in turns."""
    subject = _one_subject(options)
    dtype, types = options.dtype[0], type_arguments(options)
    workloads = [WORKLOADS[name] for name in options.workload or ("W1", "W2", "W3", "W5")]
    with (
        start_server(subject, dtype, [*LANE, *types], drafts=True) as drafting,
        start_server(subject, dtype, [*LANE, *types]) as plain,
    ):
        for server in (drafting, plain):  # so that both know how long steps take
            send(server, _WARM_UP, subject)
        order = itertools.cycle([(drafting, plain), (plain, drafting)])  # neither is always the first

        def ask(workload: Workload) -> tuple[StreamFigures, StreamFigures]:
            seed, found = subject.seeds(), dict[ServerProcess, StreamFigures]()
            for server in next(order):
                answers, _ = send(server, workload, replace(subject, seeds=lambda: seed))
                found[server] = figures = summarise(answers, workload.streams)
                name = "with" if server is drafting else "without"
                say(f"{workload.name}, {name} drafts: {number(figures.tokens_per_s)} tokens/s")
            return found[drafting], found[plain]

        rows = compare(workloads, ask, 1 if options.quick else TURNS)
    results = {
        "machine": machine(),
        "model": subject.name,
        "types": types_label(dtype, options),
        "promised_ms": 1000 * DEFAULT_POLICIES[Lane.STANDARD].tpot_s,
        "drafts": rows,
    }
    print_compared(results)
    return results


def _encoder(path: Path) -> Callable[[str], list[int]]:
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(path / "tokenizer.json"))
    return lambda text: list(tokenizer.encode(text, add_special_tokens=False).ids)


def measure_ceilings() -> Ceilings:
    say("what the machine can do")
    return Ceilings(**run_module("penstock.app.bench.ceilings", {"threads": num_cores()}))


def say(text: str) -> None:
    print(f"bench: {text}", file=sys.stderr, flush=True)


def model_paths(options: argparse.Namespace) -> list[Path]:
    """Raises OperatorError if there is no such checkpoint."""
    if options.model:
        found = [find_checkpoint(asked_for(model), None) for model in options.model]
        return [DEMO_MODEL if path.resolve() == DEMO_MODEL.resolve() else path for path in found]
    say("writing the random 135 M checkpoint, if it is not there yet")
    return [DEMO_MODEL, ensure_checkpoint(LLAMA_135M)]


def _one_subject(options: argparse.Namespace) -> Subject:
    """The model that is given, or the 135 M shape."""
    return read_subject(model_paths(options)[0] if options.model else ensure_checkpoint(LLAMA_135M))


def read_subject(path: Path) -> Subject:
    """Raises OperatorError if the checkpoint is none that is served."""
    try:
        config, tokenizer = read_config(path), read_tokenizer(path)
    except CheckpointError as error:
        raise OperatorError(f"--model {path}: {error}") from None
    words = [i for i in range(tokenizer.vocab_size) if _WORD.fullmatch(tokenizer.token_bytes(i))]
    name = "demo" if path == DEMO_MODEL else path.name
    stored = num_bytes(path) / num_weights(config)
    return Subject(path, name, arithmetic_of(config), config.max_position, words, stored)


def machine() -> Row:
    return {"cores": num_cores(), "processor": _processor(), "python": platform.python_version()}


def _processor() -> str:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        return platform.processor()
    return next(
        (line.split(":")[1].strip() for line in text.splitlines() if line.startswith("model name")), ""
    )


def generate(subject: Subject, quick: bool) -> Row:
    """transformers' generate, one request after another."""
    num_requests, length = (1, OUTPUT_TOKENS // 4) if quick else (3, OUTPUT_TOKENS)
    say(f"{subject.name}: transformers' generate, {num_requests} times {length} tokens")
    workload = Workload(
        name="", streams=1, prompt_tokens=PROMPT_TOKENS, output_tokens=length, rounds=num_requests
    )
    bodies = workload.bodies("", subject.token_ids, subject.seeds())
    job = {
        "model": str(subject.path),
        "prompts": [body["prompt"] for body in bodies[0]],
        "num_output_tokens": length,
        "threads": num_cores(),
    }
    seconds = run_module("penstock.app.bench.generate", job)
    return {"model": subject.name, "tokens_per_s": length * len(seconds) / sum(seconds), "seconds": seconds}


def type_arguments(options: argparse.Namespace) -> list[str]:
    """The arguments of a server for the types that were asked for beside --dtype."""
    chosen = {"--quantize": options.quantize, "--kv-dtype": options.kv_dtype}
    return [text for flag, value in chosen.items() if value is not None for text in (flag, value)]


def types_label(dtype: str, options: argparse.Namespace) -> str:
    """The types of a server as the tables name them: "auto", or "auto --quantize int8"."""
    return " ".join([dtype, *type_arguments(options)])


def start_server(
    subject: Subject, dtype: str, more: Sequence[str] = (), *, drafts: bool = False
) -> ServerProcess:
    """A server that computes one token of each sequence in a step, unless drafts are what is measured."""
    say(" ".join([f"{subject.name}, {dtype}: starting the server", *more]))
    arguments = [
        "--model",
        str(subject.path),
        "--dtype",
        dtype,
        "--served-model-name",
        subject.served_as,
        *more,
    ]
    arguments += [] if drafts else ["--no-speculation"]
    server = ServerProcess(arguments)
    try:
        server.wait_ready()
        send(server, Workload(name="", streams=2, prompt_tokens=8, output_tokens=4), subject)
    except ServerFailed as error:
        raise OperatorError(f"the server did not start: {error}") from None
    except BaseException:
        server.kill()  # nobody else knows of it yet
        raise
    return server


def _serve_and_measure(subject: Subject, dtype: str, options: argparse.Namespace, results: Row) -> None:
    label = types_label(dtype, options)
    with start_server(subject, dtype, type_arguments(options)) as server:
        if "http" in options.only:
            for streams in options.streams:
                workload = _closed_loop(streams, options.quick)
                results["http"].append(_http(server, subject, label, workload))
        if "prefix" in options.only and dtype == options.dtype[0]:
            results["prefix"].append(_prefix(server, subject, 3 if options.quick else 9))


def _closed_loop(streams: int, quick: bool) -> Workload:
    rounds = 1 if quick else max(1, 4 // streams)
    length = OUTPUT_TOKENS // 4 if quick else OUTPUT_TOKENS
    return Workload(
        name="", streams=streams, prompt_tokens=PROMPT_TOKENS, output_tokens=length, rounds=rounds
    )


def send(server: AnyServer, workload: Workload, subject: Subject) -> tuple[list[TimedAnswer], float]:
    """Runs a workload from a client process: its answers, and the client's CPU seconds."""
    seed = subject.seeds()
    bodies = workload.bodies(subject.served_as, subject.token_ids, seed)
    bodies += workload.interactive_bodies(subject.served_as, subject.token_ids, seed)
    starts_s = [0.0] * workload.streams + workload.interactive_starts_s()
    job = Job(server.host, server.port, "/v1/completions", bodies, starts_s, workload.seconds)
    result = run_module("penstock.app.bench.client", asdict(job))
    return [TimedAnswer(**answer) for answer in result["answers"]], result["cpu_s"]


def _http(server: AnyServer, subject: Subject, dtype: str, workload: Workload) -> Row:
    """One workload, with the server's own cost beside it; `dtype` is the label of its types."""
    label = f"{workload.name or 'closed loop'}, {workload.streams} streams"
    say(f"{subject.name}, {dtype}: {label}")
    pid = 0 if isinstance(server, OtherServer) else server.process.pid  # the system knows no 0
    alone = {} if workload.interactive is None else {"alone": _alone(server, subject, workload)}
    loop_before = _loop_cpu_s(pid)
    with KVWatch(None if isinstance(server, OtherServer) else server.url) as kv:
        answers, client_cpu_s = send(server, workload, subject)
    loop_cpu_s = _loop_cpu_s(pid) - loop_before
    row = _figures(answers, workload)
    say(f"{subject.name}, {dtype}: {number(row['tokens_per_s'])} tokens/s")
    everything = summarise(answers, workload.streams)
    computed = everything.prompt_tokens - everything.cached_tokens
    flop = subject.arithmetic.total(computed, everything.output_tokens)
    return {
        "model": subject.name,
        "dtype": dtype,
        "workload": workload.name,
        **row,
        **alone,
        "gflop_per_s": flop / everything.duration_s / 1e9,
        "loop_cpu_us_per_token": loop_cpu_s * 1e6 / max(1, everything.output_tokens),
        "client_cpu_s": client_cpu_s,
        "kv_unfilled": kv.unfilled,
    }


def _alone(server: AnyServer, subject: Subject, workload: Workload) -> Row:
    """The figures of a workload's streams, and of its interactive requests, without each other."""
    streams, interactive = workload.alone()
    say(f"{workload.name}: each part alone, {workload.alone_s:g} s each")
    return {
        "tokens_per_s": rate_until(send(server, streams, subject)[0], workload.alone_s),
        "interactive_ttft_p50_ms": summarise(send(server, interactive, subject)[0], 1).ttft_p50_ms,
    }


def _figures(answers: list[TimedAnswer], workload: Workload) -> Row:
    """The figures of a workload's streams, and under "interactive" those of the requests beside them.

    An interactive request that was refused has not failed: the lane refuses what it could not answer in time.
    """
    streams = [answer for answer in answers if answer.stream < workload.streams]
    row = asdict(summarise(streams, workload.streams))
    if workload.seconds is not None:
        row["tokens_per_s"] = rate_until(streams, workload.seconds)
    if workload.interactive is not None:
        beside = [answer for answer in answers if answer.stream >= workload.streams]
        row["interactive"] = figures = asdict(summarise(beside, 1))
        row["failed"] += figures["failed"] - figures["refused"]
        errors = (answer.error for answer in beside if not answer.was_refused)
        row["first_error"] = row["first_error"] or next(filter(None, errors), None)
    return row


def _loop_cpu_s(pid: int) -> float:
    """CPU seconds of the server's main thread, on which its event loop runs; NaN where the system does not say."""
    try:
        return int(Path(f"/proc/{pid}/task/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return math.nan


def _prefix(server: ServerProcess, subject: Subject, num_pairs: int) -> Row:
    """Time to first token of a prompt never seen, and of one that begins like it."""
    shared = min(PREFIX_TOKENS, subject.max_length - PROMPT_TOKENS - 8)
    say(f"{subject.name}: a shared prefix of {shared} tokens, cold and found")
    cold, hit = [], []
    for _ in range(num_pairs):
        workload = Workload(
            name="", streams=1, prompt_tokens=PROMPT_TOKENS, shared_tokens=shared, output_tokens=2, rounds=2
        )
        first, second = send(server, workload, subject)[0]
        cold.append(first.ttft_s * 1000)
        hit.append(second.ttft_s * 1000)
    return {
        "model": subject.name,
        "shared_tokens": shared,
        "cached_tokens": second.num_cached_tokens,
        "ttft_cold_p50_ms": percentile(cold, 50),
        "ttft_hit_p50_ms": percentile(hit, 50),
        "ratio": percentile(cold, 50) / percentile(hit, 50),
    }
