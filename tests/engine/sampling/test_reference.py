"""The rule in plain torch against the rule by hand, and at its edges."""

from __future__ import annotations

import math
from fractions import Fraction
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.params import SamplingParams
from penstock.engine.sampling import reference
from penstock.engine.sampling.reference import LEVELS_PER_NAT, MASS_UNIT
from penstock.engine.sampling.sampler import Sampler
from penstock.engine.sampling.tables import Filters
from tests.engine.fake_cuda import CudaGraph, patched
from tests.engine.ranges import assert_logprobs
from tests.engine.sampling import numpy_reference
from tests.engine.sampling.cases import (
    EOS,
    PARAMS,
    ROWS,
    TOKENS,
    VOCAB,
    assert_by_hand,
    choose_next,
    draws,
    holding,
    make_logits,
    make_sampler,
    make_sequence,
    sample,
    states,
)
from tests.few import examples

LEVEL = 1 / LEVELS_PER_NAT
GRID = st.lists(st.integers(-40, 40).map(lambda n: n / 8), min_size=VOCAB, max_size=VOCAB)
ON_GRID = {
    "temperature": st.sampled_from([0.0, 0.25, 1.0, 2.0]),
    "top_p": st.sampled_from([0.0, 0.25, 0.5, 0.875, 1.0]),
    "top_k": st.integers(0, VOCAB + 3),
    "min_p": st.sampled_from([0.0, 0.125, 0.5, 1.0]),
    "frequency_penalty": st.sampled_from([-0.5, 0.0, 0.5]),
    "repetition_penalty": st.sampled_from([0.5, 1.0, 2.0]),
}
"""Numbers that float32 adds and multiplies without rounding: much ties, and ties exactly."""


@given(GRID, st.tuples(PARAMS, st.fixed_dictionaries(ON_GRID)), st.lists(TOKENS, max_size=6), st.data())
@settings(max_examples=examples(120))
def test_a_token_is_chosen_as_written_down(
    logits: list[float], params: tuple[Any, Any], prompt: list[int], data: st.DataObject
) -> None:
    sequence = make_sequence(params[0] | params[1], prompt, data.draw(st.lists(TOKENS, max_size=6)))
    (token_id,) = choose_next([sequence], torch.tensor([logits]))
    assert token_id in numpy_reference.acceptable(logits, sequence, frozenset({EOS}))
    values = numpy_reference.processed(logits, sequence, frozenset({EOS}))
    if sequence.request.sampling.temperature == 0 and values.max() > -math.inf:
        assert token_id == values.argmax(), "the lowest id of the largest"


@given(st.lists(ROWS, min_size=1, max_size=5), st.integers(0, 2**32 - 1), st.sampled_from([0.5, 4.0]))
@settings(max_examples=examples(80))
def test_the_tokens_of_some_steps_are_those_by_hand(rows: list[Any], seed: int, scale: float) -> None:
    """A token that was chosen is counted, and penalised in the next step."""
    sequences = [make_sequence(params, prompt, output, i) for i, (params, prompt, output) in enumerate(rows)]
    sampler = holding(sequences)
    for step in range(3):
        logits = make_logits(len(rows), seed + step, scale)
        token_ids = sample(sampler, logits, dict(enumerate(sequences)))
        assert_by_hand(token_ids, logits, sequences)
        if -1 in token_ids:
            return
        for sequence, token_id in zip(sequences, token_ids, strict=True):
            sequence.token_ids.append(token_id)


@pytest.mark.parametrize(
    "filters", [{}, {"top_k": 7}, {"top_p": 0.8}, {"top_k": 20, "top_p": 0.6, "min_p": 0.01}], ids=str
)
def test_thousands_of_draws_differ_nowhere_from_those_by_hand(filters: dict[str, Any]) -> None:
    sequences = [make_sequence({**filters, "seed": seed}) for seed in range(2_500)]
    logits = make_logits(len(sequences), 1)
    assert_by_hand(choose_next(sequences, logits), logits, sequences)


