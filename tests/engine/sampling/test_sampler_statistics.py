"""Frequencies of what is drawn against probabilities from numpy, and penalties against counts from numpy.

Each test is for both samplers, plain torch and native. Seeds are fixed: a test that passes once passes always.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from engine.kernels.cpu import native
from engine.planning.request import Request, SamplingParams, Sequence
from engine.sampling import sampler
from engine.sampling.batch import F64, SampledRows, SamplingBatch, SamplingState

VOCAB = 24
EOS = (3, 5)
Sample = Callable[[torch.Tensor, SamplingBatch], SampledRows]


@pytest.fixture(scope="module", params=["torch", "native"])
def sample(request: pytest.FixtureRequest) -> Sample:
    if request.param == "torch":
        return sampler.sample
    try:
        team = native.load_library(lambda _: None).start_team(2)
    except native.NativeUnavailable as error:
        pytest.skip(str(error))
    return lambda logits, batch: native.sample(team, logits, batch, batch.wants_logprobs)


def sequence(
    prompt: Iterable[int] = (), output: Iterable[int] = (), index: int = 0, **params: Any
) -> Sequence:
    sampling = SamplingParams(**params)
    made = Sequence(
        Request(request_id="r", prompt_token_ids=tuple(prompt), sampling=sampling, n=index + 1), index
    )
    made.token_ids += output
    return made


def choose(sample: Sample, logits: torch.Tensor, sequences: list[Sequence]) -> NDArray[np.int32]:
    """One token for each; a single row of logits is for all."""
    rows = logits.expand(len(sequences), -1).contiguous()
    return sample(rows, SamplingState(logits.shape[-1], EOS).build(sequences)).token_ids


def random_logits(seed: int, size: int = VOCAB, scale: float = 1.5) -> torch.Tensor:
    return scale * torch.randn(size, generator=torch.Generator().manual_seed(seed))


def probabilities(logits: F64, temperature: float, top_k: int, top_p: float, min_p: float) -> F64:
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


def chi_square(found: NDArray[np.int64], expected: F64) -> tuple[float, int]:
    """The statistic and its degrees of freedom; rare tokens are pooled into one."""
    rare = expected < 5
    cells = [*zip(found[~rare], expected[~rare], strict=True), (found[rare].sum(), expected[rare].sum())]
    cells = [(n, e) for n, e in cells if e > 0]
    return float(sum((n - e) ** 2 / e for n, e in cells)), max(1, len(cells) - 1)


def most_likely_bound(degrees: int) -> float:
    """Of honest samplers, all but one in ten thousand stay below (Wilson and Hilferty's approximation)."""
    return float(degrees * (1 - 2 / (9 * degrees) + 3.72 * (2 / (9 * degrees)) ** 0.5) ** 3)


MIXTURES: dict[str, dict[str, Any]] = {
    "plain": {},
    "cool": {"temperature": 0.6},
    "top-k": {"top_k": 6},
    "top-p": {"top_p": 0.7},
    "min-p": {"min_p": 0.08},
    "top-k, then top-p": {"top_k": 8, "top_p": 0.8},
    "all of them, hot": {"temperature": 1.7, "top_k": 15, "top_p": 0.9, "min_p": 0.03},
    "all of them, cool": {"temperature": 0.8, "top_k": 10, "top_p": 0.9, "min_p": 0.1},
}


@pytest.mark.parametrize("mixture", MIXTURES.values(), ids=MIXTURES.keys())
def test_frequencies_are_the_probabilities(sample: Sample, mixture: dict[str, Any]) -> None:
    count = 2_000
    logits = random_logits(7)
    tokens = choose(sample, logits, [sequence(seed=seed, **mixture) for seed in range(count)])
    wanted = {"temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, **mixture}
    expected = count * probabilities(logits.double().numpy(), **wanted)
    found = np.bincount(tokens, minlength=VOCAB)
    assert not found[expected == 0].any()
    statistic, degrees = chi_square(found, expected)
    assert statistic < most_likely_bound(degrees)


def test_the_bound_would_tell_a_wrong_temperature() -> None:
    """The chi-square test has teeth: frequencies of temperature 1.1 are not taken for those of 1."""
    logits = random_logits(7)
    tokens = choose(sampler.sample, logits, [sequence(seed=seed, temperature=1.1) for seed in range(4_000)])
    expected = 4_000 * probabilities(logits.double().numpy(), 1.0, 0, 1.0, 0.0)
    statistic, degrees = chi_square(np.bincount(tokens, minlength=VOCAB), expected)
    assert statistic > most_likely_bound(degrees)


def test_the_tokens_of_one_seed_are_as_independent_as_those_of_many(sample: Sample) -> None:
    """Pairs of neighbours in one sequence, a fair coin each, against four equal cells."""
    count = 2_000
    sequences = [sequence(output=[0] * number, seed=5) for number in range(count + 1)]
    tosses = choose(sample, torch.zeros(2), sequences)
    pairs = np.bincount(tosses[:-1] * 2 + tosses[1:], minlength=4)
    statistic, degrees = chi_square(pairs, np.full(4, count / 4))
    assert statistic < most_likely_bound(degrees)


def test_the_choices_of_one_request_are_independent(sample: Sample) -> None:
    count = 2_000
    first, second = (
        choose(sample, torch.zeros(3), [sequence(seed=seed, index=index) for seed in range(count)])
        for index in (0, 1)
    )
    statistic, degrees = chi_square(np.bincount(first * 3 + second, minlength=9), np.full(9, count / 9))
    assert statistic < most_likely_bound(degrees)


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


@settings(max_examples=40, deadline=None)
@given(histories, histories, settings_of, st.integers(0, 1_000))
def test_the_greedy_token_is_the_largest_after_penalties(
    sample: Sample, prompt: list[int], output: list[int], params: dict[str, Any], seed: int
) -> None:
    logits = random_logits(seed, scale=3.0)
    (token,) = choose(sample, logits, [sequence(prompt, output, temperature=0.0, **params)])
    wanted = penalised(logits.double().numpy(), prompt, output, params)
    assert wanted[token] >= wanted.max() - 1e-4


def test_a_bias_multiplies_the_odds_by_its_exponential(sample: Sample) -> None:
    count = 2_000
    logits = random_logits(2)
    sequences = [sequence(seed=seed, logit_bias={4: 1.5, 6: -1.0}) for seed in range(count)]
    weights = logits.double().exp().numpy()
    weights[4] *= np.exp(1.5)
    weights[6] *= np.exp(-1.0)
    found = np.bincount(choose(sample, logits, sequences), minlength=VOCAB)
    statistic, degrees = chi_square(found, count * weights / weights.sum())
    assert statistic < most_likely_bound(degrees)


STOPS = frozenset({7, 8})


@pytest.mark.parametrize("ending", sorted({*EOS, *STOPS}))
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_before_min_tokens_no_token_that_ends_is_chosen_however_likely(
    sample: Sample, ending: int, temperature: float
) -> None:
    logits = torch.zeros(VOCAB)
    logits[ending] = 60.0
    early, due = (
        sequence(output=[0] * n, temperature=temperature, min_tokens=3, stop_token_ids=STOPS) for n in (2, 3)
    )
    tokens = choose(sample, logits, [early, due])
    assert tokens[0] not in {*EOS, *STOPS}
    assert tokens[1] == ending


@pytest.mark.parametrize("ending", sorted({*EOS, *STOPS}))
def test_min_tokens_bans_no_end_of_sequence_that_is_ignored(sample: Sample, ending: int) -> None:
    logits = torch.zeros(VOCAB)
    logits[ending] = 60.0
    early = sequence(temperature=0.0, min_tokens=3, stop_token_ids=STOPS, ignore_eos=True)
    (token,) = choose(sample, logits, [early])
    assert (token == ending) == (ending in EOS)


@settings(max_examples=30, deadline=None)
@given(st.integers(0, 1_000), st.integers(1, 70), st.sampled_from([0.0, 0.5, 3.0]))
def test_logprobs_are_the_log_softmax_of_the_raw_logits_at_the_chosen_token(
    sample: Sample, seed: int, count: int, temperature: float
) -> None:
    logits = random_logits(seed, VOCAB * count, scale=4.0).view(count, VOCAB)
    sequences = [
        sequence([1], [2, 2], seed=i, temperature=temperature, presence_penalty=1.0, num_logprobs=0)
        for i in range(count)
    ]
    rows = sample(logits, SamplingState(VOCAB, EOS).build(sequences))
    wanted = logits.double().log_softmax(-1).numpy()[np.arange(count), rows.token_ids]
    np.testing.assert_allclose(rows.logprobs, wanted, atol=1e-5)


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 70), st.integers(0, 100), st.data())
def test_a_seed_says_the_same_at_any_place_of_any_batch(
    sample: Sample, count: int, seed: int, data: st.DataObject
) -> None:
    logits = random_logits(seed, VOCAB * count).view(count, VOCAB)
    sequences = [sequence(output=[1] * (i % 3), seed=seed + i, top_p=0.9) for i in range(count)]
    state = SamplingState(VOCAB, EOS)
    together = sample(logits, state.build(sequences)).token_ids
    order = data.draw(st.permutations(range(count)))[: data.draw(st.integers(1, count))]
    some = sample(logits[order].contiguous(), state.build([sequences[i] for i in order])).token_ids
    assert some.tolist() == together[order].tolist()


@settings(max_examples=30, deadline=None)
@given(st.integers(-(2**63), 2**63 - 1), st.integers(0, 9), st.integers(0, 50))
def test_a_draw_depends_on_seed_choice_and_number_and_on_nothing_else(
    seed: int, index: int, number: int
) -> None:
    one = sequence([1, 2], [3] * number, index, seed=seed)
    other = sequence([4], range(number), index, seed=seed, temperature=0.3, top_k=2, logit_bias={1: 2.0})
    drawn = [float(SamplingState(VOCAB, EOS).build([s]).uniform[0]) for s in (one, other)]
    assert drawn[0] == drawn[1]
    neighbours = [
        sequence([1, 2], [3] * number, index, seed=seed + 1),
        sequence([1, 2], [3] * number, index + 1, seed=seed),
        sequence([1, 2], [3] * (number + 1), index, seed=seed),
    ]
    assert drawn[0] not in SamplingState(VOCAB, EOS).build(neighbours).uniform.tolist()
