"""Shapes of load: never more than all users, and each has what its name says."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtests.curves import SHAPES, double_wave, flash_crowd, steps
from loadtests.settings import read_tenants


@given(st.sampled_from(list(SHAPES)), st.floats(0, 1))
def test_a_share_is_one(shape: str, passed: float) -> None:
    assert 0 < SHAPES[shape](passed) <= 1


def test_steps_go_up_to_all() -> None:
    assert [steps(passed) for passed in (0, 0.2, 0.4, 0.6, 0.8, 1.0)] == [0.2, 0.4, 0.6, 0.8, 1.0, 1.0]


def test_a_crowd_comes_ten_times_as_large_and_goes() -> None:
    assert flash_crowd(0.3) == 10 * flash_crowd(0.1) == 10 * flash_crowd(0.5)


def test_the_evening_is_higher_than_the_morning_and_noon_lower_than_both() -> None:
    assert double_wave(0.7) > double_wave(0.3) > double_wave(0.5) > double_wave(0.0)


def test_every_shape_at_these_times() -> None:
    times = (0.0, 0.19, 0.2, 0.3, 0.39, 0.4, 0.5, 0.6, 0.7, 0.85, 1.0)
    found = {name: [round(shape(passed), 4) for passed in times] for name, shape in SHAPES.items()}
    assert found == {
        "constant": [1.0] * 11,
        "steps": [0.2, 0.2, 0.4, 0.4, 0.4, 0.6, 0.6, 0.8, 0.8, 1.0, 1.0],
        "double-wave": [0.2003, 0.3839, 0.4188, 0.7, 0.4563, 0.4193, 0.2477, 0.5504, 1.0, 0.3246, 0.2005],
        "flash-crowd": [0.1, 0.1, 1.0, 1.0, 1.0, *[0.1] * 6],
    }


def test_tenants_are_read() -> None:
    assert read_tenants("") == {"default": ""}
    assert read_tenants("ann=k1,bob=k2=") == {"ann": "k1", "bob": "k2="}
    with pytest.raises(ValueError, match="NAME=KEY"):
        read_tenants("ann")
