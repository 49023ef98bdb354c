"""How much of a chain is read: as much as is ahead of computing by most, and never what no one can use."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.outside import STATE
from penstock.engine.tiers.rates import ReadRate, Reads, choose_reads, compute_seconds


def chosen(
    num_known: int, costs: list[float | None], computes: list[float], num_seen: tuple[int, ...] = (0,)
) -> Reads | None:
    """Of a chain with such costs of reading, by block, in every table."""
    return choose_reads(
        num_known,
        len(costs),
        num_seen,
        lambda depth, _: depth < num_known,
        lambda depth, _: costs[depth],
        lambda first, end: computes[first:end],
    )


def test_all_is_read_while_nothing_is_known_of_rates() -> None:
    reads = chosen(1, [0.0] * 4, [0.0] * 4)
    assert reads is not None
    assert reads.places == [(1, 0), (2, 0), (3, 0)]
    assert (reads.end, reads.read_s, reads.compute_s) == (4, 0.0, 0.0)


def test_blocks_behind_one_that_is_nowhere_are_not_read() -> None:
    reads = chosen(0, [0.1, 0.1, None, 0.1], [1.0] * 4)
    assert reads is not None
    assert reads.places == [(0, 0), (1, 0)]
    assert reads.read_s == pytest.approx(0.2)
    assert reads.compute_s == pytest.approx(2.0)


def test_what_is_computed_sooner_is_not_read() -> None:
    assert chosen(0, [1.1] * 4, [1.0] * 4) is None
    reads = chosen(0, [0.5, 0.5, 3.0, 0.5], [1.0] * 4)
    assert reads is not None
    assert reads.end == 2


def test_slow_first_blocks_are_read_for_the_sake_of_those_behind_them() -> None:
    reads = chosen(0, [1.5, 0.1, 0.1], [1.0] * 3)
    assert reads is not None
    assert reads.end == 3


def test_behind_a_window_nothing_is_read() -> None:
    reads = chosen(0, [0.1] * 6, [1.0] * 6, num_seen=(0, 2))
    assert reads is not None
    assert [place for place in reads.places if place[1] == 1] == [(4, 1), (5, 1)]
    assert [place for place in reads.places if place[1] == 0] == [(depth, 0) for depth in range(6)]


@given(
    num_known=st.integers(0, 3),
    here=st.lists(st.booleans(), min_size=16, max_size=16),
    there=st.lists(st.booleans(), min_size=16, max_size=16),
    num_seen=st.sampled_from([(0,), (2,), (0, 2), (0, 3, 1), (3, 2), (0, 0)]),
)
def test_what_is_read_completes_a_prefix(
    num_known: int, here: list[bool], there: list[bool], num_seen: tuple[int, ...]
) -> None:
    """By brute force: the longest prefix of which every table has all that is seen."""

    def is_here(depth: int, table: int) -> bool:
        known = depth < num_known and depth >= (num_known - num_seen[table] if num_seen[table] else 0)
        return known or here[(depth * 3 + table) % 16]

    def has(depth: int, table: int) -> bool:
        return is_here(depth, table) or there[(depth * 5 + table) % 16]

    def is_whole(end: int) -> bool:
        firsts = [max(0, end - seen) if seen else 0 for seen in num_seen]
        return all(has(depth, table) for table, first in enumerate(firsts) for depth in range(first, end))

    reads = choose_reads(
        num_known,
        8,
        num_seen,
        is_here,
        lambda depth, table: 0.0 if there[(depth * 5 + table) % 16] else None,
        lambda first, end: [0.0] * (end - first),
    )
    longest = max((end for end in range(9) if is_whole(end)), default=0)
    assert (reads.end if reads else num_known) == max(longest, num_known)
    if reads is not None:
        read = set(reads.places)
        assert not any(is_here(*place) for place in read)
        for table, seen in enumerate(num_seen):
            first = max(0, reads.end - seen) if seen else 0
            assert all(is_here(depth, table) or (depth, table) in read for depth in range(first, reads.end))


@given(
    num_known=st.integers(0, 3),
    there=st.lists(st.booleans(), min_size=8, max_size=8),
    states=st.lists(st.sampled_from([None, "here", "there"]), min_size=8, max_size=8),
)
def test_what_is_read_ends_with_a_state(num_known: int, there: list[bool], states: list[str | None]) -> None:
    def is_here(depth: int, table: int) -> bool:
        return states[depth] == "here" if table == STATE else depth < num_known

    def read_seconds(depth: int, table: int) -> float | None:
        has = states[depth] == "there" if table == STATE else there[depth]
        return 0.5 if has else None

    reads = choose_reads(
        num_known, 8, [0], is_here, read_seconds, lambda first, end: [2.0] * (end - first), needs_state=True
    )
    num_there = next((depth for depth in range(num_known, 8) if not there[depth]), 8)
    longest = max((end for end in range(num_known + 1, num_there + 1) if states[end - 1]), default=num_known)
    assert (reads.end if reads else num_known) == longest
    if reads is not None:
        read = reads.places[:-1] if reads.has_state else reads.places
        assert read == [(depth, 0) for depth in range(num_known, longest)]
        assert reads.has_state == (states[longest - 1] == "there")
        assert reads.read_s == 0.5 * len(reads.places)


def test_a_state_that_takes_too_long_to_read_is_not_read() -> None:
    def reads(state_s: float) -> int:
        chosen = choose_reads(
            *(0, 4, [0], lambda *_: False, lambda _, table: state_s if table == STATE else 0.1),
            lambda first, end: [1.0] * (end - first),
            needs_state=True,
        )
        return chosen.end if chosen else 0

    assert [reads(3.5), reads(3.7)] == [4, 0]


def test_a_block_costs_what_it_adds_to_a_step() -> None:
    seconds = compute_seconds(lambda tokens, _, __, pairs: 5.0 + tokens + pairs / 100, 4, 1, 3)
    assert seconds == pytest.approx([4 + 0.26, 4 + 0.42])
    assert compute_seconds(lambda *_: 0.0, 4, 1, 3) == [0.0, 0.0]


def test_a_rate_follows_the_last_reads_and_is_forgotten() -> None:
    rate = ReadRate()
    assert rate.seconds(100, 0.0) == 0.0
    rate.note(100, 1.0, 0.0)
    assert rate.seconds(200, 1.0) == pytest.approx(2.0)
    for _ in range(40):
        rate.note(100, 3.0, 2.0)
    assert rate.seconds(100, 3.0) == pytest.approx(3.0, rel=0.01)
    assert rate.seconds(100, 70.0) == 0.0
