"""The parts of the bench with scripts for servers and clients: what is asked of them, and made of the answers."""

from __future__ import annotations

import json
import math
import platform
import shutil
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from http.server import BaseHTTPRequestHandler, HTTPServer
from itertools import count
from pathlib import Path
from pprint import pformat
from threading import Thread
from types import SimpleNamespace
from typing import Any
from zlib import crc32

import pytest
import torch
from tokenizers import Tokenizer, decoders, models

from penstock.app.bench import replay, runs
from penstock.app.bench.checkpoint import LLAMA_TINY, config_of, ensure_checkpoint
from penstock.app.bench.client import Job
from penstock.app.bench.replay import compare, print_comparison, print_groups, print_promises
from penstock.app.bench.server_process import ServerFailed
from penstock.app.cli import main
from penstock.app.errors import OperatorError
from penstock.app.reader import TimedAnswer
from penstock.priority.lanes import Lane
from penstock.priority.simulator.trace import Arrival
from penstock.priority.steptime import NAMES
from tests.app.expected import expected

PROMISES = """\
penstock_promises_total{lane="interactive",outcome="kept"} 99
penstock_promises_total{lane="interactive",outcome="broken"} 1
penstock_promises_total{lane="standard",outcome="kept"} 0
penstock_promises_total{lane="standard",outcome="broken"} 0
penstock_promise_coverage_ratio{lane="interactive",bound="low"} 0.946
penstock_promise_coverage_ratio{lane="interactive",bound="high"} 0.998
"""
METRICS = "penstock_kv_usage_ratio 0.5\npenstock_kv_unfilled_ratio 0.02\n" + "".join(
    f'penstock_step_model_seconds{{coefficient="{name}"}} {value}\n'
    for name, value in zip(NAMES, (0.01, 1e-4, 1e-3, 1e-7, 0.0), strict=True)
)


class Scripted:
    """Runs no process: notes what each was to do, and answers by a rule."""

    def __init__(self) -> None:
        self.lines: list[str] = []

    def run_module(self, module: str, job: Any) -> object:
        match module:
            case "penstock.app.bench.generate":
                self.lines.append(f"generate {job | {'prompts': crc32(repr(job['prompts']).encode())}}")
                return [0.4 + 0.1 * place for place in range(len(job["prompts"]))]
            case "penstock.app.bench.ceilings":
                self.lines.append(f"ceilings {job}")
                return {"memory_gb_per_s": 20.0 + len(self.lines), "peaks": {"fma8": 100.0, "fma16": 0.0}}
        return self._client(Job(**job))

    def _client(self, job: Job) -> object:
        starts_s = job.starts_s or [0.0] * len(job.bodies)
        answers, sent = [], []
        for stream, bodies in enumerate(job.bodies):
            for place, body in enumerate(bodies[:3]):
                sent.append(f"at {starts_s[stream]:.6g} {len(bodies)} times {_digest(body)}")
                answers.append(
                    _answer(
                        job,
                        stream,
                        place,
                        starts_s[stream] + 10.0 * place,
                        body,
                        0.001 * (len(self.lines) % 7),
                    )
                )
        self.lines.append(
            f"{job.host}:{job.port}{job.path}, {len(job.bodies)} streams, stop after {job.stop_s}, last {sent[-1]}, "
            f"all {crc32(repr(sent).encode()):08x} {sorted(set(job.keys or []))}"
        )
        return {"answers": [asdict(answer) for answer in answers], "cpu_s": 0.25}


def _digest(body: Any) -> str:
    """A body of which the whole may not change."""
    sizes = f"{len(body['prompt'])} tokens in, {body['max_tokens']} out, {body['service_tier']}"
    return f"{sizes}, {crc32(repr(body).encode()):08x}"


