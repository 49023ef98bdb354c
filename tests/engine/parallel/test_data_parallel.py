"""Ranks over gloo that have sequences of their own and share out experts, against the same models in one process."""

from __future__ import annotations

import os
import random
import signal
import threading
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from penstock.app.checkpoint import DEMO_MODEL
from penstock.engine.config import ModelConfig
from penstock.engine.errors import CheckpointError
from penstock.engine.model.checkpoint import read_config
from penstock.engine.model.split import check_shared_experts
from penstock.engine.planning.device import DeviceError
from penstock.engine.planning.params import Pooling
from penstock.engine.planning.request import Request
from penstock.engine.spec import Experts
from tests.engine.driver import Driver
from tests.engine.families import SPARSE, STATES
from tests.engine.parallel.comparing import SHARED, Pool, ask, checkpoint, compare, guided, prompt, scores

FAMILIES = ("Qwen 3 MoE", "DeepSeek V3")


def make(family: str, folder: Path, **overrides: Any) -> Path:
    return SPARSE[family].make(folder, **{"vocab_size": 517, **overrides})


def both(pool: Pool, folder: Path, size: int = 2, **options: Any) -> tuple[Driver, Driver]:
    """The model in one process, and on ranks with as many blocks each."""
    options = {"num_blocks": 60, **options}
    followers = pool.of(size)
    return Driver(folder, **options), Driver(
        folder, **options, followers=followers, data_parallel_attention=True
    )


def tokens_of(driver: Driver) -> dict[tuple[str, int], list[int]]:
    return {key: driver.tokens(*key) for key in driver.outputs}


def experts_of(config: ModelConfig) -> list[Experts]:
    return [layer.feed_forward for layer in config.layers if isinstance(layer.feed_forward, Experts)]


@pytest.mark.parametrize("family", FAMILIES)
def test_two_ranks_choose_the_tokens_of_one_process(pool: Pool, family: str, tmp_path: Path) -> None:
    """Greedy tokens with log probabilities, choices, filters, beams, scored prompts, preemptions, prefix hits."""
    compare(pool.of(2), make(family, tmp_path), data_parallel_attention=True)


@pytest.mark.long("families whose experts ranks share out")
@pytest.mark.parametrize("family", [family for family in SPARSE if family not in FAMILIES])
def test_two_ranks_serve_every_family_with_experts(pool: Pool, family: str, tmp_path: Path) -> None:
    folder = make(family, tmp_path)
    counts = {own.router.num_experts for own in experts_of(read_config(folder))}
    if any(count % 2 for count in counts):
        with pytest.raises(CheckpointError, match=r"the model has [57] experts, which do not split among 2"):
            check_shared_experts(folder, read_config(folder), 2)
        return
    compare(pool.of(2), folder, data_parallel_attention=True)


@pytest.mark.long("more than two ranks")
def test_four_ranks_choose_them_too(pool: Pool, tmp_path: Path) -> None:
    compare(pool.of(4), make("Qwen 3 MoE", tmp_path, num_experts=8), data_parallel_attention=True)


def test_ranks_run_their_own_sequences(pool: Pool, tmp_path: Path) -> None:
    """One alone leaves the other rank with experts only; then each has some, and choices are on their parent's."""
    alone, together = both(pool, make("Qwen 3 MoE", tmp_path))
    first = [ask("one", prompt(1, 20), max_tokens=20), ask("more", prompt(2, 33), n=2)]
    for driver in (alone, together):
        driver.queue.put(first[0], 0.0)
        for _ in range(3):
            driver.step()
    assert {s.rank for s in together.scheduler.sequences.running} == {0}

    ranks: dict[tuple[str, int], int] = {}

    def note(_: int) -> None:
        ranks.update({s.key: s.rank for s in together.scheduler.sequences.running})

    alone.run(first[1])
    together.run(first[1], before_step=note)
    assert ranks == {("one", 0): 0, ("more", 0): 1, ("more", 1): 1}
    assert tokens_of(together) == tokens_of(alone)


def test_follow_ups_go_on_where_their_prefix_is(pool: Pool, tmp_path: Path) -> None:
    alone, together = both(pool, make("DeepSeek V3", tmp_path))
    turns = [ask(name, prompt(seed, 40), max_tokens=8) for seed, name in enumerate("ab")]
    for driver in (alone, together):
        driver.run(*turns)
    part_of: dict[str, int] = {}
    for turn in reversed(turns):
        known = (*turn.prompt_token_ids, *together.tokens(turn.request_id), *prompt(9, 4))
        again = ask(f"{turn.request_id} again", known)
        hits = together.scheduler.sequences.counters.num_prefix_hit_tokens

        def note(_: int) -> None:
            part_of.update({s.request.request_id: s.rank for s in together.scheduler.sequences.running})

        alone.run(again)
        together.run(again, before_step=note)
        assert together.scheduler.sequences.counters.num_prefix_hit_tokens == hits + 32
    assert part_of == {"a again": 0, "b again": 1}
    assert tokens_of(together) == tokens_of(alone)


