"""The queue's front: order within a lane and a tenant, places, cancelling, expiring."""

from __future__ import annotations

import sys
from dataclasses import replace
from math import inf
from threading import Lock

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.engine.planning.request import Request
from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.queue import LaneQueue
from penstock.priority.steptime import StepTimeModel
from penstock.priority.verdict import Refusal
from tests.priority.simulated_engine import (
    ask,
    check_books,
    known_model,
    lines,
    permissive,
    serve,
    settle,
    take,
    take_all,
)
from tests.priority.simulated_engine import make_queue as make_permissive_queue


def make_queue(max_requests: int = 4, max_tokens: int = 100, ttl_s: float = 10.0) -> LaneQueue:
    bounds = LanePolicy(max_requests=max_requests, max_tokens=max_tokens, ttl_s=ttl_s)
    return LaneQueue(Lock(), dict.fromkeys(Lane, bounds))


def test_the_urgent_lane_goes_first_and_each_lane_in_order() -> None:
    queue = make_queue()
    for name, lane in [("b0", 2), ("s0", 1), ("i0", 0), ("s1", 1), ("i1", 0)]:
        queue.put(ask(name, 1, lane=Lane(lane)), 0.0)
    assert take_all(queue) == ["i0", "i1", "s0", "s1", "b0"]


def test_the_position_counts_those_of_the_lane_with_an_earlier_deadline() -> None:
    queue = make_queue()
    queue.put(ask("i0", 1), 0.0)
    for name in ("s0", "s1", "s2"):
        queue.put(ask(name, 1, lane=Lane.STANDARD, tenant=name), 0.0)
    assert [queue.position(name) for name in ("i0", "s0", "s1", "s2")] == [0, 0, 1, 2]
    assert queue.cancel("s0")
    assert [queue.position(name) for name in ("s0", "s1", "s2")] == [None, 0, 1]
    taken = take_all(queue)
    assert all(queue.position(name) is None for name in taken)
    assert queue.position("never") is None


def test_a_head_that_does_not_fit_stays_the_head() -> None:
    queue = make_queue()
    queue.put(ask("a", 2), 0.0)
    queue.put(ask("b", 1), 0.0)
    assert queue.take(lambda request: len(request.prompt_token_ids) < 2) is None
    assert take_all(queue) == ["a", "b"]


def test_whether_a_request_fits_is_asked_without_the_lock_and_what_is_cancelled_meanwhile_is_not_taken() -> (
    None
):
    """The answer may take the hashes of a long prompt, and nobody who comes or goes waits for it."""
    lock = Lock()
    queue = LaneQueue(lock, permissive())
    queue.put(ask("gone", 1), 0.0)
    queue.put(ask("stays", 1), 0.0)
    asked = []

    def fits(request: Request) -> bool:
        assert not lock.locked()
        asked.append(request.request_id)
        return request.request_id == "stays" or queue.cancel("gone")

    taken = queue.take(fits)
    assert taken is not None
    assert (taken.request_id, asked) == ("stays", ["gone", "stays"])
    check_books(queue)


def test_a_more_urgent_head_may_try_if_the_one_whose_turn_it_is_does_not_fit() -> None:
    """Never the other way round: what is too large must not be overtaken by what is less urgent."""
    queue = make_permissive_queue()
    for i in range(60):  # so that it is the batch lane's turn
        queue.put(ask(f"before-{i}", 4_000), 0.0)
        queue.put(ask(f"batch-{i}", 10, lane=Lane.BATCH), 0.0)
    order: list[str] = []
    while not any(name.startswith("batch") for name in order):
        request = queue.take(lambda r: r.lane == 0 or r.request_id != "batch-0" or len(order) > 50)
        assert request is not None
        order.append(request.request_id)
    assert len(order) > 50, "the interactive lane went on while the batch lane's head did not fit"
    assert order[-1] == "batch-0", "and the batch lane's own later ones did not overtake it"


PATIENT = permissive(ttft_s=(1.0, 30.0, inf))
"""A prompt of 8,000 tokens takes 0.26 s alone and is due after 4.4 s, one of 80 after the shortest promise of 1 s."""


@pytest.mark.parametrize(
    ("lane", "at_s", "goes_before"),
    [(Lane.STANDARD, 0.5, True), (Lane.STANDARD, 4.9, False), (Lane.INTERACTIVE, 0.5, False)],
)
def test_a_short_prompt_goes_before_the_rest_of_a_long_one_unless_that_is_due_sooner(
    lane: Lane, at_s: float, goes_before: bool
) -> None:
    queue = make_permissive_queue(PATIENT, model=known_model())
    long = ask("long", 8_000, lane=lane)
    queue.put(long, 0.0)
    take(queue)
    queue.put(ask("short", 80, lane=lane, at_s=at_s), at_s)
    assert queue.take(lambda _: True, lane) is None
    taken = queue.take(lambda _: True, lane, long)
    assert (taken is not None) == goes_before


