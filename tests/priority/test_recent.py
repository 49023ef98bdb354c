"""What tenants had of late, and what they have open."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.priority.lanes import Lane
from penstock.priority.recent import LastMinute
from penstock.priority.tenants import Demands
from tests.priority.simulated_engine import ask, make_queue, serve, take


@given(st.lists(st.tuples(st.sampled_from("ab"), st.integers(-5, 50), st.floats(0, 40)), max_size=30))
def test_a_minute_is_kept_and_at_most_five_seconds_more(added: list[tuple[str, int, float]]) -> None:
    recent, now = LastMinute(), 1e6
    times: list[tuple[str, int, float]] = []
    for name, amount, wait_s in added:
        now += wait_s
        recent.add(name, amount, now)
        times.append((name, amount, now))
    sums = recent.sums(now)
    for name in "ab":
        surely = [amount for other, amount, at in times if other == name and now - at < 60]
        maybe = [amount for other, amount, at in times if other == name and 60 <= now - at < 65]
        assert sums.get(name, 0) in {sum(surely) + sum(maybe[i:]) for i in range(len(maybe) + 1)}


def test_names_of_long_ago_are_not_kept() -> None:
    recent = LastMinute()
    for number in range(1_000):
        recent.add(f"{number}", 1, 100.0)
    recent.add("now", 1, 166.0)
    assert recent.sums(166.0) == {"now": 1}
    assert recent.sums(1e9) == {}


def test_a_tenant_has_its_work_and_what_it_has_open_in_all_lanes() -> None:
    queue = make_queue()
    for number, lane in enumerate((Lane.INTERACTIVE, Lane.INTERACTIVE, Lane.BATCH)):
        queue.put(ask(f"b{number}", 100, lane=lane, tenant="busy"), 0.0)
    queue.put(ask("q", 10, lane=Lane.STANDARD, tenant="quiet"), 0.0)
    request = take(queue)
    assert request is not None
    queue.charge([(request, 100, 1, 101)], 1.0)
    work = {"busy": queue.tenants()["busy"]}
    assert queue.demands(1.0) == Demands(work, {"busy": 2, "quiet": 1}, {"busy": 1})
    serve(queue, request, 1, 2.0)
    work = {"busy": queue.tenants()["busy"]}
    assert queue.demands(2.0) == Demands(work, {"busy": 2, "quiet": 1}, {})
    assert queue.demands(70.0) == Demands({}, {"busy": 2, "quiet": 1}, {})
