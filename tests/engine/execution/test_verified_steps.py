"""Drafts on a device that runs beside the host, on a CPU: right and wrong ones change no answer, and graphs neither."""

from __future__ import annotations

import random
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from penstock.engine.config import LoadOptions
from penstock.engine.execution import loader
from penstock.engine.execution.drafter import MadeDrafts
from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.execution.loader import load_model
from penstock.engine.execution.runner import ModelRunner
from penstock.engine.execution.seats import StepShape
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.drafts import DraftSource, SharedTokens
from penstock.engine.planning.device import StepInFlight
from penstock.engine.planning.drafting import Proposer
from penstock.engine.planning.request import Sequence
from penstock.engine.planning.step import Masks, StepPlan, before_open
from penstock.engine.planning.timings import DraftSeconds
from tests.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.execution.test_steps import SEATS, RepeatingDevice, StepDriver, ask, device_runner, padded
from tests.engine.fake_runner import UnpricedDrafting
from tests.engine.rounding_noise import error_of

Answers = dict[tuple[str, int], list[int]]
Captured = tuple[ModelRunner, RepeatingDevice]
"""A runner with graphs, and the device that replays them."""

REQUESTS = (
    ask("greedy", 21, max_tokens=16, temperature=0.0),
    ask("warm", 9, n=3, max_tokens=12, seed=5, top_p=0.9),
    ask("penalised", 17, max_tokens=14, seed=2, presence_penalty=1.0, repetition_penalty=1.3),
    ask("greedy penalised", 5, max_tokens=14, temperature=0.0, frequency_penalty=0.8),
    ask("banned", 3, seed=3, min_tokens=5, stop_token_ids=frozenset(range(40)), top_k=30),
    ask("told", 12, max_tokens=12, seed=4, num_logprobs=3, min_p=0.01),
    ask("long", 60, max_tokens=20, seed=6),
    ask("again", 60, max_tokens=12, seed=7),
)


class AnswerProposer:
    """Knows the answers, and tells each token of them as it is with a probability of `accuracy`."""

    name = "proposer"
    is_behind = False

    def __init__(self, answers: Answers, accuracy: float) -> None:
        self._answers, self._rightness, self._random = answers, accuracy, random.Random(0)
        self.is_broken = False

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        if self.is_broken:
            raise RuntimeError("broken")
        return [self._propose(*pair) for pair in zip(sequences, lengths, strict=True)]

    def _propose(self, sequence: Sequence, most: int) -> list[int]:
        first = sequence.num_output_tokens
        right = self._answers[sequence.key][first : first + most]
        return [
            token if self._random.random() < self._rightness else self._random.randrange(VOCAB_SIZE)
            for token in right
        ]

    def forget(self, sequence: Sequence) -> None: ...


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint("qwen3", tmp_path_factory.mktemp("model"))


