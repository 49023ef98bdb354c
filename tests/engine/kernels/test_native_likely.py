"""The most likely tokens by the native kernels: exact log probabilities, and an order that no other row changes."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels.cpu.native import NativeLibrary, NativeMostLikely
from penstock.engine.sampling.reference import logprobs_of, most_likely
from tests.engine.kernels.levels import FEW_LEVELS, params
from tests.engine.kernels.sampling_rows import ints
from tests.engine.ranges import assert_logprobs
from tests.few import examples

VOCABS = [1, 7, 8, 255, 257, 2055, 16_384 + 3]


@pytest.fixture(scope="module", params=params(FEW_LEVELS))
def level(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def finders(library: NativeLibrary) -> list[NativeMostLikely]:
    """One for each of several numbers of threads."""
    return [NativeMostLikely(library.start_team(threads)) for threads in (1, 2, 5)]


def random_logits(num_rows: int, vocab: int, seed: int, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(num_rows, vocab, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=examples(60), deadline=None)
@given(
    st.sampled_from(VOCABS),
    st.lists(st.integers(0, 4), min_size=1, max_size=7),
    st.sampled_from([0, 1, 5, 20, 300, 20_000]),
    st.integers(0, 2**31),
    st.sampled_from([0.0, 3.0, 1e30]),
    st.booleans(),
)
def test_tokens_are_those_of_the_specification_and_ties_are_in_order_of_id(
    finders: list[NativeMostLikely],
    vocab: int,
    rows: list[int],
    num: int,
    seed: int,
    scale: float,
    has_ties: bool,
) -> None:
    logits = random_logits(5, vocab, seed, scale)
    logits = logits.round() if has_ties else logits
    asked = logits[rows]
    order = torch.sort(asked, dim=1, descending=True, stable=True).indices[:, :num]
    expected_norms, _, expected = most_likely(logits, ints(rows), num)
    for find in finders:
        norms, token_ids, logprobs = find(logits, ints(rows), num)
        assert (token_ids.dtype, logprobs.dtype) == (torch.int32, torch.float32)
        assert token_ids.equal(order.to(torch.int32))
        torch.testing.assert_close(norms, expected_norms)
        torch.testing.assert_close(logprobs, expected)
        assert logprobs_of(logits, ints(rows), order[:, 0], norms).equal(logprobs[:, 0]) if num else True
        for column in range(min(num, vocab, 9)):
            assert_logprobs(logprobs[:, column], asked, token_ids[:, column])


@settings(max_examples=examples(20), deadline=None)
@given(st.sampled_from(VOCABS), st.integers(1, 7), st.integers(0, 2**31))
def test_neither_company_nor_threads_change_a_bit(
    finders: list[NativeMostLikely], vocab: int, num_rows: int, seed: int
) -> None:
    logits = random_logits(num_rows, vocab, seed)
    together = finders[0](logits, ints(range(num_rows)), 20)
    for find in finders:
        for row in range(num_rows):
            alone = find(logits, ints([row]), 20)
            assert all(
                found.equal(all_of_them[row : row + 1])
                for found, all_of_them in zip(alone, together, strict=True)
            )


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize("place", [0, 255, 700, 16_386])
def test_a_row_that_is_not_finite_is_told_and_no_other(
    finders: list[NativeMostLikely], bad: float, place: int
) -> None:
    logits, rows = random_logits(3, 16_387, 0), ints(range(3))
    good = finders[0](logits, rows, 3)
    logits[1, place] = bad
    for find in finders:
        norms, token_ids, logprobs = find(logits, rows, 3)
        assert logprobs.isnan().all(1).tolist() == [False, True, False]
        assert logprobs_of(logits, rows, ints([1, 1, 1]), norms).isnan().tolist() == [False, True, False]
        for found, expected in zip((norms, token_ids, logprobs), good, strict=True):
            assert found[::2].equal(expected[::2])


def test_banned_tokens_come_last(finders: list[NativeMostLikely]) -> None:
    logits = torch.full((1, 600), -math.inf)
    logits[0, [3, 599]] = torch.tensor([0.0, 1.0])
    for find in finders:
        _, token_ids, logprobs = find(logits, ints([0]), 4)
        assert token_ids.tolist() == [[599, 3, 0, 1]]
        assert logprobs[0].exp().tolist() == pytest.approx([0.7310586, 0.2689414, 0, 0])


def test_no_rows_and_rows_that_do_not_exist(finders: list[NativeMostLikely]) -> None:
    shapes = [found.shape for found in finders[0](torch.zeros(2, 10), ints([]), 3)]
    assert shapes == [(0, 2), (0, 3), (0, 3)]
    for rows in ([2], [0, -1]):
        with pytest.raises(ValueError, match="2 rows of logits"):
            finders[0](torch.zeros(2, 10), ints(rows), 3)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_logits_of_half_precision(finders: list[NativeMostLikely], dtype: torch.dtype) -> None:
    logits = random_logits(2, 300, 0).to(dtype)
    for found, expected in zip(
        finders[1](logits, ints([1]), 5), finders[1](logits.float(), ints([1]), 5), strict=True
    ):
        assert found.equal(expected)
