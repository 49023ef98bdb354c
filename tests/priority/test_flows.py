"""Flows: the arithmetic of what others go on sending."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.priority.flows import fair_part, seconds_to_catch_up

DEMANDS = st.lists(st.tuples(st.floats(0, 1e4), st.integers(1, 8)), max_size=6)


@given(rate=st.floats(1, 1e4), weight=st.integers(1, 8), others=DEMANDS)
def test_a_fair_part_is_what_is_left_when_nobody_has_more_than_it_for_its_weight(
    rate: float, weight: int, others: list[tuple[float, int]]
) -> None:
    each = fair_part(rate, weight, others) / weight
    given_away = sum(min(demand, each * other) for demand, other in others)
    assert given_away + each * weight == pytest.approx(rate)


def test_who_asks_for_little_leaves_the_rest_to_the_others() -> None:
    assert fair_part(90.0, 1, []) == 90.0
    assert fair_part(90.0, 1, [(50.0, 1), (10.0, 1)]) == 40.0
    assert fair_part(90.0, 1, [(1e9, 2)]) == 30.0


@given(
    work=st.floats(0, 1e4),
    rate=st.floats(1, 1e4),
    others=st.lists(st.tuples(st.floats(1, 1e4), st.floats(1, 1e4)), max_size=6),
)
def test_the_time_to_catch_up_is_that_in_which_all_is_done_that_came(
    work: float, rate: float, others: list[tuple[float, float]]
) -> None:
    seconds = seconds_to_catch_up(work, rate, others)
    done = work + sum(min(due, arrivals * seconds) for due, arrivals in others)
    assert seconds * rate == pytest.approx(done)