def test_who_had_more_does_not_go_before_the_prompt_of_another() -> None:
    queue = make_permissive_queue(PATIENT, model=known_model())
    long = ask("long", 8_000, lane=Lane.STANDARD, tenant="modest")
    queue.put(long, 0.0)
    take(queue)
    for number in range(3):  # more than the long prompt
        request = ask(f"before-{number}", 4_000, lane=Lane.STANDARD, tenant="greedy")
        queue.put(request, 0.0)
        take(queue)
        serve(queue, request)
    queue.put(ask("short", 80, lane=Lane.STANDARD, tenant="greedy"), 0.0)
    assert queue.take(lambda _: True, Lane.STANDARD, long) is None


def test_a_full_lane_refuses_and_says_when_to_come_back() -> None:
    queue = make_queue(max_requests=2)
    queue.put(ask("a", 1, lane=Lane.STANDARD), 0.0)
    queue.put(ask("b", 1, lane=Lane.STANDARD), 0.0)
    with pytest.raises(Refusal, match="standard lane is full") as refusal:
        queue.put(ask("c", 1, lane=Lane.STANDARD), 0.0)
    assert refusal.value.reason == "queue_full"
    assert not refusal.value.tenant_limit
    assert 1.0 <= refusal.value.retry_after_s <= 60.0
    queue.put(ask("d", 1, lane=Lane.BATCH), 0.0)


def test_a_lane_is_bounded_in_tokens_but_takes_one_big_request_when_empty() -> None:
    queue = make_queue(max_tokens=10)
    queue.put(ask("big", 50), 0.0)
    with pytest.raises(Refusal):
        queue.put(ask("small", 1), 0.0)


def test_what_is_in_the_prefix_cache_takes_no_place() -> None:
    queue = make_queue(max_tokens=20)
    queue.put(ask("a", 40), 0.0, num_cached=30)
    queue.put(ask("b", 40), 0.0, num_cached=30)
    with pytest.raises(Refusal):
        queue.put(ask("c", 40), 0.0, num_cached=39)


def test_the_faster_requests_finish_the_sooner_one_may_come_back() -> None:
    def retry_after(gap_s: float) -> float:
        queue = make_queue(max_requests=40, max_tokens=10_000)
        for i in range(40):
            queue.put(ask(f"r{i}", 1), 0.0)
        for i in range(20):
            request = take(queue)
            assert request is not None
            serve(queue, request, 1, i * gap_s)
            queue.put(ask(f"next-{i}", 1), i * gap_s)
        with pytest.raises(Refusal) as refusal:
            queue.put(ask("late", 1), 20 * gap_s)
        return refusal.value.retry_after_s

    assert 1.0 < retry_after(0.3) < retry_after(2.0) < 60.0


# Deadlines


@given(arrivals=st.lists(st.integers(0, 5_000_000), min_size=1, max_size=20), lane=st.sampled_from(Lane))
def test_the_earliest_deadline_of_a_tenant_goes_first(arrivals: list[int], lane: Lane) -> None:
    """Invariant 8. They are put in any order: a request that waited elsewhere brings its arrival with it."""
    queue = make_permissive_queue(permissive(ttft_s=(1.0, 5.0, 30.0)))
    for number, at_us in enumerate(arrivals):
        queue.put(ask(str(number), 3, lane=lane, at_s=at_us / 1e6), 6.0)
    taken = [int(name) for name in take_all(queue)]
    assert taken == sorted(range(len(arrivals)), key=lambda number: (arrivals[number], number))


@given(st.data())
def test_an_earlier_deadline_is_never_overtaken_within_its_tenant(data: st.DataObject) -> None:
    """Invariant 8, with several tenants and lanes, and with heads that do not fit in between."""
    queue = make_permissive_queue(permissive(ttft_s=(1.0, 5.0, 30.0)))
    waiting: dict[tuple[str, int], list[tuple[float, int]]] = {}
    for number in range(data.draw(st.integers(1, 40))):
        if data.draw(st.booleans()):
            at_s = data.draw(st.integers(0, 20))
            lane, tenant = data.draw(st.sampled_from(Lane)), data.draw(st.sampled_from("abc"))
            size = data.draw(st.integers(1, 400))
            queue.put(ask(str(number), size, lane=lane, tenant=tenant, at_s=at_s), 30.0)
            waiting.setdefault((tenant, lane), []).append((at_s, number))
        else:
            most = data.draw(st.sampled_from([200, 1_000]))
            request = queue.take(lambda r, most=most: len(r.prompt_token_ids) <= most)  # type: ignore[misc]
            if request is not None:
                own = waiting[request.tenant, request.lane]
                assert (request.arrival_s, int(request.request_id)) == min(own)
                own.remove(min(own))


