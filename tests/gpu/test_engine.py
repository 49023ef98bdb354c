"""The engine on a GPU against transformers' greedy `generate`, and against itself: graphs or not, overlap or not."""

from __future__ import annotations

import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request
from tests.engine.checkpoints import FAMILIES, make_checkpoint
from tests.engine.rounding_noise import check_logprobs, error_of
from tests.gpu.cuda import DEVICE, needs_cuda
from tests.gpu.engines import RunningEngine

pytestmark = needs_cuda

MAX_TOKENS = 24


def prompt_of(length: int, seed: int = 0) -> tuple[int, ...]:
    numbers = random.Random(seed * 1_000 + length)
    return tuple(numbers.randrange(5, 300) for _ in range(length))


def greedy(name: str, prompt: tuple[int, ...], max_tokens: int = MAX_TOKENS, n: int = 1) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True)
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, n=n)


def drawn(name: str, prompt: tuple[int, ...], seed: int, max_tokens: int = MAX_TOKENS) -> Request:
    sampling = SamplingParams(
        temperature=0.8,
        top_p=0.9 if seed % 2 else 1.0,
        top_k=40 if seed % 3 else 0,
        min_p=0.01 if seed % 5 else 0.0,
        frequency_penalty=0.3 if seed % 4 == 0 else 0.0,
        repetition_penalty=1.2 if seed % 7 == 0 else 1.0,
        logit_bias={7: 2.0, 9: -100.0},
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=True,
    )
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)


def mixed(count: int) -> list[Request]:
    return [greedy(f"r{i}", prompt_of(1 + (i * 7) % 61, i)) for i in range(count)]


class Oracle:
    """transformers' answers, on the same card."""

    def __init__(self, folder: Path) -> None:
        # Not above: it takes seconds, for nothing where there is no GPU.
        from transformers import AutoModelForCausalLM

        self._model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).to(DEVICE)

    def answer(self, request: Request) -> list[int]:
        ids = torch.tensor([request.prompt_token_ids], device=DEVICE)
        length = request.sampling.max_tokens
        out = self._model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=length,
            min_new_tokens=length,
            do_sample=False,
            pad_token_id=0,
            eos_token_id=-1,
        )
        return [int(token) for token in out[0, ids.shape[1] :]]

    @torch.inference_mode()
    def logits(self, prompt: tuple[int, ...]) -> torch.Tensor:
        """[vocab] of the token after the prompt."""
        logits: torch.Tensor = self._model(torch.tensor([prompt], device=DEVICE)).logits
        return logits[0, -1].cpu()


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(request.param, tmp_path_factory.mktemp(request.param))


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """For what does not depend on the family."""
    return make_checkpoint("llama", tmp_path_factory.mktemp("one"))


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Oracle:
    return Oracle(folder)


@pytest.fixture(scope="module")
def engine(folder: Path) -> Iterator[RunningEngine]:
    with RunningEngine(folder) as running:
        yield running


def check(engine: RunningEngine, oracle: Oracle, *requests: Request) -> None:
    for request in requests:
        for index in range(request.n):
            assert engine.tokens(request.request_id, index) == oracle.answer(request), (
                request.request_id,
                index,
            )


def test_alone(engine: RunningEngine, oracle: Oracle) -> None:
    for length in (1, 16, 40, 300):
        request = greedy("r", prompt_of(length))
        engine.run(request)
        check(engine, oracle, request)


def test_together(engine: RunningEngine, oracle: Oracle) -> None:
    """More than the engine may run at a time, so that they also come and go."""
    requests = mixed(40)
    engine.run(*requests)
    check(engine, oracle, *requests)


def test_the_choices_of_one_prompt(engine: RunningEngine, oracle: Oracle) -> None:
    request = greedy("r", prompt_of(35), n=3)
    engine.run(request)
    check(engine, oracle, request)


def test_preempted(llama: Path) -> None:
    oracle = Oracle(llama)
    with RunningEngine(llama, num_blocks=20) as engine:
        requests = [greedy(f"r{i}", prompt_of(40, i), 60) for i in range(6)]
        engine.run(*requests)
        assert engine.num_preemptions > 0
        check(engine, oracle, *requests)


def test_others_are_cancelled(engine: RunningEngine, oracle: Oracle) -> None:
    kept, gone = mixed(8), [greedy(f"g{i}", prompt_of(20, 50 + i), 300) for i in range(8)]

    def cancel(num_tokens: int) -> None:
        if num_tokens > 60:
            for request in gone:
                engine.cancel(request.request_id)

    engine.run(*kept, *gone, after_tokens=cancel)
    check(engine, oracle, *kept)
    reasons = {engine.outputs[request.request_id, 0][-1].finish_reason for request in gone}
    assert reasons == {FinishReason.CANCELLED}


@pytest.mark.parametrize(
    "options",
    [
        {"cuda_graphs": False},
        {"overlap": False},
        {"cuda_graphs": False, "overlap": False},
        {"max_drafts": 0},
        {"max_drafts": 0, "cuda_graphs": False},
    ],
)
def test_graphs_and_overlap_change_no_token(llama: Path, options: dict[str, Any]) -> None:
    requests = [*mixed(20), *(drawn(f"d{i}", prompt_of(9 + i, i), seed=i) for i in range(20))]
    found = []
    for wanted in ({}, options):
        with RunningEngine(llama, **wanted) as engine:
            engine.run(*requests)
            found.append({request.request_id: engine.tokens(request.request_id) for request in requests})
    assert found[0] == found[1]


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_half_precision_is_as_far_off_as_its_roundings(dtype: str, tmp_path: Path) -> None:
    folder = make_checkpoint("llama", tmp_path, dtype=dtype)
    oracle, kept = Oracle(folder), getattr(torch, dtype)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True, num_logprobs=5)
    prompts = [prompt_of(length) for length in (3, 17, 90)]
    with RunningEngine(folder, dtype=dtype) as engine:
        engine.run(
            *(
                Request(request_id=str(i), prompt_token_ids=p, sampling=sampling)
                for i, p in enumerate(prompts)
            )
        )
        for i, prompt in enumerate(prompts):
            first = engine.outputs[str(i), 0][0].logprobs
            assert first is not None
            check_logprobs(first[0], oracle.logits(prompt), error_of(folder, prompt, kept, kept))


def test_what_it_takes_is_told_and_fits(llama: Path) -> None:
    """Without a number of blocks the card is filled up to the share that was asked for, and not beyond.

    What others take of it meanwhile, such as tests beside these, makes no difference.
    """
    free, total = torch.cuda.mem_get_info(DEVICE)
    share = (total - free) / total + 0.05
    before = torch.cuda.memory_reserved(DEVICE)
    with RunningEngine(llama, num_blocks=None, gpu_memory_utilization=share, max_num_seqs=8) as engine:
        assert any("KV cache" in line for line in engine.said)
        engine.run(*mixed(8))
        taken = torch.cuda.memory_reserved(DEVICE) - before
        assert taken < engine.runner.model.memory.available + (64 << 20)
