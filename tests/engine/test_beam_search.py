"""Beam search against transformers' `generate(num_beams=...)`: the same answers in the same order, in float32."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.planning.params import BeamParams, SamplingParams
from penstock.engine.planning.request import Request
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver

MAX_TOKENS = 10


class Oracle:
    def __init__(self, family: str, folder: Path) -> None:
        make_checkpoint(family, folder)
        self.driver = Driver(folder, num_blocks=96)
        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def answers(self, request: Request) -> list[list[int]]:
        assert request.beams is not None
        ids = torch.tensor([request.prompt_token_ids])
        ends = sorted(request.beams.end_token_ids)
        found = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=request.sampling.max_tokens,
            do_sample=False,
            num_beams=request.n,
            num_return_sequences=request.n,
            length_penalty=request.beams.length_penalty,
            early_stopping=request.beams.early_stopping,
            pad_token_id=0,
            eos_token_id=ends or -1,
        )
        return [until(answer, ends) for answer in found[:, ids.shape[1] :].tolist()]

    def got(self, request: Request) -> list[list[int]]:
        return [self.driver.tokens(request.request_id, index) for index in range(request.n)]


def until(token_ids: list[int], ends: list[int]) -> list[int]:
    """An answer without what fills it up after its end."""
    for place, token_id in enumerate(token_ids, 1):
        if token_id in ends:
            return token_ids[:place]
    return token_ids


@pytest.fixture(scope="module", params=["qwen3", "mistral"])
def oracle(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Oracle:
    return Oracle(request.param, tmp_path_factory.mktemp(request.param))


def search(name: str, n: int, seed: int = 0, length: int = 21) -> Request:
    pick = random.Random(seed)
    return Request(
        request_id=name,
        prompt_token_ids=tuple(pick.randrange(5, 300) for _ in range(length)),
        sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS),
        n=n,
        beams=BeamParams(),
    )


def some_ends(oracle: Oracle, seed: int, num: int) -> frozenset[int]:
    """Tokens that a search is likely to come by: some of those that a wide one found."""
    oracle.driver.fresh()
    request = search("wide", 8, seed)
    oracle.driver.run(request)
    found = sorted({token_id for answer in oracle.got(request) for token_id in answer[2:]})
    return frozenset(random.Random(seed).sample(found, min(num, len(found))))


def test_answers_of_full_length(oracle: Oracle) -> None:
    oracle.driver.fresh()
    requests = [search(f"s{n}", n, seed=n, length=9 + 4 * n) for n in (2, 3, 5, 8)]
    oracle.driver.run(*requests)
    for request in requests:
        assert oracle.got(request) == oracle.answers(request)


@pytest.mark.parametrize("early_stopping", [False, True, "never"])
@pytest.mark.parametrize("length_penalty", [1.0, 0.0, 2.5, -1.5])
def test_answers_that_end_early(oracle: Oracle, length_penalty: float, early_stopping: Any) -> None:
    requests = []
    for seed in range(4):
        params = BeamParams(
            length_penalty=length_penalty,
            early_stopping=early_stopping,
            end_token_ids=some_ends(oracle, seed, 1 + 2 * seed),
        )
        requests.append(replace(search(f"s{seed}", 2 + seed, seed), beams=params))
    oracle.driver.fresh()
    oracle.driver.run(*requests)
    assert [oracle.got(request) for request in requests] == [oracle.answers(r) for r in requests]
    lengths = [len(answer) for request in requests for answer in oracle.got(request)]
    assert min(lengths) < MAX_TOKENS or length_penalty > 1  # which prefers long ones


def test_one_beam_is_greedy(oracle: Oracle) -> None:
    oracle.driver.fresh()
    plain = Request(
        request_id="greedy",
        prompt_token_ids=search("s", 1).prompt_token_ids,
        sampling=SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    oracle.driver.run(search("s", 1), plain)
    assert oracle.driver.tokens("s") == oracle.driver.tokens("greedy")


@pytest.mark.parametrize("case", ["chunks", "few blocks", "no cache", "a hit", "gave way"])
def test_whatever_happens_on_the_way(oracle: Oracle, case: str) -> None:
    driver, request = oracle.driver, search("s", 4, seed=5, length=37)
    driver.fresh(
        budget=3 if case == "chunks" else None,
        num_blocks=12 if case == "few blocks" else None,
        prefix_cache=case != "no cache",
    )

    def preempt(step: int) -> None:
        if case == "gave way" and step in (1, 3, 4, 6) and driver.scheduler.sequences.running:
            driver.scheduler.sequences.preempt(driver.scheduler.sequences.running[-1])

    if case == "a hit":
        driver.run(search("before", 3, seed=5, length=37))
    neighbour = Request(
        request_id="r",
        prompt_token_ids=(7, 8, 9),
        sampling=SamplingParams(seed=3, max_tokens=MAX_TOKENS, ignore_eos=True),
    )
    driver.run(request, neighbour, before_step=preempt)
    assert oracle.got(request) == oracle.answers(request)
    said = driver.tokens("r")
    timings = driver.outputs["s", 0][-1].timings
    assert timings is not None
    assert timings.num_cached_tokens == (32 if case == "a hit" else 0)
    assert (timings.num_preemptions > 0) == (case == "gave way")
    driver.fresh()
    driver.run(neighbour)
    assert driver.tokens("r") == said


def test_log_probabilities_are_those_of_the_answers(oracle: Oracle) -> None:
    oracle.driver.fresh()
    sampling = SamplingParams(temperature=0.0, max_tokens=4, num_logprobs=2, num_prompt_logprobs=1)
    request = Request(request_id="s", prompt_token_ids=(5, 6, 7), sampling=sampling, n=3, beams=BeamParams())
    oracle.driver.run(request)
    sums = []
    for index in range(3):
        outputs = oracle.driver.outputs["s", index]
        told = [one for output in outputs for one in output.logprobs or ()]
        assert [len(one.top) for one in told] == [2] * 4
        sums.append(sum(one.logprob for one in told))
        prompt = outputs[0].prompt_logprobs
        assert (prompt is not None and len(prompt) == 2) == (index == 0)
    assert sums == sorted(sums, reverse=True)
    tokens = oracle.driver.tokens("s", 1)
    again = Request(
        request_id="again",
        prompt_token_ids=(5, 6, 7, *tokens),
        sampling=SamplingParams(temperature=0.0, max_tokens=1, num_prompt_logprobs=0),
    )
    oracle.driver.run(again)
    (output,) = oracle.driver.outputs["again", 0]
    assert output.prompt_logprobs is not None
    assert sum(one.logprob for one in output.prompt_logprobs[2:]) == pytest.approx(sums[1], abs=1e-4)
