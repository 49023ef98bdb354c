"""Every family in a run: chunks, several sequences, preemption and prefix hits change no token and no bit."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
import transformers

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request
from tests.engine.driver import Driver
from tests.engine.families import LLAMA4_ROPE, SPARSE, STATES, TINY, YARN, Tiny

LENGTHS = {"long": 150, "short": 20, "other": 97}
MAX_TOKENS = 12


def prompt(name: str) -> list[int]:
    return [(31 * i + LENGTHS[name]) % 390 + 3 for i in range(LENGTHS[name])]


def request(name: str) -> Request:
    sampling = SamplingParams(temperature=0.0, max_tokens=MAX_TOKENS, ignore_eos=True, num_logprobs=2)
    return Request(request_id=name, prompt_token_ids=tuple(prompt(name)), sampling=sampling)


def check_greedy(folder: Path, *answers: tuple[list[int], list[int]]) -> None:
    """After each prompt, and each token of its answer, transformers finds the next token of the answer most likely."""
    model = transformers.AutoModelForCausalLM.from_pretrained(
        folder, dtype=torch.float32, attn_implementation="eager"
    )
    for token_ids, answer in answers:
        assert len(answer) == MAX_TOKENS
        with torch.inference_mode():
            logits = model(torch.tensor([token_ids + answer[:-1]])).logits[0]
        assert logits[len(token_ids) - 1 :].argmax(-1).tolist() == answer


STRETCHED = {
    "Qwen 2.5": Tiny("Qwen2Config", {"max_position_embeddings": 64, "rope_parameters": YARN}),
    "Qwen 3": Tiny("Qwen3Config", {"head_dim": 24, "max_position_embeddings": 80, "rope_parameters": YARN}),
    "Llama 3.1": Tiny(
        "LlamaConfig", {"rope_parameters": {**LLAMA4_ROPE, "factor": 8.0, "high_freq_factor": 4.0}}
    ),
}
"""Each for 64 positions, and 512 by its scaling."""


@pytest.mark.parametrize("model", STRETCHED)
def test_beyond_its_original_context_a_model_says_what_transformers_says(model: str, tmp_path: Path) -> None:
    folder = STRETCHED[model].make(tmp_path)
    driver = Driver(folder, num_blocks=128, budget=100)
    assert driver.runner.model.max_model_len == 512
    driver.run(request("long"))
    check_greedy(folder, (prompt("long"), driver.tokens("long")))


def answers(driver: Driver) -> dict[str, list[object]]:
    """Tokens and, where a row's bits depend on nothing but itself, their log probabilities, to the last bit."""
    is_exact = driver.runner.model.kernels.team is not None
    outputs = {name: driver.outputs[name, 0] for name in LENGTHS}
    return {
        name: [(o.token_ids, o.logprobs if is_exact else None) for o in outputs[name]] for name in LENGTHS
    }


@pytest.mark.parametrize("family", TINY | SPARSE | STATES)
def test_a_run_says_what_transformers_says_whatever_happens_to_it(family: str, tmp_path: Path) -> None:
    folder = (TINY | SPARSE | STATES)[family].make(tmp_path)
    driver = Driver(folder, num_blocks=128, budget=400)
    requests = [request(name) for name in LENGTHS]
    driver.run(*requests)
    expected = answers(driver)
    # Phi 4 mini is served with the factors of long sequences.
    compared = [name for name in LENGTHS if family != "Phi 4 mini" or LENGTHS[name] > 64]
    check_greedy(folder, *((prompt(name), driver.tokens(name)) for name in compared))

    driver.run(*requests)
    assert answers(driver) == {name: 2 * outputs for name, outputs in expected.items()}, "found again"
    cached = {name: driver.outputs[name, 0][-1].timings for name in LENGTHS}
    # A state is found at any token, and keys and values where a block ends.
    found = (149, 19, 96) if family in STATES else (144, 16, 96)
    assert tuple(t.num_cached_tokens for t in cached.values() if t) == found

    def preempt(step: int) -> None:
        running = driver.scheduler.sequences.running
        if step % 11 == 8 and running:
            driver.scheduler.sequences.preempt(running[step % len(running)])

    driver.fresh(budget=7)
    driver.run(*requests, before_step=preempt)
    assert answers(driver) == expected, "in chunks, and with interruptions"
    assert driver.scheduler.sequences.counters.num_preemptions
