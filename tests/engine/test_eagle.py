"""Heads in EAGLE-3's format: they draft what the paper's description says, and change no answer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.execution import loader
from penstock.engine.hashing import split_mix
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.lookup import Lookup
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from penstock.engine.planning.step import StepPlan
from penstock.engine.sampling.noise import gumbel, hashes, noise_keys
from tests.engine.checkpoints import VOCAB_SIZE, make_checkpoint
from tests.engine.driver import Driver
from tests.engine.eagle_heads import NUM_DRAFTED, TAPS, ReferenceHead, make_eagle
from tests.engine.fake_runner import drafting_always
from tests.engine.test_drafts import (
    SETTINGS,
    answers,
    count,
    drafter_of,
    preempting,
    prompt_of,
    requests_of,
    run,
)

SLACK = 0.05
"""The tolerance of logits with a deviation of about 1: kernels round more than the oracle, features to 8 bits."""


@dataclass(frozen=True)
class Drafted:
    """The inputs of a head, and its drafts."""

    token_ids: list[int]
    num_outputs: int
    drafts: list[int]
    seed: int
    index: int
    temperature: float


def recorded(driver: Driver, patch: pytest.MonkeyPatch) -> list[Drafted]:
    """What the draft model is asked from now on, with its answers."""
    drafter_of(driver)
    drafted, draft = list[Drafted](), driver.runner.draft

    def noted(plan: StepPlan, *, may_stay: bool) -> list[list[int]]:  # noqa: ARG001
        found = draft(plan, may_stay=False)
        assert found is not None
        for chunk, drafts in zip([c for c in plan.chunks if c.is_open], found, strict=True):
            sequence = chunk.sequence
            if drafts:
                sampling = sequence.request.sampling
                tokens, num_outputs = list(sequence.token_ids), sequence.num_output_tokens
                facts = sampling.seed or 0, sequence.index, sampling.temperature
                drafted.append(Drafted(tokens, num_outputs, drafts, *facts))
        return found

    patch.setattr(driver.runner, "draft", noted)
    return drafted


class Target:
    """The hidden states of a checkpoint's tokens, by transformers."""

    def __init__(self, folder: Path) -> None:
        self._model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        self.embedding = self._model.get_input_embeddings().weight.detach()
        self._known: list[tuple[list[int], list[Tensor]]] = []

    def taps(self, token_ids: list[int]) -> list[Tensor]:
        """[T, hidden] three times; if longer sequences come first, they are computed once for what they begin with."""
        num = len(token_ids)
        for known, taps in self._known:
            if known[:num] == token_ids:
                return [tap[:num] for tap in taps]
        with torch.inference_mode():
            states = self._model(torch.tensor([token_ids]), output_hidden_states=True).hidden_states
        self._known.append((token_ids, [states[tap][0] for tap in TAPS]))
        return self._known[-1][1]


def assert_as_the_oracle_says(drafted: list[Drafted], target: Target, oracle: ReferenceHead) -> None:
    assert_chosen(drafted, lambda token_ids: oracle.features(target.taps(token_ids)), oracle.logits)


def assert_chosen(
    drafted: list[Drafted],
    features_of: Callable[[list[int]], Tensor],
    logits_of: Callable[[list[int], Tensor, list[int]], Tensor],
) -> None:
    """Checks that drafts are what is chosen by logits that an oracle makes of the features of known tokens."""
    for one in sorted(drafted, key=lambda one: -len(one.token_ids)):
        if len(one.token_ids) == 1:
            continue  # nothing is known of what the model thinks
        logits = logits_of(one.token_ids, features_of(one.token_ids[:-1]), one.drafts[:-1])
        numbers = one.num_outputs + torch.arange(len(one.drafts))
        state = split_mix(one.seed, one.index)
        states = torch.full_like(numbers, state - (1 << 64 if state >> 63 else 0))
        scores = logits + one.temperature * gumbel(hashes(noise_keys(states, numbers), VOCAB_SIZE))
        chosen = scores.gather(1, torch.tensor(one.drafts)[:, None]).squeeze(1)
        assert (chosen >= scores.amax(1) - SLACK).all(), one


def wipe(driver: Driver) -> None:
    """Nothing that an earlier run kept of the same tokens is to help."""
    model = driver.runner.model
    assert model.features is not None
    model.features.zero_()
    drafter = drafter_of(driver)
    drafter.model.kv.data.zero_()
    drafter._kv._contents.clear()


