"""Coverage: 99 in 100 promises are kept whatever happens, and a forecast is no more work for many tenants."""

from __future__ import annotations

import sys
from contextlib import nullcontext
from functools import partial
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority import admission, rivals
from penstock.priority.coverage import ALPHA, ENOUGH, GAMMA, Coverage, Margin, interval
from penstock.priority.lanes import Lane
from penstock.priority.queue import LaneQueue
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.trace import Demand, mixed
from tests.few import examples
from tests.priority.simulated_engine import (
    ask,
    check_books,
    known_model,
    make_queue,
    permissive,
    refusal_of,
    serve,
    take,
)
from tests.priority.test_admission import IDLE, PROMISES, Waiting, forecast, situation, situations, weightings
from tests.priority.test_forecast import CPU

# The bound


@given(st.lists(st.floats(0.1, 4.0), min_size=1, max_size=400), st.integers(0, 399), st.integers(1, 8))
@settings(max_examples=examples(100))
def test_no_more_promises_are_broken_than_the_bound_allows(
    wrong: list[float], start: int, num_open: int
) -> None:
    """`wrong` is by how much each first token is later than its forecast; `num_open` outcomes are not known yet."""
    margin, margins, broken = Margin(), list[float](), list[bool]()
    for place in range(len(wrong)):
        margins.append(margin.value)
        if place >= num_open:
            broken.append(wrong[place - num_open] > margins[place - num_open])
            margin.note(is_kept=not broken[-1])
        assert margin.value >= 1.0
    some = broken[start:]
    assert sum(some) <= ALPHA * len(some) + (max(1.0, *wrong) + GAMMA * (num_open + 1) - 1) / GAMMA


def test_a_tenant_with_enough_outcomes_has_a_margin_of_its_own() -> None:
    lane, late, quiet = Coverage(), Margin(), Margin()
    for _ in range(ENOUGH):
        lane.note(late, is_kept=False)
    first = lane.margin.value
    assert (
        first
        == lane.margin_of(late)
        == lane.margin_of(quiet)
        == pytest.approx(1 + ENOUGH * GAMMA * (1 - ALPHA))
    )
    lane.note(late, is_kept=False)
    assert lane.margin_of(late) > first == lane.margin_of(quiet)
    for _ in range(ENOUGH):
        lane.note(quiet, is_kept=True)
    assert lane.margin_of(quiet) == 1.0 < lane.margin.value < first
    assert (lane.num, lane.num_kept) == (2 * ENOUGH + 1, ENOUGH)


def test_the_interval_is_that_of_wilson() -> None:
    assert interval(0, 0) == (0.0, 1.0)
    assert interval(10, 10) == pytest.approx((0.7225, 1.0), abs=1e-4)
    assert interval(990, 1_000) == pytest.approx((0.9817, 0.9946), abs=1e-4)


# What is counted


def test_a_promise_is_broken_when_its_time_has_passed_and_kept_by_a_first_token_in_time() -> None:
    queue = make_queue(PROMISES, promises=True, model=known_model())
    queue.observe(IDLE)
    for number, at_s in enumerate((0.5, 2.0)):
        queue.put(ask(str(number), 100), 0.0)
        request = take(queue)
        assert request is not None
        serve(queue, request, 1, at_s)
    queue.put(ask("waits", 100, at_s=3.0), 3.0)
    queue.expire(3.9)
    one = queue.coverage()[Lane.INTERACTIVE]
    assert (one.num, one.num_kept) == (2, 1)
    queue.expire(4.1)
    queue.expire(4.2)
    one = queue.coverage()[Lane.INTERACTIVE]
    assert (one.num, one.num_kept) == (3, 1)
    assert one.margin.value == pytest.approx(1 + GAMMA * (2 - 2 * ALPHA), abs=2 * GAMMA * ALPHA)
    assert Lane.BATCH not in queue.coverage()


def test_refusals_near_the_border_are_expected_to_be_needless_as_often_as_those_let_in_were_early() -> None:
    queue = make_queue(PROMISES, promises=True, model=known_model())
    queue.observe(IDLE)
    one = queue._lanes[Lane.INTERACTIVE].coverage
    for _ in range(32):
        one.border.add(0.5)
        one.border.add(1.5)
    for number in range(40):
        if refusal_of(partial(queue.put, ask(str(number), 1_500, tenant=f"t{number}"), 0.0)) is not None:
            break
    assert one.num_needless == pytest.approx(0.5)


