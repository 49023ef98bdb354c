"""Prompts that need much of the memory, beside a flood of small ones that would take every block that is given back."""

from __future__ import annotations

from dataclasses import replace
from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.summary import is_kept
from penstock.priority.simulator.trace import Arrival
from tests.few import examples
from tests.priority.simulated_engine import COEFFICIENTS, SimulatedEngine, ask, make_queue, permissive

SHARES = (1.0, 0.92, 0.8)
NUM_BLOCKS = 100
AGEING_S = 0.5
FLOOD_S = 20.0


def engine_with(ageing_s: float = AGEING_S, *, seats: int = 50) -> SimulatedEngine:
    return SimulatedEngine(
        make_queue(permissive(ageing_s=(inf, ageing_s, ageing_s))),
        num_blocks=NUM_BLOCKS + 1,
        max_num_seqs=seats,
        budget=200,
        prefix_cache=False,
        kv_shares=SHARES,
    )


def flood_until(
    engine: SimulatedEngine,
    name: str,
    *,
    lane: Lane,
    each: int,
    tenants: str = "xyz",
    until_s: float = FLOOD_S,
) -> float:
    """Keeps small requests waiting until the named one has ended, or for so long; says when that was."""
    for number in range(100_000):
        if (name, 0) in engine.ended or engine.now > until_s:
            return engine.now
        waiting = sum(engine.queue.depths().values())
        for extra in range(max(0, 8 - waiting)):
            tenant = tenants[(number + extra) % len(tenants)]
            small = ask(
                f"{number}-{extra}", each, lane=lane, tenant=tenant, at_s=engine.now, max_tokens=6 + extra
            )
            engine.put(small)
        engine.step()
    raise AssertionError("the flood does not end")


@given(
    part=st.floats(0.3, 0.6),
    lane=st.sampled_from([Lane.STANDARD, Lane.BATCH]),
    flood=st.sampled_from(Lane),
    each=st.integers(8, 60),
    seats=st.integers(2, 50),
)
@settings(max_examples=examples(15))
def test_a_prompt_that_needs_half_the_memory_does_not_wait_for_ever(
    part: float, lane: Lane, flood: Lane, each: int, seats: int
) -> None:
    engine = engine_with(seats=seats)
    for number in range(60):
        engine.put(ask(f"before-{number}", each, lane=flood, tenant="x", max_tokens=12))
    engine.step()
    engine.put(ask("large", int(part * NUM_BLOCKS * 4), lane=lane, tenant="large", at_s=engine.now))
    flood_until(engine, "large", lane=flood, each=each)
    assert ("large", 0) in engine.ended, "it waited for as long as the flood went on"


def test_without_ageing_it_would_wait() -> None:
    """The flood is one that does starve it: what the other tests see is the reservation's doing."""
    engine = engine_with(inf)
    for number in range(60):
        engine.put(ask(f"before-{number}", 28, tenant="x", max_tokens=12))
    engine.step()
    engine.put(ask("large", 200, lane=Lane.BATCH, tenant="large", at_s=engine.now))
    flood_until(engine, "large", lane=Lane.INTERACTIVE, each=28)
    assert ("large", 0) not in engine.ended


@pytest.mark.parametrize("part", [0.5, 0.95])
def test_the_urgent_keep_half_of_the_memory_meanwhile(part: float) -> None:
    """However much it needs, urgent requests go on to start in the other half."""
    engine = engine_with()
    for number in range(60):
        engine.put(ask(f"before-{number}", 40, tenant="x", max_tokens=12))
    engine.step()
    engine.put(ask("large", int(part * NUM_BLOCKS * 4), lane=Lane.BATCH, tenant="large", at_s=engine.now))
    most_idle_s, started_s, num_started = 0.0, engine.now, len(engine.starts)
    for number in range(400):
        for extra in range(max(0, 8 - sum(engine.queue.depths().values()))):
            engine.put(ask(f"{number}-{extra}", 40, tenant="y", at_s=engine.now, max_tokens=6 + extra))
        engine.step()
        if len(engine.starts) > num_started:
            started_s, num_started = engine.now, len(engine.starts)
        most_idle_s = max(most_idle_s, engine.now - started_s)
    assert most_idle_s < AGEING_S


@pytest.mark.long("machines and noises")
def test_interactive_promises_hold_beside_large_batch_prompts() -> None:
    """A flood fills the memory for 90 s. One starts in its midst, for few of the promises in that short time."""
    rng, at_s = Random(1), 0.0
    arrivals = [Arrival(5.0 + 30 * n, 12_000, 50, lane=Lane.BATCH, tenant="large") for n in range(2)]
    while at_s < 90.0:
        at_s += rng.expovariate(12.0)
        sizes = rng.randint(100, 1_500), rng.randint(20, 400)
        arrivals.append(Arrival(at_s, *sizes, lane=Lane.INTERACTIVE, tenant=rng.choice("abc")))
    arrivals.sort(key=lambda arrival: arrival.at_s)
    machine = Machine(coefficients=COEFFICIENTS, num_kv_tokens=24_000)

    def run(ageing_s: float) -> tuple[float, float]:
        """When the first large prompt had its first token, and the part of the promises that were kept."""
        batch = replace(DEFAULT_POLICIES[Lane.BATCH], ageing_s=ageing_s)
        served = simulate(arrivals, machine, lanes={**DEFAULT_POLICIES, Lane.BATCH: batch}).served
        urgent = [s for s in served if s.arrival.lane is Lane.INTERACTIVE]
        kept = sum(s.refused is None and is_kept(s, DEFAULT_POLICIES) for s in urgent) / len(urgent)
        return min(s.first_token_s or inf for s in served if s.arrival.lane is Lane.BATCH), kept

    (without_s, kept_without), (aged_s, kept) = run(inf), run(60.0)
    assert without_s > 90.0, "the flood does not starve it: this shows nothing"
    assert aged_s < 90.0
    assert kept > kept_without - 0.08
