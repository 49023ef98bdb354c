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
from engine.sampling.batch import SampledRows, SamplingBatch, SamplingState, split_mix, uniform
from engine.sampling.sampler import sample, top_logprobs

VOCAB = 12
EOS = 3

LOGITS = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
TOKENS = st.integers(0, VOCAB - 1)
PARAMS = st.fixed_dictionaries(
    {
        "temperature": st.sampled_from([0.0, 0.25, 1.0, 2.0]),
        "top_p": st.sampled_from([0.0, 0.25, 0.5, 0.875, 1.0]),
        "top_k": st.integers(0, VOCAB + 3),
        "min_p": st.sampled_from([0.0, 0.125, 0.5, 1.0]),
        "presence_penalty": st.sampled_from([-1.0, 0.0, 0.5]),
        "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.5]),
        "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
        "logit_bias": st.dictionaries(TOKENS, st.sampled_from([-100.0, -1.0, 2.0]), max_size=3),
        "seed": st.integers(-(2**63), 2**63 - 1),
        "min_tokens": st.integers(0, 4),
        "stop_token_ids": st.frozensets(TOKENS, max_size=2),
        "ignore_eos": st.booleans(),
    }
)
PROMPTS = st.lists(TOKENS, max_size=6)
OUTPUTS = st.lists(TOKENS, max_size=6)


def make_sequence(params: dict[str, Any], prompt: list[int], output: list[int], index: int = 0) -> Sequence:
    request = Request(request_id="r", prompt_token_ids=tuple(prompt), sampling=SamplingParams(**params))
    sequence = Sequence(request, index)
    sequence.token_ids += output
    return sequence


def choose(logits: list[list[float]], sequences: list[Sequence]) -> SampledRows:
    return sample(torch.tensor(logits), SamplingState(VOCAB, (EOS,)).build(sequences))


def one_row_batch(**arrays: Any) -> SamplingBatch:
    return SamplingState(VOCAB, ()).build([make_sequence(arrays, [], [])])


def processed_by_hand(logits: list[float], sequence: Sequence) -> list[float]:
    """Biases and penalties, one token at a time, from what OpenAI and the CTRL paper say."""
    p = sequence.request.sampling
    prompt, output = (
        set(sequence.request.prompt_token_ids),
        Counter(sequence.token_ids[sequence.num_prompt_tokens :]),
    )
    ending = p.stop_token_ids if p.ignore_eos else p.stop_token_ids | {EOS}
    values = []
    for token_id, logit in enumerate(logits):
        value = logit + p.logit_bias.get(token_id, 0.0)
        if sequence.num_output_tokens < p.min_tokens and token_id in ending:
            value = -math.inf
        if token_id in prompt or token_id in output:
            value = value / p.repetition_penalty if value > 0 else value * p.repetition_penalty
        value -= p.frequency_penalty * output[token_id] + p.presence_penalty * (output[token_id] > 0)
        values.append(value)
    return values


def allowed_by_hand(values: list[float], p: SamplingParams) -> dict[int, float]:
    """The tokens that may be drawn and their weights: top-k, then top-p, then min-p; ties stay together."""
    largest = max(values)
    weights = {i: math.exp((v - largest) / p.temperature) for i, v in enumerate(values) if v > -math.inf}
    ranked = sorted(weights.values(), reverse=True)
    if p.top_k:
        weights = {i: w for i, w in weights.items() if w >= ranked[min(p.top_k, len(ranked)) - 1]}
    total = sum(weights.values())
    kept = {}
    for i, w in weights.items():
        more_likely = sum(other for other in weights.values() if other > w)
        ahead = more_likely < p.top_p * total or more_likely == 0
        if ahead and w >= p.min_p:
            kept[i] = w
    return kept


def draw_by_hand(kept: dict[int, float], at: float) -> int:
    target, passed = at * sum(kept.values()), 0.0
    for token_id in sorted(kept):
        passed += kept[token_id]
        if passed > target:
            return token_id
    return max(kept)


