"""Models of which a part of the keys and values is kept: what they say, whatever happens to a sequence."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import transformers
from torch import Tensor

from penstock.engine.errors import NotEnoughMemory
from penstock.engine.model.checkpoint import read_config
from penstock.engine.planning.keeping import Keeping
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from tests.engine.driver import Driver
from tests.engine.fake_runner import FakeProposer, drafting_always
from tests.engine.families import SPARSE, STATES, TINY, Tiny
from tests.engine.rounding_noise import largest
from tests.engine.test_eagle import without_native

KEEPING = Keeping.of(64, 16)
"""The first 16 tokens and at least 48 more; 64 are dropped at a time."""
MAX_TOKENS = 90
LENGTHS = {"long": 300, "short": 20, "other": 129, "edge": KEEPING.most}
LLAMA = Tiny("LlamaConfig")


def prompt(name: str) -> list[int]:
    return [(31 * i + i * i % 57 + LENGTHS[name]) % 390 + 3 for i in range(LENGTHS[name])]


def request(name: str, keeping: Keeping | None = KEEPING, max_tokens: int = MAX_TOKENS) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, num_logprobs=2)
    return Request(request_id=name, prompt_token_ids=tuple(prompt(name)), sampling=sampling, keeping=keeping)


def mask(num_tokens: int, keeping: Keeping = KEEPING) -> Tensor:
    """[1, 1, T, T]: 0 where the token of a row attends to that of a column, else the smallest number there is."""
    rows, columns = torch.arange(num_tokens)[:, None], torch.arange(num_tokens)[None]
    dropped = torch.tensor([keeping.num_dropped(position) for position in range(num_tokens)])[:, None]
    sees = (columns <= rows) & ((columns < keeping.num_first) | (columns >= keeping.num_first + dropped))
    return torch.where(sees, 0.0, torch.finfo(torch.float32).min)[None, None]


def expected_logprobs(folder: Path, token_ids: list[int]) -> Tensor:
    """[T, vocabulary]: what transformers says after each token, at its true position, of the tokens that are kept."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([token_ids]), attention_mask=mask(len(token_ids))).logits[0]
    return logits.log_softmax(-1)


def outputs(driver: Driver, *names: str) -> dict[str, list[object]]:
    """Tokens and log probabilities, to the last bit."""
    return {name: [(o.token_ids, o.logprobs) for o in driver.outputs[name, 0]] for name in names}


def check_against_transformers(driver: Driver, folder: Path, name: str) -> None:
    tokens = driver.tokens(name)
    assert len(tokens) == MAX_TOKENS
    expected = expected_logprobs(folder, [*prompt(name), *tokens[:-1]])[LENGTHS[name] - 1 :]
    assert tokens == expected.argmax(-1).tolist()
    chosen = [o.logprobs[0].logprob for o in driver.outputs[name, 0] if o.logprobs]
    assert largest(torch.tensor(chosen) - expected.max(-1).values) < 1e-3
    timings = driver.outputs[name, 0][-1].timings
    assert timings is not None
    assert timings.num_kv_dropped == KEEPING.num_dropped(LENGTHS[name] + MAX_TOKENS - 2)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return LLAMA.make(tmp_path_factory.mktemp("llama"))


