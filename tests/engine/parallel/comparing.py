"""Models on several processes over gloo, compared with the same models in one process."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.model.checkpoint import read_config, read_tokenizer
from penstock.engine.parallel.group import Grid
from penstock.engine.parallel.leader import Followers
from penstock.engine.planning.params import BeamParams, Pooling, SamplingParams
from penstock.engine.planning.request import Request
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.text.grammar import Grammar, GrammarKind
from penstock.engine.text.grammars import Grammars
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver
from tests.engine.test_thinking import FORCED, Numbers, budget_of


class Pool:
    """The processes that tests share: those that the test before asked for, or others are started."""

    def __init__(self) -> None:
        self._followers: Followers | None = None

    def of(self, num_ranks: int, num_stages: int = 1) -> Followers:
        grid = Grid(num_ranks, num_stages)
        if self._followers is None or self._followers.grid != grid:
            self.close()
            self._followers = Followers(grid)
            self._followers.join()
        return self._followers

    def close(self) -> None:
        if self._followers is not None:
            self._followers.close()
            self._followers = None


MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    # One key-value head, which all ranks have; biases, which one rank adds; a vocabulary that is padded.
    "llama": (
        "llama",
        {"num_key_value_heads": 1, "attention_bias": True, "mlp_bias": True, "vocab_size": 517},
    ),
    "mistral": ("mistral", {}),
    "qwen2": ("qwen2", {"vocab_size": 515}),
    "qwen3": ("qwen3", {"num_key_value_heads": 4}),
}


def checkpoint(name: str, folder: Path, **overrides: Any) -> Path:
    family, own = MODELS[name]
    return make_checkpoint(family, folder, **{"num_hidden_layers": 2, **own, **overrides})


def prompt(seed: int, length: int) -> tuple[int, ...]:
    return tuple(random.Random(seed).choices(range(3, 500), k=length))


def ask(name: str, token_ids: tuple[int, ...], n: int = 1, **sampling: Any) -> Request:
    params = SamplingParams(**{"max_tokens": 6, "seed": 7, **sampling})
    return Request(request_id=name, prompt_token_ids=token_ids, sampling=params, n=n)


SHARED = prompt(0, 40)
REQUESTS = (
    ask("greedy", SHARED + prompt(1, 9), temperature=0.0, num_logprobs=2),
    ask("choices", SHARED + prompt(2, 3), n=3, temperature=1.3),
    ask("filters", prompt(3, 33), top_p=0.8, top_k=40, min_p=0.01, num_prompt_logprobs=1),
    ask("penalties", prompt(4, 5), repetition_penalty=1.3, presence_penalty=0.5, logit_bias={9: 4.0}),
    ask("thoughts", prompt(6, 9), thinking=budget_of(2)),
    replace(ask("beams", prompt(5, 18), n=3, temperature=0.0), beams=BeamParams(length_penalty=0.5)),
)


def run(driver: Driver) -> dict[tuple[str, int], list[int]]:
    """Prompts in pieces of at most 23 tokens, two preemptions, then the prompts again as prefix hits."""
    driver.fresh(budget=23)

    def preempt(step: int) -> None:
        if step in (4, 7):
            driver.scheduler.sequences.preempt(driver.scheduler.sequences.running[-1])

    driver.run(*REQUESTS, before_step=preempt)
    assert driver.scheduler.sequences.counters.num_preemptions >= 2
    driver.run(ask("again", SHARED + prompt(1, 9), temperature=0.0))
    assert driver.scheduler.sequences.counters.num_prefix_hit_tokens >= 32
    return {key: driver.tokens(*key) for key in driver.outputs}


def scores(driver: Driver, name: str) -> list[float]:
    """The log probabilities of a prompt's tokens."""
    found = driver.outputs[name, 0][0].prompt_logprobs
    assert found is not None
    return [at.logprob for at in found]


def compare(followers: Followers, folder: Path, **options: Any) -> None:
    alone = Driver(folder, num_blocks=60, sink=Numbers())
    together = Driver(folder, num_blocks=60, followers=followers, sink=Numbers(), **options)
    assert together.facts.num_blocks == 60
    answers = run(together)
    assert answers == run(alone)
    assert tuple(answers["thoughts", 0][2:5]) == FORCED
    assert scores(together, "filters") == pytest.approx(scores(alone, "filters"), abs=1e-4, rel=1e-4)


def guided(followers: Followers | None, folder: Path = DEMO_MODEL, **options: Any) -> list[list[int]]:
    """A model's tokens by a grammar, with the demo model's tokenizer."""
    tokenizer, eos = read_tokenizer(DEMO_MODEL), read_config(DEMO_MODEL).eos_token_ids
    driver = Driver(
        folder,
        grammars=Grammars(tokenizer, eos),
        sink=TextSink(tokenizer, eos),
        followers=followers,
        **options,
    )
    grammar = Grammar(GrammarKind.REGEX, "(yes|no)( [a-z]{2,5}){3}")
    driver.run(*(ask(f"{i}", prompt(i, 9), grammar=grammar, max_tokens=30, seed=i) for i in range(4)))
    return [driver.tokens(f"{i}") for i in range(4)]


def embedding(folder: Path, followers: Followers | None) -> list[float] | None:
    """The mean of a prompt's hidden states."""
    sampling = SamplingParams(max_tokens=0)
    driver = Driver(folder, num_blocks=60, followers=followers)
    driver.run(Request(request_id="r", prompt_token_ids=SHARED, sampling=sampling, pooling=Pooling.MEAN))
    return driver.outputs["r", 0][0].embedding
