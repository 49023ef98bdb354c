"""Watermarks in steps: every row knows the token before it, with drafts and graphs, natively and in plain torch."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

from penstock.engine.config import LoadOptions
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.model.drafts import DraftSource
from penstock.engine.text.watermark import Watermark, evidence
from tests.engine.checkpoints import make_checkpoint
from tests.engine.execution.test_plain_steps import PlainDriver
from tests.engine.execution.test_steps import SEATS, RepeatingDevice, StepDriver, ask, device_runner
from tests.engine.execution.test_verified_steps import AnswerProposer, Drafts, load

MARK = Watermark(key=0xFEED_5EED, delta=3.0)
ABSOLUTE = Watermark(key=0xBEEF, gamma=0.25, delta=60.0)
"""It leaves green tokens alone: random models have no logits that far apart."""

REQUESTS = (
    ask("greedy", 21, max_tokens=16, temperature=0.0, watermark=MARK),
    ask("warm", 9, n=3, max_tokens=12, seed=5, top_p=0.9, watermark=MARK),
    ask("penalised", 17, max_tokens=14, seed=2, presence_penalty=1.0, watermark=MARK),
    ask("sifted", 7, seed=8, max_tokens=16, typical_p=0.8, watermark=MARK),
    ask("green", 11, max_tokens=45, seed=1, watermark=ABSOLUTE),
    ask("green penalised", 5, max_tokens=14, seed=4, frequency_penalty=0.4, watermark=ABSOLUTE),
    ask("plain", 12, max_tokens=12, seed=4),
    ask("told", 12, max_tokens=12, seed=4, num_logprobs=3, watermark=MARK),
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def runner(folder: Path) -> ModelRunner:
    """Plain torch, with graphs."""
    return device_runner(load(folder), RepeatingDevice(), max_drafts=5)


@pytest.fixture(scope="module")
def expected(folder: Path) -> StepDriver:
    return StepDriver(device_runner(load(folder), None, num_ahead=0), num_ahead=0).run(*REQUESTS)


def test_all_tokens_come_from_the_lists_after_their_own_previous_ones(expected: StepDriver) -> None:
    tokens = expected.tokens()
    for request in REQUESTS:
        if request.sampling.watermark is ABSOLUTE:
            text = [request.prompt_token_ids[-1], *tokens[request.request_id, 0]]
            assert all(ABSOLUTE.is_green(*pair) for pair in pairwise(text))
    assert tokens["plain", 0] != tokens["told", 0], "which differs by the watermark alone"


@pytest.mark.parametrize("how", [{}, {"num_blocks": 12}, {"budget": 9, "prefix_cache": False}])
def test_a_step_ahead_changes_no_answer(
    runner: ModelRunner, expected: StepDriver, how: dict[str, Any]
) -> None:
    assert StepDriver(runner, **how).run(*REQUESTS, preempt_at=(4, 9)).tokens() == expected.tokens()


@pytest.mark.parametrize("accuracy", [1.0, 0.7, 0.0])
def test_drafts_change_no_answer(runner: ModelRunner, expected: StepDriver, accuracy: float) -> None:
    drafts = Drafts(AnswerProposer(expected.tokens(), accuracy))
    driver = StepDriver(runner, drafting=drafts).run(*REQUESTS, preempt_at=(4, 9))
    assert driver.tokens() == expected.tokens()
    assert bool(drafts.count[True]) == (accuracy > 0)
    assert bool(drafts.count[False]) == (accuracy < 1)


@pytest.mark.parametrize("may_follow", [False, True])
def test_drafts_of_a_model_have_the_watermark(folder: Path, expected: StepDriver, may_follow: bool) -> None:
    """A model that drafts for itself is right, which it could not be without it."""
    runner = device_runner(load(folder, DraftSource(folder)), None, max_drafts=5)
    drafts = Drafts(None, may_follow=may_follow)
    assert StepDriver(runner, drafting=drafts).run(*REQUESTS, preempt_at=(4, 9)).tokens() == expected.tokens()
    assert drafts.count[True] > 10
    assert not drafts.count[False]


@pytest.mark.parametrize("accuracy", [None, 0.7])
def test_native_steps_choose_the_same(folder: Path, expected: StepDriver, accuracy: float | None) -> None:
    """Steps without a watermark are still one native call."""
    options = LoadOptions(
        device="cpu", dtype="float32", num_blocks=120, max_batch_tokens=32, max_num_seqs=SEATS
    )
    model = load_model(folder, options, lambda _: None, lambda *_: None)
    if model.kernels.team is None:
        pytest.skip("there are no native kernels")
    answers = expected.tokens() | {("late", 0): []}
    drafting = None if accuracy is None else Drafts(AnswerProposer(answers, accuracy))
    late = ask("late", 12, max_tokens=80, seed=4)
    driver = PlainDriver(model, beside=True, whole=True, drafting=drafting)
    found = driver.run(*REQUESTS, late).tokens()
    assert len(found.pop(("late", 0))) == 80
    assert found == expected.tokens()
    assert driver.kinds.count("apart") > 10
    assert driver.kinds.count("beside") > 10


def test_the_key_finds_its_texts_and_no_other_does(runner: ModelRunner) -> None:
    marked, plain = (
        [ask(f"{name} {i}", 6, max_tokens=150, seed=i, watermark=mark) for i in range(4)]
        for name, mark in (("marked", Watermark(key=1, delta=3.0)), ("plain", None))
    )
    tokens = StepDriver(runner).run(*marked, *plain).tokens()
    for request in marked:
        text = tokens[request.request_id, 0]
        assert evidence(text, Watermark(key=1)).z > 6
        assert abs(evidence(text, Watermark(key=2)).z) < 4
    for request in plain:
        assert abs(evidence(tokens[request.request_id, 0], Watermark(key=1)).z) < 4
