"""A model of random weights behind HTTP: what clients get of it, and what the server costs beside the device.

`python -m loadtests.gpu.serving llama-8b|qwen3-0.6b --mode MODE --scratch DIR`
"""

from __future__ import annotations

import shutil
import statistics
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from itertools import count
from pathlib import Path
from typing import TypeVar

from loadtests.gpu import alone
from loadtests.gpu.figures import emit, emit_skip, say
from loadtests.gpu.sizes import TEXT_TOKENS, Arguments, ModelShape, ServingSizes, parse_arguments, serving
from penstock.app.bench.checkpoint import write_checkpoint
from penstock.app.bench.client import Job, ask
from penstock.app.bench.job import run_module
from penstock.app.bench.server_process import ServerProcess
from penstock.app.bench.statistics import summarise
from penstock.app.bench.workloads import Workload
from penstock.app.reader import TimedAnswer

PROMPT_TOKENS = 32
_CLIENT_PROCESSES = 4
"""Among which many streams are shared out: one alone would be slower than the server."""
_ALONE_S = 150.0
_CLIENT_S = 60.0
"""No measurement of one server takes longer."""
_LAST_WORDS = 30
"""Lines of a server that are shown when something failed."""
_MOST_TOLD = 600
"""Characters of an error in the report."""

T = TypeVar("T")


