"""A server is asked for what a run of each mode promises, and its figures are those that its answers make."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from loadtests.gpu import figures, serving, sizes
from loadtests.gpu.parts import Outcome
from penstock.app.reader import TimedAnswer

Sent = tuple[int, int, int, int, int]
"""Streams, prompt tokens, output tokens, rounds, client processes."""


class FakeServer:
    """Answers after 1 ms for each token of the prompt, and a token takes 2 ms and 1 us for each of the prompt."""

    host, port = "here", 80

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.flags: list[str] = []
        self.lines = [f"line {i}" for i in range(40)] + ["weights take room", "rest"]
        self.sent: list[Sent] = []
        self.error: str | None = None
        self.alone: list[dict[str, Any]] = []
        self.device_ms: float | None = 4.0
        self.says: list[str] = []
        self.outcome = Outcome("")
        clock = iter([3.0, 10.0])
        monkeypatch.setattr(serving, "time", SimpleNamespace(monotonic=lambda: next(clock)))
        monkeypatch.setattr(serving, "ServerProcess", self.start)
        monkeypatch.setattr(serving, "write_checkpoint", self.write)
        monkeypatch.setattr(serving, "ask", self.ask)
        monkeypatch.setattr(serving, "run_module", self.run_alone)
        monkeypatch.setattr(serving, "say", self.says.append)
        monkeypatch.setattr(figures, "_tell", lambda said: self.outcome.take(json.dumps(said)))

    def start(self, flags: list[str]) -> FakeServer:
        self.flags = flags
        return self

    def __enter__(self) -> None:
        pass

    def __exit__(self, *_: object) -> None:
        pass

    def write(self, _: object, folder: Path) -> None:
        folder.mkdir()

    def ask(self, run: Any, job: Any, num_processes: int) -> list[TimedAnswer]:
        assert (run.func, run.keywords) == (self.run_alone, {"timeout_s": 60.0})
        assert (job.host, job.port, job.path) == ("here", 80, "/v1/completions")
        (prompt_tokens, output_tokens), *_ = {
            (len(body["prompt"]), body["max_tokens"]) for bodies in job.bodies for body in bodies
        }
        self.sent.append((len(job.bodies), prompt_tokens, output_tokens, len(job.bodies[0]), num_processes))
        first_s, each_s = prompt_tokens / 1e3, 0.002 + prompt_tokens / 1e6
        times_s = [first_s + number * each_s for number in range(output_tokens)]
        answer = TimedAnswer(0.0, times_s[-1], times_s, num_output_tokens=output_tokens, error=self.error)
        return [answer for bodies in job.bodies for _ in bodies]

    def run_alone(self, module: str, job: dict[str, Any], **options: object) -> list[dict[str, Any]]:
        assert (module, options) == ("loadtests.gpu.alone", {"timeout_s": 150.0, "stderr": None})
        self.alone.append(job)
        return [
            {"streams": streams, "tpot_ms": 1.6, "step_ms": 5.0, "device_ms": self.device_ms}
            for streams in job["streams"]
        ]

    @property
    def figures(self) -> dict[str, tuple[float, str, str]]:
        return {figure.name: (figure.value, figure.unit, figure.how) for figure in self.outcome.figures}


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> FakeServer:
    return FakeServer(monkeypatch)


def bench(name: str, mode: str, folder: Path) -> serving.Bench:
    return serving.Bench(name, sizes.Arguments(mode, folder, (name,)))


def test_the_figures_of_one_stream(server: FakeServer, tmp_path: Path) -> None:
    bench("llama-8b", "full", tmp_path).run()
    contexts = (1024, 8192, 16_384, 32_768)
    # Linear maps of 218,103,808 weights in each of 32 layers; 4,096 elements of queries and of attention's sums.
    flop = 2 * (32 * (218_103_808 * 8192 + 2 * 4096 * sum(range(1, 8193))) + 4096 * 128_256)
    expected = {
        "start": (7, "s", "from the command to the first answer"),
        "TPOT, batch 1": (2.032, "ms", "32 in, 512 out, the median of 3"),
        **{f"TPOT, batch 1, context {n:,}": (2 + n / 1000, "ms", "") for n in contexts},
        "KV slope of a step": (0.001, "ms per token", "TPOT, a line through 1,024, 8,192, 16,384, 32,768"),
        "prefill of 8,192 tokens": (
            flop / 8.192 / 1e12,
            "TFLOP/s",
            "8192 ms from request to first token, the best of 3, attention counted",
        ),
        "step, 64 streams": (5, "ms", "engine alone, the median"),
        "device time of a step, 64 streams": (4, "ms", "CUDA events"),
        "host's share of a step, 64 streams": (25, "%", "what a step takes beyond the device's own time"),
    }
    assert server.figures == {
        f"llama-8b: {name}": (pytest.approx(value), *words) for name, (value, *words) in expected.items()
    }
    assert server.says == [
        "llama-8b: writing the checkpoint",
        "llama-8b: starting the server",
        "weights take room",
        "llama-8b: one stream",
        *(f"llama-8b: one stream, context {n:,}" for n in contexts),
        "llama-8b: prompts of 8,192",
        "llama-8b: the engine alone, 64 streams",
    ]


def test_the_figures_of_many_streams(server: FakeServer, tmp_path: Path) -> None:
    server.device_ms = None
    bench("qwen3-0.6b", "full", tmp_path).run()
    seconds = 0.512 + 127 * (0.002 + 512 / 1e6)
    expected = {
        "start": (7, "s", "from the command to the first answer"),
        "TPOT, batch 1": (2.032, "ms", "32 in, 512 out, the median of 3"),
        "500 requests of 512 in, 128 out": (
            500 * 128 / seconds,
            "output tokens/s",
            "all at once, TTFT P50 512 ms, 0 failed",
        ),
        "TPOT, 256 streaming clients": (2.032, "ms", "the median of their streams"),
        "step, 64 streams": (5, "ms", "engine alone, the median"),
        "step, 256 streams": (5, "ms", "engine alone, the median"),
        "TPOT, 256 streams, no client": (1.6, "ms", "engine alone, the median"),
        "TPOT with 256 clients, above none": (27, "%", ""),
    }
    assert server.figures == {
        f"qwen3-0.6b: {name}": (pytest.approx(value), *words) for name, (value, *words) in expected.items()
    }
    assert server.outcome.skipped == [
        ("qwen3-0.6b: host's share of a step, 64 streams", "the device's own time is known on CUDA only")
    ]
    assert "qwen3-0.6b: the engine alone, 64 and 256 streams" in server.says


def test_what_fails_is_told_and_the_rest_is_measured(
    server: FakeServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    ask = server.ask

    def failing(*arguments: Any) -> list[TimedAnswer]:
        server.error = "no" if len(server.sent) == 2 else None
        return ask(*arguments)

    monkeypatch.setattr(serving, "ask", failing)
    monkeypatch.setattr(serving, "parse_arguments", lambda: sizes.Arguments("quick", tmp_path, ("llama-8b",)))
    assert serving.main() == 1
    assert server.outcome.skipped == [("llama-8b: slope", "RuntimeError: a request failed: no")]
    assert "\n".join(["the server said:", *server.lines[12:]]) in server.says
    assert "llama-8b: prefill of 8,192 tokens" in server.figures
