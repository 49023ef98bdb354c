"""Models on 2 and 4 ranks over gloo, against the same models in one process. The ranks are started once for each."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest

from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.model.parse import read_config
from penstock.engine.model.split import check_split
from penstock.engine.parallel.leader import Followers, ParallelRunner
from penstock.engine.planning.device import DeviceError, RunnerFacts, StepInFlight
from penstock.engine.planning.params import BeamParams, Pooling, SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.step import StepPlan
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver
from tests.engine.families import SPARSE, STATES, TINY, unlike
from tests.engine.test_thinking import FORCED, Numbers, budget_of

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


class Pool:
    """The ranks that the tests share: as many as the test before asked for, or they are started anew."""

    def __init__(self) -> None:
        self._size = 1
        self._followers: Followers

    def of(self, size: int) -> Followers:
        if size != self._size:
            self.close()
            self._followers, self._size = Followers(size), size
            self._followers.join()
        return self._followers

    def close(self) -> None:
        if self._size > 1:
            self._followers.close()
            self._size = 1


@pytest.fixture(scope="module")
def pool() -> Iterator[Pool]:
    ranks = Pool()
    yield ranks
    ranks.close()


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
    assert driver.scheduler.sequences.counters.num_preemptions == 2
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


@pytest.mark.parametrize("name", MODELS)
def test_two_ranks_choose_the_tokens_of_one_process(pool: Pool, name: str, tmp_path: Path) -> None:
    compare(pool.of(2), checkpoint(name, tmp_path))


@pytest.mark.parametrize("family", unlike("families on two ranks"))
def test_two_ranks_serve_every_family(pool: Pool, family: str, tmp_path: Path) -> None:
    folder = (TINY | SPARSE | STATES)[family].make(tmp_path, vocab_size=517)
    if family.startswith(("OLMo", "MiniMax")):
        with pytest.raises(CheckpointError, match="norms all heads as one row, which ranks do not have"):
            check_split(folder, read_config(folder), 2)
        return
    compare(pool.of(2), folder)


@pytest.mark.parametrize("expert_parallel", ["on", "off"])
@pytest.mark.parametrize("size", [2, pytest.param(3, marks=pytest.mark.long("more than two ranks"))])
def test_ranks_share_experts_or_the_rows_of_each(
    pool: Pool, size: int, expert_parallel: str, tmp_path: Path
) -> None:
    folder = SPARSE["Qwen 3 MoE"].make(
        tmp_path,
        **{"num_attention_heads": 6, "num_key_value_heads": 6, "num_experts": 6, "moe_intermediate_size": 36},
        **{"intermediate_size": 96, "vocab_size": 517},
    )
    compare(pool.of(size), folder, expert_parallel=expert_parallel)


def test_prompts_are_pooled(pool: Pool, tmp_path: Path) -> None:
    folder = checkpoint("qwen2", tmp_path)
    request = Request(
        request_id="r",
        prompt_token_ids=SHARED,
        sampling=SamplingParams(max_tokens=0),
        pooling=Pooling.MEAN,
    )
    found = []
    for ranks in (None, pool.of(2)):
        driver = Driver(folder, num_blocks=60, followers=ranks)
        driver.run(request)
        found.append(driver.outputs["r", 0][0].embedding)
    assert found[1] == pytest.approx(found[0], abs=1e-4)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_what_is_quantized_in_parts_is_as_good(pool: Pool, tmp_path: Path, quantize: str) -> None:
    """Inputs that are split are rounded in other groups, so that the numbers differ; they are as near to float32."""
    folder = checkpoint("qwen3", tmp_path, hidden_size=128, intermediate_size=256, head_dim=32)

    def found(**options: Any) -> list[float]:
        driver = Driver(folder, num_blocks=60, **options)
        driver.run(*(ask(f"{i}", prompt(20 + i, 60), num_prompt_logprobs=0, max_tokens=1) for i in range(4)))
        return [score for i in range(4) for score in scores(driver, f"{i}")]

    exact = found()
    alone, together = found(quantize=quantize), found(quantize=quantize, followers=pool.of(2))

    def error(numbers: list[float]) -> float:
        return fmean(abs(a - b) for a, b in zip(numbers, exact, strict=True))

    assert 0 < error(together) < 1.3 * error(alone)


class Unloadable:
    """A runner of rank 0 that cannot load its part."""

    def load(self) -> RunnerFacts:
        raise RuntimeError("no graph for you")

    def draft(self, plan: StepPlan, *, may_stay: bool) -> list[list[int]]:
        raise NotImplementedError

    def launch(self, plan: StepPlan) -> StepInFlight:
        raise NotImplementedError

    def forget(self, sequences: Iterable[Sequence]) -> None:
        raise NotImplementedError

    def close(self) -> None:
        pass


def test_rank_0_that_cannot_load_ends_although_the_others_wait_for_it(pool: Pool, tmp_path: Path) -> None:
    folder, followers = checkpoint("mistral", tmp_path), pool.of(2)
    options = LoadOptions(device="cpu", dtype="float32", num_blocks=60)
    runner = ParallelRunner(folder, options, start=lambda: followers, make_runner=lambda _: Unloadable())
    with pytest.raises(RuntimeError, match="no graph for you"):
        runner.load()
    pool.close()  # the other rank is in the midst of a sum


@pytest.mark.long("more than two ranks")
def test_four_ranks_choose_them_too(pool: Pool, tmp_path: Path) -> None:
    compare(pool.of(4), checkpoint("llama", tmp_path))


def test_a_rank_that_is_killed_ends_the_steps_at_once(pool: Pool, tmp_path: Path) -> None:
    """At some moment between two steps, or within one; and an idle engine is told, too."""
    followers = pool.of(4)
    driver = Driver(checkpoint("mistral", tmp_path), num_blocks=60, followers=followers)
    driver.runs.forget([])
    killer = threading.Timer(random.uniform(0, 0.2), os.kill, (followers.pids[2], signal.SIGKILL))

    def kill(step: int) -> None:
        if step == 2:
            killer.start()

    with pytest.raises(DeviceError, match=r"^rank \d \(process \d+\) ended with"):
        driver.run(ask("long", SHARED, max_tokens=400), before_step=kill)
    with pytest.raises(DeviceError, match=r"^rank \d \(process \d+\) ended with"):
        driver.runs.forget([])