@given(LOGITS, PARAMS, PROMPTS, OUTPUTS)
@settings(max_examples=300)
def test_a_token_is_chosen_as_written_down(
    logits: list[float], params: dict[str, Any], prompt: list[int], output: list[int]
) -> None:
    sequence = make_sequence(params, prompt, output)
    values = processed_by_hand(logits, sequence)
    chosen = int(choose([logits], [sequence]).token_ids[0])
    p = sequence.request.sampling
    if max(values) == -math.inf:
        assert chosen == -1
    elif p.temperature == 0:
        assert chosen == values.index(max(values))
    else:
        at = uniform_by_hand(p.seed, 0, len(output))
        kept = allowed_by_hand(values, p)
        # A draw on the very border between two tokens may fall to either side.
        near = {draw_by_hand(kept, min(1.0, max(0.0, at + shift))) for shift in (-1e-6, 0, 1e-6)}
        assert chosen in near


def uniform_by_hand(seed: int, index: int, number: int) -> float:
    return (split_mix(split_mix(seed, index), number) >> 11) * 2.0**-53


@given(st.lists(st.tuples(LOGITS, PARAMS, PROMPTS, OUTPUTS), min_size=1, max_size=5))
def test_a_row_does_not_depend_on_the_rows_around_it(rows: list[tuple[Any, Any, Any, Any]]) -> None:
    logits = [row[0] for row in rows]
    sequences = [make_sequence(*row[1:]) for row in rows]
    together = choose(logits, sequences)
    for i, sequence in enumerate(sequences):
        alone = choose([logits[i]], [sequence])
        assert alone.token_ids[0] == together.token_ids[i]


@given(LOGITS, st.integers(0, VOCAB))
def test_log_probabilities_are_those_of_the_untouched_logits(logits: list[float], num: int) -> None:
    sequence = make_sequence({"temperature": 0.0, "logit_bias": {4: 90.0}, "num_logprobs": 0}, [], [])
    rows = choose([logits], [sequence])
    expected = torch.tensor(logits).log_softmax(-1)
    assert rows.token_ids[0] == 4
    assert rows.logprobs[0] == pytest.approx(float(expected[4]), abs=1e-5)
    top = top_logprobs(torch.tensor(logits), num)
    assert [value for _, value in top] == pytest.approx(
        sorted(expected.tolist(), reverse=True)[:num], abs=1e-5
    )
    assert all(value == pytest.approx(float(expected[i]), abs=1e-5) for i, value in top)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(bad: float, temperature: float) -> None:
    sequences = [make_sequence({"temperature": temperature}, [], []) for _ in range(3)]
    logits = [[0.0] * VOCAB, [0.0] * (VOCAB - 1) + [bad], [1.0] + [0.0] * (VOCAB - 1)]
    token_ids = choose(logits, sequences).token_ids
    assert token_ids[1] == -1
    assert (token_ids[[0, 2]] >= 0).all()


def test_a_row_with_every_token_banned_fails() -> None:
    sequence = make_sequence(
        {"temperature": 1.0, "logit_bias": dict.fromkeys(range(VOCAB), -math.inf)}, [], []
    )
    assert choose([[0.0] * VOCAB], [sequence]).token_ids[0] == -1


def test_the_frequencies_drawn_are_the_probabilities() -> None:
    """Chi-square with 11 degrees of freedom: 99.99 % of honest samplers stay below 38."""
    logits = torch.linspace(-2, 2, VOCAB)
    sequences = [make_sequence({"seed": seed}, [], []) for seed in range(4000)]
    rows = sample(logits.expand(len(sequences), -1), SamplingState(VOCAB, ()).build(sequences))
    expected = logits.softmax(-1).numpy() * len(sequences)
    found = np.bincount(rows.token_ids, minlength=VOCAB)
    assert ((found - expected) ** 2 / expected).sum() < 38


