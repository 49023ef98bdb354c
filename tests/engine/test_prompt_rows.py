"""Log probabilities of prompts, and embeddings, against transformers': in chunks, after preemption, beside others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from penstock.engine.planning.params import Pooling, SamplingParams
from penstock.engine.planning.request import FinishReason, Request, TokenLogprobs
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver
from tests.engine.fake_runner import drafting_always
from tests.engine.test_drafts import AnswerProposer

PROMPT = tuple((37 * i + 11) % 390 for i in range(61))


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def driver(folder: Path) -> Driver:
    return Driver(folder, num_blocks=96, max_num_seqs=4)


@pytest.fixture(scope="module")
def oracle(folder: Path) -> Any:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.inference_mode():
        return model(torch.tensor([PROMPT]), output_hidden_states=True)


@pytest.fixture(scope="module")
def expected(oracle: Any) -> Any:
    """[tokens - 1, vocab]: what each token of the prompt says of the one after it."""
    return oracle.logits[0, :-1].log_softmax(-1)


def scored(
    name: str, prompt: tuple[int, ...] = PROMPT, num: int = 3, n: int = 1, max_tokens: int = 4
) -> Request:
    sampling = SamplingParams(
        temperature=0.0, max_tokens=max_tokens, ignore_eos=True, num_prompt_logprobs=num, num_logprobs=1
    )
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, n=n)


def found_of(driver: Driver, name: str, index: int = 0) -> list[TokenLogprobs]:
    first, *others = driver.outputs[name, index]
    assert all(output.prompt_logprobs is None for output in others)
    assert first.prompt_logprobs is not None
    return first.prompt_logprobs


def check(found: list[TokenLogprobs], expected: Tensor, num: int = 3) -> None:
    assert len(found) == len(expected)
    for at, logprobs, token_id in zip(found, expected, PROMPT[1:], strict=False):
        values, token_ids = logprobs.topk(num)
        assert at.logprob == pytest.approx(logprobs[token_id].item(), abs=2e-4)
        assert [token for token, _ in at.top] == token_ids.tolist()
        assert [value for _, value in at.top] == pytest.approx(values.tolist(), abs=2e-4)


@pytest.mark.parametrize("budget", [64, 7])
def test_those_of_a_prompt_are_those_of_transformers(driver: Driver, expected: Tensor, budget: int) -> None:
    driver.fresh(budget=budget)
    driver.run(scored("r"))
    check(found_of(driver, "r"), expected)


def test_they_are_the_same_bits_in_any_chunks_and_company(driver: Driver) -> None:
    if driver.runner.model.kernels.name != "native":
        pytest.skip("needs a C++ compiler: plain torch does not promise the same bits in every batch")
    driver.fresh()
    driver.run(scored("r"))
    alone = found_of(driver, "r")
    driver.fresh(budget=23)
    driver.run(scored("other", PROMPT[5:40], 1), scored("r"), scored("third", PROMPT[9:], 0))
    assert found_of(driver, "r") == alone
    assert {len(at.top) for at in found_of(driver, "other")} == {1}
    assert {len(at.top) for at in found_of(driver, "third")} == {0}


def test_a_cached_prefix_is_computed_again_for_them(driver: Driver, expected: Tensor) -> None:
    driver.fresh()
    driver.run(scored("first"))
    driver.run(scored("second"))
    check(found_of(driver, "second"), expected)
    driver.run(Request(request_id="third", prompt_token_ids=PROMPT, sampling=SamplingParams(max_tokens=1)))
    timings = [driver.outputs[name, 0][-1].timings for name in ("second", "third")]
    assert [found.num_cached_tokens for found in timings if found is not None] == [0, 48]


@pytest.mark.parametrize("prefix_cache", [True, False])
def test_after_preemption_they_come_once(driver: Driver, expected: Tensor, prefix_cache: bool) -> None:
    driver.fresh(budget=9, prefix_cache=prefix_cache)
    scheduler = driver.scheduler

    def preempt(step: int) -> None:
        if step in (3, 6, 8) and scheduler.sequences.running:
            scheduler.sequences.preempt(scheduler.sequences.running[0])

    driver.run(scored("r"), before_step=preempt)
    assert scheduler.sequences.counters.num_preemptions == 3
    check(found_of(driver, "r"), expected)


def test_choices_share_those_of_the_first(driver: Driver, expected: Tensor) -> None:
    driver.fresh()
    driver.run(scored("r", n=6))
    check(found_of(driver, "r"), expected)
    assert all(driver.outputs["r", index][0].prompt_logprobs is None for index in range(1, 6))
    assert [len(driver.tokens("r", index)) for index in range(6)] == [4] * 6


def test_they_come_beside_drafts_that_are_verified(driver: Driver, expected: Tensor) -> None:
    plain = Request(
        request_id="plain",
        prompt_token_ids=(5, 6, 7) * 5,
        sampling=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
    )
    driver.fresh(budget=16)
    driver.run(plain)
    alone = driver.tokens("plain")
    driver.fresh(budget=16)
    driver.scheduler.drafting = drafting_always(
        AnswerProposer({("plain", 0): alone, ("r", 0): []}, accuracy=0.8), driver.facts.max_drafts
    )
    driver.run(plain, scored("r"))
    timings = driver.outputs["plain", 0][-1].timings
    assert timings is not None
    assert timings.drafts["proposer"].num_drafted
    assert driver.tokens("plain") == alone
    check(found_of(driver, "r"), expected)


def test_a_step_beside_others_scores_few_tokens(driver: Driver, expected: Tensor) -> None:
    """So it takes no longer than others'; once they have ended, the rest of the prompt is computed at once."""
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    driver.fresh(max_scored=9)
    driver.queue.put(Request(request_id="plain", prompt_token_ids=PROMPT[:5], sampling=sampling), 0.0)
    driver.step()
    for name in ("r", "later"):
        driver.queue.put(scored(name), 0.0)
    plans = [driver.step() for _ in range(3)]
    assert [[len(chunk.scored) for chunk in plan.chunks] for plan in plans] == [[0, 9]] * 3
    driver.run()
    assert len(driver.tokens("plain")) == 4
    for name in ("r", "later"):
        check(found_of(driver, name), expected)


