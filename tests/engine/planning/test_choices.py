"""Choices of one request: forks that share a prompt say what separate requests with the same random numbers say."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import FinishReason, Request
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver
from tests.engine.fake_runner import make_request
from tests.engine.workloads import Run, Workload
from tests.few import examples

GAMMA = 0x9E3779B97F4A7C15
"""The step of SplitMix64: output i of the generator seeded with s is output 0 of that seeded with s + i * GAMMA."""


@pytest.fixture(scope="module", params=["float32", "bfloat16"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder = make_checkpoint("qwen3", tmp_path_factory.mktemp(request.param))
    driver = Driver(folder, dtype=request.param, num_blocks=96)
    if driver.runner.model.kernels.name != "native":
        pytest.skip("needs a C++ compiler: plain torch does not promise the same bits in every batch")
    return driver


def sampled(
    name: str, length: int, n: int = 1, seed: int = 3, max_tokens: int = 6, **more: object
) -> Request:
    params: dict[str, object] = {"temperature": 1.4, "top_p": 0.95, **more}
    sampling = SamplingParams(
        seed=seed,
        max_tokens=max_tokens,
        ignore_eos=True,
        num_logprobs=2,
        **params,  # type: ignore[arg-type]
    )
    prompt = tuple((11 * i + length) % 400 for i in range(length))
    return Request(request_id=name, prompt_token_ids=prompt, sampling=sampling, n=n)


def answer(driver: Driver, name: str, index: int = 0) -> list[object]:
    """Tokens with their log probabilities, which tell any difference in any bit of the logits."""
    return [(output.token_ids, output.logprobs) for output in driver.outputs[name, index]]


def alone(driver: Driver, request: Request) -> list[list[object]]:
    driver.fresh()
    driver.run(request)
    return [answer(driver, request.request_id, index) for index in range(request.n)]


@pytest.mark.parametrize("length", [1, 15, 16, 17, 32, 33])
def test_forks_are_separate_requests_with_seeds_of_their_own(driver: Driver, length: int) -> None:
    forks = alone(driver, sampled("r", length, n=4, seed=77))
    for index in range(4):
        (separate,) = alone(driver, sampled("r", length, seed=(77 + index * GAMMA) % 2**64))
        assert separate == forks[index]


def test_a_choice_does_not_depend_on_how_many_there_are(driver: Driver) -> None:
    many = alone(driver, sampled("r", 19, n=6))
    for n in (1, 2, 5):
        assert alone(driver, sampled("r", 19, n=n)) == many[:n]
    assert len({str(choice) for choice in many}) == 6


@pytest.mark.parametrize("seats", [1, 2, 3])
@pytest.mark.parametrize("prefix_cache", [True, False])
def test_a_choice_that_had_to_wait_for_a_seat_says_the_same(
    driver: Driver, seats: int, prefix_cache: bool
) -> None:
    """It is no fork then: its prompt is found in the cache, or computed again."""
    request = sampled("r", 21, n=4)
    expected = alone(driver, request)
    everybody, driver.max_num_seqs = driver.max_num_seqs, seats
    driver.fresh(prefix_cache=prefix_cache)
    driver.max_num_seqs = everybody
    driver.run(request)
    assert [answer(driver, "r", index) for index in range(4)] == expected


def test_greedy_choices_are_all_the_same_to_the_last_bit(driver: Driver) -> None:
    first, *others = alone(driver, sampled("r", 20, n=4, temperature=0.0))
    assert others == [first] * 3


@pytest.mark.parametrize("at", [1, 2, 4])
def test_a_choice_that_gave_way_says_the_same(driver: Driver, at: int) -> None:
    request = sampled("r", 18, n=3)
    expected = alone(driver, request)
    driver.fresh()

    def preempt(step: int) -> None:
        if step == at:
            for sequence in list(driver.scheduler.sequences.running)[1:]:
                driver.scheduler.sequences.preempt(sequence)

    driver.run(request, before_step=preempt)
    assert driver.scheduler.sequences.counters.num_preemptions == 2
    assert [answer(driver, "r", index) for index in range(3)] == expected


def test_penalties_count_the_output_of_the_choice_alone(driver: Driver) -> None:
    request = sampled("r", 17, n=3, presence_penalty=1.5, frequency_penalty=0.5, seed=9, max_tokens=12)
    forks = alone(driver, request)
    for index in range(3):
        separate = sampled(
            "r", 17, presence_penalty=1.5, frequency_penalty=0.5, seed=9 + index * GAMMA, max_tokens=12
        )
        assert alone(driver, separate) == [forks[index]]


# On a fake runner


def workload(request: Request, num_blocks: int, seats: int, prefix_cache: bool = True) -> Workload:
    return Workload(
        requests=(request,),
        arrivals=(0,),
        num_blocks=num_blocks,
        budget=16,
        max_num_seqs=seats,
        max_model_len=100,
        prefix_cache=prefix_cache,
    )


@settings(max_examples=examples(60), deadline=None)
@given(st.integers(1, 20), st.integers(1, 6), st.integers(2, 9))
def test_a_prompt_is_computed_once_for_all_its_choices(length: int, n: int, max_tokens: int) -> None:
    """And its last token once more for each fork, whose first logits it brings."""
    request = make_request("r", list(range(length)), max_tokens=max_tokens, n=n)
    run = Run(workload(request, 200, 6)).finish()
    assert run.runner.num_tokens == length + (n - 1) + n * (max_tokens - 1)


@settings(max_examples=examples(40), deadline=None)
@given(st.integers(1, 12), st.integers(2, 5), st.integers(0, 4), st.integers(0, 5))
def test_a_choice_that_fails_takes_no_other_with_it(length: int, n: int, bad: int, seats: int) -> None:
    request = make_request("r", list(range(length)), max_tokens=4, n=n)
    run = Run(workload(request, 60, 1 + seats))
    run.runner.bad.add(("r", bad % n))
    run.finish()
    reasons = [run.ended["r", index].finish_reason for index in range(n)]
    assert reasons.count(FinishReason.FAILED) == 1
    assert reasons[bad % n] is FinishReason.FAILED
    assert all(len(run.tokens["r", i]) == 4 for i in range(n) if i != bad % n)
    assert not any(run.tables.pool.ref_counts)