@given(
    st.lists(st.integers(-16, 16).map(lambda n: n / 8), min_size=8, max_size=8),
    st.sampled_from([1.0, 2.0]),
    st.integers(0, 9),
    st.sampled_from([0.25, 0.5, 0.875, 1.0]),
    st.sampled_from([0.0, 0.125, 0.5]),
)
@settings(max_examples=examples(60))
def test_exactly_what_the_filters_keep_is_drawn(
    logits: list[float], temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """By rank and ties, with so many draws that every token that is kept comes."""
    params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    expected, also = numpy_reference.kept(np.array(logits), params)
    assert (expected == also).all()
    depth = -math.log(min_p) if min_p else math.inf
    found = draws(
        reference.choose, torch.tensor(logits), states(1_500),
        temperature=temperature, top_k=min(top_k, 8), top_p=top_p, min_p_depth=depth,
    )  # fmt: skip
    assert set(found.tolist()) == set(np.flatnonzero(expected).tolist())


def test_the_nucleus_ends_exactly_where_integer_masses_say() -> None:
    """Float32 numbers next to a border of the nucleus fall on the side that exact arithmetic puts them."""
    for seed in range(8):
        logits = torch.randn(5, generator=torch.Generator().manual_seed(seed)).sort(descending=True).values
        masses = [int(mass) for mass in (torch.exp(logits - logits[0]) * MASS_UNIT).tolist()]
        for num_above in range(1, 5):
            share = Fraction(sum(masses[:num_above]), sum(masses))
            near = np.float32(share)
            for top_p in (np.nextafter(near, np.float32(0)), near, np.nextafter(near, np.float32(1))):
                found = draws(reference.choose, logits, states(500), top_p=top_p)
                num_kept = num_above + (share < Fraction(float(top_p)))
                assert found.max() == num_kept - 1


def test_a_level_with_exactly_top_p_above_it_is_not_in_the_nucleus() -> None:
    """One token of mass 1, two of mass 1/2: half of all is above the two."""
    logits = torch.tensor([0.0, -math.log(2), -math.log(2)])
    assert set(draws(reference.choose, logits, states(300), top_p=0.5).tolist()) == {0}
    above = np.nextafter(np.float32(0.5), np.float32(1))
    assert set(draws(reference.choose, logits, states(300), top_p=above).tolist()) == {0, 1, 2}


@pytest.mark.parametrize("temperature", [0.25, 1.0, 2.0])
@pytest.mark.parametrize("filters", [{"top_k": 1}, {"top_p": 0.0}, {"top_k": 1, "top_p": 0.3}], ids=str)
def test_top_k_of_one_is_greedy_up_to_the_width_of_a_level(
    temperature: float, filters: dict[str, float]
) -> None:
    logits = torch.full((9,), -50 * LEVEL)
    logits[2] = 0.0
    for levels, expected in ((0.9, {2, 6}), (1.1, {2}), (-0.9, {2, 6}), (-1.1, {6})):
        logits[6] = -levels * LEVEL * temperature
        found = draws(reference.choose, logits, states(200), temperature=temperature, **filters)
        assert set(found.tolist()) == expected


@pytest.mark.parametrize("temperature", [0.3, 1.0, 1.7])
def test_top_k_of_one_is_greedy(temperature: float) -> None:
    logits = make_logits(100, 4)[1::3]
    sequences = [
        make_sequence({"temperature": temperature, "top_k": 1, "seed": i}) for i in range(len(logits))
    ]
    assert choose_next(sequences, logits) == logits.argmax(-1).tolist()


def test_what_ties_with_the_last_kept_is_kept() -> None:
    """One token above, four that tie, among them 0 and -0, the rest below: top-k of 2 keeps all five."""
    logits = torch.full((VOCAB,), -1.0)
    logits[[5, 15, 16, 39]] = torch.tensor([0.0, -0.0, 0.0, -0.0])
    logits[20] = 1.0
    for filters in ({"top_k": 2}, {"top_p": 0.08}):
        params = {**filters, "temperature": 9.0}
        found = choose_next([make_sequence({**params, "seed": seed}) for seed in range(100)], logits)
        assert set(found) == {5, 15, 16, 20, 39}


def test_zero_and_minus_zero_tie_for_the_largest() -> None:
    logits = torch.full((40, VOCAB), -1.0)
    logits[:, 5], logits[:, 39] = 0.0, -0.0
    sequences = [make_sequence({"top_k": 1, "seed": seed}) for seed in range(40)]
    found = choose_next(sequences, logits)
    assert set(found) == {5, 39}
    assert_by_hand(found, logits, sequences)
    greedy = [make_sequence({"temperature": 0.0, "seed": seed}) for seed in range(40)]
    assert set(choose_next(greedy, logits)) == {5}


@pytest.mark.parametrize("temperature", [1e-40, 1e-30, 1e-10])
@pytest.mark.parametrize("filters", [{}, {"top_k": 3, "top_p": 0.5, "min_p": 0.1}], ids=str)
def test_a_tiny_temperature_is_the_argmax(temperature: float, filters: dict[str, Any]) -> None:
    logits = make_logits(60, 9)[1::3]
    sequences = [
        make_sequence({"temperature": temperature, "seed": i, **filters}) for i in range(len(logits))
    ]
    assert choose_next(sequences, logits) == logits.argmax(-1).tolist()


@given(PARAMS, st.integers(0, 1000), st.integers(-(2**63), 2**63 - 1))
@settings(max_examples=examples(40))
def test_temperature_zero_ignores_filters_and_noise(params: dict[str, Any], seed: int, other: int) -> None:
    off = {"temperature": 0.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0}
    greedy = [make_sequence({**params, "temperature": 0.0}), make_sequence({**params, **off, "seed": other})]
    logits = make_logits(1, seed).expand(2, -1)
    sampler = holding(greedy)
    one, plain = sample(sampler, logits, dict(enumerate(greedy)), Filters())
    assert one == plain


@given(st.lists(ROWS, min_size=2, max_size=5), st.integers(0, 2**32 - 1), st.randoms())
@settings(max_examples=examples(50))
def test_a_row_does_not_depend_on_the_rows_around_it(rows: list[Any], seed: int, random: Any) -> None:
    """Nor on its seat."""
    sequences = [make_sequence(*row) for row in rows]
    logits = make_logits(len(rows), seed)
    places = random.sample(range(8), len(rows))
    together = make_sampler(8)
    for place, sequence in zip(places, sequences, strict=True):
        together.assign(place, sequence)
    token_ids = sample(together, logits, dict(zip(places, sequences, strict=True)), Filters())
    for row, sequence in enumerate(sequences):
        alone = sample(holding([sequence]), logits[row : row + 1], {0: sequence}, Filters())
        assert alone == [token_ids[row]]


@given(st.lists(ROWS, min_size=1, max_size=4), st.integers(0, 2**32 - 1), st.tuples(*[st.booleans()] * 2))
@settings(max_examples=examples(100))
def test_filters_that_no_row_asks_for_change_no_token(
    rows: list[Any], seed: int, more: tuple[bool, bool]
) -> None:
    sequences = dict(enumerate(make_sequence(*row) for row in rows))
    logits = make_logits(len(rows), seed)
    asked = holding(list(sequences.values())).filters(sequences)
    added = Filters(asked.top_k or more[0], asked.top_p or more[1])
    found = [sample(holding(list(sequences.values())), logits, sequences, f) for f in (asked, added)]
    assert found[0] == found[1]


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("params", [{"temperature": 0.0}, {"top_p": 0.9, "top_k": 9}, {}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(bad: float, params: dict[str, Any]) -> None:
    sequences = [make_sequence({**params, "frequency_penalty": 1.0}) for _ in range(3)]
    sampler = holding(sequences)
    logits = make_logits(3, 0)
    logits[1, 30] = bad
    token_ids = sample(sampler, logits, dict(enumerate(sequences)))
    assert token_ids[1] == -1
    assert_by_hand([token_ids[0], token_ids[2]], logits[::2], sequences[::2])
    assert sampler.tables.counts.sum(-1).tolist() == [2, 0, 2], "what was not chosen is not counted"


def test_a_bad_token_that_is_banned_still_fails_its_row() -> None:
    logits = make_logits(1, 0)
    logits[0, 7] = math.nan
    assert choose_next([make_sequence({"logit_bias": {7: -math.inf}})], logits) == [-1]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("left", [None, 0, 17, VOCAB - 1])
def test_only_a_token_that_is_not_banned_is_chosen(temperature: float, left: int | None) -> None:
    """None is left: the row fails, whatever the filters, and the row beside it does not."""
    bans = {token_id: -math.inf for token_id in range(VOCAB) if token_id != left}
    filters: list[dict[str, Any]] = [{}, {"top_k": 2, "top_p": 0.5, "min_p": 0.1, "presence_penalty": 1.0}]
    for params in filters:
        sequences = [
            make_sequence({**params, "temperature": temperature, "logit_bias": bans}, [1], [2, left or 5]),
            make_sequence({"temperature": temperature}),
        ]
        logits = make_logits(2, 3)
        found = choose_next(sequences, logits)
        assert found[0] == (-1 if left is None else left)
        assert_by_hand(found[1:], logits[1:], sequences[1:])


def test_bans_before_min_tokens_may_leave_nothing() -> None:
    everything = frozenset(range(VOCAB))
    sequences = [
        make_sequence({"min_tokens": 3, "stop_token_ids": everything}, [], [0] * num) for num in (2, 3)
    ]
    found = choose_next(sequences, make_logits(2, 3))
    assert found[0] == -1
    assert found[1] >= 0


@pytest.mark.parametrize("repetition", [1e-38, 1e38])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("filters", [{}, {"top_k": 5, "top_p": 0.9, "min_p": 0.1}], ids=str)
def test_a_penalty_that_overflows_leaves_a_token(
    repetition: float, temperature: float, filters: dict[str, Any]
) -> None:
    """Every token was seen; logits of both signs, whose quotients and products are beyond float32."""
    params = {"repetition_penalty": repetition, "temperature": temperature, **filters}
    sequences = [make_sequence({**params, "seed": i}, range(VOCAB)) for i in range(9)]
    logits = torch.cat((make_logits(3, 5), make_logits(3, 6).abs() + 1, -make_logits(3, 7).abs() - 1)) * 100
    token_ids = sample(holding(sequences), logits, dict(enumerate(sequences)))
    assert min(token_ids) >= 0
    if repetition < 1:
        assert all(logits[row, token_ids[row]] > 0 for row in range(6)), "the quotients are the largest"


def test_a_penalty_that_overflows_lifts_no_ban() -> None:
    params = {"repetition_penalty": 1e38, "logit_bias": dict.fromkeys(range(1, VOCAB), -math.inf)}
    assert choose_next([make_sequence(params, range(VOCAB))], -make_logits(1, 2).abs() - 100) == [0]


def test_padding_chooses_nothing_and_counts_nothing() -> None:
    sampler = holding([make_sequence({"temperature": 0.0, "frequency_penalty": 9.0})])
    seats, numbers = torch.tensor([-1, 0, -1], dtype=torch.int32), torch.zeros(3, dtype=torch.int32)
    logits = make_logits(1, 5).expand(3, -1).clone()
    logits[2] = math.nan
    token_ids = sampler.sample(logits, seats, numbers, Filters())
    assert token_ids.tolist() == [-1, int(logits[0].argmax()), -1]
    assert int(sampler.tables.counts.sum()) == 2


@given(st.lists(ROWS, min_size=1, max_size=3), st.sampled_from([torch.float32, torch.bfloat16]))
@settings(max_examples=examples(30))
def test_the_logits_are_not_changed(rows: list[Any], dtype: torch.dtype) -> None:
    sequences = [make_sequence(*row) for row in rows]
    logits = make_logits(len(rows), 8).to(dtype)
    before = logits.clone()
    choose_next(sequences, logits)
    assert logits.equal(before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_what_it_says(dtype: torch.dtype) -> None:
    sequences = {seat: make_sequence({"seed": seat, "top_p": 0.9}) for seat in range(9)}
    sampler = holding(list(sequences.values()))
    logits = make_logits(9, 3).to(dtype)
    half, full = (sample(sampler, given, sequences) for given in (logits, logits.float()))
    assert half == full


@given(st.integers(0, 1000), st.lists(st.integers(0, 2), max_size=4), st.integers(0, VOCAB + 3))
def test_the_most_likely_tokens_stand_best_first(seed: int, rows: list[int], num: int) -> None:
    logits, asked = make_logits(3, seed), torch.tensor(rows, dtype=torch.int32)
    norms, token_ids, logprobs = reference.most_likely(logits, asked, num)
    assert token_ids.dtype == torch.int32
    best = logits[rows].sort(-1, descending=True).values[:, :num]
    assert torch.equal(logits[rows].gather(1, token_ids.long()), best)
    for column, its_ids in enumerate(token_ids.unbind(1)):
        assert_logprobs(logprobs[:, column], logits[rows], its_ids)
        assert reference.logprobs_of(logits, asked, its_ids, norms).equal(logprobs[:, column])


def test_a_vocabulary_of_one_token() -> None:
    assert choose_next([make_sequence({"top_k": 1, "top_p": 0.5})], torch.tensor([3.0])) == [0]


def test_the_host_waits_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither to assign a seat nor to choose; a graph of the work gives the tokens of other logits, and counts them."""
    params = {"top_k": 5, "top_p": 0.9, "min_p": 0.01, "presence_penalty": 1.0, "min_tokens": 1}
    rows = [make_sequence({**params, "seed": i, "logit_bias": {2: 1.0}}, [1, 2]) for i in range(3)]
    steps = [make_logits(4, seed) for seed in range(3)]
    inputs = torch.tensor([2, -1, 0, 1], dtype=torch.int32), torch.zeros(4, dtype=torch.int32)
    eager = holding(rows)
    expected = [eager.sample(logits, *inputs, Filters()).tolist() for logits in steps]
    with patched(monkeypatch) as device:
        cuda = torch.device("cuda", 0)
        sampler = Sampler(3, VOCAB, (EOS,), cuda, reference.choose)
        logits, seats, numbers = (tensor.to(cuda) for tensor in (steps[0].clone(), *inputs))
        with device.watching():
            for filters in (Filters(), Filters(False, False)):
                sampler.sample(logits, torch.full_like(seats, -1), numbers, filters)
            for seat, sequence in enumerate(rows):
                sampler.assign(seat, sequence)
        graph = CudaGraph()
        with torch.cuda.graph(graph, pool=0):  # type: ignore[arg-type]
            chosen = sampler.sample(logits, seats, numbers, Filters())
        found = [chosen.tolist()]
        for later in steps[1:]:
            logits.copy_(later)
            graph.replay()
            found.append(chosen.tolist())
    assert found == expected