@pytest.mark.parametrize("in_torch", [False, True])
@pytest.mark.parametrize("budget", [400, 64, 37])
def test_answers_are_those_of_transformers_with_the_dropped_tokens_masked(
    folder: Path, budget: int, in_torch: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if in_torch:
        without_native(monkeypatch)
    driver = Driver(folder, num_blocks=128, budget=budget)
    driver.run(*map(request, LENGTHS))
    for name in LENGTHS:
        check_against_transformers(driver, folder, name)


@pytest.mark.parametrize("family", ["DeepSeek V3", "Qwen 3"])
def test_other_families_say_what_transformers_says(family: str, tmp_path: Path) -> None:
    folder = (TINY | SPARSE)[family].make(tmp_path)
    driver = Driver(folder, num_blocks=128, budget=100)
    driver.run(request("long"))
    check_against_transformers(driver, folder, "long")


def preempting(driver: Driver) -> Callable[[int], None]:
    def preempt(step: int) -> None:
        sequences = driver.scheduler.sequences
        if step % 23 == 11 and sequences.running:
            sequences.preempt(sequences.running[-1])

    return preempt


MODELS = {
    "Llama": LLAMA,
    "windows": replace(TINY["Gemma 3"], entries=TINY["Gemma 3"].entries | {"sliding_window": 24}),
    "latents": SPARSE["DeepSeek V3"],
    "delta": STATES["Qwen 3.5"],
    "mamba": STATES["Granite 4 H"],
}


@pytest.mark.parametrize("model", MODELS)
def test_no_bit_depends_on_chunks_company_cache_pool_or_preemption(model: str, tmp_path: Path) -> None:
    folder = MODELS[model].make(tmp_path)
    driver = Driver(folder, num_blocks=256, budget=400)
    if driver.runner.model.kernels.team is None:
        pytest.skip("rows of plain torch depend on their company")
    requests = [request(name) for name in LENGTHS]
    for one in requests:
        driver.run(one)
    expected = outputs(driver, *LENGTHS)
    for budget in (400, 64, 23):
        driver.fresh(budget=budget)
        driver.run(*requests)
        assert outputs(driver, *LENGTHS) == expected
    for prefix_cache in (True, False):
        driver.fresh(budget=50, prefix_cache=prefix_cache)
        driver.run(*requests, before_step=preempting(driver))
        assert outputs(driver, *LENGTHS) == expected
        assert driver.scheduler.sequences.counters.num_preemptions > 0
        driver.outputs.clear()
        driver.run(*requests)  # what is found of the run before
        assert outputs(driver, *LENGTHS) == expected


@pytest.mark.parametrize("model", ["Llama", "delta"])
def test_choices_begin_where_the_prompt_ends_in_what_is_kept(model: str, tmp_path: Path) -> None:
    driver = Driver(MODELS[model].make(tmp_path), num_blocks=256, budget=64)
    for name in ("long", "edge", "short"):
        driver.run(request(name))
        driver.run(replace(request(name), request_id="choices", n=2))
        assert [driver.tokens("choices", index) for index in range(2)] == [driver.tokens(name)] * 2
        driver.outputs.clear()


def test_a_model_says_what_its_layers_see(tmp_path: Path) -> None:
    chunked = read_config(SPARSE["Llama 4"].make(tmp_path / "chunked"))
    windowed = read_config(TINY["Gemma 3"].make(tmp_path / "windowed"))
    assert (chunked.sees_chunks, windowed.sees_chunks, windowed.longest_window) == (True, False, 24)


@pytest.mark.parametrize("kv_dtype", ["auto", "int8"])
def test_a_prompt_longer_than_the_pool_is_answered_with_the_same_bits(folder: Path, kv_dtype: str) -> None:
    roomy = Driver(folder, num_blocks=128, budget=64, kv_dtype=kv_dtype)
    tight = Driver(folder, num_blocks=12, budget=64, kv_keep=64, kv_dtype=kv_dtype)
    assert tight.scheduler.max_len == 11 * 16
    assert tight.scheduler.longest(KEEPING) >= 512
    assert tight.runner.model.max_model_len == 512
    requests = [request(name) for name in LENGTHS]
    for driver in (roomy, tight):
        driver.run(*requests)
    assert tight.scheduler.sequences.counters.num_preemptions > 0
    assert outputs(tight, *LENGTHS) == outputs(roomy, *LENGTHS)


def test_a_pool_that_has_no_room_for_what_is_kept_is_refused(folder: Path) -> None:
    with pytest.raises(
        NotEnoughMemory,
        match="--kv-keep 64 takes 8 KV blocks for a sequence, up to 128 tokens, and there are 7",
    ):
        Driver(folder, num_blocks=8, kv_keep=64)


class Right(FakeProposer):
    """Knows the answers, and is wrong now and then."""

    def __init__(self, answers: dict[str, list[int]]) -> None:
        self.answers = answers

    def _propose(self, sequence: Sequence, most: int) -> list[int]:
        num = sequence.num_output_tokens
        right = self.answers[sequence.request.request_id][num : num + most]
        return [token if (num + i) % 5 else 7 for i, token in enumerate(right)]


def test_drafts_change_no_token(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("tests.engine.driver.Drafting", drafting_always)
    driver = Driver(folder, num_blocks=128, budget=64)
    requests = [request(name) for name in LENGTHS]
    driver.run(*requests)
    expected = {name: driver.tokens(name) for name in LENGTHS}
    driver.fresh(proposer=Right(expected))
    driver.run(*requests)
    assert {name: driver.tokens(name) for name in LENGTHS} == expected
    timings = driver.outputs["long", 0][-1].timings
    assert timings is not None
    assert timings.drafts["fake"].num_accepted > 20
