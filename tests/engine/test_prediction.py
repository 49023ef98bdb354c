"""Layers of multi-token prediction: they draft what transformers' layers say, and change no answer."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from penstock.engine.execution.loaded import LoadedModel
from penstock.engine.planning.lookup import Lookup
from tests.engine.driver import Driver
from tests.engine.fake_runner import drafting_always
from tests.engine.model.gguf.test_stored_states import CHANGES
from tests.engine.model.test_prediction import load
from tests.engine.model.test_transformer import make_batch
from tests.engine.predictions import ReferencePrediction, make_predicting, write_predicting
from tests.engine.test_drafts import SETTINGS, answers, count, preempting, requests_of, run
from tests.engine.test_eagle import assert_chosen, recorded, wipe, without_native

LATER = pytest.mark.long("prediction with states and experts")
FAMILIES = [
    "Qwen 3.5",
    "GLM-4.5",
    pytest.param("DeepSeek V3", marks=LATER),
    pytest.param("Qwen 3.5 MoE", marks=LATER),
    pytest.param("Qwen 3 Next", marks=LATER),
]
TOKEN_IDS = [7 * i % 390 + 3 for i in range(40)]


@pytest.fixture(scope="module", params=FAMILIES)
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_predicting(request.param, tmp_path_factory.mktemp("model"), **CHANGES.get(request.param, {}))


@pytest.fixture(scope="module")
def driver(folder: Path) -> Driver:
    return Driver(folder, num_blocks=256)


@pytest.fixture(autouse=True)
def _drafts_in_every_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Random layers are hardly ever right, and nobody would ask them for long."""
    monkeypatch.setattr("tests.engine.driver.Drafting", drafting_always)
    monkeypatch.setattr("penstock.engine.planning.drafting._LOWEST_RATE", 0.0)
    monkeypatch.setattr("penstock.engine.planning.drafting.Drafting._model_seconds", lambda *_: 0.0)


def hidden_of(model: LoadedModel, size: int) -> Tensor:
    """What the layer makes of the known tokens, in steps of so many of them, of which none but the last is sampled."""
    assert model.draft is not None
    made = []
    for start in range(0, len(TOKEN_IDS), size):
        end = min(start + size, len(TOKEN_IDS))
        step = make_batch([(TOKEN_IDS[:end], start)])
        slots = torch.tensor([[int(start > 0), 1, 0, end - start]], dtype=torch.int32)
        model.decoder(replace(step, state_slots=slots, sample_rows=step.sample_rows[-1:]))
        made.append(model.draft.decoder(step))
    return torch.cat(made)


@pytest.mark.parametrize("is_native", [True, False])
def test_hidden_states_are_those_of_transformers_however_a_prompt_is_cut(
    folder: Path, is_native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if not is_native:
        without_native(monkeypatch)
    model = load(folder, max_batch_tokens=64, max_num_seqs=64)[0]
    assert (model.kernels.team is not None) == is_native
    oracle = ReferencePrediction(folder)
    expected = oracle.hidden(TOKEN_IDS[1:], oracle.features(TOKEN_IDS)[:-1])
    found = hidden_of(model, 64)
    assert model.features is not None
    kept = model.features[1:].flatten(0, 1)[: len(TOKEN_IDS)].float()
    features = oracle.features(TOKEN_IDS)
    assert (kept - features).abs().max() <= features.abs().max() / 128, "a bit of bfloat16"
    assert (found[1:] - expected).abs().max() < 0.02 * expected.abs().max()
    assert oracle.hidden(TOKEN_IDS[1:], kept[:-1]).sub(found[1:]).abs().max() < 2e-4 * expected.abs().max()
    again = hidden_of(model, 7)
    assert torch.equal(again, found) if is_native else (again - found).abs().max() < 0.02 * found.abs().max()


def test_a_gguf_file_has_the_same_layer(folder: Path, tmp_path: Path) -> None:
    path = write_predicting(folder, tmp_path / "model.gguf")
    found, expected = (hidden_of(load(where, max_batch_tokens=64)[0], 64) for where in (path, folder))
    assert (found - expected).abs().max() < 1e-3 * expected.abs().max(), "some features are rounded otherwise"


def test_drafts_are_the_oracles_whatever_becomes_of_blocks_and_states(driver: Driver, folder: Path) -> None:
    oracle = ReferencePrediction(folder)
    requests = requests_of({"temperature": 0.7})
    hows: tuple[dict[str, Any], ...] = (
        {},
        {"budget": 7, "prefix_cache": False},
        {"before_step": preempting(driver)},
        {"num_blocks": 20, "num_states": 10},
    )
    for how in hows:
        expected = run(driver, requests, None, **how)
        wipe(driver)
        with pytest.MonkeyPatch.context() as patch:
            drafted = recorded(driver, patch)
            assert run(driver, requests, None, model=True, **how) == expected, how
        assert len(drafted) > 25, how
        assert_chosen(drafted[::4], oracle.features, oracle.logits)
    assert len({token for one in drafted for token in one.drafts}) > 50


def test_plain_torch_drafts_what_the_oracle_says(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_native(monkeypatch)
    driver, oracle = Driver(folder, num_blocks=256), ReferencePrediction(folder)
    requests = requests_of({"temperature": 0.7})[:4]
    expected = run(driver, requests, None)
    drafted = recorded(driver, monkeypatch)
    assert answers(run(driver, requests, None, model=True)) == answers(expected)
    assert len(drafted) > 10
    assert_chosen(drafted[::2], oracle.features, oracle.logits)


@pytest.mark.parametrize("setting", SETTINGS)
def test_every_setting(driver: Driver, setting: str) -> None:
    requests = requests_of(SETTINGS[setting])
    expected = run(driver, requests, None)
    assert run(driver, requests, Lookup(), model=True) == expected
    assert count(driver, "draft").num_drafted > 25