@pytest.mark.parametrize("seed", range(2))
def test_promises_are_kept_while_the_machine_becomes_twice_as_slow(seed: int) -> None:
    machine = Machine(coefficients=CPU, num_kv_tokens=24_000, max_batch_tokens=512, max_num_seqs=64)
    arrivals = mixed(Demand(rate=5.0, duration_s=400.0, seed=seed, kind="chat"))
    result = simulate(arrivals, machine, slowness=lambda now: 2.0 if now > 200.0 else 1.0)
    let_in = [one for one in result.served if one.promised_s < inf and one.refused != "promise_out_of_reach"]
    kept = sum(one.ttft_s is not None and one.ttft_s <= one.promised_s for one in let_in)
    assert len(let_in) > 0.8 * sum(one.arrival.lane is not Lane.BATCH for one in result.served)
    assert kept >= 0.985 * len(let_in)


# The work of a forecast


def calls_of_put(num_tenants: int) -> int:
    """Counts the function calls of one `put`, C's included, when so many tenants wait."""
    queue = LaneQueue(nullcontext(), permissive(ttft_s=(1e6, 1e6, inf)), model=known_model())
    queue.observe(IDLE)
    for number in range(num_tenants):
        queue.put(ask(f"waits-{number}", 64, tenant=f"tenant-{number}"), 0.0)
    num_calls = 0

    def count(_frame: object, event: str, _argument: object) -> None:
        nonlocal num_calls
        num_calls += event in ("call", "c_call")

    sys.setprofile(count)
    try:
        queue.put(ask("one more", 64, tenant="tenant-0"), 0.0)
    finally:
        sys.setprofile(None)
    return num_calls


def test_a_forecast_is_the_same_work_however_many_tenants_wait() -> None:
    assert calls_of_put(2_000) <= 1.05 * calls_of_put(rivals.MOST_NAMED + 2)


def test_a_body_of_many_texts_asks_for_one_forecast(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(PROMISES, promises=True, model=known_model())
    queue.observe(IDLE)
    asked = list[object]()
    forecast_of = admission.Admission.forecast

    def counted(*arguments: object, **named: object) -> object:
        asked.append(arguments)
        return forecast_of(*arguments, **named)  # type: ignore[arg-type]

    monkeypatch.setattr(admission.Admission, "forecast", counted)
    texts = [ask(str(number), 64, lane=Lane.STANDARD) for number in range(1_000)]
    _, whole = queue.put_all(texts, 0.0, [(0, 0)] * len(texts))
    assert len(asked) == 1
    assert queue.depths()[Lane.STANDARD] == 1_000
    assert whole is not None
    assert whole.raw_s >= 1_000 * 64 * known_model().coefficients[1]


def test_a_forecast_is_remembered_while_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    queue = make_queue(PROMISES, promises=True, model=known_model())
    queue.observe(IDLE)
    asked = list[object]()
    rivals_of = rivals.rivals_of

    def counted(*arguments: object) -> object:
        asked.append(arguments)
        return rivals_of(*arguments)  # type: ignore[arg-type]

    monkeypatch.setattr(admission, "rivals_of", counted)
    first = [queue.predict(Lane.INTERACTIVE, 512, at_s) for at_s in (1.0, 1.01, 1.02)]
    assert len(asked) == 1
    assert first[0] == first[1] == first[2]
    queue.put(ask("waits", 2_000, at_s=1.03), 1.03)
    later = queue.predict(Lane.INTERACTIVE, 512, 1.04)
    assert later is not None
    assert first[0] is not None
    assert later.raw_s > first[0].raw_s
    asked.clear()
    queue.predict(Lane.INTERACTIVE, 512, 1.04 + admission.REMEMBERED_S)
    assert len(asked) == 1


def test_a_body_is_let_in_whole_or_not_at_all() -> None:
    queue = make_queue(permissive(ttft_s=(0.5, 0.5, inf)), promises=True, model=known_model())
    queue.observe(IDLE)
    texts = [ask(str(number), 1_000) for number in range(3)]
    assert refusal_of(partial(queue.put_all, texts, 0.0, [(0, 0)] * 3)) is None
    behind = [ask(f"more-{number}", 1_000, tenant="b") for number in range(9)]
    assert refusal_of(partial(queue.put_all, behind, 0.6, [(0, 0)] * 9)) is not None
    assert queue.depths()[Lane.INTERACTIVE] == 3
    check_books(queue)


@given(situations, weightings, st.integers(1, 3_000))
@settings(max_examples=examples(30))
def test_tenants_taken_as_one_never_make_a_forecast_sooner(
    others: list[Waiting], weights: dict[str, int], num_prompt: int
) -> None:
    exact = forecast(situation(others, weights), num_prompt, Lane.INTERACTIVE).raw_s
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(rivals, "MOST_NAMED", 0)
        together = forecast(situation(others, weights), num_prompt, Lane.INTERACTIVE).raw_s
    # What is due to all is reckoned from the least clock of all, which whole tokens may move, some for each weight.
    slack_s = 2 * (sum(weights.values()) + 1) * known_model().coefficients[1]
    assert together >= exact - slack_s
