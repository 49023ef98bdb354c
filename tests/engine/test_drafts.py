"""With drafts, right ones and wrong ones, the model says what it says without: every token and log probability."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable
from dataclasses import replace
from math import exp
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from penstock.engine.execution.draft_kv import DraftChunk
from penstock.engine.execution.drafter import Drafter
from penstock.engine.model.drafts import DraftSource, SharedTokens
from penstock.engine.planning.drafting import Proposer
from penstock.engine.planning.lookup import Lookup
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Output, Request, Sequence
from penstock.engine.planning.step import StepPlan
from penstock.engine.planning.timings import DraftCount
from tests.engine.checkpoints import FAMILIES, VOCAB_SIZE, make_checkpoint
from tests.engine.driver import Driver
from tests.engine.fake_runner import drafting_always
from tests.engine.sampling.frequencies import bound

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


class AnswerProposer:
    """Knows the answers, and tells each token of them as it is with a probability of `accuracy`."""

    name = "proposer"
    is_behind = False

    def __init__(self, answers: dict[tuple[str, int], list[int]], accuracy: float, seed: int = 0) -> None:
        self._answers, self._rightness, self._numbers = answers, accuracy, random.Random(seed)

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        return [self._propose(*pair) for pair in zip(sequences, lengths, strict=True)]

    def _propose(self, sequence: Sequence, most: int) -> list[int]:
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
    """Runs requests with the drafts of a proposer that costs nothing or, with `model`, of the draft model."""
    before_step: Callable[[int], None] = how.pop("before_step", lambda _: None)
    driver.fresh(proposer=proposer, **how)
    driver.run(*requests, before_step=before_step)
    return {key: told(outputs) for key, outputs in driver.outputs.items()}


def answers(found: dict[Any, Any]) -> dict[tuple[str, int], list[int]]:
    return {key: [ids[0] for ids, *_ in outputs] for key, outputs in found.items()}


def count(driver: Driver, proposer: str) -> DraftCount:
    """The drafts of all sequences that ended."""
    ends = [outputs[-1].timings for outputs in driver.outputs.values()]
    found = [ended.drafts[proposer] for ended in ends if ended is not None and proposer in ended.drafts]
    sums = DraftCount()
    for one in found:
        sums.add(one)
    return sums


def num_accepted(driver: Driver) -> int:
    return count(driver, "proposer").num_accepted


@pytest.fixture(scope="module")
def driver(tmp_path_factory: pytest.TempPathFactory) -> Driver:
    driver = Driver(make_checkpoint("qwen3", tmp_path_factory.mktemp("qwen3")), num_blocks=256)
    if not driver.facts.max_drafts:
        pytest.skip("drafts are verified by the native kernels, and there is no compiler for them")
    return driver


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(driver: Driver, setting: str, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = requests_of(SETTINGS[setting])
    expected = run(driver, requests, None)
    for accuracy in (1.0, 0.7, 0.0):
        assert run(driver, requests, AnswerProposer(answers(expected), accuracy)) == expected
        assert num_accepted(driver) > 0 or not accuracy
    assert run(driver, requests, Lookup()) == expected
    monkeypatch.setattr("penstock.engine.planning.lookup._STEP_TOKENS", 5)
    assert run(driver, requests, Lookup()) == expected, "nor by a lookup that is behind"


@pytest.mark.parametrize("family", FAMILIES)
def test_every_family(tmp_path: Path, family: str) -> None:
    driver = Driver(make_checkpoint(family, tmp_path), num_blocks=256)
    if not driver.facts.max_drafts:
        pytest.skip("drafts are verified by the native kernels, and there is no compiler for them")
    requests = requests_of({"temperature": 0.8})
    expected = run(driver, requests, None)
    assert run(driver, requests, AnswerProposer(answers(expected), 0.8)) == expected
    assert num_accepted(driver) > 0


def test_what_drafts_bring_follows_the_distribution(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over many seeds, each of two likely tokens is taken as often as its probability says: Pearson's chi-square."""
    sampling = SamplingParams(temperature=0.125, top_k=2, max_tokens=16, num_logprobs=2, ignore_eos=True)
    requests = [
        Request(
            request_id=f"r{seed}",
            prompt_token_ids=prompt_of(9, seed),
            sampling=replace(sampling, seed=seed),
            n=8,
        )
        for seed in range(60)
    ]
    expected_answers = answers(run(driver, requests, None))
    monkeypatch.setattr("tests.engine.driver.Drafting", drafting_always)
    monkeypatch.setattr(driver, "max_num_seqs", 8)  # so that their steps have room
    found = run(driver, requests, AnswerProposer(expected_answers, 0.7))
    assert num_accepted(driver) > 1_000
    first, chance = [], []
    for token_ids, logprobs, _ in (output for outputs in found.values() for output in outputs):
        (top_id, top), (_, second) = logprobs[0].top
        first.append(token_ids[0] == top_id)
        chance.append(1 / (1 + exp(8 * (second - top))))
    bins, chances = np.digitize(chance, np.linspace(0.5, 1.0, 9)), np.array(chance)
    expected, variance = np.bincount(bins, chances), np.bincount(bins, chances * (1 - chances))
    some = variance > 5
    assert some.sum() > 3
    statistic = ((np.bincount(bins, first) - expected)[some] ** 2 / variance[some]).sum()
    assert statistic < bound(int(some.sum()))