@pytest.fixture(autouse=True)
def _drafts_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random heads are hardly ever right, and nobody would ask them for long."""
    monkeypatch.setattr("tests.engine.driver.Drafting", drafting_always)
    monkeypatch.setattr("penstock.engine.planning.drafting._LOWEST_RATE", 0.0)
    monkeypatch.setattr("penstock.engine.planning.drafting.Drafting._model_seconds", lambda *_: 0.0)


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    folder = tmp_path_factory.mktemp("eagle")
    return make_checkpoint("qwen3", folder / "target"), make_eagle(folder / "head")


@pytest.fixture(scope="module")
def driver(folders: tuple[Path, Path]) -> Driver:
    target, head = folders
    return Driver(target, num_blocks=256, draft=DraftSource(head))


@pytest.fixture(scope="module")
def in_torch(folders: tuple[Path, Path]) -> Driver:
    """The same in plain torch, pass by pass."""
    target, head = folders
    with pytest.MonkeyPatch.context() as patch:
        without_native(patch)
        return Driver(target, num_blocks=256, draft=DraftSource(head))


def without_native(patch: pytest.MonkeyPatch) -> None:
    """Models that are loaded run in plain torch."""
    patch.setattr(loader, "select", lambda _, device, dtype, *__: reference_kernels(device, dtype))


@pytest.mark.parametrize("name", ["driver", "in_torch"])
def test_drafts_are_the_oracles_whatever_becomes_of_blocks(
    name: str, folders: tuple[Path, Path], request: pytest.FixtureRequest
) -> None:
    driver: Driver = request.getfixturevalue(name)
    target = Target(folders[0])
    oracle = ReferenceHead.of(folders[1], target.embedding)
    requests = requests_of({"temperature": 0.7})
    preempt = preempting(driver)
    hows: tuple[dict[str, Any], ...] = (
        {},
        {"budget": 7},
        {"budget": 7, "prefix_cache": False},
        {"before_step": preempt},
        {"num_blocks": 14},
    )
    for how in hows[2 * (name == "in_torch") :]:  # what becomes of blocks is planned alike
        expected = run(driver, requests, None, **how)
        wipe(driver)
        with pytest.MonkeyPatch.context() as patch:
            drafted = recorded(driver, patch)
            assert run(driver, requests, None, model=True, **how) == expected, how
        assert len(drafted) > 25, how
        assert_as_the_oracle_says(drafted[::2], target, oracle)


def test_a_fork_drafts_once_its_block_is_copied(
    driver: Driver, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The block that the head reads is copied after the step is planned."""
    target = Target(folders[0])
    sampling = SamplingParams(seed=5, temperature=0.9, max_tokens=12, ignore_eos=True)
    request = Request(request_id="r", prompt_token_ids=prompt_of(20, 3), sampling=sampling, n=3)
    expected = run(driver, [request], None)
    wipe(driver)
    drafted = recorded(driver, monkeypatch)
    assert run(driver, [request], None, model=True) == expected
    assert {one.index for one in drafted} == {0, 1, 2}
    assert_as_the_oracle_says(drafted, target, ReferenceHead.of(folders[1], target.embedding))


@pytest.mark.parametrize(
    ("family", "how"),
    [
        ("llama", {"prefix": "layers.0"}),
        ("qwen3", {"norm_before_residual": True}),
        ("qwen2", {"hidden": 48, "has_embedding": True}),
        ("llama", {"num_drafted": VOCAB_SIZE, "draft_vocab_size": None}),
    ],
)
def test_every_kind_of_head(
    tmp_path: Path, family: str, how: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = make_checkpoint(family, tmp_path / "target")
    head = make_eagle(tmp_path / "head", **how)
    driver = Driver(folder, num_blocks=256, draft=DraftSource(head))
    target = Target(folder)
    requests = requests_of({"temperature": 0.0})
    expected = run(driver, requests, None)
    drafted = recorded(driver, monkeypatch)
    assert run(driver, requests, None, model=True) == expected
    assert_as_the_oracle_says(drafted[::4], target, ReferenceHead.of(head, target.embedding))
    assert len({token for one in drafted for token in one.drafts}) > 50


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(driver: Driver, setting: str) -> None:
    requests = requests_of(SETTINGS[setting])
    expected = run(driver, requests, None)
    assert run(driver, requests, Lookup(), model=True) == expected
    assert count(driver, "draft").num_drafted > 25


def test_plain_torch_says_the_same_with_drafts_and_without(in_torch: Driver) -> None:
    requests = requests_of(SETTINGS["penalties"])
    expected = run(in_torch, requests, None)
    assert answers(run(in_torch, requests, Lookup(), model=True)) == answers(expected)
    assert count(in_torch, "draft").num_drafted > 25


def test_only_tokens_of_the_head_are_drafted(
    driver: Driver, folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    drafted = recorded(driver, monkeypatch)
    run(driver, requests_of({"temperature": 2.0}), None, model=True)
    found = {token for one in drafted for token in one.drafts}
    assert len(found) > NUM_DRAFTED / 2
    assert found <= {*ReferenceHead.of(folders[1], torch.empty(0)).drafted().tolist()}


def test_more_sequences_than_have_their_logits_at_once(
    folders: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    target, draft = Target(folders[0]), DraftSource(folders[1])
    driver = Driver(folders[0], num_blocks=256, budget=512, max_num_seqs=70, draft=draft)
    sampling = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
    prompts = [prompt_of(3, i) for i in range(70)]
    requests = [Request(request_id=str(p), prompt_token_ids=p, sampling=sampling) for p in prompts]
    drafted = recorded(driver, monkeypatch)
    run(driver, requests, None, model=True)
    assert sum(one.num_outputs == 1 for one in drafted) == 70
    assert_as_the_oracle_says(drafted, target, ReferenceHead.of(folders[1], target.embedding))
