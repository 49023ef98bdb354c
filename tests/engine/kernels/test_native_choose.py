"""Native sampling against its specification in plain torch, on any mixture of parameters."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels.cpu.native import NativeChoose, NativeLibrary
from penstock.engine.sampling import reference
from penstock.engine.sampling.tables import Choose, Filters
from tests.engine.kernels.levels import FEW_LEVELS, params
from tests.engine.kernels.sampling_rows import (
    EVERYTHING,
    Row,
    all_allowed,
    ints,
    make_tables,
    num_explained,
    random_masks,
    run,
)
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what the native kernels take")

VOCABS = [1, 7, 24, 40, 257, 1000, 32_768 + 3]
PENALTIES = [
    (1.0, 0.0, 0.0),
    (0.5, 1.5, -0.7),
    (1.3, 0.0, 0.0),
    (1e-38, 0.0, 0.0),
    (1.0, -3e38, 0.0),
    (2.0, 0.0, 2e38),
]
"""Repetition, presence and frequency; some of them overflow, and what they make is clamped."""


@pytest.fixture(scope="module", params=params(FEW_LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def choosers(library: NativeLibrary) -> list[NativeChoose]:
    """One for each of several numbers of threads."""
    return [NativeChoose(library.start_team(threads)) for threads in (1, 2, 5)]


@pytest.fixture(scope="module")
def choose(choosers: list[NativeChoose]) -> NativeChoose:
    return choosers[1]


def normal(shape: tuple[int, int], seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def rounded(logits: Tensor) -> Tensor:
    """Coarse values, so that ties happen."""
    return (logits * 2).round() / 2


@st.composite
def rows_of(draw: st.DrawFn, vocab: int) -> Row:
    ids = st.integers(0, vocab - 1)
    repetition, presence, frequency = draw(st.sampled_from(PENALTIES))
    banned = draw(st.dictionaries(ids, st.sampled_from([0.0, 3.0]), max_size=3))
    return Row(
        temperature=draw(st.sampled_from([0.0, 1e-40, 0.3, 0.6, 1.0, 1.7, 50.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 20, 100, max(1, vocab - 1), vocab])),
        top_p=draw(st.sampled_from([0.0, 0.05, 0.5, 0.9, 0.999, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.02, 0.3, 1.0])),
        seed=draw(st.integers(0, 2**64 - 1)),
        repetition=repetition,
        presence=presence,
        frequency=frequency,
        min_tokens=draw(st.sampled_from([0, 2])),
        bias=draw(st.dictionaries(ids, st.sampled_from([-np.inf, -100.0, 0.5, 20.0]), max_size=5)),
        banned=banned,
        codes=draw(st.dictionaries(ids, st.integers(0, 7), max_size=8)),
    )


@st.composite
def mixtures(draw: st.DrawFn) -> tuple[int, list[Row]]:
    vocab = draw(st.sampled_from(VOCABS))
    return vocab, draw(st.lists(rows_of(vocab), min_size=1, max_size=6))


@settings(max_examples=examples(60), deadline=None)
@given(
    mixture=mixtures(),
    seed=st.integers(0, 2**31),
    scale=st.sampled_from([0.0, 0.5, 4.0]),
    has_ties=st.booleans(),
    poison=st.none() | st.sampled_from([np.nan, np.inf, -np.inf]),
    padding=st.booleans(),
    share=st.sampled_from([None, 0.0, 0.02, 0.9]),
)
def test_several_steps_are_those_of_the_specification(
    choosers: list[NativeChoose],
    mixture: tuple[int, list[Row]],
    seed: int,
    scale: float,
    has_ties: bool,
    poison: float | None,
    padding: bool,
    share: float | None,
) -> None:
    """`share` of the tokens are allowed by masks."""
    vocab, rows = mixture
    tables = make_tables(rows, vocab)
    others = [make_tables(rows, vocab) for _ in choosers]
    seats = ints([*range(len(rows)), *[-1] * padding])
    for number in range(3):
        logits = normal((len(seats), vocab), seed + number, scale)
        logits = rounded(logits) if has_ties else logits
        if poison is not None and number == 1:
            logits[0, seed % vocab] = poison
        numbers, before = torch.full_like(seats, number), make_tables(rows, vocab)
        before.counts.copy_(tables.counts)
        masks = None if share is None else random_masks(len(seats), vocab, share, seed + number)
        token_ids = reference.choose(logits, tables, seats, numbers, EVERYTHING, masks)
        assert masks is None or all_allowed(token_ids, masks)
        for choose, own in zip(choosers, others, strict=True):
            found = choose(logits, own, seats, numbers, EVERYTHING, masks)
            assert masks is None or all_allowed(found, masks)
            num_explained(found, token_ids, logits, before, seats, numbers, masks)
            same = found == token_ids
            assert torch.equal(
                own.counts[seats[same & (seats >= 0)]], tables.counts[seats[same & (seats >= 0)]]
            )
            own.counts.copy_(tables.counts)


@pytest.mark.parametrize("has_filters", [False, True])
def test_ten_thousand_draws(choose: NativeChoose, has_filters: bool) -> None:
    """They agree with the specification everywhere but where rounding decides, which is nearly never."""
    count, vocab = 100, 503
    filtered = [
        {"top_k": 20, "top_p": 0.95},
        {"top_k": 300},
        {"top_p": 0.9},
        {"min_p": 0.01},
    ]
    rows = [
        Row(seed=i, temperature=(0.6, 1.0, 1.5)[i % 3], **(filtered[i % 4] if has_filters else {}))  # type: ignore[arg-type]
        for i in range(count)
    ]
    tables, seats, different = make_tables(rows, vocab), ints(range(count)), 0
    for number in range(100):
        logits, numbers = normal((count, vocab), number), torch.full_like(seats, number)
        expected = reference.choose(logits, tables, seats, numbers, EVERYTHING)
        found = choose(logits, tables, seats, numbers, EVERYTHING)
        different += num_explained(found, expected, logits, tables, seats, numbers)
    assert different <= 5


@settings(max_examples=examples(20), deadline=None)
@given(mixture=mixtures(), seed=st.integers(0, 2**31), has_ties=st.booleans())
def test_neither_company_nor_threads_change_a_bit(
    choosers: list[NativeChoose], mixture: tuple[int, list[Row]], seed: int, has_ties: bool
) -> None:
    vocab, rows = mixture
    logits = normal((len(rows), vocab), seed)
    logits = rounded(logits) if has_ties else logits
    together = run(choosers[0], logits, rows)
    for choose in choosers:
        assert run(choose, logits, rows) == together
        alone = [run(choose, logits[i : i + 1], [row])[0] for i, row in enumerate(rows)]
        assert alone == together


@pytest.mark.parametrize(
    "filters", [Filters(top_k=False), Filters(top_p=False), Filters(top_k=False, top_p=False)], ids=str
)
def test_work_that_no_row_asks_for_changes_no_token(choose: NativeChoose, filters: Filters) -> None:
    row = Row(top_k=20 * filters.top_k, top_p=0.9 if filters.top_p else 1.0)
    rows = [replace(row, seed=seed) for seed in range(20)]
    logits = normal((20, 1000), 0)
    assert run(choose, logits, rows, filters=filters) == run(choose, logits, rows)


def test_frequencies_are_the_probabilities(choose: NativeChoose) -> None:
    logits = torch.tensor([0.0, 1.0, 2.0, 1.0])
    tokens = run(choose, logits.repeat(40_000, 1), [Row(seed=seed) for seed in range(40_000)])
    found = torch.tensor(tokens).bincount(minlength=4) / 40_000
    torch.testing.assert_close(found, logits.softmax(0), atol=0.01, rtol=0)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_half_precision(choose: NativeChoose, dtype: torch.dtype) -> None:
    logits, rows = normal((5, 300), 0).to(dtype), [Row(seed=seed) for seed in range(5)]
    assert run(choose, logits, rows) == run(choose, logits.float(), rows)


@pytest.mark.parametrize("poison", [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize("place", [0, 5, 36, 255, 256, 300, 32_767, 32_768, 40_000])
@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_k": 5}, {"bias": {3: 1.0}}], ids=str)
def test_a_row_that_is_not_finite_fails_alone(
    choosers: list[NativeChoose], poison: float, place: int, changes: dict[str, float]
) -> None:
    logits = normal((3, 40_001), 0)
    row = Row(**changes)  # type: ignore[arg-type]
    good = run(choosers[0], logits, [row] * 3)
    logits[1, place] = poison
    for choose in choosers:
        assert run(choose, logits, [row] * 3) == [good[0], -1, good[2]]
        assert run(choose, logits[1:2], [row]) == [-1]


@pytest.mark.parametrize("changes", [{"temperature": 0.0}, {}, {"top_p": 0.9}, {"top_k": 3}], ids=str)
def test_bans(choose: NativeChoose, changes: dict[str, float]) -> None:
    flat = Row(**changes)  # type: ignore[arg-type]
    everything = replace(flat, banned=dict.fromkeys(range(37), 0.0), min_tokens=4)
    all_but_one = replace(flat, bias={i: -np.inf for i in range(37) if i != 11})
    logits = torch.zeros(2, 37)
    assert run(choose, logits, [everything, all_but_one]) == [-1, 11]
    assert run(choose, logits, [everything, all_but_one], numbers=[4, 4])[0] >= 0


def test_the_argmax_is_the_first(choosers: list[NativeChoose]) -> None:
    logits = torch.zeros(1, 40_000)
    logits[0, [300, 20_000, 39_999]] = 2.0
    for choose in choosers:
        assert run(choose, logits, [Row(temperature=0.0)]) == [300]
    assert run(choosers[0], torch.tensor([[0.0, 2.0, 1.0, 2.0]]), [Row(temperature=0.0)]) == [1]


def test_of_equal_scores_the_first_is_chosen(choosers: list[NativeChoose]) -> None:
    """Noise is lost beside logits this large, so that all scores are equal."""
    logits = torch.full((1, 40_000), 1e30)
    for choose in choosers:
        for row in (Row(), Row(top_k=5), Row(top_p=0.5)):
            assert run(choose, logits, [row]) == [0]


def test_every_token_is_reached(choose: NativeChoose) -> None:
    tokens = run(choose, torch.zeros(500, 9), [Row(seed=seed) for seed in range(500)])
    assert set(tokens) == set(range(9))


def test_a_tiny_temperature_is_the_argmax(choose: NativeChoose) -> None:
    assert run(choose, torch.tensor([[0.0, 2.0, 1.0]]), [Row(temperature=1e-40)]) == [1]


def test_ties_are_kept_together(choose: NativeChoose) -> None:
    """All tokens on the level of the last one that top-k or top-p keeps are kept, too."""
    logits = torch.tensor([2.0] + [1.0] * 5 + [-9.0]).repeat(500, 1)
    for changes in ({"top_k": 2}, {"top_p": 0.5}):
        tokens = run(choose, logits, [Row(seed=seed, **changes) for seed in range(500)])
        assert set(tokens) == set(range(6))


def test_counts_go_on_from_step_to_step(choose: NativeChoose) -> None:
    """A token that comes is penalised more each time, until another one is ahead."""
    tables = make_tables([Row(temperature=0.0, frequency=1.0), Row(temperature=0.0)], 4)
    logits = torch.tensor([[0.0, 2.5, 1.0, 0.0]]).repeat(2, 1)
    chosen = [choose(logits, tables, ints([0, 1]), ints([n, n]), EVERYTHING).tolist() for n in range(5)]
    assert chosen == [[1, 1], [1, 1], [2, 1], [1, 1], [0, 1]]
    assert tables.counts.tolist()[0] == [2, 6, 2, 0]
    assert tables.counts[1].eq(0).all()


def test_no_rows_and_only_padding(choose: NativeChoose) -> None:
    tables = make_tables([Row()], 10)
    assert choose(torch.empty(0, 10), tables, ints([]), ints([]), EVERYTHING).shape == (0,)
    token_ids = choose(torch.zeros(2, 10), tables, ints([-1, -1]), ints([0, 0]), EVERYTHING)
    assert token_ids.tolist() == [-1, -1]


def test_one_chooser_serves_several_tables(choose: NativeChoose) -> None:
    for vocab in (40, 1000, 7):
        rows = [Row(seed=seed) for seed in range(4)]
        logits = normal((4, vocab), 0)
        assert run(choose, logits, rows) == run(reference.choose, logits, rows)


def test_what_does_not_fit_is_refused(choose: NativeChoose) -> None:
    tables = make_tables([Row(), Row()], 10)
    logits, seats, numbers = torch.zeros(2, 10), ints([0, 1]), ints([0, 0])
    with pytest.raises(ValueError, match="seat"):
        choose(logits, tables, ints([0, 2]), numbers, EVERYTHING)
    with pytest.raises(ValueError, match="seats"):
        choose(logits, tables, seats[:1], numbers, EVERYTHING)
    with pytest.raises(ValueError, match="numbers"):
        choose(logits, tables, seats, numbers.long(), EVERYTHING)
    with pytest.raises(ValueError, match="logits"):
        choose(logits[:, :9], tables, seats, numbers, EVERYTHING)


@pytest.mark.parametrize("num_sharing", [0, 1, 2, 3, 255, 256, 257, 4000])
def test_top_k_of_a_whole_vocabulary(choosers: list[NativeChoose], num_sharing: int) -> None:
    """Any number of tokens at the border, in any run of the row: as many are kept as the specification keeps."""
    logits = normal((1, 40_000), num_sharing)
    border = logits[0].sort(descending=True).values[20]
    logits[0, torch.randperm(40_000, generator=torch.Generator().manual_seed(0))[:num_sharing]] = border
    kept = (logits[0] >= border).nonzero().flatten()
    for top_k in (21, 25, 600):
        expected = set(kept.tolist()) if top_k == 21 else None
        rows = [Row(seed=seed, temperature=40.0, top_k=top_k) for seed in range(12)]
        implementations: list[Choose] = [reference.choose, *choosers]
        found = [run(choose, logits.repeat(12, 1), rows) for choose in implementations]
        assert all(tokens == found[0] for tokens in found)
        assert expected is None or set(found[0]) <= expected
