"""Arguments that are wrong say what is wanted."""

from __future__ import annotations

from argparse import ArgumentTypeError
from collections.abc import Callable

import pytest

from penstock.app.arguments import count, listed, not_negative, one_of, positive, quantity, whole


@pytest.mark.parametrize(
    ("read", "text", "said"),
    [
        (whole, "1.5", "'1.5' is not a whole number"),
        (positive, "fast", "'fast' is not a number"),
        (positive, "inf", "'inf' is not a number"),
        (positive, "nan", "'nan' is not a number"),
        (positive, "0", "must be greater than 0, not 0"),
        (not_negative, "-0.1", "must be at least 0, not -0.1"),
        (count, "0", "must be at least 1, not 0"),
        (quantity(int, most=1_000), "1001", "must be at most 1,000, not 1001"),
        (one_of(["a", "b"]), "c", "'c' is none of a, b"),
        (listed(count), "1,,2", "'' is not a whole number"),
    ],
)
def test_a_wrong_value_is_told(read: Callable[[str], object], text: str, said: str) -> None:
    with pytest.raises(ArgumentTypeError) as caught:
        read(text)
    assert str(caught.value) == said


def test_bounds_are_allowed_and_a_list_has_each_value_once() -> None:
    assert quantity(float, least=0, most=2)("2") == 2.0
    assert whole("-3") == -3
    assert listed(count)("4,1,4") == [4, 1]
    assert listed(one_of("ab"))("b,a") == ["b", "a"]