def test_a_step_of_one_sequence_scores_all_that_it_has_room_for(driver: Driver, expected: Tensor) -> None:
    driver.fresh(max_scored=9)
    driver.queue.put(scored("r"), 0.0)
    (chunk,) = driver.step().chunks
    assert len(chunk.scored) == len(PROMPT) - 1
    check(found_of(driver, "r"), expected)


def test_of_one_token_there_are_none(driver: Driver) -> None:
    driver.fresh()
    driver.run(scored("r", PROMPT[:1]))
    assert found_of(driver, "r") == []


@pytest.mark.parametrize("n", [1, 3])
def test_without_output_tokens_the_prompt_is_scored_and_that_is_all(
    driver: Driver, expected: Tensor, n: int
) -> None:
    driver.fresh()
    driver.run(scored("r", n=n, max_tokens=0))
    check(found_of(driver, "r"), expected)
    for index in range(n):
        (only,) = driver.outputs["r", index]
        assert (only.token_ids, only.finish_reason) == ([], FinishReason.LENGTH)


def pooled(pooling: Pooling, name: str = "r") -> Request:
    return Request(
        request_id=name,
        prompt_token_ids=PROMPT,
        sampling=SamplingParams(temperature=0.0, max_tokens=0),
        pooling=pooling,
    )


def embedding_of(driver: Driver, name: str = "r") -> list[float]:
    (only,) = driver.outputs[name, 0]
    assert only.embedding is not None
    assert only.finish_reason is FinishReason.LENGTH
    return only.embedding


@pytest.mark.parametrize("budget", [64, 7])
@pytest.mark.parametrize("preempted", [False, True])
@pytest.mark.parametrize("pooling", Pooling)
def test_an_embedding_is_made_of_the_hidden_states_of_transformers(
    driver: Driver, oracle: Any, pooling: Pooling, budget: int, preempted: bool
) -> None:
    driver.fresh(budget=budget)
    driver.run(scored("before", max_tokens=1))  # whose blocks are cached

    def preempt(step: int) -> None:
        if preempted and step in (3, 5) and driver.scheduler.sequences.running:
            driver.scheduler.sequences.preempt(driver.scheduler.sequences.running[0])

    driver.run(pooled(pooling), scored("beside"), before_step=preempt)
    hidden = oracle.hidden_states[-1][0]
    expected = {Pooling.LAST: hidden[-1], Pooling.FIRST: hidden[0], Pooling.MEAN: hidden.mean(0)}[pooling]
    assert embedding_of(driver) == pytest.approx(expected.tolist(), abs=2e-4)
    timings = driver.outputs["r", 0][-1].timings
    assert timings is not None
    assert timings.num_cached_tokens == (48 if pooling is Pooling.LAST else 0)
    check(found_of(driver, "beside"), oracle.logits[0, :-1].log_softmax(-1))


def test_the_last_token_is_pooled_when_all_before_it_is_cached(driver: Driver) -> None:
    """Its step has the shape of a decode, of which there may be a graph."""
    driver.fresh()
    prompt = PROMPT[:49]
    first, second = (
        Request(
            request_id=name,
            prompt_token_ids=prompt,
            sampling=SamplingParams(temperature=0.0, max_tokens=0),
            pooling=Pooling.LAST,
        )
        for name in ("r", "again")
    )
    driver.run(first)
    driver.run(second)
    assert embedding_of(driver, "again") == pytest.approx(embedding_of(driver), abs=1e-5)
