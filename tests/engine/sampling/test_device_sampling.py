"""Sampling on the device, in plain torch, against the sampler of the CPU: the same tokens from the same logits."""

from __future__ import annotations

import math
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.planning.request import Request, SamplingParams, Sequence
from engine.sampling import batch, sampler
from engine.sampling.device import DeviceSampler, Needs, SampledOnDevice, uniform

VOCAB = 40
EOS = 3
CPU = torch.device("cpu")

TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.3, 1.0, 1.7]),
        "top_p": st.sampled_from([0.0, 0.05, 0.5, 0.9, 1.0]),
        "top_k": st.sampled_from([0, 1, 5, VOCAB - 1, VOCAB, VOCAB + 9]),
        "min_p": st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.7, 0.0, 0.3]),
        "repetition_penalty": st.sampled_from([0.6, 1.0, 1.3]),
        "logit_bias": st.dictionaries(
            st.integers(-1, VOCAB), st.sampled_from([-100.0, -math.inf, -1.0, 2.0]), max_size=4
        ),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.frozensets(TOKENS, max_size=2),
        "ignore_eos": st.booleans(),
        "num_logprobs": st.sampled_from([None, 0, 3]),
    }
)
ROWS = st.tuples(PARAMS, st.lists(TOKENS, max_size=6), st.lists(TOKENS, max_size=6))


def make_sequence(params: dict[str, Any], prompt: list[int], output: list[int], index: int = 0) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params))
    sequence = Sequence(request, index)
    sequence.token_ids += output
    return sequence


def make_logits(num_rows: int, seed: int, scale: float = 3.0) -> torch.Tensor:
    """Any floats, but for one row in three of coarse steps, in which much ties."""
    numbers = np.random.default_rng(seed)
    logits = numbers.standard_normal((num_rows, VOCAB)) * scale
    logits[::3] = np.round(logits[::3])
    return torch.from_numpy(logits.astype(np.float32))


def sample(
    device_sampler: DeviceSampler, logits: torch.Tensor, sequences: dict[int, Sequence]
) -> SampledOnDevice:
    """One step over sequences by slot; as in the engine, with what they need and no more."""
    slots = torch.tensor(list(sequences), dtype=torch.int32)
    numbers = torch.tensor([s.num_output_tokens for s in sequences.values()], dtype=torch.int32)
    return device_sampler.sample(logits, slots, numbers, device_sampler.needs(sequences))


def reference(logits: torch.Tensor, sequences: list[Sequence]) -> batch.SampledRows:
    built = batch.SamplingState(VOCAB, (EOS,)).build(sequences)
    built.wants_logprobs = True
    return sampler.sample(logits, built)


def assert_same(found: SampledOnDevice, expected: batch.SampledRows) -> None:
    assert found.token_ids.tolist() == expected.token_ids.tolist()
    usable = expected.token_ids >= 0
    np.testing.assert_allclose(found.logprobs.numpy()[usable], expected.logprobs[usable], atol=1e-5)
    assert np.isnan(found.logprobs.numpy()[~usable]).all()


@given(st.lists(ROWS, min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 4.0]))
@settings(max_examples=150, deadline=None)
def test_same_tokens_as_the_sampler(rows: list[Any], seed: int, scale: float) -> None:
    sequences = [make_sequence(params, prompt, output, i) for i, (params, prompt, output) in enumerate(rows)]
    device_sampler = DeviceSampler(len(rows), VOCAB, (EOS,), CPU)
    for slot, sequence in enumerate(sequences):
        device_sampler.assign(slot, sequence)
    logits = make_logits(len(rows), seed, scale)
    for step in range(3):
        expected = reference(logits, sequences)
        assert_same(sample(device_sampler, logits, dict(enumerate(sequences))), expected)
        for sequence, token_id in zip(sequences, expected.token_ids.tolist(), strict=True):
            sequence.token_ids.append(max(token_id, 0))
        if (expected.token_ids < 0).any():
            return
        logits = make_logits(len(rows), seed + step, scale)


