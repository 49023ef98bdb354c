"""Measures the gain of drafts: requests with them and with `--no-speculation`, in turns, through HTTP."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from penstock.app.bench.client import Job, ask
from penstock.app.bench.job import ModuleRunner
from penstock.app.bench.server_process import ServerProcess
from penstock.app.bench.statistics import summarise
from penstock.app.bench.workloads import completion, story_question
from penstock.app.reader import TimedAnswer

STREAMS = (1, 8, 32)
OUTPUT_TOKENS = 256
TURNS = 2
_PERIOD, _PROMPT_TOKENS, _STORIES = 24, 192, 2

Row = dict[str, Any]


@dataclass(slots=True)
class DraftsBench:
    """Two servers of one model, with drafts and without."""

    drafting: ServerProcess
    plain: ServerProcess
    run_module: ModuleRunner
    token_ids: Sequence[int]
    """Prompts are made of these."""
    quick: bool
    tells_stories: bool = False
    """The model tells the stories of the demo model."""

    def measure(self) -> list[Row]:
        return [
            self._compared(text, temperature, streams)
            for text in (*(("stories",) if self.tells_stories else ()), "again", "repeating", "random")
            for temperature in (0.0, 0.8)
            for streams in STREAMS
        ]

    def _compared(self, text: str, temperature: float, streams: int) -> Row:
        """One workload; every turn sends both servers the same prompts, new ones unless they are to come again."""
        rates: dict[str, list[float]] = {"with": [], "without": []}
        drafts: dict[str, list[int]] = {}
        num_turns = 1 if self.quick else TURNS
        for turn in range(num_turns + (text == "again")):
            bodies = self._bodies(text, temperature, streams, 0 if text == "again" else turn)
            servers = [("with", self.drafting), ("without", self.plain)]
            for name, server in servers if turn % 2 else reversed(servers):  # neither is always the first
                answers = self._answers(server, bodies)
                rates[name].append(summarise(answers, streams).tokens_per_s)
                _count(drafts, answers)
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
            "drafts": drafts,
        }

    def _bodies(
        self, text: str, temperature: float, streams: int, turn: int
    ) -> list[list[dict[str, object]]]:
        source = random.Random(f"{text} {temperature} {streams} {turn}")
        length = OUTPUT_TOKENS // 8 if self.quick else OUTPUT_TOKENS
        if text == "stories":
            return [[_story(source, temperature, length) for _ in range(_STORIES)] for _ in range(streams)]
        found = []
        for number in range(streams):
            period = _PERIOD if text == "repeating" else _PROMPT_TOKENS
            words = source.choices(self.token_ids, k=period)
            body = completion("bench", words * (_PROMPT_TOKENS // period), length)
            found.append([{**body, "temperature": temperature, "seed": number}])
        return found

    def _answers(self, server: ServerProcess, bodies: list[list[dict[str, object]]]) -> list[TimedAnswer]:
        path = "/v1/chat/completions" if "messages" in bodies[0][0] else "/v1/completions"
        return ask(self.run_module, Job(server.host, server.port, path, bodies))


def _story(source: random.Random, temperature: float, length: int) -> dict[str, object]:
    """A request for one of the stories that the demo model tells, to its end."""
    body = completion("bench", [], length)
    del body["prompt"], body["ignore_eos"]
    return {
        **body,
        "messages": [{"role": "user", "content": story_question(source)}],
        "temperature": temperature,
        "seed": source.randrange(1 << 30),
    }


def _count(drafts: dict[str, list[int]], answers: Sequence[TimedAnswer]) -> None:
    """Adds up by proposer how many drafts there were, and how many were right."""
    for answer in answers:
        for name, count in answer.drafts.items():
            sums = drafts.setdefault(name, [0, 0])
            sums[0] += count["draft_tokens"]
            sums[1] += count["accepted_tokens"]
