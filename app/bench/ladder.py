"""`penstock bench --ladder`: what each idea of serving brings, one on top of the other, on one load.

    generate      transformers' generate in float32, one request after another: what one would write first
    batching      this server: continuous batching over paged KV; no two prompts have a beginning in common
    + prefix      the same number of tokens, most of each prompt shared with all others
    + 8 bits      weights in int8 (or as --quantize says)
    + drafts      speculation: the lookup, and for the demo model its draft model

The load is many users who ask at the same moment. With `generate` they wait for each other, and nobody sees a token
before an answer is whole; its times for many users follow from those of single requests. Each rung also says how many
users at once keep the interactive promise, and what a million output tokens cost at a price for the machine's hour.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from math import inf
from statistics import fmean
from typing import Any

from penstock.app.bench.client import Job, ask
from penstock.app.bench.job import ModuleRunner
from penstock.app.bench.report import print_failures
from penstock.app.bench.server_process import ServerProcess
from penstock.app.bench.statistics import percentile, summarise
from penstock.app.bench.workloads import completion, story_question
from penstock.app.reader import TimedAnswer
from penstock.app.tables import number, table
from penstock.priority.lanes import DEFAULT_POLICIES, Lane

Row = dict[str, Any]
Start = Callable[[Sequence[str]], AbstractContextManager[ServerProcess]]
"""Starts a server with these arguments."""

USERS = 64
SHARED_TOKENS, OWN_TOKENS, OUTPUT_TOKENS = 1_024, 32, 64
_PROMISE = DEFAULT_POLICIES[Lane.INTERACTIVE]
_ENOUGH = 0.95
_MOST_USERS = 256
_MEASURED_ALONE = 3


@dataclass(frozen=True, slots=True)
class Ladder:
    """The rungs for one model."""

    start: Start
    run_module: ModuleRunner
    encode: Callable[[str], list[int]] | None
    """Text to tokens of a model that tells stories; None for random weights, to which all text is the same."""
    token_ids: Sequence[int]
    model: str
    quantize: str
    draft: Sequence[str]
    """Arguments that name the draft model, if there is one."""
    threads: int

    def measure(self) -> Iterator[Row]:
        """A row for each rung, as soon as it is measured."""
        yield self._generate()
        yield from self._serve("batching, paged KV", ["--no-speculation"], shared=False)
        yield from self._serve("+ prefix cache", ["--no-speculation"], shared=True)
        quantized = ["--quantize", self.quantize]
        yield from self._serve(f"+ {self.quantize}", [*quantized, "--no-speculation"], shared=True)
        yield from self._serve("+ drafts", [*quantized, *self.draft], shared=True)

    def _generate(self) -> Row:
        """One after another: user i waits for i answers before its own, and reads its own when it is whole."""
        prompts = self._prompts(_MEASURED_ALONE, 0, shared=False)
        job = {
            "model": self.model,
            "prompts": prompts,
            "num_output_tokens": OUTPUT_TOKENS,
            "threads": self.threads,
        }
        each_s = fmean(self.run_module("penstock.app.bench.generate", job))
        ttft_ms = [1000 * each_s * (place + 1) for place in range(USERS)]
        return {
            "rung": "generate, one by one",
            "tokens_per_s": OUTPUT_TOKENS / each_s,
            "ttft_p50_ms": percentile(ttft_ms, 50),
            "ttft_p99_ms": percentile(ttft_ms, 99),
            "users": int(_PROMISE.ttft_s / each_s),
            "failed": 0,
            "requests": _MEASURED_ALONE,
            "first_error": None,
        }

    def _serve(self, rung: str, arguments: Sequence[str], *, shared: bool) -> Iterator[Row]:
        with self.start(arguments) as server:
            self._ask(server, 2, 1, shared=shared)  # the prefix is there, and the server knows its steps
            answers = self._ask(server, USERS, 2, shared=shared)
            found = asdict(summarise(answers, USERS))
            keys = ("tokens_per_s", "ttft_p50_ms", "ttft_p99_ms", "failed", "requests", "first_error")
            yield {
                "rung": rung,
                **{key: found[key] for key in keys},
                "users": most_users(lambda users: self._kept(server, users, shared=shared)),
            }

    def _kept(self, server: ServerProcess, users: int, *, shared: bool) -> float:
        """The part of so many users at once for whom the promise is kept."""
        answers = self._ask(server, users, 100 + users, shared=shared)
        return sum(map(is_kept, answers)) / users

    def _ask(self, server: ServerProcess, users: int, seed: int, *, shared: bool) -> list[TimedAnswer]:
        prompts = self._prompts(users, seed, shared=shared)
        bodies = [[completion("bench", prompt, OUTPUT_TOKENS)] for prompt in prompts]
        job = Job(server.host, server.port, "/v1/completions", bodies)
        return ask(self.run_module, job)

    def _prompts(self, users: int, seed: int, *, shared: bool) -> list[list[int]]:
        """Prompts of the same length, with or without a common beginning."""
        source = random.Random(seed)
        return [
            self._words(random.Random("shared") if shared else source, SHARED_TOKENS)
            + self._words(source, OWN_TOKENS)
            for _ in range(users)
        ]

    def _words(self, source: random.Random, length: int) -> list[int]:
        if self.encode is None:
            return source.choices(self.token_ids, k=length)
        words: list[int] = []
        while len(words) < length:
            words += self.encode(f" {story_question(source)}")
        return words[:length]


def is_kept(answer: TimedAnswer) -> bool:
    """Returns whether an answer came whole, and as soon and as fast as interactive requests are promised."""
    if answer.error or not answer.token_times_s:
        return False
    return answer.ttft_s <= _PROMISE.ttft_s and not answer.tpot_s > _PROMISE.tpot_s


def most_users(kept: Callable[[int], float]) -> int:
    """The most users at once of whom enough keep the promise: doubled while they do, then halfway between."""
    users = 1
    while kept(users) >= _ENOUGH:
        users *= 2
        if users > _MOST_USERS:
            return _MOST_USERS
    if users < 4:
        return users // 2
    between = users * 3 // 4
    return between if kept(between) >= _ENOUGH else users // 2


def print_ladder(model: str, rows: Sequence[Row], price: float) -> None:
    head = [model, "tok/s", "times", "TTFT P50", "P99 ms", "users", f"$ per M at {price:g}/h"]
    first = rows[0]["tokens_per_s"]
    cells = [
        [
            row["rung"],
            number(row["tokens_per_s"]),
            f"{number(row['tokens_per_s'] / first)}x",
            number(row["ttft_p50_ms"]),
            number(row["ttft_p99_ms"]),
            str(row["users"]),
            number(cost_per_million(price, row["tokens_per_s"])),
        ]
        for row in rows
    ]
    print("\n" + table(head, cells))
    promise = f"a first token within {_PROMISE.ttft_s:g} s, then one every {1000 * _PROMISE.tpot_s:g} ms"
    print(f"{USERS} users at once, {SHARED_TOKENS + OWN_TOKENS} tokens in, {OUTPUT_TOKENS} out.")
    print(f"users: the most at once of whom {_ENOUGH:.0%} have {promise}")
    print_failures((row["rung"], row) for row in rows)


def cost_per_million(price: float, tokens_per_s: float) -> float:
    """The price of a million output tokens of a machine with this price an hour."""
    return price * 1e6 / (3600 * tokens_per_s) if tokens_per_s else inf
