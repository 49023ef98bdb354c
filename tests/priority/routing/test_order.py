"""The least loaded are found first, whatever the set they are looked for in."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority.routing.order import CLOSE, LoadOrder
from tests.few import examples


@given(
    puts=st.lists(st.tuples(st.integers(0, 9), st.floats(1e-4, 1e3) | st.none()), max_size=40),
    among=st.integers(0, 2**10 - 1),
    later=st.integers(0, 2**10 - 1),
)
@settings(max_examples=examples(150))
def test_they_come_by_load_within_five_percent(
    puts: list[tuple[int, float | None]], among: int, later: int
) -> None:
    order, known = LoadOrder(), dict[int, float]()
    for slot, seconds in puts:
        if seconds is None:
            order.drop(1 << slot)
            known.pop(slot, None)
        else:
            order.put(1 << slot, seconds)
            known[slot] = seconds
    found = list(order.least(among, later))
    assert sorted(found) == sorted(slot for slot in known if among >> slot & 1)
    for i, slot in enumerate(found):
        assert all(known[slot] <= known[after] * CLOSE * 1.0001 for after in found[i + 1 :])


def test_among_equals_those_of_later_are_last() -> None:
    order = LoadOrder()
    for slot in range(4):
        order.put(1 << slot, 1.0)
    assert list(order.least(0b1111, 0b0011)) == [2, 3, 0, 1]
