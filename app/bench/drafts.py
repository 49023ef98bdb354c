"""What drafts bring: the same requests with them and with `--no-speculation`, in turns, through HTTP."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

from app.bench.client import Answer, Job
from app.bench.server_process import ServerProcess
from app.bench.statistics import summarise
from app.bench.workloads import completion

STREAMS = (1, 8, 32)
OUTPUT_TOKENS = 256
TURNS = 3
_PERIOD, _PROMPT_TOKENS = 24, 192

Row = dict[str, Any]


@dataclass(slots=True)
class DraftsBench:
    """Two servers of one model, with drafts and without."""

    drafting: ServerProcess
    plain: ServerProcess
    run_module: Callable[[str, object], Any]
    token_ids: Sequence[int]
    """That prompts are made of."""
    quick: bool

    def measure(self) -> list[Row]:
        return [
            self._compared(text, temperature, streams)
            for text in ("again", "repeating", "random")
            for temperature in (0.0, 0.8)
            for streams in STREAMS
        ]

    def _compared(self, text: str, temperature: float, streams: int) -> Row:
        """One workload; every turn sends both servers the same prompts, new ones unless they are to come again."""
        rates: dict[str, list[float]] = {"with": [], "without": []}
        num_turns = 1 if self.quick else TURNS
        for turn in range(num_turns + (text == "again")):
            bodies = self._bodies(text, temperature, streams, 0 if text == "again" else turn)
            for name, server in (("with", self.drafting), ("without", self.plain)):
                rates[name].append(self._tokens_per_s(server, bodies))
        if text == "again":  # the first time does not count
            rates = {name: found[1:] for name, found in rates.items()}
        with_drafts, without = median(rates["with"]), median(rates["without"])
        return {
            "text": text,
            "temperature": temperature,
            "streams": streams,
            "tokens_per_s": with_drafts,
            "without": without,
            "ratio": with_drafts / without,
        }

    def _bodies(
        self, text: str, temperature: float, streams: int, turn: int
    ) -> list[list[dict[str, object]]]:
        source = random.Random(f"{text} {temperature} {streams} {turn}")
        length = OUTPUT_TOKENS // 8 if self.quick else OUTPUT_TOKENS
        found = []
        for number in range(streams):
            period = _PERIOD if text == "repeating" else _PROMPT_TOKENS
            words = source.choices(self.token_ids, k=period)
            body = completion("bench", words * (_PROMPT_TOKENS // period), length)
            found.append([{**body, "temperature": temperature, "seed": number}])
        return found

    def _tokens_per_s(self, server: ServerProcess, bodies: list[list[dict[str, object]]]) -> float:
        job = asdict(Job(server.host, server.port, "/v1/completions", bodies))
        answers = [Answer(**answer) for answer in self.run_module("client", job)["answers"]]
        return summarise(answers, len(bodies)).tokens_per_s
