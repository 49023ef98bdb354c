"""Measures how far a draft model should draft: the same stories with k drafts in every step, for each k."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lab.bench.stepping import Always, Stepper
from penstock.app.bench.workloads import story_question
from penstock.engine.config import MAX_DRAFTS, LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.model.checkpoint import read_tokenizer
from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from penstock.engine.planning.timings import DraftCount
from penstock.gateway.wire.prompts import Prompts

LENGTHS = (0, 1, 2, 3, 4, 6, MAX_DRAFTS)


@dataclass(frozen=True, slots=True)
class Job:
    model: str
    draft: str | None
    """Without one, the model's own layer drafts."""
    quantize: str | None
    threads: int
    streams: list[int]
    num_tokens: int
    """The length of each story."""
    rounds: int


@dataclass(slots=True)
class Depth:
    """The outcome of k drafts in every step of so many streams."""

    streams: int
    length: int
    """k"""
    temperature: float
    num_steps: int = 0
    num_tokens: int = 0
    seconds: float = 0.0
    acceptance: list[float] | None = None
    """By position: the share of the drafts after right ones that were right."""
    rate: float = 0.0
    """The share of right drafts over all positions."""
    expected: float = 1.0
    """(1 - a^(k + 1)) / (1 - a): the tokens of a sequence in a step if each draft is right by itself, a times in 1."""

    def conclude(self, drafts: DraftCount) -> None:
        tried = [*drafts.drafted[:1], *drafts.accepted[:-1]]
        self.acceptance = [right / max(1, all) for right, all in zip(drafts.accepted, tried, strict=True)]
        self.rate = drafts.num_accepted / max(1, sum(tried))
        self.expected = sum(self.rate**i for i in range(self.length + 1))


class DepthBench:
    """One model and its draft, step by step on this thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        options = LoadOptions(device="cpu", quantize=job.quantize, num_threads=job.threads, num_blocks=1024)
        draft = None if job.draft is None else DraftSource(Path(job.draft))
        self._stepper = Stepper(
            lambda: load_model(Path(job.model), options, lambda _: None, lambda *_: None, draft)
        )
        self._prompts = Prompts(read_tokenizer(Path(job.model)))

    def measure(self) -> list[Depth]:
        found = []
        for temperature in (0.0, 0.8):
            for streams in self._job.streams:
                depths = [Depth(streams, length, temperature) for length in LENGTHS]
                drafts = [DraftCount() for _ in LENGTHS]
                for turn in range(self._job.rounds):
                    for depth, count in zip(depths, drafts, strict=True):
                        self._run(depth, turn, count)
                for depth, count in zip(depths, drafts, strict=True):
                    depth.conclude(count)
                found += depths
        return found

    def _run(self, depth: Depth, turn: int, drafts: DraftCount) -> None:
        """Adds one round of stories: the steps in which all streams have a token to compute and k drafts."""
        drafting = None
        if depth.length and self._stepper.facts.has_draft_model:
            drafting = Always(None, depth.length)
        for step in self._stepper.run(self._requests(depth, turn), drafting):
            chunks = step.plan.chunks
            lengths = [len(chunk.drafts) for chunk in chunks if chunk.num_tokens == 1 + len(chunk.drafts)]
            if lengths == [depth.length] * depth.streams:
                depth.num_steps += 1
                depth.num_tokens += step.num_tokens
                depth.seconds += step.seconds
                for chunk in chunks:
                    drafts.note(len(chunk.drafts), chunk.num_accepted)

    def _requests(self, depth: Depth, turn: int) -> list[Request]:
        """The stories of a round."""
        source, found = random.Random(turn), list[Request]()
        for number in range(depth.streams):
            sampling = SamplingParams(
                temperature=depth.temperature, seed=number, max_tokens=self._job.num_tokens, ignore_eos=True
            )
            prompt = self._prompts.chat([{"role": "user", "content": story_question(source)}])
            found.append(Request(request_id=str(number), prompt_token_ids=tuple(prompt), sampling=sampling))
        return found


def gains(rows: Sequence[Mapping[str, Any]]) -> list[float]:
    """By row of a Depth, tokens a second as multiples of the figure without drafts; 0 where there are none."""
    plain_s: dict[tuple[int, float], float] = {}
    found = []
    for row in rows:
        of, per_token_s = (row["streams"], row["temperature"]), row["seconds"] / max(1, row["num_tokens"])
        if not row["length"]:
            plain_s[of] = per_token_s
        found.append(plain_s[of] / per_token_s if per_token_s else 0.0)
    return found


def measure(**job: Any) -> list[Depth]:
    """A Depth for each number of streams and each k of a Job."""
    return DepthBench(Job(**job)).measure()
