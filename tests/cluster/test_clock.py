"""A switch that was held up itself blames no replica for it."""

from __future__ import annotations

import pytest

from penstock.cluster.members import MOST_S, AwakeClock
from penstock.priority.lanes import Lane
from penstock.priority.routing.router import STALE_S, RouteQuery, Router
from penstock.priority.verdict import Refusal
from tests.clock import Clock
from tests.priority.routing.messages import snapshot

ASK = RouteQuery(lane=Lane.STANDARD, tenant="t", num_prompt=10)


def test_it_keeps_time_and_stands_still_while_nobody_reads_it() -> None:
    real = Clock()
    awake = AwakeClock(real)
    begun_s = awake()
    for _ in range(8):
        real.now += 0.25
        awake()
    assert awake() - begun_s == pytest.approx(2)
    real.now += 100
    assert awake() - begun_s == pytest.approx(2 + MOST_S)
    real.now += 0.25
    assert awake() - begun_s == pytest.approx(2.25 + MOST_S)


@pytest.mark.parametrize(("held_up_s", "is_silent"), [(10 * STALE_S, False), (0.25, True)])
def test_replicas_are_stale_for_their_own_silence_alone(held_up_s: float, is_silent: bool) -> None:
    """Of a switch that is held up once, and of one that hears nothing for longer than it may."""
    real = Clock()
    clock, router = AwakeClock(real), Router()
    router.on_snapshot(snapshot("r0"), clock())
    for _ in range(1 if not is_silent else round(2 * STALE_S / held_up_s)):
        real.now += held_up_s
        clock()
    assert isinstance(router.choose(ASK, clock()), Refusal) == is_silent
