"""Texts that are scored after a prompt, against transformers': in one batch, beyond the seats, after preemption."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.engine.planning.params import Branch, SamplingParams
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.priority.lanes import Lane
from penstock.priority.routing.state import LaneWork
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver

PROMPT = tuple((37 * i + 11) % 390 for i in range(45))  # no number of whole blocks


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def driver(folder: Path) -> Driver:
    return Driver(folder, num_blocks=96, max_num_seqs=4)


@pytest.fixture(scope="module")
def model(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def text(number: int) -> tuple[int, ...]:
    return tuple((29 * i + 7 * number) % 390 for i in range(3 + number % 5))


def tree(num_texts: int, *, with_second_level: bool = True) -> tuple[Branch, ...]:
    """A prompt with texts after it; two more tokens, side by side, go on from every third of them."""
    parents = [number for number in range(1, num_texts + 1) if with_second_level and number % 3 == 0]
    below = {parent: (num_texts + 1 + 2 * i, 2) for i, parent in enumerate(parents)}
    return (
        Branch(first_child=1, num_children=num_texts),
        *(
            Branch(token_ids=text(n), candidates=(5, 9, 200), first_child=first, num_children=num)
            for n in range(1, num_texts + 1)
            for first, num in [below.get(n, (0, 0))]
        ),
        *(Branch(token_ids=(token,), candidates=(8,), parent=n) for n in parents for token in (5, 9)),
    )


def branching(name: str, branches: tuple[Branch, ...]) -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(temperature=0.0, max_tokens=0),
        n=len(branches),
        branches=branches,
    )


def only_output(driver: Driver, name: str, index: int) -> Output:
    (only,) = driver.outputs[name, index]
    return only


def scores(driver: Driver, request: Request) -> list[list[float] | None]:
    return [only_output(driver, request.request_id, index).scores for index in range(request.n)]


@torch.inference_mode()
def check(driver: Driver, model: Any, request: Request) -> None:
    for index, branch in enumerate(request.branches):
        only = only_output(driver, request.request_id, index)
        assert (only.finish_reason, only.token_ids) == (FinishReason.LENGTH, [])
        if not branch.candidates:
            assert only.scores is None
            continue
        logits: Tensor = model(torch.tensor([request.token_ids_of(index)])).logits[0, -1]
        assert only.scores == pytest.approx(
            logits.log_softmax(-1)[list(branch.candidates)].tolist(), abs=2e-4
        )


def test_the_tokens_of_a_branch_follow_those_that_it_goes_on_from() -> None:
    request = branching("r", tree(3))
    assert request.token_ids_of(0) == list(PROMPT)
    assert request.token_ids_of(5) == [*PROMPT, *text(3), 9]
    assert request.num_prompt_tokens == len(PROMPT) + sum(len(text(n)) for n in (1, 2, 3)) + 2


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.parametrize("num_texts", [1, 3, 12])  # with 12, most find no seat
def test_log_probabilities_are_those_of_transformers(
    driver: Driver, model: Any, budget: int, num_texts: int
) -> None:
    driver.fresh(budget=budget)
    request = branching("r", tree(num_texts))
    driver.run(request)
    check(driver, model, request)


def test_the_prompt_is_computed_once(driver: Driver) -> None:
    driver.fresh()
    request = branching("r", tree(3, with_second_level=False))
    driver.queue.put(request, 0.0)
    plans = [driver.step() for _ in range(2)]
    assert [plan.num_tokens for plan in plans] == [len(PROMPT), request.num_prompt_tokens - len(PROMPT)]
    assert driver.scheduler.sequences.is_idle


def test_beyond_the_seats_less_than_a_block_of_it_is_computed_again(driver: Driver) -> None:
    driver.fresh()
    request = branching("r", tree(12, with_second_level=False))
    driver.queue.put(request, 0.0)
    num_computed = 0
    while not driver.scheduler.sequences.is_idle or any(driver.queue.depths().values()):
        num_computed += driver.step().num_tokens
        assert len(driver.scheduler.sequences.waiting) <= 1  # one stands for all that follow it
    num_without_seat = 12 - driver.max_num_seqs
    num_in_last_block = len(PROMPT) % driver.facts.block_size
    assert num_computed <= request.num_prompt_tokens + num_without_seat * num_in_last_block


def test_they_are_the_same_bits_in_any_company(driver: Driver) -> None:
    if driver.runner.model.kernels.name != "native":
        pytest.skip("needs a C++ compiler: plain torch does not promise the same bits in every batch")
    request = branching("r", tree(12))
    driver.fresh()
    driver.run(request)
    alone = scores(driver, request)
    driver.fresh(budget=13)
    sampling = SamplingParams(temperature=0.0, max_tokens=9, ignore_eos=True)
    other = Request(request_id="other", prompt_token_ids=PROMPT[5:40], sampling=sampling)
    driver.run(other, request, branching("second", tree(5)))
    assert scores(driver, request) == alone
    assert len(driver.tokens("other")) == 9


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_after_preemption_each_is_told_once(driver: Driver, model: Any, prefix_cache: bool) -> None:
    driver.fresh(budget=9, prefix_cache=prefix_cache)
    scheduler = driver.scheduler

    def preempt(step: int) -> None:
        if step % 5 == 3 and scheduler.sequences.running and step < 40:
            scheduler.sequences.preempt(scheduler.sequences.running[-1])

    request = branching("r", tree(6))
    driver.run(request, before_step=preempt)
    assert scheduler.sequences.counters.num_preemptions >= 3
    check(driver, model, request)


def test_a_pool_with_little_room_computes_them_all(driver: Driver, model: Any) -> None:
    driver.fresh(num_blocks=8)
    request = branching("r", tree(12))
    driver.run(request)
    check(driver, model, request)


@pytest.mark.parametrize("num_steps", range(6))
def test_when_it_is_cancelled_every_choice_ends_once(driver: Driver, num_steps: int) -> None:
    driver.fresh(budget=20)
    request = branching("r", tree(12))
    driver.queue.put(request, 0.0)
    for _ in range(num_steps):
        driver.step()
    ended = [index for _, index in driver.outputs]
    if num_steps:
        cancelled = driver.scheduler.sequences.cancel("r", 0.0)
        assert sorted([*ended, *(output.index for output in cancelled)]) == list(range(request.n))
    else:
        assert driver.queue.cancel("r")
    assert driver.scheduler.sequences.is_idle
    driver.scheduler.sequences.check()


def test_one_that_fails_takes_with_it_what_goes_on_from_it(driver: Driver) -> None:
    driver.fresh()
    driver.queue.put(branching("r", tree(3)), 0.0)
    driver.step()
    plan = driver.scheduler.plan(0.0)
    (third,) = [chunk for chunk in plan.chunks if chunk.sequence.index == 3]
    result = driver.runs.launch(plan)
    result.choose()
    brought = result.wait()
    brought.sampled[plan.chunks.index(third)].error = "its logits were not finite"
    outputs = driver.scheduler.commit(plan, brought, 0.0)
    reasons = {output.index: output.finish_reason for output in outputs}
    assert reasons == {1: FinishReason.LENGTH, 2: FinishReason.LENGTH} | dict.fromkeys(
        (3, 4, 5), FinishReason.FAILED
    )
    assert driver.scheduler.sequences.is_idle


def test_the_queue_counts_what_they_take(driver: Driver) -> None:
    def work() -> LaneWork:
        return driver.queue.load(0.0, num_free_kv=0).lanes[Lane.STANDARD]

    driver.fresh()
    request = branching("r", tree(3))
    driver.queue.put(request, 0.0)
    assert sum(work().queued.values()) == request.num_prompt_tokens
    driver.step()
    assert (work().num_running, work().num_prefill_left) == (1, request.num_prompt_tokens - len(PROMPT))
    driver.run()
    assert (work().num_running, work().num_prefill_left) == (0, 0)


def test_a_second_request_finds_the_prompt_in_the_cache(driver: Driver) -> None:
    driver.fresh()
    first = branching("first", tree(2))
    driver.run(first)
    driver.run(replace(first, request_id="second"))
    timings = only_output(driver, "second", 0).timings
    assert timings is not None
    assert timings.num_cached_tokens == len(PROMPT) // driver.facts.block_size * driver.facts.block_size
