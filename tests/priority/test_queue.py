from __future__ import annotations

from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from engine.request import Sequence
from priority.lanes import Lane
from priority.queue import LaneQueue, Refusal
from tests.engine.paper import make_request


def make_queue(max_requests: int = 4, max_tokens: int = 100, ttl_s: float = 10.0) -> LaneQueue:
    bounds = LanePolicy(max_requests=max_requests, max_tokens=max_tokens, ttl_s=ttl_s)
    return LaneQueue(Lock(), dict.fromkeys(Lane, bounds))


def take_all(queue: LaneQueue) -> list[str]:
    taken = []
    while (request := queue.take(lambda _: True)) is not None:
        taken.append(request.request_id)
    return taken


def test_the_urgent_lane_goes_first_and_each_lane_in_order() -> None:
    queue = make_queue()
    for name, lane in [("b0", 2), ("s0", 1), ("i0", 0), ("s1", 1), ("i1", 0)]:
        queue.put(make_request(name, [1], lane=lane), 0.0)
    assert queue.position("s1") == 3
    assert take_all(queue) == ["i0", "i1", "s0", "s1", "b0"]
    assert queue.position("s1") is None


def test_a_head_that_does_not_fit_stays_the_head() -> None:
    queue = make_queue()
    queue.put(make_request("a", [1, 2]), 0.0)
    queue.put(make_request("b", [1]), 0.0)
    assert queue.take(lambda request: len(request.prompt_token_ids) < 2) is None
    assert take_all(queue) == ["a", "b"]


def test_a_full_lane_refuses_and_says_when_to_come_back() -> None:
    queue = make_queue(max_requests=2)
    queue.put(make_request("a", [1]), 0.0)
    queue.put(make_request("b", [1]), 0.0)
    with pytest.raises(Refusal, match="standard lane is full") as refusal:
        queue.put(make_request("c", [1]), 0.0)
    assert refusal.value.reason == "queue_full"
    assert not refusal.value.tenant_limit
    assert 1.0 <= refusal.value.retry_after_s <= 60.0
    queue.put(make_request("d", [1], lane=Lane.BATCH), 0.0)


def test_a_lane_is_bounded_in_tokens_but_takes_one_big_request_when_empty() -> None:
    queue = make_queue(max_tokens=10)
    queue.put(make_request("big", [1] * 50), 0.0)
    with pytest.raises(Refusal):
        queue.put(make_request("small", [1]), 0.0)


def test_cancel_is_true_only_for_what_waits_here() -> None:
    queue = make_queue()
    queue.put(make_request("a", [1]), 0.0)
    assert queue.cancel("a")
    assert not queue.cancel("a")
    assert not queue.cancel("never")
    assert take_all(queue) == []


def test_what_waits_too_long_expires() -> None:
    queue = make_queue(ttl_s=5.0)
    queue.put(make_request("old", [1], arrival_s=0.0), 0.0)
    queue.put(make_request("new", [1], arrival_s=4.0), 4.0)
    assert [r.request_id for r in queue.expire(5.5)] == ["old"]
    assert queue.expire(5.5) == []
    assert take_all(queue) == ["new"]


def test_the_faster_requests_finish_the_sooner_one_may_come_back() -> None:
    def retry_after(gap_s: float) -> float:
        queue = make_queue(max_requests=40)
        for i in range(40):
            queue.put(make_request(f"r{i}", [1]), 0.0)
            queue.note_finished(i * gap_s)
        with pytest.raises(Refusal) as refusal:
            queue.put(make_request("late", [1]), 40 * gap_s)
        return refusal.value.retry_after_s

    assert retry_after(0.3) < retry_after(2.0)


@pytest.mark.parametrize("bounds", [(0, 1, 1.0), (1, -1, 1.0), (1, 1, 0.0)])
def test_a_bound_of_nothing_is_refused_by_name(bounds: tuple[int, int, float]) -> None:
    with pytest.raises(ValueError, match="must be greater than 0"):
        LanePolicy(max_requests=bounds[0], max_tokens=bounds[1], ttl_s=bounds[2])


def test_the_victim_is_the_newest_of_the_least_urgent_lane() -> None:
    queue = make_queue()
    running = [
        Sequence(make_request(name, [1], lane=lane), order=order)
        for order, (name, lane) in enumerate([("b0", 2), ("i", 0), ("b1", 2), ("s", 1)])
    ]
    victim = queue.victim(running)
    assert victim is running[2]
    assert queue.victim([]) is None


actions = st.lists(
    st.tuples(st.sampled_from(["put", "take", "cancel", "expire"]), st.integers(0, 2), st.integers(0, 9))
)


@given(actions)
def test_every_request_leaves_exactly_once_and_bounds_hold(steps: list[tuple[str, int, int]]) -> None:
    queue = make_queue(max_requests=3, max_tokens=12, ttl_s=3.0)
    let_in: list[str] = []
    left: list[str] = []
    for now, (action, lane, pick) in enumerate(steps):
        if action == "put":
            request = make_request(f"r{now}", [1] * (1 + pick), lane=lane, arrival_s=float(now))
            try:
                queue.put(request, float(now))
                let_in.append(request.request_id)
            except Refusal:
                pass
        elif action == "take" and (taken := queue.take(lambda _: True)) is not None:
            left.append(taken.request_id)
        elif action == "cancel" and let_in and queue.cancel(let_in[pick % len(let_in)]):
            left.append(let_in[pick % len(let_in)])
        elif action == "expire":
            left.extend(r.request_id for r in queue.expire(float(now)))
        assert sum(queue.depths().values()) == len(let_in) - len(left)
        assert max(queue.depths().values()) <= 3
    left.extend(take_all(queue))
    assert sorted(left) == sorted(let_in)