# Leaving


def test_cancel_is_true_only_for_what_waits_here() -> None:
    queue = make_queue()
    queue.put(ask("a", 1), 0.0)
    queue.put(ask("b", 1), 0.0)
    taken = take(queue)
    assert taken is not None
    assert not queue.cancel(taken.request_id), "the engine has it"
    assert queue.cancel("b")
    assert not queue.cancel("b")
    assert not queue.cancel("never")
    assert take_all(queue) == []


@given(names=st.sets(st.integers(0, 19)), lane=st.sampled_from(Lane))
def test_what_was_cancelled_is_never_taken(names: set[int], lane: Lane) -> None:
    """Invariant 15, the queue's half: it never reaches the engine, and its place is free at once."""
    policies = dict.fromkeys(Lane, LanePolicy(max_requests=20, tenant_share=1.0))
    queue = LaneQueue(Lock(), policies)
    for number in range(20):
        queue.put(ask(str(number), 2, lane=lane, tenant="ab"[number % 2]), 0.0)
    assert all(queue.cancel(str(number)) for number in names)
    check_books(queue)
    for number in names:
        queue.put(ask(f"new-{number}", 2, lane=lane), 0.0)
    taken = take_all(queue)
    assert len(taken) == 20
    assert not {str(number) for number in names} & set(taken)


@given(
    arrivals=st.lists(st.integers(0, 40), min_size=1, max_size=20),
    now=st.integers(0, 120),
    ttls=st.tuples(st.integers(1, 60), st.integers(1, 60), st.integers(1, 60)),
)
def test_what_waits_too_long_expires_and_is_never_taken(
    arrivals: list[int], now: int, ttls: tuple[int, int, int]
) -> None:
    """Invariant 16. Nothing else goes, and it takes no step of the engine."""
    ttl_s = dict(zip(Lane, ttls, strict=True))
    queue = make_permissive_queue({lane: replace(permissive()[lane], ttl_s=ttl_s[lane]) for lane in Lane})
    requests: dict[str, Request] = {}
    for number, at_s in enumerate(arrivals):
        lane = Lane(number % 3)
        request = requests[str(number)] = ask(str(number), 2, lane=lane, tenant="ab"[number % 2], at_s=at_s)
        queue.put(request, at_s)
    overdue = {name for name, r in requests.items() if now - r.arrival_s > ttl_s[Lane(r.lane)]}
    assert {request.request_id for request in queue.expire(now)} == overdue
    assert queue.expire(now) == []
    check_books(queue)
    assert set(take_all(queue)) == set(requests) - overdue


def test_what_runs_does_not_expire() -> None:
    queue = make_queue(ttl_s=5.0)
    queue.put(ask("runs", 4), 0.0)
    request = take(queue)
    assert request is not None
    assert queue.expire(1_000.0) == []
    serve(queue, request, 3, 1_000.0)
    check_books(queue)


def test_tenants_that_left_long_ago_are_forgotten() -> None:
    """Else every name that ever came would stay."""
    queue = make_queue(max_requests=1_000, max_tokens=10_000)
    for number in range(100):
        queue.put(ask(str(number), 1, tenant=f"t{number}"), 0.0)
    runs = take(queue)
    assert runs is not None
    for number in range(100):
        queue.cancel(str(number))
    queue.expire(599.0)
    assert len(queue.tenants()) == 100
    queue.expire(601.0)
    assert list(queue.tenants()) == [runs.tenant], "who runs is not idle"
    serve(queue, runs, 1, 700.0)
    queue.expire(1_000.0)
    assert list(queue.tenants()) == [runs.tenant]
    queue.expire(2_000.0)
    assert queue.tenants() == {}


def test_unknown_requests_are_nobodys() -> None:
    """The engine may report on a request that did not come through the queue: its own warm-up, say."""
    queue = make_queue()
    stranger = ask("stranger", 5)
    queue.charge([(stranger, 5, 1, 6)], 0.0)
    settle(queue, stranger)
    assert queue.tenants() == {}
    assert all(line.num_running == 0 for line in lines(queue))


actions = st.lists(
    st.tuples(st.sampled_from(["put", "take", "cancel", "expire"]), st.integers(0, 2), st.integers(0, 9))
)