def test_a_small_pool_makes_sequences_of_its_rank_give_way(pool: Pool, tmp_path: Path) -> None:
    alone, together = both(pool, make("Qwen 3 MoE", tmp_path), num_blocks=10)
    requests = [
        ask(f"{i}", prompt(i, 10 + 7 * i), n=1 + i % 2, max_tokens=40, temperature=i % 3) for i in range(7)
    ]
    alone.run(*requests)
    together.run(*requests)
    assert together.scheduler.sequences.counters.num_preemptions > 2
    assert tokens_of(together) == tokens_of(alone)


def test_results_of_prompts_are_put_together(pool: Pool, tmp_path: Path) -> None:
    alone, together = both(pool, make("Qwen 3 MoE", tmp_path))
    scored = [
        ask(f"s{i}", prompt(i, 9 + 5 * i), num_prompt_logprobs=i, num_logprobs=2, max_tokens=2)
        for i in range(4)
    ]
    pooled = [
        replace(ask(f"p{i}", prompt(20 + i, 12), max_tokens=0), pooling=pooling)
        for i, pooling in enumerate(Pooling)
    ]
    mixed: list[Request] = [request for pair in zip(scored, pooled, strict=False) for request in pair]
    for driver in (alone, together):
        driver.run(*mixed, scored[-1])
    for request in scored:
        expected = pytest.approx(scores(alone, request.request_id), abs=1e-4, rel=1e-4)
        assert scores(together, request.request_id) == expected
    for request in pooled:
        own, other = (driver.outputs[request.request_id, 0][0].embedding for driver in (alone, together))
        assert other == pytest.approx(own, abs=1e-4)
    assert tokens_of(together) == tokens_of(alone)


def test_each_rank_masks_its_own_rows_by_a_grammar(pool: Pool, tmp_path: Path) -> None:
    folder = make("Qwen 3 MoE", tmp_path, vocab_size=read_config(DEMO_MODEL).vocab_size)
    assert guided(pool.of(2), folder, data_parallel_attention=True) == guided(None, folder)


def test_the_imbalance_of_ranks_is_told(pool: Pool, tmp_path: Path) -> None:
    """Three sequences on two ranks: one of them has twice as many tokens as the other, 4/3 of the mean."""
    _, together = both(pool, make("Qwen 3 MoE", tmp_path))
    for i in range(3):
        together.queue.put(ask(f"{i}", prompt(i, 16), max_tokens=60, ignore_eos=True), 0.0)
    used = [plan.experts for plan in (together.step() for _ in range(40)) if plan.experts is not None]
    loads = [use.load for use in used if use.load is not None]
    assert len(loads) > 2
    assert all(1.0 <= load.ranks <= 2.0 and load.experts >= 1.0 for load in loads)
    assert loads[-1].rows == pytest.approx(4 / 3)


@pytest.mark.parametrize(
    ("family", "said", "options"),
    [
        ("Qwen 3 MoE", "it gives each rank whole experts; see --expert-parallel", {"expert_parallel": "off"}),
        ("Qwen 3 MoE", "the model cannot be cut by --pipeline-parallel as well", {"num_stages": 2}),
        ("Qwen 3 MoE", "one process has all sequences; see --tensor-parallel", {"num_ranks": 1}),
        ("Qwen 3 MoE", "the model has 8 experts, which do not split among 3 ranks", {"num_ranks": 3}),
        ("Qwen 3 Next", "the model has layers with a state, which it does not serve", {}),
        ("mistral", "the model has no experts", {}),
    ],
)
def test_what_is_refused(family: str, said: str, options: dict[str, Any], tmp_path: Path) -> None:
    is_dense = family == "mistral"
    folder = checkpoint(family, tmp_path) if is_dense else (SPARSE | STATES)[family].make(tmp_path)
    with pytest.raises(CheckpointError) as refused:
        check_shared_experts(folder, read_config(folder), **{"num_ranks": 2, **options})
    assert str(refused.value) == f"--data-parallel-attention: {said}"


@pytest.mark.parametrize("rank", [1, 2])
def test_a_rank_that_is_killed_ends_the_steps_at_once(pool: Pool, rank: int, tmp_path: Path) -> None:
    """Whether it has the sequence, or experts alone, at some moment between two steps, or within one."""
    _, driver = both(pool, make("Qwen 3 MoE", tmp_path, num_experts=6), 3)
    killer = threading.Timer(random.uniform(0, 0.2), os.kill, (pool.of(3).pids[rank], signal.SIGKILL))

    def kill(step: int) -> None:
        if step == 2:
            killer.start()

    said = r"^rank \d \(process \d+\) ended with"
    with pytest.raises(DeviceError, match=said):
        driver.run(*(ask(f"{i}", SHARED, max_tokens=400) for i in range(2)), before_step=kill)
    with pytest.raises(DeviceError, match=said):
        driver.runs.forget([])
    pool.close()