def test_split_mix_is_the_published_generator() -> None:
    """First outputs for seed 1234567, from the reference implementation's test vector."""
    published = [6457827717110365317, 3203168211198807973, 9817491932198370423, 4593380528125082431]
    assert [split_mix(1234567, number) for number in range(4)] == published


@given(st.lists(st.tuples(st.integers(0, 2**64 - 1), st.integers(0, 2**32)), min_size=1, max_size=5))
def test_the_arrays_hold_the_same_numbers(pairs: list[tuple[int, int]]) -> None:
    keys, numbers = (np.array(column, np.uint64) for column in zip(*pairs, strict=True))
    expected = [(split_mix(key, number) >> 11) * 2.0**-53 for key, number in pairs]
    assert uniform(keys, numbers).tolist() == expected
    assert all(0 <= value < 1 for value in expected)


def test_choices_and_tokens_draw_different_numbers() -> None:
    drawn = {uniform_by_hand(7, index, number) for index in range(20) for number in range(20)}
    assert len(drawn) == 400


@given(PARAMS, PROMPTS, st.lists(st.lists(TOKENS, max_size=5), max_size=5))
def test_counts_kept_from_step_to_step_are_those_of_a_fresh_start(
    params: dict[str, Any], prompt: list[int], gains: list[list[int]]
) -> None:
    """Steps that pass a sequence over (a preemption, a batch that is full) leave gaps; nothing may be lost in them."""
    kept = SamplingState(VOCAB, (EOS,))
    sequence = make_sequence(params, prompt, [])
    for gained in gains:
        sequence.token_ids += gained
        assert_equal(kept.build([sequence]), SamplingState(VOCAB, (EOS,)).build([sequence]))


@given(st.lists(st.tuples(PARAMS, PROMPTS, OUTPUTS), max_size=5), st.data())
def test_rows_come_and_go_in_any_order(rows: list[tuple[Any, Any, Any]], data: st.DataObject) -> None:
    kept = SamplingState(VOCAB, (EOS,))
    sequences = [make_sequence(*row) for row in rows]
    for _ in range(3):
        step = data.draw(st.permutations(sequences))[: data.draw(st.integers(0, len(sequences)))]
        assert_equal(kept.build(step), SamplingState(VOCAB, (EOS,)).build(step))
        for sequence in step:
            sequence.token_ids.append(data.draw(TOKENS))


def test_choices_of_one_request_count_their_own_output() -> None:
    state = SamplingState(VOCAB, ())
    first, second = (
        make_sequence({"frequency_penalty": 1.0}, [1], output, i) for i, output in enumerate(([5], [6, 6]))
    )
    batch = state.build([first, second])
    assert batch.seen_starts.tolist() == [0, 1, 2]
    assert batch.seen_ids.tolist() == [5, 6]
    assert batch.seen_counts.tolist() == [1, 2]


def test_many_distinct_tokens_are_all_counted() -> None:
    output = [i % 300 for i in range(900)]
    batch = SamplingState(300, ()).build([make_sequence({"presence_penalty": 1.0}, [], output)])
    assert dict(zip(batch.seen_ids.tolist(), batch.seen_counts.tolist(), strict=True)) == Counter(output)


def test_sequences_that_ended_are_forgotten() -> None:
    state = SamplingState(VOCAB, ())
    for _ in range(3000):
        state.build([make_sequence({}, [1], [])])
    assert len(state._rows) <= 1100


def test_ids_beyond_the_vocabulary_are_left_out() -> None:
    batch = one_row_batch(
        logit_bias={VOCAB: 5.0, -1: 5.0, 2: 1.0}, min_tokens=1, stop_token_ids=frozenset({99})
    )
    assert batch.bias_ids.tolist() == [2]


def assert_equal(found: SamplingBatch, expected: SamplingBatch) -> None:
    for name in SamplingBatch.__slots__:
        np.testing.assert_array_equal(getattr(found, name), getattr(expected, name), err_msg=name)
