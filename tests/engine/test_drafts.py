"""With drafts, right ones and wrong ones, the model says what it says without: every token and log probability."""

from __future__ import annotations

import random
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.planning.drafting import Proposer
from engine.planning.lookup import Lookup
from engine.planning.request import Output, Request, SamplingParams, Sequence
from tests.engine.checkpoints import FAMILIES, make_checkpoint
from tests.engine.driver import Driver

SETTINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cool": {"temperature": 0.7},
    "hot": {"temperature": 1.3},
    "top-k": {"top_k": 5},
    "top-p": {"top_p": 0.8},
    "min-p": {"min_p": 0.1},
    "penalties": {"presence_penalty": 0.9, "frequency_penalty": 0.4, "repetition_penalty": 1.3},
    "greedy penalties": {"temperature": 0.0, "frequency_penalty": 0.7},
    "bias": {"logit_bias": {7: 5.0, 9: 5.0, 11: -100.0}},
    "min tokens": {"min_tokens": 9, "stop_token_ids": frozenset(range(0, 300, 2))},
    "log probabilities": {"num_logprobs": 3},
}


class Prophet:
    """Knows the answers, and tells each token of them as it is with a probability of `rightness`."""

    name = "prophet"

    def __init__(self, answers: dict[tuple[str, int], list[int]], rightness: float, seed: int = 0) -> None:
        self._answers, self._rightness, self._numbers = answers, rightness, random.Random(seed)

    def propose(self, sequence: Sequence, most: int) -> list[int]:
        first = sequence.num_output_tokens
        right = self._answers[sequence.key][first : first + most]
        numbers = self._numbers
        return [token if numbers.random() < self._rightness else numbers.randrange(300) for token in right]

    def forget(self, sequence: Sequence) -> None: ...


def prompt_of(length: int, seed: int) -> tuple[int, ...]:
    """A few words, again and again."""
    numbers = random.Random(seed)
    words = [numbers.randrange(5, 300) for _ in range(numbers.randrange(3, 9))]
    return tuple(words[i % len(words)] for i in range(length))


def requests_of(setting: dict[str, Any]) -> list[Request]:
    return [
        Request(
            request_id=f"r{i}",
            prompt_token_ids=prompt_of(1 + (i * 11) % 70, i),
            sampling=SamplingParams(seed=i, max_tokens=20, **{"ignore_eos": True, **setting}),
            n=3 if i == 2 else 1,
        )
        for i in range(8)
    ]


def told(outputs: list[Output]) -> list[Any]:
    assert all(len(output.token_ids) == 1 for output in outputs), "every token is an output"
    return [(output.token_ids, output.logprobs, output.finish_reason) for output in outputs]


def run(driver: Driver, requests: list[Request], proposer: Proposer | None, **how: Any) -> dict[Any, Any]:
    before_step: Callable[[int], None] = how.pop("before_step", lambda _: None)
    driver.fresh(proposer=proposer, **how)
    driver.run(*requests, before_step=before_step)
    return {key: told(outputs) for key, outputs in driver.outputs.items()}


def answers(found: dict[Any, Any]) -> dict[tuple[str, int], list[int]]:
    return {key: [ids[0] for ids, *_ in outputs] for key, outputs in found.items()}


def num_accepted(driver: Driver) -> int:
    return driver.scheduler.counters.num_accepted_tokens


@pytest.fixture(autouse=True)
def _short_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    """Answers are short here, and drafts are to be in most of their steps."""
    monkeypatch.setattr("engine.planning.drafting._TRIAL_STEPS", 2)


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    driver = Driver(make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3")), num_blocks=256)
    if not driver.facts.max_drafts:
        pytest.skip("drafts are verified by the native kernels, and there is no compiler for them")
    return driver


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(driver: Driver, setting: str) -> None:
    requests = requests_of(SETTINGS[setting])
    expected = run(driver, requests, None)
    for rightness in (1.0, 0.7, 0.0):
        assert run(driver, requests, Prophet(answers(expected), rightness)) == expected
        assert num_accepted(driver) > 0 or not rightness
    assert run(driver, requests, Lookup()) == expected


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    driver = Driver(make_checkpoint(family, tmp_path), num_blocks=256)
    if not driver.facts.max_drafts:
        pytest.skip("drafts are verified by the native kernels, and there is no compiler for them")
    requests = requests_of({"temperature": 0.8})
    expected = run(driver, requests, None)
    assert run(driver, requests, Prophet(answers(expected), 0.8)) == expected
    assert num_accepted(driver) > 0


def test_chunked_prompts_preemption_and_a_pool_that_is_nearly_full(driver: Driver) -> None:
    requests = requests_of({"temperature": 0.9})
    expected = run(driver, requests, None)
    prophet = Prophet(answers(expected), 0.8)
    assert run(driver, requests, prophet, budget=7, prefix_cache=False) == expected

    def preempt(step: int) -> None:
        if driver.scheduler.running and step % 3 == 2:
            driver.scheduler.preempt(driver.scheduler.running[step % len(driver.scheduler.running)])

    assert run(driver, requests, prophet, before_step=preempt) == expected
    assert num_accepted(driver) > 0


def test_a_cancelled_sequence_leaves_the_others_alone(driver: Driver) -> None:
    requests = requests_of({"temperature": 0.9})
    expected = run(driver, requests, None)

    def cancel(step: int) -> None:
        if step == 3:
            for output in driver.scheduler.cancel("r1", 0.0):
                driver.outputs.setdefault(("r1", output.index), []).append(replace(output, token_ids=[0]))

    found = run(driver, requests, Prophet(answers(expected), 0.8), before_step=cancel)
    assert len(found.pop(("r1", 0))) < len(expected.pop(("r1", 0)))
    assert found == expected


def test_answers_that_repeat_themselves_take_few_steps(driver: Driver) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=60, logit_bias={7: 100.0}, ignore_eos=True)
    request = Request(request_id="r", prompt_token_ids=(1, 2, 3), sampling=sampling)
    run(driver, [request], Lookup())
    steps: list[int] = []
    run(driver, [request], Lookup(), before_step=steps.append)
    assert answers({("r", 0): told(driver.outputs["r", 0])})["r", 0] == [7] * 60
    assert len(steps) < 30
