"""Native sampling against the rules of SamplingBatch, written out in numpy with a full sort in float64."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from engine.kernels.cpu import build
from engine.kernels.cpu.native import NativeUnavailable, Team, load_library, sample
from engine.sampling.batch import F64, SamplingBatch


@pytest.fixture(scope="module")
def team() -> Team:
    try:
        build.find_compiler()
    except NativeUnavailable as error:
        pytest.skip(str(error))
    return load_library(print).start_team(2)


@dataclass(frozen=True, kw_only=True)
class Row:
    logits: Sequence[float]
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    uniform: float = 0.5
    repetition: float = 1.0
    presence: float = 0.0
    frequency: float = 0.0
    bias: dict[int, float] = field(default_factory=dict)
    seen: dict[int, int] = field(default_factory=dict)


def make_batch(rows: Sequence[Row]) -> SamplingBatch:
    def column(name: str, dtype: Any) -> Any:
        return np.array([getattr(row, name) for row in rows], dtype)

    def starts(name: str) -> Any:
        return np.cumsum([0, *[len(getattr(row, name)) for row in rows]]).astype(np.int32)

    def listed(values: list[Any], dtype: Any) -> Any:
        return np.array(values, dtype)

    return SamplingBatch(
        temperature=column("temperature", np.float32),
        top_k=column("top_k", np.int32),
        top_p=column("top_p", np.float32),
        min_p=column("min_p", np.float32),
        uniform=column("uniform", np.float64),
        repetition=column("repetition", np.float32),
        presence=column("presence", np.float32),
        frequency=column("frequency", np.float32),
        bias_starts=starts("bias"),
        bias_ids=listed([i for row in rows for i in row.bias], np.int32),
        bias_values=listed([v for row in rows for v in row.bias.values()], np.float32),
        seen_starts=starts("seen"),
        seen_ids=listed([i for row in rows for i in row.seen], np.int32),
        seen_counts=listed([n for row in rows for n in row.seen.values()], np.int32),
    )


def run(team: Team, rows: Sequence[Row], logprobs: bool = True) -> tuple[list[int], list[float]]:
    logits = torch.tensor([list(row.logits) for row in rows], dtype=torch.float32)
    result = sample(team, logits, make_batch(rows), logprobs)
    return result.token_ids.tolist(), result.logprobs.tolist()


def expected(row: Row) -> int:
    logits = adjusted(row)
    if row.temperature == 0:
        return int(logits.argmax())
    weights = np.exp((logits - logits.max()) / np.float64(np.float32(row.temperature)))
    order = np.argsort(-weights, kind="stable")
    if 0 < row.top_k < len(order):
        weights[weights < weights[order[row.top_k - 1]]] = 0.0
    if row.top_p < 1:
        before = np.cumsum(weights[order]) - weights[order]
        kept = max(1, int((before < row.top_p * weights.sum()).sum()))
        weights[weights < weights[order[kept - 1]]] = 0.0
    weights[weights < row.min_p * weights.max()] = 0.0
    cumulative = np.cumsum(weights)
    return int(np.searchsorted(cumulative, row.uniform * cumulative[-1], side="right"))


def adjusted(row: Row) -> F64:
    logits = np.array(row.logits, np.float32).astype(np.float64)
    for token, value in row.bias.items():
        logits[token] += value
    for token, count in row.seen.items():
        logits[token] *= 1 / row.repetition if logits[token] > 0 else row.repetition
        logits[token] -= count * row.frequency + (count > 0) * row.presence
    return logits


def acceptable(row: Row) -> set[int]:
    """The token expected, and those to which a rounding error of the thresholds would lead.

    The choice goes up with `uniform` in order of id, so that it is anything between those of its two neighbours.
    """
    e = 3e-6
    found: set[int] = set()
    for dp in (-e, 0, e):
        for dm in (-e, 0, e):
            near = replace(row, top_p=row.top_p + dp, min_p=row.min_p + dm)
            lowest, highest = (
                expected(replace(near, uniform=min(max(row.uniform + du, 0.0), 1 - 1e-9))) for du in (-e, e)
            )
            found |= {expected(near), *range(lowest, highest + 1)}
    return found - {token for token, value in row.bias.items() if value == -np.inf}


VOCAB = 37
# Coarse values, so that ties happen; whole steps, so that what is no tie is far from one.
LOGITS = st.lists(st.integers(-20, 20).map(lambda n: n / 4), min_size=VOCAB, max_size=VOCAB)
IDS = st.integers(0, VOCAB - 1)
ROWS = st.builds(
    Row,
    logits=LOGITS,
    temperature=st.sampled_from([0.0, 0.5, 1.0, 2.0]),
    top_k=st.sampled_from([0, 1, 3, 10, 100]),
    top_p=st.sampled_from([0.0, 0.1, 0.5, 0.9, 1.0]),
    min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
    uniform=st.floats(0, 1, exclude_max=True),
    repetition=st.sampled_from([1.0, 0.5, 2.0]),
    presence=st.sampled_from([0.0, 0.5, -1.0]),
    frequency=st.sampled_from([0.0, 0.25]),
    bias=st.dictionaries(IDS, st.sampled_from([-np.inf, -2.0, 1.0, 100.0]), max_size=5),
    seen=st.dictionaries(IDS, st.integers(0, 3), max_size=5),
)


@given(st.lists(ROWS, min_size=1, max_size=5))
@settings(max_examples=200, deadline=None)
def test_tokens_are_those_of_the_rules(team: Team, rows: list[Row]) -> None:
    tokens, _ = run(team, rows)
    for row, token in zip(rows, tokens, strict=True):
        assert token in acceptable(row)


@given(ROWS, st.lists(ROWS, min_size=1, max_size=3))
@settings(max_examples=50, deadline=None)
def test_company_changes_nothing(team: Team, row: Row, others: list[Row]) -> None:
    alone, together = run(team, [row]), run(team, [*others, row])
    assert alone[0][0] == together[0][-1]
    assert alone[1][0] == together[1][-1]


@pytest.mark.parametrize(
    "changes", [{}, {"top_p": 0.9}, {"top_k": 50}, {"top_k": 700, "top_p": 0.5}, {"min_p": 0.1}]
)
def test_a_whole_vocabulary(team: Team, changes: dict[str, Any]) -> None:
    generator = np.random.default_rng(0)
    rows = [
        Row(
            logits=(3 * generator.standard_normal(5003)).tolist(),
            uniform=float(generator.random()),
            **changes,
        )
        for _ in range(20)
    ]
    tokens, _ = run(team, rows)
    for row, token in zip(rows, tokens, strict=True):
        assert token in acceptable(row)


def test_frequencies_are_the_probabilities(team: Team) -> None:
    logits = [0.0, 1.0, 2.0, 1.0]
    uniforms = np.linspace(0, 1, 4000, endpoint=False)
    tokens, _ = run(team, [Row(logits=logits, uniform=u) for u in uniforms])
    probabilities = np.exp(logits) / np.exp(logits).sum()
    np.testing.assert_allclose(np.bincount(tokens) / 4000, probabilities, atol=1e-3)


def test_logprobs_are_of_the_raw_logits(team: Team) -> None:
    logits = (5 * torch.randn(8, 1000, generator=torch.Generator().manual_seed(0))).tolist()
    rows = [Row(logits=row, temperature=0.3, bias={7: 50.0}) for row in logits]
    tokens, logprobs = run(team, rows)
    assert tokens == [7] * 8
    wanted = torch.tensor(logits).double().log_softmax(-1)[:, 7]
    torch.testing.assert_close(torch.tensor(logprobs).double(), wanted, atol=1e-5, rtol=1e-6)


def test_logprobs_only_where_asked(team: Team) -> None:
    _, logprobs = run(team, [Row(logits=[0.0, 1.0])], logprobs=False)
    assert np.isnan(logprobs[0])


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 36])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_row_that_is_not_finite_fails_alone(
    team: Team, poison: float, place: int, temperature: float
) -> None:
    good = Row(logits=[float(i) for i in range(VOCAB)], temperature=temperature)
    bad = replace(good, logits=[*good.logits[:place], poison, *good.logits[place + 1 :]])
    tokens, _ = run(team, [good, bad, good])
    assert tokens == [expected(good), -1, expected(good)]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_bans(team: Team, temperature: float) -> None:
    everything = dict.fromkeys(range(VOCAB), -np.inf)
    all_but_one = {i: -np.inf for i in range(VOCAB) if i != 11}
    flat = Row(logits=[0.0] * VOCAB, temperature=temperature, top_p=0.9)
    tokens, _ = run(team, [replace(flat, bias=everything), replace(flat, bias=all_but_one)])
    assert tokens == [-1, 11]


def test_the_argmax_is_the_first(team: Team) -> None:
    assert run(team, [Row(logits=[0.0, 2.0, 1.0, 2.0], temperature=0.0)])[0] == [1]


def test_the_last_token_is_reached(team: Team) -> None:
    assert run(team, [Row(logits=[0.0] * 9, uniform=np.nextafter(1.0, 0.0))])[0] == [8]


def test_a_tiny_temperature_is_the_argmax(team: Team) -> None:
    assert run(team, [Row(logits=[0.0, 2.0, 1.0], temperature=1e-40, uniform=0.99)])[0] == [1]


def test_no_rows(team: Team) -> None:
    result = sample(team, torch.empty(0, 10), make_batch([]))
    assert result.token_ids.shape == (0,)


def test_what_is_no_token_is_refused(team: Team) -> None:
    for changes in ({"bias": {3: 1.0}}, {"seen": {-1: 1}}):
        with pytest.raises(ValueError, match="vocabulary"):
            run(team, [Row(logits=[0.0, 1.0, 2.0], **changes)])


def test_arrays_that_do_not_fit_are_refused(team: Team) -> None:
    batch = make_batch([Row(logits=[0.0, 1.0])])
    with pytest.raises(ValueError, match="top_p"):
        sample(team, torch.zeros(1, 2), replace(batch, top_p=np.zeros(2, np.float32)))
    with pytest.raises(ValueError, match="bias_ids"):
        sample(team, torch.zeros(1, 2), replace(batch, bias_starts=np.array([0, 3], np.int32)))
    with pytest.raises(ValueError, match="float32"):
        sample(team, torch.zeros(1, 2).double(), batch)