@given(st.lists(ROWS, min_size=2, max_size=5), st.integers(0, 2**32 - 1), st.randoms())
@settings(max_examples=50, deadline=None)
def test_a_row_does_not_depend_on_the_rows_around_it(rows: list[Any], seed: int, random: Any) -> None:
    sequences = [make_sequence(*row) for row in rows]
    logits = make_logits(len(rows), seed)
    places = random.sample(range(8), len(rows))
    together = DeviceSampler(8, VOCAB, (EOS,), CPU)
    for place, sequence in zip(places, sequences, strict=True):
        together.assign(place, sequence)
    found = sample(together, logits, dict(zip(places, sequences, strict=True))).token_ids.tolist()
    for row, sequence in enumerate(sequences):
        alone = DeviceSampler(1, VOCAB, (EOS,), CPU)
        alone.assign(0, sequence)
        assert sample(alone, logits[row : row + 1], {0: sequence}).token_ids.tolist() == [found[row]]


def test_ten_thousand_draws_differ_nowhere() -> None:
    """The random numbers fall anywhere: a border between two tokens that lies elsewhere would show."""
    num = 2500
    filters: list[dict[str, Any]] = [
        {},
        {"top_k": 7},
        {"top_p": 0.8},
        {"top_k": 20, "top_p": 0.6, "min_p": 0.01},
    ]
    for params in filters:
        sequences = [make_sequence(params | {"seed": seed}, [], []) for seed in range(num)]
        device_sampler = DeviceSampler(num, VOCAB, (EOS,), CPU, max_penalised=0)
        for slot, sequence in enumerate(sequences):
            device_sampler.assign(slot, sequence)
        logits = make_logits(num, 1)
        assert_same(sample(device_sampler, logits, dict(enumerate(sequences))), reference(logits, sequences))


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**31 - 2)), min_size=1, max_size=5))
def test_the_random_numbers_are_the_same(pairs: list[tuple[int, int]]) -> None:
    keys, numbers = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    found = uniform(torch.from_numpy(keys.view(np.int64)), torch.from_numpy(numbers.astype(np.int32)))
    assert found.tolist() == batch.uniform(keys, numbers).tolist()


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    device_sampler = DeviceSampler(3, VOCAB, (EOS,), CPU)
    sequences = {slot: make_sequence({"temperature": temperature, "top_p": 0.9}, [], []) for slot in range(3)}
    for slot, sequence in sequences.items():
        device_sampler.assign(slot, sequence)
    logits = make_logits(3, 0)
    logits[1, 30] = bad
    found = sample(device_sampler, logits, sequences)
    assert found.token_ids[1] == -1
    assert found.logprobs[1].isnan()
    assert (found.token_ids[[0, 2]] >= 0).all()
    assert_same(found, reference(logits, list(sequences.values())))


def test_a_row_with_every_token_banned_fails() -> None:
    sequence = make_sequence({"logit_bias": dict.fromkeys(range(VOCAB), -math.inf)}, [], [])
    device_sampler = DeviceSampler(1, VOCAB, (EOS,), CPU)
    device_sampler.assign(0, sequence)
    assert sample(device_sampler, make_logits(1, 0), {0: sequence}).token_ids.tolist() == [-1]


