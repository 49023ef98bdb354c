"""Measures what Redis costs while it is well, and what is left of it in the first token while it is not.

streams    64 chats at a time: on a server without Redis, on one with it, and there every stream resumable; in turns
trouble    ten resumable chats a second, while Redis is well, paused, slow, and gone
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from random import Random
from statistics import median
from typing import Any

from lab.bench.redis_process import RedisProcess, SlowLine
from penstock.app.bench.client import Job, ask
from penstock.app.bench.job import ModuleRunner
from penstock.app.bench.server_process import ServerProcess
from penstock.app.bench.statistics import StreamFigures, summarise
from penstock.app.reader import TimedAnswer

Start = Callable[[Sequence[str]], AbstractContextManager[ServerProcess]]
"""Starts a server with these arguments more."""
Row = dict[str, Any]

STREAMS, ROUNDS, TURN_S = 64, 5, 8.0
RATE, SECONDS = 10, 20
FEW_TOKENS, MAX_TOKENS = 16, 512
SLOW_S = 0.15
KINDS = ("without", "plain", "resumable")


class StoreBench:
    """The parts, on two servers of one model, one of them with a Redis."""

    def __init__(
        self,
        redis: RedisProcess,
        without: ServerProcess,
        shared: ServerProcess,
        run: ModuleRunner,
        *,
        quick: bool,
    ) -> None:
        self.redis = redis
        self.servers = {"without": without, "plain": shared, "resumable": shared}
        self.run = run
        self.quick = quick
        self.random = Random(1)

    def streams(self) -> Row:
        """Tokens per second of every turn, and how the medians compare to those without Redis."""
        length = self._length()
        turns = [
            {kind: summarise(self._burst(kind, length), STREAMS) for kind in KINDS}
            for _ in range(1 if self.quick else ROUNDS)
        ]
        rates = {kind: [turn[kind].tokens_per_s for turn in turns] for kind in KINDS}
        medians = {kind: median(rates[kind]) for kind in KINDS}
        return {
            "streams": STREAMS,
            "output_tokens": length,
            "turns": rates,
            "tokens_per_s": medians,
            "ratio": {kind: medians[kind] / medians["without"] for kind in KINDS},
            **_failures([figures for turn in turns for figures in turn.values()]),
        }

    def trouble(self, start: Start) -> list[Row]:
        """Time to first token of a small steady load in each state of Redis, the change to it included.

        `start` gives one more server, on a slow line; at the end there is no Redis any more.
        """
        shared = self.servers["plain"]
        rows = [self._steady("none", self.servers["without"]), self._steady("well", shared)]
        self.redis.pause()
        rows.append(self._steady("paused", shared))
        self.redis.resume()
        with SlowLine(self.redis.url) as line, start(["--redis-url", line.url]) as distant:
            line.delay_s = SLOW_S
            rows.append(self._steady(f"slow by {SLOW_S * 1000:.0f} ms", distant))
        shared.wait_line(" Redis is back")
        self.redis.kill()
        rows.append(self._steady("gone", shared))
        return rows

    def _length(self) -> int:
        """Tokens of each stream, so that a turn takes about `TURN_S`; the servers are warm after this."""
        answers = [self._burst(kind, FEW_TOKENS) for kind in KINDS]
        rate = summarise(answers[-1], STREAMS).tokens_per_s
        turn_s = TURN_S / 8 if self.quick else TURN_S
        return min(MAX_TOKENS, max(FEW_TOKENS, round(rate * turn_s / STREAMS)))

    def _burst(self, kind: str, length: int) -> list[TimedAnswer]:
        bodies = [[self._chat(length, resumable=kind == "resumable")] for _ in range(STREAMS)]
        return self._send(self.servers[kind], bodies, None)

    def _steady(self, state: str, server: ServerProcess) -> Row:
        number = RATE * (1 if self.quick else SECONDS)
        bodies = [[self._chat(FEW_TOKENS, resumable=True)] for _ in range(number)]
        figures = summarise(self._send(server, bodies, [i / RATE for i in range(number)]), 1)
        return {
            "redis": state,
            "ttft_p50_ms": figures.ttft_p50_ms,
            "ttft_p99_ms": figures.ttft_p99_ms,
            **_failures([figures]),
        }

    def _chat(self, num_output: int, *, resumable: bool) -> dict[str, object]:
        """Every one says something else, so that nothing is found in a cache."""
        numbers = [str(self.random.randrange(1_000_000)) for _ in range(8)]
        return {
            "model": "bench",
            "messages": [{"role": "user", "content": " ".join(numbers)}],
            "max_tokens": num_output,
            "temperature": 0,
            "ignore_eos": True,
            "service_tier": "flex",
            "stream": True,
            "stream_options": {"include_usage": True, "resumable": resumable},
        }

    def _send(
        self, server: ServerProcess, bodies: list[list[dict[str, object]]], starts_s: list[float] | None
    ) -> list[TimedAnswer]:
        job = Job(server.host, server.port, "/v1/chat/completions", bodies, starts_s)
        return ask(self.run, job)


def _failures(runs: Sequence[StreamFigures]) -> Row:
    return {
        "requests": sum(figures.requests for figures in runs),
        "failed": sum(figures.failed for figures in runs),
        "first_error": next((figures.first_error for figures in runs if figures.failed), None),
    }
