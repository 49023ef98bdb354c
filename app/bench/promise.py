"""Measures whether promises are kept: interactive requests next to batch work, overload, and the simulator's forecast.

The 135 M shape, through HTTP. Each part runs on the same server, one after another:

    alone      one interactive request a second, 64 tokens in, 32 out
    batch      eight streams of the batch lane kept full, 512 in, 128 out
    beside     both at once
    overload   twice the interactive requests that the server can answer, on top of nothing
    replay     a generated trace on the server and in the simulator, with the step times that the server measured
"""

from __future__ import annotations

import sys
from collections.abc import Sequence
from math import nan
from random import Random
from typing import Any

from penstock.app.bench.client import Job, ask
from penstock.app.bench.job import ModuleRunner
from penstock.app.bench.replay import compare, figures_of
from penstock.app.bench.server_process import ServerProcess
from penstock.app.bench.statistics import percentile
from penstock.app.bench.workloads import completion
from penstock.app.reader import TimedAnswer
from penstock.gateway.wire.lanes import tier_of
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.simulator.summary import Summary
from penstock.priority.simulator.trace import Demand, mixed

Row = dict[str, Any]

SECONDS = 60.0
BATCH_STREAMS, BATCH_PROMPT, BATCH_OUTPUT = 8, 512, 128
PROMPT, OUTPUT = 64, 32
PROMISE_S = DEFAULT_POLICIES[Lane.INTERACTIVE].ttft_s


class PromiseBench:
    """The parts, on one server."""

    def __init__(
        self, server: ServerProcess, run: ModuleRunner, token_ids: Sequence[int], seconds: float
    ) -> None:
        self.server = server
        self.run = run
        self.token_ids = token_ids
        self.seconds = seconds
        self.random = Random(1)

    def measure(self) -> Row:
        result: Row = {}
        # The server first sees steps of every kind, so that it knows how long they take.
        self._send(
            [self._batch_stream() for _ in range(4)] + self._interactive(5), [0.0] * 4 + _every_second(5), 5.0
        )
        result["alone"] = self._figures(self._send(self._interactive(20), _every_second(20)))
        result["batch"] = self._figures(self._send(self._batch_streams(), None, self.seconds))
        batch = self._batch_streams()  # others: nothing is to be found in the prefix cache
        number = int(self.seconds)
        both = self._send(
            batch + self._interactive(number), [0.0] * len(batch) + _every_second(number), self.seconds
        )
        result["beside_batch"] = self._figures([a for a in both if a.stream < len(batch)])
        result["beside"] = self._figures([a for a in both if a.stream >= len(batch)])
        result["overload"] = self._overload()
        result["replay"] = self._replay()
        return result

    def _overload(self) -> Row:
        """Requests that keep coming at twice the rate that a closed loop of 16 reaches."""
        streams = [[self._body(PROMPT, OUTPUT, Lane.BATCH)] for _ in range(16)]
        closed = self._send(streams, None, 15.0)
        rate = len(closed) / (max(a.ended_s for a in closed) - min(a.started_s for a in closed))
        number = int(2 * rate * self.seconds)
        starts = sorted(self.random.uniform(0, self.seconds) for _ in range(number))
        answers = self._send(self._interactive(number), starts)
        return {"capacity_per_s": rate, "offered_per_s": 2 * rate, **self._figures(answers)}

    def _replay(self) -> Row:
        """Serves and simulates one trace, with more KV than it needs."""
        trace = mixed(Demand(2.0, self.seconds, seed=7, kind="chat"))
        machine, served, simulated = compare(self.server, self.run, trace, self.token_ids)
        sizes = {
            name: getattr(machine, name) for name in ("num_kv_tokens", "max_batch_tokens", "max_num_seqs")
        }
        return {
            "machine": {**machine.coefficients, **sizes},
            "served": _side(served),
            "simulated": _side(simulated),
        }

    def _batch_streams(self) -> list[list[dict[str, object]]]:
        return [self._batch_stream() for _ in range(BATCH_STREAMS)]

    def _batch_stream(self) -> list[dict[str, object]]:
        return [self._body(BATCH_PROMPT, BATCH_OUTPUT, Lane.BATCH) for _ in range(100)]

    def _interactive(self, number: int) -> list[list[dict[str, object]]]:
        return [[self._body(PROMPT, OUTPUT, Lane.INTERACTIVE)] for _ in range(number)]

    def _body(self, num_prompt: int, num_output: int, lane: Lane) -> dict[str, object]:
        prompt = self.random.choices(self.token_ids, k=num_prompt)
        return completion("bench", prompt, num_output, tier_of(lane))

    def _send(
        self, bodies: list[list[dict[str, object]]], starts_s: list[float] | None, stop_s: float | None = None
    ) -> list[TimedAnswer]:
        job = Job(self.server.host, self.server.port, "/v1/completions", bodies, starts_s, stop_s)
        return ask(self.run, job)

    def _figures(self, answers: list[TimedAnswer]) -> Row:
        done = [a for a in answers if not a.error]
        refused = [a for a in answers if a.was_refused]
        failed = [a.error for a in answers if a.error and a not in refused]
        for error in failed[:3]:
            print(f"bench: {error}", file=sys.stderr)
        duration_s = max(a.ended_s for a in answers) - min(a.started_s for a in answers)
        waits_ms = [(a.ended_s - a.started_s) * 1000 for a in refused]
        ttft_ms = [a.ttft_s * 1000 for a in done]
        forecasts = [a.ttft_s / a.predicted_ttft_s for a in done if a.predicted_ttft_s]
        return {
            "requests": len(answers),
            "refused": len(refused),
            "failed": len(failed),
            "kept": sum(a.ttft_s <= PROMISE_S for a in done) / len(done) if done else nan,
            "tokens_per_s": sum(a.num_output_tokens for a in done) / duration_s,
            "longest_gap_ms": max((max(a.gaps_s) * 1000 for a in done if a.gaps_s), default=nan),
            "refused_p50_ms": percentile(waits_ms, 50),
            "refused_p99_ms": percentile(waits_ms, 99),
            "real_over_forecast_p90": percentile(forecasts, 90),
            **{f"ttft_p{p}_ms": percentile(ttft_ms, p) for p in (50, 90, 99)},
        }


def _side(summary: Summary) -> Row:
    return dict(zip(("ttft_p50_ms", "ttft_p90_ms", "tokens_per_s", "kept"), figures_of(summary), strict=True))


def _every_second(number: int) -> list[float]:
    return [float(second) for second in range(number)]