def load(folder: Path, draft: DraftSource | None = None) -> LoadedModel:
    """On plain torch's kernels, which a device has where there are no others."""
    options = LoadOptions(
        device="cpu", dtype="float32", num_blocks=60, max_batch_tokens=48, max_num_seqs=SEATS
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(loader, "select", lambda _, device, dtype, *__: reference_kernels(device, dtype))
        return load_model(folder, options, lambda _: None, lambda *_: None, draft)


@pytest.fixture(scope="module")
def model(folder: Path) -> LoadedModel:
    return load(folder)


@pytest.fixture(scope="module")
def expected(model: LoadedModel) -> StepDriver:
    """Without drafts, one step after another."""
    return StepDriver(device_runner(model, None, num_ahead=0), num_ahead=0).run(*REQUESTS)


@pytest.fixture(scope="module")
def captured(model: LoadedModel) -> Captured:
    device = RepeatingDevice()
    return device_runner(model, device, max_drafts=5), device


class Drafts(UnpricedDrafting):
    """In most steps; what was verified is counted by whether it was right."""

    def __init__(self, lookup: Proposer | None, most: int = 5, *, may_follow: bool = False) -> None:
        """Without a proposer, the draft model makes the drafts."""
        super().__init__(lookup, most, random.Random(1), has_model=lookup is None, may_follow=may_follow)
        self.count = Counter[bool]()

    def observe(self, plan: StepPlan, seconds: float) -> DraftSeconds:
        found = super().observe(plan, seconds)
        for chunk in plan.chunks:
            self.count[True] += chunk.num_accepted
            self.count[False] += len(before_open([*chunk.drafts])) - chunk.num_accepted
        return found


@pytest.mark.parametrize(
    ("accuracy", "graphs", "how"),
    [
        (1.0, True, {}),
        (0.7, True, {"num_blocks": 12}),
        (0.7, False, {"budget": 9, "prefix_cache": False}),
        (0.0, False, {}),
    ],
)
def test_drafts_change_no_answer(
    model: LoadedModel,
    captured: Captured,
    expected: StepDriver,
    accuracy: float,
    graphs: bool,
    how: dict[str, Any],
) -> None:
    """All kinds of sampling at once, beside prompts in chunks, with sequences that give way, fork and share blocks."""
    runner = captured[0] if graphs else device_runner(model, None, max_drafts=5)
    drafts = Drafts(AnswerProposer(expected.tokens(), accuracy))
    driver = StepDriver(runner, drafting=drafts, **how).run(*REQUESTS, preempt_at=(4, 9))
    assert driver.tokens() == expected.tokens()
    assert bool(drafts.count[True]) == (accuracy > 0)
    assert bool(drafts.count[False]) == (accuracy < 1)
    assert driver.scheduler.sequences.counters.num_preemptions >= 2


def test_steps_with_drafts_are_replayed_whole(folder: Path, captured: Captured, expected: StepDriver) -> None:
    """Rows are padded to the next graph; each round of a sequence with penalties is a replay more."""
    runner, device = captured
    driver = StepDriver(runner, drafting=Drafts(AnswerProposer(expected.tokens(), 0.8)))
    launch, seen = driver.launch, Counter[str]()

    def noted(plan: StepPlan) -> StepInFlight:
        shape, before = StepShape.of(plan), len(device.replays)
        step = launch(plan)
        num = len(device.replays) - before
        has_prompts = any(chunk.num_tokens > 1 + len(chunk.drafts) for chunk in plan.chunks)
        if shape.verifies and shape.num_rows <= 32 and not has_prompts:
            is_penalised = any(c.drafts and "penal" in c.sequence.request.request_id for c in plan.chunks)
            num_rounds = 1 + is_penalised * max(len(chunk.drafts) for chunk in plan.chunks)
            assert num == 1 + num_rounds, "a pass, and a choice for each round"
            seen["in rounds" if is_penalised else "at once"] += 1
            found = runner.steps.passes.covering(shape)
            assert found is not None
            seen["padded"] += found.num_tokens > shape.num_tokens
        return step

    driver.launch = noted  # type: ignore[method-assign]
    assert driver.run(*REQUESTS).tokens() == expected.tokens()
    assert min(seen["in rounds"], seen["at once"], seen["padded"]) > 2
    error = 2 * error_of(folder, list(range(1, 40)))
    for output, other in zip(driver.outputs["told", 0], expected.outputs["told", 0], strict=True):
        assert output.logprobs is not None
        assert other.logprobs is not None
        (mine,), (theirs,) = output.logprobs, other.logprobs
        assert mine.logprob == pytest.approx(theirs.logprob, abs=error)
        assert [token for token, _ in mine.top] == [token for token, _ in theirs.top]


class LimitedStepDriver(StepDriver):
    """Two of the requests may bring the first 64 tokens alone."""

    limited = ("penalised", "long")

    def launch(self, plan: StepPlan) -> StepInFlight:
        first, num_rows = [], 0
        for chunk in plan.chunks:
            is_limited = chunk.samples and chunk.sequence.request.request_id in self.limited
            first.append(num_rows if is_limited else -1)
            num_rows += is_limited * (1 + len(chunk.drafts))
        if num_rows:
            plan.masks = Masks(bytearray(b"\xff" * 8 * num_rows), 2, first)
        return super().launch(plan)


def test_masks_limit_the_rows_of_drafts(model: LoadedModel, captured: Captured) -> None:
    plain = LimitedStepDriver(device_runner(model, None, num_ahead=0), num_ahead=0).run(*REQUESTS).tokens()
    drafts = Drafts(AnswerProposer(plain, 0.8))
    assert LimitedStepDriver(captured[0], drafting=drafts).run(*REQUESTS).tokens() == plain
    assert min(drafts.count.values()) > 5
    assert max(plain["long", 0]) < 64


def test_who_is_cancelled_leaves_the_others_alone(captured: Captured, expected: StepDriver) -> None:
    class Cancelling(StepDriver):
        def step(self) -> None:
            if self.num_steps == 5:
                assert self.scheduler.sequences.cancel("greedy", 0.0)
            super().step()

    drafts = Drafts(AnswerProposer(expected.tokens(), 0.8))
    found = Cancelling(captured[0], drafting=drafts).run(*REQUESTS).tokens()
    assert 0 < len(found.pop(("greedy", 0))) < 16
    assert found == {key: tokens for key, tokens in expected.tokens().items() if key != ("greedy", 0)}


def test_a_proposer_that_fails_is_switched_off(captured: Captured, expected: StepDriver) -> None:
    proposer = AnswerProposer(expected.tokens(), 0.8)

    class Breaking(StepDriver):
        def step(self) -> None:
            proposer.is_broken = self.num_steps > 6
            super().step()

    drafts = Drafts(proposer)
    driver = Breaking(captured[0], drafting=drafts).run(*REQUESTS)
    assert driver.tokens() == expected.tokens()
    assert drafts.failed == ["proposer"]
    assert drafts.count[True]


def test_logits_after_a_draft_that_are_not_finite_bring_no_token(
    model: LoadedModel, expected: StepDriver
) -> None:
    """The tokens before count, and the next step computes the row again."""
    runner = device_runner(model, None, max_drafts=5)
    driver = StepDriver(runner, drafting=Drafts(AnswerProposer(expected.tokens(), 1.0)))
    decoder, launch, broken = runner.model.decoder, driver.launch, list[int]()

    def noted(plan: StepPlan) -> StepInFlight:
        if plan.num_drafts and len(plan.chunks[0].drafts) > 2 and not broken:
            broken.append(plan.num_tokens)

            def breaks(batch: Any) -> torch.Tensor:
                object.__setattr__(runner.model, "decoder", decoder)
                hidden = decoder(batch)
                hidden[2] = torch.nan
                return hidden

            object.__setattr__(runner.model, "decoder", breaks)
        return launch(plan)

    driver.launch = noted  # type: ignore[method-assign]
    assert driver.run(*REQUESTS).tokens() == expected.tokens()
    assert broken


# A draft model on the device


@pytest.fixture(scope="module")
def twin(folder: Path) -> Captured:
    """A model that drafts for itself: all of its drafts are right, but for those whose rounding makes a difference."""
    model = load(folder, DraftSource(folder))
    assert model.draft is not None
    draft, device = replace(model.draft, decoder=padded(model.draft.decoder)), RepeatingDevice()
    return device_runner(replace(model, draft=draft), device, max_drafts=5), device


def drafted(runner: ModelRunner, *, may_follow: bool = False, **how: Any) -> tuple[StepDriver, Drafts]:
    drafts = Drafts(None, may_follow=may_follow)
    return StepDriver(runner, drafting=drafts, **how).run(*REQUESTS, preempt_at=(4, 9)), drafts


@pytest.mark.parametrize("may_follow", [False, True])
@pytest.mark.parametrize("how", [{"num_blocks": 12}, {"prefix_cache": False, "budget": 16}])
def test_a_model_agrees_with_itself(
    twin: Captured, expected: StepDriver, how: dict[str, Any], may_follow: bool
) -> None:
    """With penalties, too: what is drafted is not counted for those. Passes of few tokens are replayed."""
    runner, device = twin
    assert runner.steps.of_draft is not None
    num_graphs = len(runner.steps.of_draft.passes.graphs)
    device.replays.clear()
    driver, drafts = drafted(runner, may_follow=may_follow, **how)
    of_draft = [number for number in device.replays if number > device.num_recorded - num_graphs]
    assert len(set(of_draft)) > 2
    assert driver.tokens() == expected.tokens()
    assert drafts.count[True] > 10
    assert not drafts.count[False]


class Changed(Drafts):
    """Of drafts some are changed to the token after them, and each that is wrong has to be one of those."""

    def observe(self, plan: StepPlan, seconds: float) -> DraftSeconds:
        for chunk in plan.chunks:
            sequence, first = chunk.sequence, chunk.start + 1 + chunk.num_accepted
            drafts = before_open([*chunk.drafts])[chunk.num_accepted :]
            if drafts and first < len(sequence.token_ids):
                assert drafts[0] == (sequence.token_ids[first] + 1) % VOCAB_SIZE, sequence
        return super().observe(plan, seconds)


@pytest.mark.parametrize("accuracy", [0.9, 0.5, 0.1])
@pytest.mark.parametrize("graphs", [True, False])
def test_what_follows_wrong_drafts_is_drafted_right(
    twin: Captured,
    expected: StepDriver,
    monkeypatch: pytest.MonkeyPatch,
    graphs: bool,
    accuracy: float,
) -> None:
    """The next step is launched, and its drafts are made, before the host knows which of the last ones were wrong."""
    runner = twin[0] if graphs else device_runner(twin[0].model, None, max_drafts=5)
    drafter, chance = runner.steps.drafter, torch.Generator().manual_seed(1)
    assert drafter is not None
    take, num_following = drafter.take, Counter[bool]()

    def changed(plan: StepPlan) -> MadeDrafts | None:
        made = take(plan)
        if made is not None:
            ids = made._token_ids
            is_kept = torch.rand(len(ids), generator=chance) < accuracy
            made._token_ids = torch.where(is_kept | (ids < 0), ids, (ids + 1) % VOCAB_SIZE)
        for chunk in plan.chunks:
            num_following[bool(chunk.drafts) and chunk.sequence.num_unsure > len(chunk.drafts)] += 1
        return made

    monkeypatch.setattr(drafter, "take", changed)
    drafts = Changed(None, may_follow=True)
    driver = StepDriver(runner, drafting=drafts).run(*REQUESTS, preempt_at=(4, 9))
    assert driver.tokens() == expected.tokens()
    assert min(drafts.count.values()) > 5
    assert num_following[True] > 20


def test_other_numbers_for_the_same_tokens(folder: Path, expected: StepDriver) -> None:
    """Read as another token each, what is drafted is wrong, and the answers are right."""
    numbers = random.Random(1).sample(range(VOCAB_SIZE), VOCAB_SIZE)
    runner = device_runner(load(folder, DraftSource(folder, SharedTokens(numbers, numbers))), None, 5)
    driver, drafts = drafted(runner)
    assert driver.tokens() == expected.tokens()
    assert drafts.count[False] > drafts.count[True]
