"""Green tokens and the evidence that they are."""

from __future__ import annotations

from math import comb, sqrt

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.text.watermark import MIN_SECRET_BYTES, Evidence, Watermark, evidence

SECRET = b"0123456789abcdef"
MARK = Watermark.of_secret(SECRET)
TOKENS = st.integers(0, 2**31 - 1)


def test_green_lists_stay_what_they_are() -> None:
    """A text is to be found by any later version."""
    assert MARK.key == 0xE53ABA80BA1185E3
    assert [[i for i in range(24) if MARK.is_green(previous, i)] for previous in (0, 1, 151_643)] == [
        [0, 1, 2, 3, 4, 5, 8, 12, 13, 15, 16, 18, 19, 21, 23],
        [0, 4, 6, 7, 8, 12, 13, 15, 16, 22],
        [0, 1, 2, 4, 13, 14, 16, 18, 19, 20],
    ]


def test_spaces_around_a_secret_do_not_count() -> None:
    """An editor ends a file with a line end."""
    assert Watermark.of_secret(b" " + SECRET + b"\r\n") == MARK
    assert Watermark.of_secret(SECRET + b"x").key != MARK.key


@pytest.mark.parametrize("secret", [b"", SECRET[1:], b" " * 20, SECRET[1:] + b"\n"])
def test_a_short_secret_is_refused(secret: bytes) -> None:
    with pytest.raises(ValueError, match=f"at least {MIN_SECRET_BYTES} bytes") as caught:
        Watermark.of_secret(secret)
    assert "123" not in str(caught.value)


def test_nothing_shows_the_key() -> None:
    assert str(MARK.key) not in repr(MARK)
    assert "key" not in repr(MARK)


@given(st.floats(0.01, 0.99), st.integers(0, 2**64 - 1), TOKENS)
def test_gamma_of_the_vocabulary_is_green(gamma: float, key: int, previous: int) -> None:
    """Within five standard deviations, of 2,000 tokens."""
    mark, num = Watermark(key=key, gamma=gamma), 2_000
    num_green = sum(mark.is_green(previous, token_id) for token_id in range(num))
    assert abs(num_green - gamma * num) < 5 * sqrt(num * gamma * (1 - gamma))


@given(st.lists(st.integers(0, 5), max_size=40))
def test_each_pair_counts_once(token_ids: list[int]) -> None:
    pairs = {(token_ids[i], token_ids[i + 1]) for i in range(len(token_ids) - 1)}
    found = evidence(token_ids, MARK)
    assert found.num_scored == len(pairs)
    assert found.num_green == len([pair for pair in pairs if MARK.is_green(*pair)])
    assert evidence(token_ids + token_ids[:1] + token_ids, MARK).num_scored <= len(pairs) + 2


def test_z_and_p_of_the_papers_formula() -> None:
    found = Evidence(num_scored=200, num_green=130, gamma=0.5)
    assert found.z == pytest.approx((130 - 100) / sqrt(200 * 0.25))
    exact = sum(comb(200, k) for k in range(130, 201)) / 2**200
    assert found.p_value == pytest.approx(exact, rel=0.5)
    quarter = Evidence(num_scored=400, num_green=100, gamma=0.25)
    assert (quarter.z, quarter.p_value) == (0, 0.5)