def _answer(
    job: Job, stream: int, place: int, at_s: float, body: dict[str, Any], late_s: float
) -> TimedAnswer:
    """Of 12 interactive streams the server refuses one and loses another; the more streams, the slower they begin."""
    started_s, num_prompt, num_output = 1000.0 + at_s, len(body["prompt"]), body["max_tokens"]
    is_interactive = body["service_tier"] == "priority"
    if is_interactive and stream % 12 in (5, 7):
        error, status = ("busy", 503) if stream % 12 == 5 else ("cut", 200)
        return TimedAnswer(started_s, started_s + 0.01 * stream, error=error, status=status, stream=stream)
    share_s = (0.01 if is_interactive else 0.04) / job.port / (1 + place)
    first_s = started_s + late_s + share_s * len(job.bodies) * (1 + stream % 9 / 9)
    times_s = [first_s + 0.06 * number + 0.002 * (number**2 % 5) for number in range((num_output + 1) // 2)]
    return TimedAnswer(
        started_s, times_s[-1], times_s, num_prompt, num_prompt // 4, num_output, stream=stream, status=200,
        predicted_ttft_s=0.1 if stream % 2 else None,
    )  # fmt: skip


@pytest.fixture
def script() -> Scripted:
    return Scripted()


@pytest.fixture
def metrics_url() -> Iterator[str]:
    """A server that has nothing but metrics."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.path == "/metrics" else 404)
            self.end_headers()
            self.wfile.write(f"{METRICS}{PROMISES}penstock_kv_blocks 4000\n".encode())

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.fixture
def bench(
    script: Scripted, metrics_url: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> Callable[..., str]:
    """Runs `penstock bench`; all that it said, wrote and asked for, as one text."""
    clock = count(1)

    class Server:
        """The more arguments, the quicker it is."""

        def __init__(self, arguments: Sequence[str]) -> None:
            script.lines.append(f"start {' '.join(arguments)}")
            self.host, self.port, self.url = "host", len(arguments), metrics_url
            self.process = SimpleNamespace(pid=1)

        def wait_ready(self) -> None:
            script.lines.append("ready")

        def __enter__(self) -> Server:
            return self

        def __exit__(self, *_: object) -> None:
            script.lines.append("stop")

    model = ensure_checkpoint(LLAMA_TINY, tmp_path)
    for name, value in {
        "ServerProcess": Server,
        "run_module": script.run_module,
        "ensure_checkpoint": lambda _: model,
        "DEMO_MODEL": Path(shutil.copytree(model, tmp_path / "demo")),
        "DEMO_DRAFT": Path("draft"),
        "num_cores": lambda: 3,
        "_processor": lambda: "P",
        "_loop_cpu_s": lambda pid: pid * next(clock) / 4,
    }.items():
        monkeypatch.setattr(runs, name, value)
    monkeypatch.setattr(platform, "python_version", lambda: "3")

    def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        figures = tmp_path / "figures.json"
        status = main(["bench", *arguments, "--json", str(figures)])
        out, error = capsys.readouterr()
        found = json.loads(figures.read_text(), parse_float=lambda text: float(f"{float(text):.6g}"))
        parts = [
            f"status {status}",
            out,
            error,
            pformat(found, width=700, compact=True, sort_dicts=False),
            *script.lines,
            "",
        ]
        return "\n".join(parts).replace(str(tmp_path), "TMP")

    return run


@pytest.mark.parametrize(
    ("name", "arguments"),
    [
        ("quick", ["--quick", "--dtype", "auto"]),
        ("workloads", ["--workload", "W1,W4", "--dtype", "float32", "--quantize", "int8"]),
        ("drafts", ["--drafts", "--workload", "W1,W3", "--dtype", "auto", "--quantize", "int8"]),
        ("ladder", ["--ladder", "--price", "2", "--model", "llama-tiny", "--plot", "ladder.png"]),
    ],
)
def test_a_whole_bench(
    bench: Callable[..., str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    name: str,
    arguments: list[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    text = bench(capsys, *arguments)
    assert text == expected(f"bench-{name}.txt", text)
    drawn = [path.read_bytes()[:4] for path in tmp_path.glob("*.png")]
    assert drawn == ([b"\x89PNG"] if name == "ladder" else [])


@pytest.mark.parametrize(("device", "variables", "machine"), [
    ("cpu", {}, (512, 256, 64_000)), ("cuda", {}, (8192, 256, 64_000)),
    ("cuda", {"PENSTOCK_MAX_BATCH_TOKENS": "99", "PENSTOCK_MAX_NUM_SEQS": "7"}, (99, 7, 64_000)),
])  # fmt: skip
def test_a_simulated_machine_has_the_steps_of_the_server(
    device: str,
    variables: dict[str, str],
    machine: tuple[int, ...],
    metrics_url: str,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(replay, "choose_device", lambda _: torch.device(device))
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    found = replay.machine_of(metrics_url)
    assert (found.max_batch_tokens, found.max_num_seqs, found.num_kv_tokens) == machine
    assert found.coefficients["alpha_s"] == 0.01


def test_a_replay_with_keys_has_tenants(
    script: Scripted, metrics_url: str, capsys: pytest.CaptureFixture[str]
) -> None:
    arrivals = [
        Arrival(
            7.0 + place,
            20 + 15 * place,
            4,
            Lane.BATCH if place % 2 else Lane.INTERACTIVE,
            f"tenant {place % 3}",
        )
        for place in range(9)
    ]
    server: Any = SimpleNamespace(host="host", port=2, url=metrics_url)
    keys = {"tenant 0": "key 0", "tenant 1": "key 1"}
    machine, served, simulated = compare(server, script.run_module, arrivals, range(300, 400), keys)
    print_comparison("made", served, simulated)
    print_groups([served, simulated])
    print_promises(metrics_url)
    rows = [
        f"{name}: {figures.offered} {figures.ttft_s.p50:.5g} {figures.tpot_s.p50:.5g}"
        for one in (served, simulated)
        for name, figures in one.tenants.items()
    ]
    text = "\n".join([capsys.readouterr().out, str(machine), *rows, *script.lines, ""])
    assert text == expected("bench-replay.txt", text)


def test_the_time_of_a_servers_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Path, "read_text", lambda path: f"2500000000 7 {path}")
    assert runs._loop_cpu_s(3) == 2.5
    monkeypatch.undo()
    assert math.isnan(runs._loop_cpu_s(-1))


def test_a_subject_is_measured_with_words(tmp_path: Path) -> None:
    with pytest.raises(OperatorError, match=rf"^--model {tmp_path}: {tmp_path}/config\.json is missing"):
        runs.read_subject(tmp_path)
    (tmp_path / "config.json").write_text(json.dumps(config_of(LLAMA_TINY)))
    vocabulary = {"aa": 5, "Ġbc": 3, "a": 1, "a1": 2, "Zz": 4, "Ġ": 6}
    made = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    made.decoder = decoders.ByteLevel()
    made.save(str(tmp_path / "tokenizer.json"))
    subject = runs.read_subject(tmp_path)
    assert (subject.name, subject.max_length, subject.token_ids) == (tmp_path.name, 2048, [3, 4, 5])
    assert [subject.seeds(), subject.seeds()] == [1, 2]


@pytest.mark.parametrize(
    ("error", "raised", "was_killed"),
    [(ServerFailed("no memory"), OperatorError("the server did not start: no memory"), False),
     (KeyboardInterrupt("stop"), KeyboardInterrupt("stop"), True)],
)  # fmt: skip
def test_a_server_that_does_not_start(
    monkeypatch: pytest.MonkeyPatch, error: BaseException, raised: BaseException, *, was_killed: bool
) -> None:
    killed: list[bool] = []

    def fail() -> None:
        raise error

    server = SimpleNamespace(wait_ready=fail, kill=lambda: killed.append(True))
    monkeypatch.setattr(runs, "ServerProcess", lambda _: server)
    subject: Any = SimpleNamespace(path="m", name="m", served_as="bench")
    with pytest.raises(type(raised), match=str(raised)):
        runs.start_server(subject, "auto")
    assert killed == [True] * was_killed


def test_the_shared_prefix_fits_the_model(script: Scripted, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(runs, "run_module", script.run_module)
    server: Any = SimpleNamespace(host="host", port=2)
    subject: Any = SimpleNamespace(
        name="m", served_as="bench", max_length=100, token_ids=[1], seeds=lambda: 1
    )
    row = runs._prefix(server, subject, 1)
    assert (row["shared_tokens"], row["cached_tokens"]) == (60, 92 // 4)
    assert row["ratio"] == pytest.approx(0.04 / 0.02)