@given(actions)
def test_every_request_leaves_exactly_once_and_bounds_hold(steps: list[tuple[str, int, int]]) -> None:
    """Invariants 1 and 2, the queue on its own; `test_conservation` has the engine with it."""
    queue = make_queue(max_requests=3, max_tokens=12, ttl_s=3.0)
    let_in: list[str] = []
    left: list[str] = []
    for now, (action, lane, pick) in enumerate(steps):
        if action == "put":
            try:
                queue.put(ask(f"r{now}", 1 + pick, lane=Lane(lane), at_s=float(now)), float(now))
                let_in.append(f"r{now}")
            except Refusal:
                pass
        elif action == "take" and (taken := take(queue)) is not None:
            left.append(taken.request_id)
        elif action == "cancel" and let_in and queue.cancel(let_in[pick % len(let_in)]):
            left.append(let_in[pick % len(let_in)])
        elif action == "expire":
            left.extend(r.request_id for r in queue.expire(float(now)))
        assert sum(queue.depths().values()) == len(let_in) - len(left)
        assert max(queue.depths().values()) <= 3
        check_books(queue)
    left.extend(take_all(queue))
    assert sorted(left) == sorted(let_in)


def served(queue: LaneQueue, number: int) -> list[str]:
    """Whose turn it was, of two tenants that always have something waiting."""
    turns = []
    for _ in range(number):
        request = take(queue)
        assert request is not None
        turns.append(request.tenant)
        serve(queue, request)
        queue.put(replace(request, request_id=f"{request.request_id}+"), 0.0)
    return turns


def test_new_weights_hold_for_those_who_are_here_and_those_who_come() -> None:
    queue = make_permissive_queue()
    queue.set_weights({"a": 3})
    for name in ("a0", "a1", "b0", "b1"):
        queue.put(ask(name, 4_000, tenant=name[0]), 0.0)
    assert served(queue, 400).count("a") == pytest.approx(300, abs=4)
    charged = queue.tenants()
    queue.set_weights({"b": 3})
    assert queue.tenants() == charged
    assert served(queue, 400).count("a") == pytest.approx(100, abs=4)
    check_books(queue)


@pytest.mark.parametrize(("num_prompt", "num_waiting"), [(1_000, 39), (20_000, 1)])
def test_a_token_of_a_long_prompt_fills_more_of_a_lane(num_prompt: int, num_waiting: int) -> None:
    """Twenty thousand tokens are as much work as 32,207 of short prompts."""
    queue = make_queue(max_requests=100, max_tokens=41_000)
    requests = [
        replace(ask(f"r{number}"), prompt_token_ids=(7,) * num_prompt) for number in range(num_waiting + 1)
    ]
    for request in requests[:-1]:
        queue.put(request, 0.0)
    with pytest.raises(Refusal, match="prompt tokens"):
        queue.put(requests[-1], 0.0)


def test_the_time_of_a_step_is_the_models_once_it_is_known() -> None:
    step = 100, 8, 4_000, 5_000
    assert LaneQueue(Lock()).step_seconds(*step) == 0.0
    model = StepTimeModel(
        {"alpha_s": 0.01, "beta_s": 1e-4, "gamma_s": 1e-3, "delta_s": 1e-6, "epsilon_s": 1e-8}
    )
    queue = LaneQueue(Lock(), model=model)
    assert queue.step_seconds(*step) == model.seconds(*step) > 0.01


def test_each_text_of_a_large_request_is_let_in_for_a_few_calls() -> None:
    """A thousand of them are let in together, while nobody else has the loop."""
    queue, number = make_queue(max_requests=2_000, max_tokens=10**6), 1_000
    requests = [ask(f"r{i}", 9) for i in range(number)]
    events: list[str] = []
    sys.setprofile(lambda _frame, event, _arg: events.append(event))
    queue.put_all(requests, 0.0, [(0, 0)] * number)
    sys.setprofile(None)
    assert events.count("call") <= 30 * number


@pytest.mark.parametrize("num_waiting", [0, 1])
def test_the_texts_of_a_request_are_let_in_together_or_not_at_all(num_waiting: int) -> None:
    queue = make_queue(max_requests=4, max_tokens=10**6)
    for number in range(num_waiting):
        queue.put(ask(f"before{number}", 9), 0.0)
    texts = [ask(f"r{number}", 9) for number in range(5 - num_waiting)]
    with pytest.raises(Refusal, match=f"{len(texts)} more are asked for; {num_waiting} answers"):
        queue.put_all(texts, 0.0, [(0, 0)] * len(texts))
    assert sum(queue.depths().values()) == num_waiting
    queue.put_all(texts[1:], 0.0, [(0, 0)] * len(texts[1:]))
    assert sum(queue.depths().values()) == 4