def test_padding_chooses_nothing_and_counts_nothing() -> None:
    device_sampler = DeviceSampler(1, VOCAB, (EOS,), CPU)
    sequence = make_sequence({"temperature": 0.0, "frequency_penalty": 9.0}, [], [])
    device_sampler.assign(0, sequence)
    slots, numbers = torch.tensor([-1, 0, -1], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    logits = make_logits(1, 5).expand(3, -1).clone()
    logits[2] = math.nan
    found = device_sampler.sample(logits, slots, numbers)
    assert found.token_ids.tolist() == [-1, int(logits[0].argmax()), -1]
    assert found.logprobs.isnan().tolist() == [True, False, True]
    assert int(device_sampler.tables.counts.sum()) == 2


@given(st.lists(st.tuples(st.integers(0, 2), ROWS, st.integers(1, 3)), max_size=6), st.integers(0, 1000))
@settings(max_examples=100, deadline=None)
def test_slots_are_used_again(turns: list[tuple[int, Any, int]], seed: int) -> None:
    """Sequences come and go; what a slot held before is never seen again, nor what a freed row of counts held."""
    device_sampler = DeviceSampler(3, VOCAB, (EOS,), CPU, max_penalised=3)
    running: dict[int, Sequence] = {}
    for slot, row, num_steps in turns:
        device_sampler.release(slot)
        running[slot] = make_sequence(*row)
        device_sampler.assign(slot, running[slot])
        for step in range(num_steps):
            logits = make_logits(len(running), seed + step)
            expected = reference(logits, list(running.values()))
            assert_same(sample(device_sampler, logits, running), expected)
            chosen = zip(list(running.items()), expected.token_ids.tolist(), strict=True)
            for (ended, sequence), token_id in chosen:
                sequence.token_ids.append(token_id)
                if token_id < 0:
                    device_sampler.release(ended)
                    del running[ended]
            if not running:
                break


@given(st.lists(TOKENS, max_size=9), st.lists(TOKENS, max_size=9))
def test_counts_are_of_the_output_and_marks_of_the_prompt(prompt: list[int], output: list[int]) -> None:
    device_sampler = DeviceSampler(1, VOCAB, (EOS,), CPU)
    device_sampler.assign(0, make_sequence({"repetition_penalty": 1.1}, prompt, output))
    codes = device_sampler.tables.counts[0].tolist()
    counts = Counter(output)
    assert codes == [2 * counts[token_id] + (token_id in prompt) for token_id in range(VOCAB)]


def test_rows_of_counts_run_out_and_come_back() -> None:
    device_sampler = DeviceSampler(3, VOCAB, (EOS,), CPU, max_penalised=1)
    penalised, plain = SamplingParams(presence_penalty=1.0), SamplingParams()
    assert device_sampler.has_room(penalised)
    device_sampler.assign(0, make_sequence({"presence_penalty": 1.0}, [], []))
    assert not device_sampler.has_room(penalised)
    assert device_sampler.has_room(plain)
    device_sampler.assign(1, make_sequence({}, [], []))
    device_sampler.release(0)
    device_sampler.release(0)
    assert device_sampler.has_room(penalised)
    device_sampler.assign(2, make_sequence({"presence_penalty": 1.0}, [], []))
    device_sampler.assign(2, make_sequence({"presence_penalty": 1.0}, [], []))


def test_too_many_biases_are_refused_and_change_nothing() -> None:
    device_sampler = DeviceSampler(1, VOCAB, (EOS,), CPU, max_biases=2)
    sequence = make_sequence({"temperature": 0.0, "logit_bias": {5: 90.0, 6: 1.0}}, [], [])
    device_sampler.assign(0, sequence)
    with pytest.raises(ValueError, match="3 tokens with a bias or a ban; 2 are the most"):
        device_sampler.assign(0, make_sequence({"logit_bias": {1: 1.0, 2: 1.0}, "min_tokens": 1}, [], []))
    assert sample(device_sampler, make_logits(1, 0), {0: sequence}).token_ids.tolist() == [5]


def test_what_is_needed_is_what_some_row_asks_for() -> None:
    device_sampler = DeviceSampler(4, VOCAB, (EOS,), CPU)
    asked: list[dict[str, Any]] = [
        {"top_k": VOCAB},
        {"top_k": 3, "num_logprobs": 2},
        {"top_p": 0.5, "num_logprobs": 4},
    ]
    for slot, params in enumerate(asked):
        device_sampler.assign(slot, make_sequence(params, [], []))
    assert device_sampler.needs([0, -1]) == Needs(False, False, 0)
    assert device_sampler.needs([0, 1]) == Needs(True, False, 2)
    assert device_sampler.needs([0, 1, 2]) == Needs(True, True, 4)


def test_what_ties_with_the_last_kept_is_kept() -> None:
    """One token above, four that tie, among them 0 and -0, the rest below: top-k of 2 keeps all five."""
    logits = torch.full((1, VOCAB), -1.0)
    logits[0, [5, 15, 16, 39]] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    logits[0, 20] = 1.0
    device_sampler = DeviceSampler(100, VOCAB, (EOS,), CPU)
    params = {"top_k": 2, "temperature": 9.0}
    sequences = {slot: make_sequence(params | {"seed": slot}, [], []) for slot in range(100)}
    for slot, sequence in sequences.items():
        device_sampler.assign(slot, sequence)
    found = sample(device_sampler, logits.expand(100, -1), sequences)
    assert set(found.token_ids.tolist()) == {5, 15, 16, 20, 39}


def test_zero_and_minus_zero_tie_for_the_largest() -> None:
    logits = torch.full((40, VOCAB), -1.0)
    logits[:, 5], logits[:, 39] = 0.0, -0.0
    device_sampler = DeviceSampler(40, VOCAB, (EOS,), CPU)
    sequences = {slot: make_sequence({"top_k": 1, "seed": slot}, [], []) for slot in range(40)}
    for slot, sequence in sequences.items():
        device_sampler.assign(slot, sequence)
    found = sample(device_sampler, logits, sequences)
    assert set(found.token_ids.tolist()) == {5, 39}
    assert_same(found, reference(logits, list(sequences.values())))


def test_a_slot_that_nothing_was_assigned_to_is_sampled_in_vain() -> None:
    """As when a graph is captured before there is a sequence."""
    device_sampler = DeviceSampler(2, VOCAB, (EOS,), CPU)
    slots, numbers = torch.tensor([1], dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    logits = make_logits(1, 0)
    assert device_sampler.sample(logits, slots, numbers).token_ids.tolist() == [int(logits.argmax())]
    assert not device_sampler.tables.counts.any()


def test_more_than_is_needed_changes_no_token() -> None:
    device_sampler = DeviceSampler(50, VOCAB, (EOS,), CPU)
    sequences = {slot: make_sequence({"seed": slot}, [], []) for slot in range(50)}
    for slot, sequence in sequences.items():
        device_sampler.assign(slot, sequence)
    slots, numbers = torch.arange(50, dtype=torch.int32), torch.zeros(50, dtype=torch.int32)
    logits = make_logits(50, 2)
    least = device_sampler.sample(logits, slots, numbers, Needs(False, False))
    most = device_sampler.sample(logits, slots, numbers)
    assert least.token_ids.tolist() == most.token_ids.tolist()


def test_the_most_likely_tokens() -> None:
    device_sampler = DeviceSampler(2, VOCAB, (EOS,), CPU)
    for slot in range(2):
        device_sampler.assign(slot, make_sequence({"num_logprobs": 5, "logit_bias": {1: 50.0}}, [], []))
    logits = torch.from_numpy(np.random.default_rng(0).standard_normal((2, VOCAB)).astype(np.float32))
    slots, numbers = torch.tensor([0, 1], dtype=torch.int32), torch.zeros(2, dtype=torch.int32)
    found = device_sampler.sample(logits, slots, numbers, device_sampler.needs([0, 1]))
    assert found.top_ids is not None
    assert found.top_logprobs is not None
    for row in range(2):
        expected = sampler.top_logprobs(logits[row], 5)
        assert found.top_ids[row].tolist() == [token_id for token_id, _ in expected]
        assert found.top_logprobs[row].tolist() == pytest.approx([value for _, value in expected], abs=1e-5)


def test_half_precision_is_what_it_says() -> None:
    device_sampler = DeviceSampler(1, VOCAB, (EOS,), CPU)
    device_sampler.assign(0, make_sequence({"seed": 4}, [], []))
    logits = make_logits(1, 3).bfloat16()
    slots, numbers = torch.zeros(1, dtype=torch.int32), torch.zeros(1, dtype=torch.int32)
    half, full = (device_sampler.sample(given, slots, numbers) for given in (logits, logits.float()))
    assert half.token_ids.tolist() == full.token_ids.tolist()
    assert half.logprobs.tolist() == full.logprobs.tolist()


@pytest.mark.parametrize("temperature", [1e-40, 1e-30])
def test_a_tiny_temperature_is_the_argmax(temperature: float) -> None:
    sequence = make_sequence({"temperature": temperature, "seed": 8}, [], [])
    device_sampler = DeviceSampler(1, VOCAB, (EOS,), CPU)
    device_sampler.assign(0, sequence)
    logits = make_logits(2, 9)[1:]
    assert sample(device_sampler, logits, {0: sequence}).token_ids.tolist() == [int(logits.argmax())]
    assert reference(logits, [sequence]).token_ids.tolist() == [int(logits.argmax())]