def test_chunked_prompts_preemption_and_a_pool_that_is_nearly_full(driver: Driver) -> None:
    requests = requests_of({"temperature": 0.9})
    expected = run(driver, requests, None)
    proposer = AnswerProposer(answers(expected), 0.8)
    assert run(driver, requests, proposer, budget=7, prefix_cache=False) == expected
    assert run(driver, requests, proposer, before_step=preempting(driver)) == expected
    assert num_accepted(driver) > 0


def test_a_cancelled_sequence_leaves_the_others_alone(driver: Driver) -> None:
    requests = requests_of({"temperature": 0.9})
    expected = run(driver, requests, None)

    def cancel(step: int) -> None:
        if step == 3:
            for output in driver.scheduler.sequences.cancel("r1", 0.0):
                driver.outputs.setdefault(("r1", output.index), []).append(replace(output, token_ids=[0]))

    found = run(driver, requests, AnswerProposer(answers(expected), 0.8), before_step=cancel)
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


def drafter_of(driver: Driver) -> Drafter:
    drafter = driver.runner.steps.drafter
    if drafter is None:
        pytest.skip("drafts are verified by the native kernels, and there is no compiler for them")
    return drafter


def preempting(driver: Driver) -> Callable[[int], None]:
    """Has one of the running sequences give way before every third step."""

    def preempt(step: int) -> None:
        sequences = driver.scheduler.sequences
        if sequences.running and step % 3 == 2:
            sequences.preempt(sequences.running[step % len(sequences.running)])

    return preempt


def assert_always_right(twin: Driver, requests: list[Request], least: int, **how: Any) -> None:
    """Checks that tokens are those without drafts, and that each of more than `least` drafts is right."""
    expected = run(twin, requests, None)
    assert run(twin, requests, None, model=True, **how) == expected, how
    found = count(twin, "draft")
    assert found.num_accepted == found.num_drafted > least, how


@pytest.fixture(scope="module")
def twin(driver: Driver) -> Driver:
    """A model that drafts for itself: whatever happens, each of its drafts is right, to the bit."""
    return Driver(driver.folder, num_blocks=256, draft=DraftSource(driver.folder))


@pytest.mark.parametrize("setting", SETTINGS)
def test_a_model_agrees_with_itself(twin: Driver, setting: str) -> None:
    assert_always_right(twin, requests_of(SETTINGS[setting]), 50)


def test_what_the_draft_knows_survives_whatever_becomes_of_blocks(twin: Driver) -> None:
    requests = requests_of({"temperature": 0.9})
    preempt = preempting(twin)
    hows: tuple[dict[str, Any], ...] = (
        {"budget": 7},
        {"budget": 7, "prefix_cache": False},
        {"before_step": preempt},
        {"before_step": preempt, "prefix_cache": False},
        {"num_blocks": 14},
        {"num_blocks": 14, "prefix_cache": False},
    )
    for how in hows:
        assert_always_right(twin, requests, 10, **how)


