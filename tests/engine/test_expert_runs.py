"""A model with experts in a run, as dense ones are: drafts, beams, grammars, and prefixes that are found again."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from penstock.engine.planning.lookup import Lookup
from penstock.engine.planning.params import BeamParams, SamplingParams
from penstock.engine.planning.request import Request
from penstock.engine.planning.text_sink import TextSink
from penstock.engine.text.grammars import Grammars
from tests.engine.driver import Driver
from tests.engine.fake_runner import drafting_always
from tests.engine.families import SPARSE
from tests.engine.grammars.test_answers import PERSON, PERSONS, closing, is_valid, text_of
from tests.engine.test_beam_search import search
from tests.engine.test_drafts import AnswerProposer, answers, count, num_accepted, requests_of, run
from tests.gateway.harness import EOS, make_tokenizer

LONG = tuple(31 * i % 390 + 3 for i in range(70))


@pytest.fixture(scope="module", params=["Qwen 3 MoE", "gpt-oss", "Llama 4", "DeepSeek V3"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SPARSE[request.param].make(tmp_path_factory.mktemp("sparse"))


@pytest.fixture(scope="module")
def driver(folder: Path) -> Driver:
    return Driver(folder, num_blocks=128)


def test_drafts_change_no_token_and_no_probability(driver: Driver, monkeypatch: pytest.MonkeyPatch) -> None:
    """To the last bit, for a row does not know what is verified beside it."""
    assert driver.facts.has_experts
    monkeypatch.setattr("tests.engine.driver.Drafting", drafting_always)
    requests = requests_of({"temperature": 0.8, "num_logprobs": 2})
    expected = run(driver, requests, None)
    assert run(driver, requests, AnswerProposer(answers(expected), 0.8)) == expected
    assert num_accepted(driver) > 0
    few = requests_of({"temperature": 0.0, "num_logprobs": 2, "logit_bias": dict.fromkeys((7, 8, 9), 50.0)})
    expected = run(driver, few, None)
    assert run(driver, few, Lookup()) == expected
    found = count(driver, "lookup")
    assert 0 < found.num_accepted < found.num_drafted


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
    assert asked.beams == BeamParams()
    assert [driver.tokens("beams", index) for index in range(3)] == found[:, ids.shape[1] :].tolist()


def test_a_prefix_is_found_again_with_the_same_bits(driver: Driver) -> None:
    sampling = SamplingParams(temperature=0.0, max_tokens=8, num_logprobs=2, ignore_eos=True)
    found = []
    driver.fresh()
    for name in ("first", "again"):
        driver.run(Request(request_id=name, prompt_token_ids=LONG, sampling=sampling))
        outputs = driver.outputs[name, 0]
        found.append([(output.token_ids, output.logprobs) for output in outputs])
    assert outputs[-1].timings is not None
    assert outputs[-1].timings.num_cached_tokens == 64
    assert found[0] == found[1]


def test_answers_are_held_to_a_schema(folder: Path) -> None:
    tokenizer = make_tokenizer()
    driver = Driver(
        folder, num_blocks=128, grammars=Grammars(tokenizer, (EOS,)), sink=TextSink(tokenizer, (EOS,))
    )
    sampling = SamplingParams(grammar=PERSONS, max_tokens=200, seed=3, logit_bias=closing(tokenizer, EOS))
    driver.run(Request(request_id="person", prompt_token_ids=LONG[:9], sampling=sampling))
    text = text_of(driver, "person")
    assert is_valid(PERSON, text), json.dumps(text)
