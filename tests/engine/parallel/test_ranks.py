"""Models on 2 and 4 ranks over gloo, against the same models in one process. The ranks are started once for each."""

from __future__ import annotations

import os
import random
import signal
import threading
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
from torch import Tensor

from penstock.engine.config import MAX_DRAFTS, LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.split import check_split
from penstock.engine.parallel.leader import Followers, ParallelRunner
from penstock.engine.planning.device import DeviceError, RunnerFacts, StepInFlight
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.step import StepPlan
from tests.engine.driver import Driver
from tests.engine.families import SPARSE, STATES, TINY, unlike
from tests.engine.parallel.comparing import (
    MODELS,
    SHARED,
    Pool,
    ask,
    checkpoint,
    compare,
    embedding,
    guided,
    prompt,
    scores,
)
from tests.engine.test_drafts import AnswerProposer, num_accepted


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


class Exchange:
    """Notes the calls of rank 0 that choosing tokens takes, and the bytes that it gives or gets by each."""

    def __init__(self, followers: Followers, patch: pytest.MonkeyPatch) -> None:
        self.calls: list[tuple[str, int]] = []
        group = followers.world.ranks
        for name in ("gather", "copy_first"):
            patch.setattr(group, name, partial(self._call, name, getattr(group, name)))

    def _call(self, name: str, call: Callable[[Tensor], Tensor], x: Tensor) -> Tensor:
        self.calls.append((name, x.nbytes))
        return call(x)


UNFILTERED: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "warm": {"temperature": 1.3},
    "penalties": {"repetition_penalty": 1.3, "presence_penalty": 0.5, "frequency_penalty": 0.3},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 0.7},
    "biases": {"logit_bias": {9: 4.0, 258: 3.0, 259: 5.0, 516: 6.0, 300: -100.0}},
    "bans": {"min_tokens": 5, "stop_token_ids": frozenset(range(0, 517, 2))},
}


def unfiltered(length: int = 12) -> list[Request]:
    return [
        ask(name, prompt(7, 9), max_tokens=length, **{"ignore_eos": True, **sampling})
        for name, sampling in UNFILTERED.items()
    ]


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.long("more than two ranks"))])
def test_without_filters_no_logits_are_exchanged(
    pool: Pool, size: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A score, a token and whether all is well of each row, on each rank, and the tokens of one process."""
    folder, followers = checkpoint("llama", tmp_path, num_attention_heads=4), pool.of(size)
    alone, together = Driver(folder, num_blocks=60), Driver(folder, num_blocks=60, followers=followers)
    exchange = Exchange(followers, monkeypatch)
    alone.run(*unfiltered())
    for request in unfiltered():
        together.queue.put(request, 0.0)
    for _ in range(12):
        exchange.calls.clear()
        plan = together.step()
        assert exchange.calls == [("gather", 12 * len(plan.chunks))]
    assert together.scheduler.sequences.is_idle
    assert {key: together.tokens(*key) for key in together.outputs} == {
        key: alone.tokens(*key) for key in alone.outputs
    }


LOGITS, CANDIDATES, CHOSEN = ("gather", 259 * 4), ("gather", 3 * 4), ("copy_first", 4)


@pytest.mark.parametrize(
    ("sampling", "calls"),
    [
        ({}, [CANDIDATES]),
        ({"top_k": 40}, [LOGITS, CHOSEN]),
        ({"top_p": 0.8}, [LOGITS, CHOSEN]),
        ({"min_p": 0.01}, [LOGITS, CHOSEN]),
        ({"typical_p": 0.5}, [LOGITS, CHOSEN]),
        ({"temperature": 0.0, "top_k": 40, "top_p": 0.8}, [CANDIDATES]),
        ({"num_logprobs": 2}, [LOGITS, CANDIDATES]),
    ],
    ids=str,
)
def test_whole_logits_are_exchanged_where_they_are_needed(
    pool: Pool,
    sampling: dict[str, Any],
    calls: list[tuple[str, int]],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """By one row: its logits are 259 numbers on either rank, with one as padding."""
    folder, followers = checkpoint("llama", tmp_path), pool.of(2)
    alone, together = Driver(folder, num_blocks=60), Driver(folder, num_blocks=60, followers=followers)
    exchange = Exchange(followers, monkeypatch)
    for driver in (alone, together):
        driver.run(ask("r", prompt(8, 30), **sampling))
    assert exchange.calls == 6 * calls
    assert together.tokens("r") == alone.tokens("r")


def test_a_prompt_that_goes_on_exchanges_nothing_but_sums(
    pool: Pool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    followers = pool.of(2)
    driver = Driver(checkpoint("mistral", tmp_path), num_blocks=60, followers=followers)
    driver.fresh(budget=16)
    exchange = Exchange(followers, monkeypatch)
    driver.queue.put(ask("r", prompt(8, 40)), 0.0)
    for num_calls in (0, 0, 1):
        driver.step()
        assert len(exchange.calls) == num_calls


def test_each_rank_masks_its_part_by_a_grammar(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, followers = guided(None), pool.of(2)
    exchange = Exchange(followers, monkeypatch)
    assert guided(followers) == alone
    assert {name for name, _ in exchange.calls} == {"gather"}
    assert max(num_bytes for _, num_bytes in exchange.calls) == 12 * 4


@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_drafts_are_verified_by_candidates(
    pool: Pool, accuracy: float, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows after wrong drafts included, and rounds of rows where penalties look at the tokens before."""
    folder, followers = checkpoint("qwen3", tmp_path), pool.of(2)
    alone = Driver(folder, num_blocks=60)
    together = Driver(folder, num_blocks=60, followers=followers, max_drafts=MAX_DRAFTS)
    alone.run(*unfiltered())
    expected = {key: alone.tokens(*key) for key in alone.outputs}
    exchange = Exchange(followers, monkeypatch)
    together.fresh(proposer=AnswerProposer(expected, accuracy))
    together.run(*unfiltered())
    assert {key: together.tokens(*key) for key in together.outputs} == expected
    assert num_accepted(together) > 0
    assert {name for name, _ in exchange.calls} == {"gather"}
    assert max(num_bytes for _, num_bytes in exchange.calls) <= 12 * together.facts.max_rows


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
    assert embedding(folder, pool.of(2)) == pytest.approx(embedding(folder, None), abs=1e-4)


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


@pytest.mark.long("more than two ranks")
def test_four_ranks_have_all_latents_and_a_head_each(pool: Pool, tmp_path: Path) -> None:
    compare(pool.of(4), SPARSE["DeepSeek V3"].make(tmp_path, vocab_size=517))


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
