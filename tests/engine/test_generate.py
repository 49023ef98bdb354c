"""The whole engine against transformers' `generate`: the same greedy tokens, whatever happens on the way.

float32, every family, random checkpoints: alone, in a batch of 32 of mixed lengths, in chunks of at most 7 tokens, with
prefix hits, after forced preemption, after copy-on-write.
"""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from tests.engine.checkpoints import FAMILIES, make_checkpoint
from tests.engine.driver import Driver
from tests.engine.rounding_noise import check_logprobs, error_of

MAX_TOKENS = 12


class Oracle:
    """One family's checkpoint, with transformers' answers."""

    def __init__(self, family: str, folder: Path) -> None:
        make_checkpoint(family, folder)
        self.driver = Driver(folder, num_blocks=256)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self._answers: dict[tuple[int, ...], list[int]] = {}

    def answer(self, prompt: tuple[int, ...]) -> list[int]:
        if prompt not in self._answers:
            ids = torch.tensor([prompt])
            out = self._model.generate(
                ids,
                attention_mask=torch.ones_like(ids),
                max_new_tokens=MAX_TOKENS,
                min_new_tokens=MAX_TOKENS,
                do_sample=False,
                pad_token_id=0,
                eos_token_id=-1,
            )
            self._answers[prompt] = out[0, len(prompt) :].tolist()
        return self._answers[prompt]

    def check(self, *requests: Request) -> None:
        for request in requests:
            for index in range(request.n):
                got = self.driver.tokens(request.request_id, index)
                assert got == self.answer(request.prompt_token_ids), (request.request_id, index)


@pytest.fixture(scope="module", params=FAMILIES)
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(request.param, tmp_path_factory.mktemp(request.param))


@cache
def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    numbers = random.Random(seed * 1_000 + length)
    return tuple(numbers.randrange(5, 300) for _ in range(length))


def greedy(name: str, prompt: tuple[int, ...], n: int = 1) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, n=n)


def mixed(count: int) -> list[Request]:
    return [greedy(f"r{i}", prompt_of(1 + (i * 7) % 61, i)) for i in range(count)]


def test_alone(oracle: Oracle) -> None:
    oracle.driver.fresh()
    request = greedy("r", prompt_of(40))
    oracle.driver.run(request)
    oracle.check(request)


def test_in_a_batch_of_32_of_mixed_lengths(oracle: Oracle) -> None:
    oracle.driver.fresh(budget=300)
    requests = mixed(32)
    oracle.driver.run(*requests)
    oracle.check(*requests)


def test_with_a_budget_of_7_tokens(oracle: Oracle) -> None:
    oracle.driver.fresh(budget=7)
    requests = mixed(6)
    oracle.driver.run(*requests)
    oracle.check(*requests)


def test_with_prefix_hits(oracle: Oracle) -> None:
    oracle.driver.fresh()
    shared = prompt_of(40)
    first, second = greedy("a", (*shared, 7, 8)), greedy("b", (*shared, 9))
    oracle.driver.run(first)
    oracle.driver.run(second, greedy("c", first.prompt_token_ids))
    oracle.check(first, second, greedy("c", first.prompt_token_ids))
    timings = oracle.driver.outputs["c", 0][-1].timings
    assert timings is not None
    assert timings.num_cached_tokens == 32


def test_after_forced_preemption(oracle: Oracle) -> None:
    oracle.driver.fresh()
    scheduler = oracle.driver.scheduler

    def preempt(step: int) -> None:
        if step in (2, 3, 7) and scheduler.sequences.running:
            scheduler.sequences.preempt(scheduler.sequences.running[step % len(scheduler.sequences.running)])

    requests = mixed(4)
    oracle.driver.run(*requests, before_step=preempt)
    assert scheduler.sequences.counters.num_preemptions == 3
    oracle.check(*requests)


def test_after_copy_on_write(oracle: Oracle) -> None:
    oracle.driver.fresh()
    request = greedy("r", prompt_of(21), n=3)
    oracle.driver.run(request)
    oracle.check(request)


def test_seeded_sampling_is_the_same_alone_and_in_any_company(oracle: Oracle) -> None:
    sampling = SamplingParams(
        temperature=1.3, top_p=0.95, top_k=50, seed=11, max_tokens=MAX_TOKENS, ignore_eos=True
    )
    seeded = Request(request_id="seeded", prompt_token_ids=prompt_of(23), sampling=sampling, n=2)
    runs = []
    for company, budget in ((0, 64), (9, 64), (9, 7)):
        oracle.driver.fresh(budget=budget)
        oracle.driver.run(*mixed(company), seeded)
        runs.append([oracle.driver.tokens("seeded", index) for index in range(2)])
    assert runs[0] == runs[1] == runs[2]
    assert runs[0][0] != runs[0][1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_far_off_as_its_roundings(dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype=dtype)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    driver = Driver(folder, dtype=dtype)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, num_logprobs=5)
    for length in (3, 17, 90):
        prompt = tuple((7 * i) % 390 for i in range(length))
        driver.run(Request(request_id=str(length), prompt_token_ids=prompt, sampling=sampling))
        first = driver.outputs[str(length), 0][0].logprobs
        assert first is not None
        with torch.inference_mode():
            logits = model(torch.tensor([prompt])).logits[0, -1]
        kernels = driver.runner.model.kernels
        error = error_of(folder, prompt, kernels.kv_dtype, kernels.activation_dtype)
        check_logprobs(first[0], logits, error)