class Bench:
    """One model, its server, and what is measured of it."""

    def __init__(self, name: str, arguments: Arguments) -> None:
        self.name = name
        self.device = arguments.device.type
        self.shape: ModelShape
        self.sizes: ServingSizes
        self.shape, self.sizes = serving(name, arguments.mode)
        self.folder = arguments.scratch / name
        self._seeds = count().__next__
        self.has_failed = False

    def run(self) -> None:
        say(f"{self.name}: writing the checkpoint")
        write_checkpoint(self.shape.config, self.folder)
        try:
            http_tpot_ms = self._serve()
            if self.sizes.host_streams:
                self._measure_alone(http_tpot_ms)
        finally:
            shutil.rmtree(self.folder, ignore_errors=True)

    def _serve(self) -> float | None:
        """TPOT with many clients, if that is measured."""
        say(f"{self.name}: starting the server")
        started_s = time.monotonic()
        server = ServerProcess(self._flags())
        with server:
            self._emit("start", time.monotonic() - started_s, "s", "from the command to the first answer")
            _say_memory(server)
            self._send(server, self._workload(2, PROMPT_TOKENS, 8))
            self._try(self._tpot, server)
            if self.sizes.contexts:
                self._try(self._slope, server)
            if self.sizes.prefill_tokens:
                self._try(self._prefill, server)
            if self.sizes.requests is not None:
                self._try(self._throughput, server, *self.sizes.requests)
            return self._try(self._clients, server) if self.sizes.clients else None

    def _emit(self, what: str, value: float, unit: str, how: str = "") -> None:
        emit(f"{self.name}: {what}", value, unit, how)

    def _try(self, measure: Callable[..., T], server: ServerProcess, *arguments: object) -> T | None:
        """Lets a failure leave the other measurements be; the server's last words are shown."""
        try:
            return measure(server, *arguments)
        except Exception as error:
            self.has_failed = True
            emit_skip(f"{self.name}: {measure.__name__.strip('_')}", f"{type(error).__name__}: {error}")
            say("\n".join(["the server said:", *server.lines[-_LAST_WORDS:]]))
            return None

    def _flags(self) -> list[str]:
        flags = {
            "--model": self.folder,
            "--device": self.device,
            "--served-model-name": "bench",
            "--max-batch-tokens": self.sizes.max_batch_tokens,
            "--max-num-seqs": self.sizes.max_num_seqs,
        }
        if self.device == "cuda":
            flags["--dtype"] = "bfloat16"
        return ["--no-speculation", *(str(part) for flag in flags.items() for part in flag)]

    def _tpot(self, server: ServerProcess) -> None:
        say(f"{self.name}: one stream")
        answers = self._send(
            server, self._workload(1, PROMPT_TOKENS, self.sizes.tpot_tokens, self.sizes.rounds)
        )
        value = _stream_tpot_ms(answers)
        how = f"{PROMPT_TOKENS} in, {self.sizes.tpot_tokens} out, the median of {len(answers)}"
        self._emit("TPOT, batch 1", value, "ms", how)

    def _slope(self, server: ServerProcess) -> None:
        """The whole step's, by one stream at several contexts."""
        values = []
        for context in self.sizes.contexts:
            say(f"{self.name}: one stream, context {context:,}")
            answers = self._send(server, self._workload(1, context, self.sizes.slope_tokens))
            values.append(_stream_tpot_ms(answers))
            self._emit(f"TPOT, batch 1, context {context:,}", values[-1], "ms")
        slope = statistics.linear_regression(self.sizes.contexts, values).slope
        contexts = ", ".join(f"{context:,}" for context in self.sizes.contexts)
        self._emit("KV slope of a step", slope, "ms per token", f"TPOT, a line through {contexts}")

    def _prefill(self, server: ServerProcess) -> None:
        num_tokens = self.sizes.prefill_tokens
        say(f"{self.name}: prompts of {num_tokens:,}")
        answers = self._send(server, self._workload(1, num_tokens, 1, self.sizes.rounds))
        seconds = min(answer.ttft_s for answer in answers)
        rate = self.shape.prefill_flop(num_tokens) / seconds / 1e12
        how = f"{seconds * 1000:.0f} ms from request to first token, the best of {len(answers)}, attention counted"
        self._emit(f"prefill of {num_tokens:,} tokens", rate, "TFLOP/s", how)

    def _throughput(
        self, server: ServerProcess, num_requests: int, prompt_tokens: int, output_tokens: int
    ) -> None:
        what = f"{num_requests} requests of {prompt_tokens} in, {output_tokens} out"
        say(f"{self.name}: {what}")
        answers = self._send(server, self._workload(num_requests, prompt_tokens, output_tokens))
        figures = summarise(answers, num_requests)
        how = f"all at once, TTFT P50 {figures.ttft_p50_ms:.0f} ms, {figures.failed} failed"
        self._emit(what, figures.tokens_per_s, "output tokens/s", how)

    def _clients(self, server: ServerProcess) -> float:
        num_clients = self.sizes.clients
        say(f"{self.name}: {num_clients} clients")
        answers = self._send(server, self._workload(num_clients, PROMPT_TOKENS, self.sizes.client_tokens))
        value = _stream_tpot_ms(answers)
        self._emit(f"TPOT, {num_clients} streaming clients", value, "ms", "the median of their streams")
        return value

    def _measure_alone(self, http_tpot_ms: float | None) -> None:
        """Measures the work of the streams in the engine without a server, and the device's part of it."""
        streams = [self.sizes.host_streams, *([self.sizes.clients] if self.sizes.clients else [])]
        say(f"{self.name}: the engine alone, {' and '.join(map(str, streams))} streams")
        paces = self._run_alone(
            streams, self.sizes.client_tokens if self.sizes.clients else self.sizes.host_tokens
        )
        for pace in paces:
            self._emit(f"step, {pace.streams} streams", pace.step_ms, "ms", "engine alone, the median")
        self._host_share(paces[0])
        if http_tpot_ms is not None:
            none = paces[-1].tpot_ms
            self._emit(
                f"TPOT, {self.sizes.clients} streams, no client", none, "ms", "engine alone, the median"
            )
            name = f"TPOT with {self.sizes.clients} clients, above none"
            self._emit(name, (http_tpot_ms / none - 1) * 100, "%")

    def _host_share(self, pace: alone.Pace) -> None:
        name = f"host's share of a step, {pace.streams} streams"
        if pace.device_ms is None:
            emit_skip(f"{self.name}: {name}", "the device's own time is known on CUDA only")
            return
        self._emit(f"device time of a step, {pace.streams} streams", pace.device_ms, "ms", "CUDA events")
        how = "what a step takes beyond the device's own time"
        self._emit(name, (pace.step_ms / pace.device_ms - 1) * 100, "%", how)

    def _run_alone(self, streams: list[int], output_tokens: int) -> list[alone.Pace]:
        job = alone.Job(
            model=str(self.folder),
            device=self.device,
            streams=streams,
            prompt_tokens=PROMPT_TOKENS,
            output_tokens=output_tokens,
            max_batch_tokens=self.sizes.max_batch_tokens,
            max_num_seqs=self.sizes.max_num_seqs,
        )
        found = run_module("loadtests.gpu.alone", asdict(job), timeout_s=_ALONE_S, stderr=None)
        return [alone.Pace(**pace) for pace in found]

    def _workload(self, streams: int, prompt_tokens: int, output_tokens: int, rounds: int = 1) -> Workload:
        return Workload(
            name="", streams=streams, prompt_tokens=prompt_tokens, output_tokens=output_tokens, rounds=rounds
        )

    def _send(self, server: ServerProcess, workload: Workload) -> list[TimedAnswer]:
        """From several client processes, if there are many streams.

        Raises:
            RuntimeError: a request failed.
        """
        bodies = workload.bodies("bench", TEXT_TOKENS, self._seeds())
        num_processes = min(_CLIENT_PROCESSES, max(1, len(bodies) // 32))
        job = Job(server.host, server.port, "/v1/completions", bodies)
        answers = ask(partial(run_module, timeout_s=_CLIENT_S), job, num_processes)
        for answer in answers:
            if answer.error is not None:
                raise RuntimeError(f"a request failed: {answer.error}")
        return answers


def _stream_tpot_ms(answers: Sequence[TimedAnswer]) -> float:
    """The median of the streams."""
    return 1000 * statistics.median(answer.tpot_s for answer in answers)


def _say_memory(server: ServerProcess) -> None:
    for line in server.lines:
        if any(word in line for word in ("memory", "weights ", "CUDA graph", "Triton")):
            say(line)


def main() -> int:
    arguments = parse_arguments()
    name = Path(arguments.names[0]).name
    try:
        bench = Bench(name, arguments)
        bench.run()
    except Exception as error:
        traceback.print_exc()
        emit_skip(f"the rest of {name}", f"{type(error).__name__}: {str(error)[-_MOST_TOLD:]}")
        return 1
    return int(bench.has_failed)


if __name__ == "__main__":
    sys.exit(main())
