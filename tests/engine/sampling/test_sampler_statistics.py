"""Frequencies of what is drawn against probabilities from numpy in float64, and penalties against counts from numpy.

Seeds are fixed: a test that passes once passes always.
"""

from __future__ import annotations

from itertools import product
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.sampling.tables import Choose, Filters
from tests.engine.sampling.cases import choose_next, draws, holding, make_sequence, sample, states
from tests.engine.sampling.frequencies import assert_frequencies, assert_independent, bound, chi_square
from tests.engine.sampling.numpy_reference import F64
from tests.few import examples

VOCAB = 24
EOS = (3, 5)
NUM = 20_000


def random_logits(seed: int, size: int = VOCAB, scale: float = 1.5) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def probabilities(
    logits: F64, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> F64:
    """Temperature, top-k, top-p of what that left, min-p relative to the largest; no ties in these logits."""
    scaled = np.exp((logits - logits.max()) / temperature)
    order = np.argsort(-scaled)
    kept = np.zeros(len(logits), bool)
    kept[order[: top_k or len(logits)]] = True
    mass = np.cumsum(scaled[order] * kept[order])
    before = mass - scaled[order]
    kept[order[before >= top_p * mass[-1]]] = False
    kept &= scaled >= min_p
    weights: F64 = np.where(kept, scaled, 0.0)
    normalised: F64 = weights / weights.sum()
    return normalised


def counted(tokens: Any, vocab: int = VOCAB) -> Any:
    return np.bincount(tokens, minlength=vocab)


@pytest.mark.parametrize("temperature", [0.6, 1.0, 1.7])
@pytest.mark.parametrize(("top_k", "top_p", "min_p"), [*product((0, 8), (1.0, 0.8), (0.0, 0.08))])
def test_frequencies_are_the_probabilities(
    choose: Choose, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    logits = random_logits(7)
    depth = -np.log(min_p) if min_p else np.inf
    columns = {"temperature": temperature, "top_k": top_k, "top_p": top_p, "min_p_depth": depth}
    tokens = draws(choose, logits, states(NUM), **columns)
    expected = probabilities(logits.double().numpy(), temperature, top_k, top_p, min_p)
    assert_frequencies(counted(tokens), expected)


@pytest.mark.parametrize("index", [0, 1])
def test_frequencies_over_the_tokens_of_one_sequence_are_the_probabilities(
    choose: Choose, index: int
) -> None:
    logits = random_logits(8)
    state = np.full(NUM, states(1, index)[0])
    tokens = draws(choose, logits, state, np.arange(NUM))
    assert_frequencies(counted(tokens), probabilities(logits.double().numpy()))


def test_frequencies_of_a_sampler_are_the_probabilities(choose: Choose) -> None:
    """The requests have all parameters together."""
    params: dict[str, Any] = {"temperature": 1.7, "top_k": 15, "top_p": 0.9, "min_p": 0.03}
    logits = random_logits(7)
    sequences = [make_sequence({**params, "seed": seed}) for seed in range(2_000)]
    tokens = choose_next(sequences, logits, eos=EOS, choose=choose)
    assert_frequencies(counted(tokens), probabilities(logits.double().numpy(), **params))


def test_a_large_vocabulary_is_drawn_from_as_a_small_one(choose: Choose) -> None:
    """2,000 tokens in 20 groups; the frequencies of the groups."""
    logits = random_logits(1, 2_000)
    tokens = np.concatenate([draws(choose, logits, state) for state in np.split(states(4_000), 16)])
    groups = probabilities(logits.double().numpy()).reshape(20, -1).sum(1)
    assert_frequencies(counted(tokens // 100, 20), groups)


def test_a_rare_token_is_drawn_as_rarely_as_it_should(choose: Choose) -> None:
    """The tail of the noise: one token in 2,000 draws, beside one that is all but certain."""
    logits = torch.tensor([np.log(1999.0), 0.0])
    tokens = draws(choose, logits, states(200_000))
    assert_frequencies(counted(tokens, 2), np.array([1999, 1]) / 2000)


def test_the_bound_would_tell_a_wrong_temperature(choose: Choose) -> None:
    """The chi-square test has teeth: frequencies of temperature 1.1 are not taken for those of 1."""
    logits = random_logits(7)
    found = counted(draws(choose, logits, states(NUM), temperature=1.1))
    statistic, degrees = chi_square(found, NUM * probabilities(logits.double().numpy()))
    assert statistic > bound(degrees)


@pytest.mark.parametrize("distance", [1, 2, 5])
def test_the_tokens_of_one_seed_are_as_independent_as_those_of_many(choose: Choose, distance: int) -> None:
    """Neighbours in one sequence, four tokens alike, against sixteen equal cells."""
    state = np.full(NUM + distance, states(6)[5])
    tosses = draws(choose, torch.zeros(4), state, np.arange(NUM + distance))
    assert_independent(tosses[:-distance], tosses[distance:], 4)


@pytest.mark.parametrize("index", [1, 2, 3])
def test_the_choices_of_one_request_are_independent(choose: Choose, index: int) -> None:
    first, other = (draws(choose, torch.zeros(4), states(NUM, i)) for i in (0, index))
    assert_independent(first, other, 4)


@pytest.mark.parametrize("distance", [1, 2, 256])
def test_the_tokens_of_neighbouring_seeds_are_independent(choose: Choose, distance: int) -> None:
    tosses = draws(choose, torch.zeros(4), states(NUM + 256))
    assert_independent(tosses[:NUM], tosses[distance : NUM + distance], 4)


def test_who_wins_says_nothing_of_who_would_be_next(choose: Choose) -> None:
    """The winner of four tokens, and the winner of the four beside them under the same noise keys."""
    first = draws(choose, torch.tensor([0.0] * 4 + [-99.0] * 4), states(NUM))
    other = draws(choose, torch.tensor([-99.0] * 4 + [0.0] * 4), states(NUM))
    assert_independent(first, other - 4, 4)


histories = st.lists(st.integers(0, VOCAB - 1), max_size=40)
settings_of = st.fixed_dictionaries(
    {
        "repetition_penalty": st.floats(0.3, 3.0),
        "presence_penalty": st.floats(-2.0, 2.0),
        "frequency_penalty": st.floats(-2.0, 2.0),
        "logit_bias": st.dictionaries(st.integers(0, VOCAB - 1), st.floats(-5.0, 5.0), max_size=6),
    }
)


def penalised(logits: F64, prompt: list[int], output: list[int], params: dict[str, Any]) -> F64:
    """OpenAI's frequency and presence penalties over the output, CTRL's repetition penalty over all."""
    counts = np.bincount(np.array(output, int), minlength=VOCAB)
    seen = (counts + np.bincount(np.array(prompt, int), minlength=VOCAB)) > 0
    biased = logits.copy()
    for token, value in params["logit_bias"].items():
        biased[token] += value
    repetition = params["repetition_penalty"]
    repeated = np.where(biased > 0, biased / repetition, biased * repetition)
    wanted = np.where(seen, repeated, biased)
    result: F64 = wanted - counts * params["frequency_penalty"] - (counts > 0) * params["presence_penalty"]
    return result


@settings(max_examples=examples(40))
@given(histories, histories, settings_of, st.integers(0, 1_000))
def test_the_greedy_token_is_the_largest_after_penalties(
    choose: Choose, prompt: list[int], output: list[int], params: dict[str, Any], seed: int
) -> None:
    logits = random_logits(seed, scale=3.0)
    greedy = make_sequence({"temperature": 0.0, **params}, prompt, output)
    (token,) = choose_next([greedy], logits, eos=EOS, choose=choose)
    wanted = penalised(logits.double().numpy(), prompt, output, params)
    assert wanted[token] >= wanted.max() - 1e-4


def test_a_bias_multiplies_the_odds_by_its_exponential(choose: Choose) -> None:
    logits = random_logits(2)
    sequences = [make_sequence({"seed": seed, "logit_bias": {4: 1.5, 6: -1.0}}) for seed in range(2_000)]
    wanted = logits.double().numpy()
    wanted[4] += 1.5
    wanted[6] -= 1.0
    tokens = choose_next(sequences, logits, eos=EOS, choose=choose)
    assert_frequencies(counted(tokens), probabilities(wanted))


STOPS = frozenset({7, 8})


@pytest.mark.parametrize("ending", sorted({*EOS, *STOPS}))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("bias", [{}, {3: 30.0, 5: 30.0, 7: 30.0, 8: 30.0}], ids=["", "biased"])
def test_before_min_tokens_no_token_that_ends_is_chosen_however_likely(
    choose: Choose, ending: int, temperature: float, bias: dict[int, float]
) -> None:
    logits = torch.zeros(VOCAB)
    logits[ending] = 60.0
    params = {"temperature": temperature, "min_tokens": 3, "stop_token_ids": STOPS, "logit_bias": bias}
    early, due = (make_sequence(params, [], [0] * num) for num in (2, 3))
    tokens = choose_next([early, due], logits, eos=EOS, choose=choose)
    assert tokens[0] not in {*EOS, *STOPS}
    assert tokens[1] == ending


@pytest.mark.parametrize("ending", sorted({*EOS, *STOPS}))
def test_min_tokens_bans_no_end_of_sequence_that_is_ignored(choose: Choose, ending: int) -> None:
    logits = torch.zeros(VOCAB)
    logits[ending] = 60.0
    params = {"temperature": 0.0, "min_tokens": 3, "stop_token_ids": STOPS, "ignore_eos": True}
    (token,) = choose_next([make_sequence(params)], logits, eos=EOS, choose=choose)
    assert (token == ending) == (ending in EOS)


@settings(max_examples=examples(30))
@given(st.integers(1, 70), st.integers(0, 100), st.data())
def test_a_seed_says_the_same_at_any_place_of_any_batch(
    choose: Choose, count: int, seed: int, data: st.DataObject
) -> None:
    logits = random_logits(seed, VOCAB * count).view(count, VOCAB)
    sequences = [make_sequence({"seed": seed + i, "top_p": 0.9}, [], [1] * (i % 3)) for i in range(count)]
    sampler = holding(sequences, vocab=VOCAB, eos=EOS, choose=choose)
    together = sample(sampler, logits, dict(enumerate(sequences)))
    order = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))]
    some = sample(sampler, logits[order].contiguous(), {i: sequences[i] for i in order}, Filters())
    assert some == [together[i] for i in order]