def test_long_prompts_and_logits_of_another_number(twin: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes of few tokens, and each of them by itself."""
    drafter = drafter_of(twin)
    monkeypatch.setattr(drafter._kv, "_max_tokens", 9)
    monkeypatch.setattr(drafter, "model", replace(drafter.model, native=None))
    for setting in ("cool", "penalties", "top-p", "log probabilities"):
        assert_always_right(twin, requests_of(SETTINGS[setting]), 10)


def test_prompts_that_others_computed_need_not_be_computed_again(
    twin: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    request = Request(
        request_id="r",
        prompt_token_ids=tuple(range(5, 105)),
        sampling=SamplingParams(temperature=0.9, max_tokens=20, ignore_eos=True),
    )
    drafter, read = drafter_of(twin), list[DraftChunk]()
    begin = drafter._kv.begin

    def noted(lengths: dict[Sequence, int], *more: Any) -> list[DraftChunk]:
        chunks = begin(lengths, *more)
        read.extend(chunks)
        return chunks

    monkeypatch.setattr(drafter._kv, "begin", noted)
    drafter._kv._contents.clear()
    expected = run(twin, [request], None, model=True)
    assert read[0].start == 0
    read.clear()
    twin.outputs.clear()
    twin.run(request)
    assert {key: told(outputs) for key, outputs in twin.outputs.items()} == expected
    assert read[0].start >= 96, "the blocks of the prompt have the draft's KV"


def test_another_models_drafts_are_verified(tmp_path: Path, driver: Driver) -> None:
    other = Driver(driver.folder, num_blocks=256, draft=DraftSource(make_checkpoint("llama", tmp_path)))
    for setting in ("cool", "penalties", "top-p"):
        requests = requests_of(SETTINGS[setting])
        expected = run(other, requests, None)
        assert run(other, requests, Lookup(), model=True) == expected
        found = count(other, "draft")
        assert 0 <= found.num_accepted < found.num_drafted


def test_a_sequence_without_finite_logits_has_no_drafts_and_leaves_others_theirs(tmp_path: Path) -> None:
    folder, broken = make_checkpoint("llama", tmp_path), tmp_path / "broken"
    shutil.copytree(folder, broken)
    tensors = load_file(broken / "model.safetensors")
    assert "lm_head.weight" in tensors, "the logits of others are finite"
    tensors["model.embed_tokens.weight"][9] = torch.nan
    save_file(tensors, broken / "model.safetensors", {"format": "pt"})
    driver = Driver(folder, num_blocks=256, draft=DraftSource(broken))
    if not driver.facts.max_drafts:
        pytest.skip("drafts are verified by the native kernels, and there is no compiler for them")
    sampling = SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True, logit_bias={9: -100.0})
    requests = [
        Request(request_id=name, prompt_token_ids=prompt, sampling=sampling)
        for name, prompt in (("bad", (7, 9, 8)), ("good", (7, 8)))
    ]
    expected = run(driver, requests, None)
    assert run(driver, requests, None, model=True) == expected
    assert driver.scheduler.drafting is not None
    assert driver.scheduler.drafting.failed == []
    drafts = {
        name: outputs[-1].timings.drafts
        for (name, _), outputs in driver.outputs.items()
        if outputs[-1].timings
    }
    assert "draft" not in drafts["bad"]
    assert drafts["good"]["draft"].num_accepted > 0


@pytest.fixture(scope="module")
def numbers() -> list[int]:
    """By token, its number in another vocabulary."""
    return random.Random(1).sample(range(VOCAB_SIZE), VOCAB_SIZE)


@pytest.fixture(scope="module")
def renumbered(driver: Driver, numbers: list[int], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The model itself, with other numbers for its tokens."""
    folder = tmp_path_factory.mktemp("renumbered") / "model"
    shutil.copytree(driver.folder, folder)
    tensors = load_file(folder / "model.safetensors")
    embedding = tensors["model.embed_tokens.weight"]
    assert "lm_head.weight" not in tensors, "it is tied to the embedding"
    tensors["model.embed_tokens.weight"] = torch.empty_like(embedding).index_copy_(
        0, torch.tensor(numbers), embedding
    )
    save_file(tensors, folder / "model.safetensors", {"format": "pt"})
    return folder


def test_a_model_of_other_numbers_is_always_right(
    driver: Driver, renumbered: Path, numbers: list[int]
) -> None:
    tokens = SharedTokens(numbers, numbers)
    other = Driver(driver.folder, num_blocks=256, draft=DraftSource(renumbered, tokens))
    for setting in ("greedy", "cool", "penalties", "top-p"):
        assert_always_right(other, requests_of(SETTINGS[setting]), 50)


def test_only_shared_tokens_are_drafted(
    driver: Driver, renumbered: Path, numbers: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Every third token is another one in the draft, and read as 5."""
    same = [-1 if token % 3 == 0 else number for token, number in enumerate(numbers)]
    tokens = SharedTokens(same, [number if number >= 0 else numbers[5] for number in same])
    other = Driver(driver.folder, num_blocks=256, draft=DraftSource(renumbered, tokens))
    proposed: list[int] = []
    draft = other.runner.draft

    def noted(plan: StepPlan, *, may_stay: bool) -> list[list[int]]:  # noqa: ARG001
        found = draft(plan, may_stay=False)
        assert found is not None
        proposed.extend(token for drafts in found for token in drafts)
        return found

    monkeypatch.setattr(other.runner, "draft", noted)
    for setting in ("greedy", "hot", "penalties", "bias", "log probabilities"):
        requests = requests_of(SETTINGS[setting])
        expected = run(other, requests, None)
        assert run(other, requests, Lookup(), model=True) == expected, setting
    assert len(proposed) > 100
    assert all(token % 3 for token in proposed)


def test_a_draft_model_that_fails_leaves_the_answers_alone(
    twin: Driver, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = requests_of({"temperature": 0.9})
    expected = run(twin, requests, None)

    def broken(*_: object) -> None:
        raise RuntimeError("broken")

    def break_it(step: int) -> None:
        if step == 9:
            monkeypatch.setattr(drafter_of(twin), "_make_natively", broken)

    assert run(twin, requests, Lookup(), model=True, before_step=break_it) == expected
    assert twin.scheduler.drafting is not None
    assert twin.scheduler.drafting.failed == ["draft"]
