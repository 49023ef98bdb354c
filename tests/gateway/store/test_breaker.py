"""The breaker: closed, open, half open; and what decides."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.gateway.store.link import MAX_FAILURES, PROBE_S, Breaker


def opened(jitter: float = 0.5) -> Breaker:
    """It opened at 0."""
    breaker = Breaker(jitter=lambda: jitter)
    breaker.failed(0, refused=True)
    return breaker


def test_it_opens_after_failures_in_a_row() -> None:
    breaker = Breaker()
    for _ in range(MAX_FAILURES - 1):
        breaker.failed(0)
    breaker.succeeded()
    for _ in range(MAX_FAILURES - 1):
        breaker.failed(0)
    assert breaker.may_call(0)
    breaker.failed(0)
    assert breaker.state == "open"
    assert not breaker.may_call(0)


def test_it_opens_at_once_if_nobody_is_there() -> None:
    assert opened().state == "open"


@pytest.mark.parametrize("jitter", [0.0, 0.3, 1.0])
def test_one_probe_after_a_while(jitter: float) -> None:
    breaker = opened(jitter)
    due_s = PROBE_S * (1 + jitter)
    assert not breaker.may_call(due_s - 0.01)
    assert breaker.may_call(due_s)
    assert breaker.state == "half_open"
    assert not breaker.may_call(due_s + 100)


def test_the_probe_decides() -> None:
    breaker = opened()
    assert breaker.may_call(10)
    breaker.failed(10)
    assert not breaker.may_call(10 + PROBE_S)
    assert breaker.may_call(20)
    breaker.succeeded()
    assert breaker.state == "closed"
    breaker.failed(20)
    assert breaker.may_call(20)


def test_a_late_failure_does_not_put_the_probe_off() -> None:
    breaker = opened()
    breaker.failed(PROBE_S)
    assert breaker.may_call(PROBE_S * 1.5)


def test_an_abandoned_probe_leaves_it_to_the_next() -> None:
    breaker = opened()
    assert breaker.may_call(10)
    breaker.abandoned(10)
    assert breaker.may_call(10)
    breaker.succeeded()
    breaker.abandoned(10)
    assert breaker.state == "closed"


@given(st.lists(st.sampled_from(["call", "succeed", "fail", "refuse", "abandon", "wait"])))
def test_it_always_finds_back(steps: list[str]) -> None:
    """Whatever happened, one call that was let in and succeeded closes it; and one is let in after a while."""
    breaker, now_s = Breaker(), 0.0
    for step in steps:
        if step == "call":
            breaker.may_call(now_s)
        elif step == "succeed":
            breaker.succeeded()
        elif step == "abandon":
            breaker.abandoned(now_s)
        elif step == "wait":
            now_s += PROBE_S
        else:
            breaker.failed(now_s, refused=step == "refuse")
    if breaker.state == "half_open":
        breaker.failed(now_s)
    assert breaker.may_call(now_s + 2 * PROBE_S)
    breaker.succeeded()
    assert breaker.state == "closed"
    assert all(breaker.may_call(now_s) for _ in range(10))
