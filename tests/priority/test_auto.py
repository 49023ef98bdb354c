"""Streams that leave their lane to the server, and requests with a promise of their own."""

from __future__ import annotations

from dataclasses import replace

import pytest

from penstock.engine.planning.request import Request
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, Urgency
from penstock.priority.queue import LaneQueue
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.summary import percentile
from penstock.priority.simulator.trace import Demand, default_clients
from penstock.priority.verdict import Refusal
from tests.priority.simulated_engine import (
    COEFFICIENTS,
    ask,
    check_books,
    known_model,
    lines,
    make_queue,
    take,
)
from tests.priority.test_admission import IDLE

INTERACTIVE, STANDARD, BATCH = Lane


def measured_queue(**interactive: float) -> LaneQueue:
    """A queue that forecasts, with these changes to its interactive lane."""
    policy = replace(DEFAULT_POLICIES[INTERACTIVE], **interactive)  # type: ignore[arg-type]
    queue = make_queue({**DEFAULT_POLICIES, INTERACTIVE: policy}, promises=True, model=known_model())
    queue.observe(IDLE)
    return queue


def stream(name: str, num_prompt: int = 8, tenant: str = "a") -> Request:
    return replace(ask(name, num_prompt, lane=STANDARD, tenant=tenant), tried_lane=INTERACTIVE)


def put(queue: LaneQueue, *requests: Request) -> list[int]:
    """Returns the lanes that they were let into."""
    let_in, _ = queue.put_all(requests, 0.0, [(0, 0)] * len(requests))
    assert [one.request_id for one in let_in] == [one.request_id for one in requests]
    check_books(queue)
    return [one.lane for one in let_in]


def fill(queue: LaneQueue, num_prompt: int = 7_900) -> None:
    """Puts streams of tenant `a` into the interactive lane until its promise is out of reach for another."""
    for number in range(99):
        if put(queue, stream(f"fill-{num_prompt}-{number}", num_prompt)) == [STANDARD]:
            return
    raise AssertionError("the lane is never full")


def test_a_stream_is_interactive_while_that_promise_can_be_kept_and_then_standard() -> None:
    queue = measured_queue()
    assert put(queue, stream("first")) == [INTERACTIVE]
    fill(queue)
    assert put(queue, stream("late", 7_900)) == [STANDARD]
    with pytest.raises(Refusal, match="the interactive lane promises 1"):
        queue.put(ask("urgent", 7_900), 0.0)
    request = take(queue)
    assert request is not None
    assert (request.request_id, request.lane) == ("first", INTERACTIVE)


def test_nothing_is_promised_before_a_step_was_measured() -> None:
    assert put(make_queue(), stream("first")) == [STANDARD]


def test_a_full_interactive_lane_refuses_no_stream() -> None:
    queue = measured_queue(max_requests=2)
    put(queue, stream("b", tenant="b"))
    assert put(queue, stream("one")) == [INTERACTIVE]
    assert put(queue, stream("two")) == [STANDARD], "the tenant's part of two is one"
    assert put(queue, stream("three", tenant="c")) == [STANDARD]


def test_all_requests_of_a_stream_are_in_one_lane() -> None:
    queue = measured_queue()
    assert put(queue, stream("a"), stream("b")) == [INTERACTIVE] * 2
    many = [stream(f"long-{number}", 7_900) for number in range(20)]
    assert put(queue, *many) == [STANDARD] * 20
    assert queue.depths() == {INTERACTIVE: 2, STANDARD: 20, BATCH: 0}


def test_of_requests_that_belong_together_none_waits_if_one_is_refused() -> None:
    queue = measured_queue()
    together = [ask(f"long-{number}", 7_900) for number in range(20)]
    with pytest.raises(Refusal):
        queue.put_all(together, 0.0, [(0, 0)] * 20)
    check_books(queue)
    assert not any(queue.depths().values())


def test_a_tenant_has_its_part_of_a_lane_where_others_are_in_another_lane() -> None:
    """A tenant that fills the standard lane leaves room for those whose streams were interactive so far."""
    queue = measured_queue()
    put(queue, stream("chat", tenant="b"))
    policy = DEFAULT_POLICIES[STANDARD]
    most = int(policy.max_requests * policy.tenant_share)
    for number in range(most):
        queue.put(ask(f"a{number}", 1, lane=STANDARD), 0.0)
    with pytest.raises(Refusal) as full:
        queue.put(ask("more", 1, lane=STANDARD), 0.0)
    assert full.value.tenant_limit
    queue.put(ask("b", 1, lane=STANDARD, tenant="b"), 0.0)


# A promise for one request


def test_a_request_is_held_to_the_promise_that_it_asks_for() -> None:
    queue = measured_queue()
    fill(queue)
    patient = replace(ask("patient", 7_900), ttft_s=5.0)
    forecast = queue.put(patient, 0.0)
    assert forecast is not None
    assert forecast.allowed_s == 5.0
    with pytest.raises(Refusal, match=r"the interactive lane promises 0\.05 s") as refused:
        queue.put(replace(ask("hasty", tenant="c"), ttft_s=0.05), 0.0)
    assert refused.value.reason == "promise_out_of_reach"


def test_the_early_check_knows_the_promise_that_a_request_asks_for() -> None:
    queue = measured_queue()
    for num_prompt in (7_900, 500, 30, 1):
        fill(queue, num_prompt)
    assert lines(queue)[INTERACTIVE].is_late
    with pytest.raises(Refusal, match="promises 1"):
        queue.check_open(Urgency(INTERACTIVE), "a", 0.0, 0.0, 1)
    queue.check_open(Urgency(INTERACTIVE, ttft_s=5.0), "a", 0.0, 0.0, 1)


def test_the_earliest_promise_of_a_tenant_is_first() -> None:
    queue = measured_queue()
    queue.put(replace(ask("patient"), ttft_s=5.0), 0.0)
    queue.put(ask("usual"), 0.0)
    queue.put(replace(ask("hasty"), ttft_s=0.5), 0.0)
    taken = [take(queue) for _ in range(3)]
    assert [one and one.request_id for one in taken] == ["hasty", "usual", "patient"]


def test_a_request_may_wait_as_long_as_it_was_promised() -> None:
    queue = measured_queue(ttl_s=10.0)
    queue.put(replace(ask("patient"), ttft_s=20.0), 0.0)
    queue.put(ask("usual"), 0.0)
    assert [one.request_id for one in queue.expire(15.0)] == ["usual"]
    assert [one.request_id for one in queue.expire(21.0)] == ["patient"]


# Fairness


def test_the_chats_of_quiet_tenants_keep_their_promise_beside_one_with_sixty_four_streams() -> None:
    """All are default clients, at twice what the machine can serve."""
    arrivals = default_clients(Demand(29.0, 30.0))
    result = simulate(arrivals, Machine(coefficients=COEFFICIENTS))
    quiet = [served for served in result.served if served.arrival.tenant != "noisy"]
    noisy = [served for served in result.served if served.arrival.tenant == "noisy"]
    assert not [served.refused for served in quiet if served.refused]
    chats = sorted(served.ttft_s for served in quiet if served.lane is INTERACTIVE and served.ttft_s)
    assert len(chats) > 0.95 * len(quiet)
    assert (percentile(chats, 99) or 9.0) <= DEFAULT_POLICIES[INTERACTIVE].ttft_s
    assert {served.lane for served in noisy} == {INTERACTIVE, STANDARD}
    refused = [served for served in noisy if served.refused]
    assert len(refused) > 0.1 * len(noisy), "it asks for more than can be served"
    assert {served.lane for served in refused} == {STANDARD}
