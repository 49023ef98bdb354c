"""Models whose layers have a state in a run: hits, drafts, preemption, forks and few slots change no token."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.errors import CheckpointError
from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.lookup import Lookup
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from tests.engine.driver import Driver
from tests.engine.eagle_heads import make_eagle
from tests.engine.fake_runner import drafting_always
from tests.engine.families import STATES, TINY
from tests.engine.test_beam_search import search
from tests.engine.test_drafts import AnswerProposer, count, num_accepted

FAMILIES = ["Qwen 3.5", "LFM2", "Granite 4 H"]
NUM_TURNS = 2


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return STATES[request.param].make(tmp_path_factory.mktemp("states"))


@pytest.fixture(scope="module")
def driver(folder: Path) -> Driver:
    return Driver(folder, num_blocks=256)


@pytest.fixture(autouse=True)
def _drafts_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.driver.Drafting", drafting_always)


def words(numbers: random.Random, count: int) -> tuple[int, ...]:
    return tuple(numbers.randrange(5, 300) for _ in range(count))


def ask(name: str, prompt: tuple[int, ...], *, n: int = 1, **sampling: Any) -> Request:
    asked: dict[str, Any] = {"temperature": 0.0, "max_tokens": 8, "seed": 5, "ignore_eos": True, **sampling}
    return Request(request_id=name, prompt_token_ids=prompt, sampling=SamplingParams(**asked), n=n)


class Conversation:
    """Turns of random lengths. What a template leaves out of a turn when the next one comes is left out here, too."""

    def __init__(self, number: int) -> None:
        self._numbers, self._number = random.Random(number), number
        system = words(random.Random(number % 2), 21) if number % 3 else ()
        self._prompt = (*system, *words(self._numbers, self._numbers.randrange(1, 30)))
        self._sampling: dict[str, Any] = {
            "temperature": 0.8 * (number % 2),
            "seed": number,
            "num_logprobs": 2,
        }

    def turn(self, number: int) -> Request:
        num_tokens = random.Random(str((self._number, number))).randrange(3, 10)
        return ask(f"{self._number}.{number}", self._prompt, max_tokens=num_tokens, **self._sampling)

    def answer(self, tokens: list[int]) -> None:
        left_out = self._numbers.randrange(4)
        kept = self._prompt[: max(1, len(self._prompt) - left_out)]
        self._prompt = (*kept, *tokens, *words(self._numbers, self._numbers.randrange(1, 10)))


def talk(driver: Driver, preempt_every: int = 0) -> dict[tuple[str, int], list[Any]]:
    """What twenty conversations at once bring: tokens and, where kernels keep the bits of a row, log probabilities."""

    def preempt(step: int) -> None:
        running = driver.scheduler.sequences.running
        if preempt_every and step % preempt_every == 2 and running:
            driver.scheduler.sequences.preempt(running[step % len(running)])

    conversations = [Conversation(number) for number in range(20)]
    for turn in range(NUM_TURNS):
        requests = [conversation.turn(turn) for conversation in conversations]
        driver.run(*requests, before_step=preempt)
        for conversation, request in zip(conversations, requests, strict=True):
            conversation.answer(driver.tokens(request.request_id))
    is_exact = driver.runner.model.kernels.team is not None
    return {
        key: [(output.token_ids, output.logprobs if is_exact else None) for output in outputs]
        for key, outputs in driver.outputs.items()
    }


def num_cached(driver: Driver, name: str) -> int:
    timings = driver.outputs[name, 0][-1].timings
    assert timings is not None
    return timings.num_cached_tokens


def test_conversations_at_once_say_what_they_say_undisturbed(driver: Driver) -> None:
    """With hits, drafts, some of which are wrong, few slots and blocks, small steps and interruptions."""
    driver.fresh(prefix_cache=False, budget=400)
    expected = talk(driver)
    proposer = AnswerProposer({key: driver.tokens(*key) for key in driver.outputs}, 0.7)
    driver.fresh(budget=50, num_blocks=30, num_states=12, proposer=proposer)
    found = talk(driver, preempt_every=3)
    assert found == expected
    assert driver.scheduler.sequences.counters.num_preemptions >= 5
    assert num_accepted(driver) > 10
    assert count(driver, "proposer").num_drafted > num_accepted(driver) + 10
    hits = [num_cached(driver, f"{number}.1") for number in range(20)]
    assert sum(hit > 0 for hit in hits) >= 5
    assert any(hit % driver.facts.block_size for hit in hits), "in the midst of a block"


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_hit_with_drafts_gives_the_text_of_neither(driver: Driver, temperature: float) -> None:
    """Tokens are few, so that a lookup finds them again, right ones and wrong ones."""
    bias = dict.fromkeys((7, 8, 9, 10), 30.0)
    prompt = words(random.Random(3), 50)
    requests = [
        ask(str(length), prompt[:length], temperature=temperature, logit_bias=bias, max_tokens=40)
        for length in (30, 50)
    ]
    texts = []
    for prefix_cache in (False, True):
        driver.fresh(prefix_cache=prefix_cache, proposer=Lookup() if prefix_cache else None)
        for request in requests:
            driver.run(request)
        texts.append([driver.tokens(request.request_id) for request in requests])
    assert texts[0] == texts[1]
    assert num_cached(driver, "50") == 29
    found = count(driver, "lookup")
    assert found.num_accepted
    assert found.num_accepted < found.num_drafted or not temperature


def test_ten_turns_are_found_but_for_what_is_new(driver: Driver) -> None:
    numbers = random.Random(1)
    prompt = words(numbers, 100)
    driver.fresh()
    for turn in range(10):
        driver.run(ask(str(turn), prompt))
        if turn:
            assert num_cached(driver, str(turn)) > 0.9 * len(prompt)
        prompt = (*prompt, *driver.tokens(str(turn)), *words(numbers, 2))
    driver.run(ask("again", prompt))
    driver.run(ask("and again", prompt))
    assert num_cached(driver, "and again") == len(prompt) - 1


def test_choices_fork_from_one_prompt(driver: Driver) -> None:
    request = ask("choices", words(random.Random(2), 45), n=3, temperature=0.8)

    def again(step: int) -> None:
        if step % 4 == 3 and driver.scheduler.sequences.running:
            driver.scheduler.sequences.preempt(driver.scheduler.sequences.running[0])

    driver.fresh(prefix_cache=False)
    driver.run(request, before_step=again)
    expected = {key: driver.tokens(*key) for key in driver.outputs}
    assert len({tuple(tokens) for tokens in expected.values()}) == 3
    driver.fresh()
    driver.run(request)
    assert {key: driver.tokens(*key) for key in driver.outputs} == expected


def test_beams_are_those_of_transformers(driver: Driver, folder: Path) -> None:
    asked = search("beams", 3)
    driver.fresh()
    driver.run(asked)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    ids = torch.tensor([asked.prompt_token_ids])
    found = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        max_new_tokens=asked.sampling.max_tokens,
        do_sample=False,
        num_beams=3,
        num_return_sequences=3,
        pad_token_id=0,
        eos_token_id=-1,
    )
    assert [driver.tokens("beams", index) for index in range(3)] == found[:, ids.shape[1] :].tolist()


@pytest.mark.parametrize("is_head", [False, True])
def test_a_draft_model_or_a_head_drafts_for_one_with_states(is_head: bool, tmp_path: Path) -> None:
    target = STATES["LFM2"].make(tmp_path / "target")
    draft = make_eagle(tmp_path / "draft") if is_head else TINY["Qwen 3"].make(tmp_path / "draft")
    driver = Driver(target, num_blocks=64, draft=DraftSource(draft))
    if not driver.facts.has_draft_model:
        pytest.skip("only native kernels show what a head reads, and there is no compiler for them")
    prompt, texts = words(random.Random(4), 40), []
    for model in (False, True):
        driver.fresh(model=model)
        driver.run(*(ask(name, prompt[:length], max_tokens=20) for name, length in (("a", 30), ("b", 40))))
        driver.run(ask("again", prompt, temperature=0.8, max_tokens=20))
        assert num_cached(driver, "again") == 39
        texts.append([driver.tokens(name) for name in ("a", "b", "again")])
    assert texts[0] == texts[1]
    assert count(driver, "draft").num_drafted


def test_a_draft_model_has_no_states(tmp_path: Path) -> None:
    target, draft = TINY["Qwen 3"].make(tmp_path / "target"), STATES["LFM2"].make(tmp_path / "draft")
    with pytest.raises(CheckpointError, match="Lfm2ForCausalLM has layers with a state, and a draft model"):
        Driver(target, draft=DraftSource(draft))
