"""Simulated servers behind a router: nothing is lost, one replica is one server, and prefixes find their home."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority.lanes import Lane
from penstock.priority.simulator.cluster import ROUTERS, Wires, simulate_cluster
from penstock.priority.simulator.result import Result
from penstock.priority.simulator.run import simulate
from penstock.priority.simulator.summary import summarise
from penstock.priority.simulator.trace import Arrival, Demand, agents
from tests.few import examples
from tests.priority.simulated_engine import permissive
from tests.priority.test_simulator import MACHINE, SMALL, check_whole, outcome, traces

REFUSALS = {"too_long", "promise_out_of_reach", "queue_full", "queue_timeout"}
AGENTS = agents(Demand(8.0, 25.0, scale=0.3))
SLOW = replace(MACHINE, coefficients={name: 4 * c for name, c in MACHINE.coefficients.items()})


@given(
    trace=traces,
    router=st.sampled_from(ROUTERS),
    num_replicas=st.integers(2, 4),
    push_delay_s=st.sampled_from([0.0, 0.02, 1.0]),
    pulls=st.booleans(),
    tier_tokens=st.sampled_from([0, 512, 100_000]),
)
@settings(max_examples=examples(40), deadline=None)
def test_every_request_gets_all_its_tokens_or_a_reason(
    trace: list[Arrival], router: str, num_replicas: int, push_delay_s: float, pulls: bool, tier_tokens: int
) -> None:
    wires = Wires(
        push_delay_s=push_delay_s, transfer_gbps=100.0, pulls=pulls, tier_tokens=tier_tokens, tier_gbps=200.0
    )
    result = simulate_cluster(trace, SMALL, router, num_replicas, wires=wires)
    assert pulls or not result.num_pulled
    assert tier_tokens or not result.num_read
    assert [served.arrival for served in result.served] == trace
    for served in result.served:
        if served.refused is not None:
            assert served.refused in REFUSALS
            assert served.finished_s is None
        else:
            check_whole(served, result)
    assert result.busy_s <= num_replicas * result.duration_s + 1e-6


@given(trace=traces, router=st.sampled_from(ROUTERS))
@settings(max_examples=examples(15), deadline=None)
def test_the_same_trace_gives_the_same_run(trace: list[Arrival], router: str) -> None:
    once, again = (simulate_cluster(trace, SMALL, router, 3) for _ in range(2))
    assert outcome(once) == outcome(again)


@given(trace=traces, router=st.sampled_from(ROUTERS[:-1]))
@settings(max_examples=examples(25), deadline=None)
def test_one_replica_is_one_server(trace: list[Arrival], router: str) -> None:
    """Where nobody is refused for being late, it makes no difference that there is a router."""
    lanes = permissive()
    alone = simulate(trace, SMALL, lanes=lanes)
    routed = simulate_cluster(trace, SMALL, router, 1, lanes=lanes)
    for a, b in zip(alone.served, routed.served, strict=True):
        assert (a.refused, a.num_tokens) == (b.refused, b.num_tokens)
        assert a.first_token_s == pytest.approx(b.first_token_s)
        assert a.finished_s == pytest.approx(b.finished_s)


def hits(result: Result) -> float:
    rate = summarise(result).hit_rate
    assert rate is not None
    return rate


def test_by_prefix_four_replicas_hit_nearly_as_often_as_one() -> None:
    """And random ones do not; the first token comes sooner for it."""
    one = simulate_cluster(AGENTS, MACHINE, "prefix", 1)
    prefix, chance = (simulate_cluster(AGENTS, MACHINE, router, 4) for router in ("prefix", "random"))
    assert hits(prefix) > 0.9 * hits(one)
    assert hits(chance) < 0.75 * hits(one)
    ttft_s = [summarise(result).total.ttft_s.p50 for result in (prefix, chance)]
    assert ttft_s[0] is not None
    assert ttft_s[1] is not None
    assert ttft_s[0] < 0.75 * ttft_s[1]


def test_a_slow_link_holds_up_the_second_token_and_nothing_before_it() -> None:
    trace = [Arrival(float(i), 1_000, 20, Lane.STANDARD) for i in range(5)]
    fast, slow = (
        simulate_cluster(trace, MACHINE, "disaggregated", 2, wires=Wires(transfer_gbps=gbps))
        for gbps in (1_000.0, 4.0)
    )
    transfer_s = Wires(transfer_gbps=4.0).transfer_s(1_000)
    assert transfer_s == pytest.approx(0.262144)
    for a, b in zip(fast.served, slow.served, strict=True):
        assert a.first_token_s == pytest.approx(b.first_token_s)
        assert b.longest_gap_s == pytest.approx(transfer_s, abs=0.02)
        assert a.longest_gap_s < 0.02


def test_a_link_carries_one_prompt_after_another() -> None:
    """Two prompts whose step ends at once: the first waits for its own KV, the second for both."""
    wires = Wires(transfer_gbps=4.0)
    trace = [Arrival(0.0, 900, 20, Lane.STANDARD) for _ in range(2)]
    result = simulate_cluster(trace, MACHINE, "disaggregated", 2, wires=wires)
    gaps = sorted(served.longest_gap_s for served in result.served)
    transfer_s = wires.transfer_s(900)
    assert gaps == pytest.approx([transfer_s, 2 * transfer_s], abs=0.03)


def test_apart_prompts_do_not_hold_up_running_streams() -> None:
    """A stream's longest gap is that of a decode step, however long the prompts that others send."""
    stream = Arrival(0.0, 16, 200, Lane.STANDARD)
    prompts = [Arrival(0.1 + 0.3 * i, 4_000, 1, Lane.STANDARD) for i in range(10)]
    apart = simulate_cluster([stream, *prompts], SLOW, "disaggregated", 2)
    together = simulate_cluster([stream, *prompts], SLOW, "least", 1)
    assert apart.served[0].longest_gap_s < 0.04 < together.served[0].longest_gap_s


def conversation(first: int, at_s: float, num_turns: int = 1) -> list[Arrival]:
    """Turns of one conversation, each 2,048 tokens longer than the one before and a second later."""
    return [
        Arrival(
            at_s + i, 2_048 * (i + 1), 4, Lane.STANDARD, hash_ids=tuple(range(first, first + 4 * (i + 1)))
        )
        for i in range(num_turns)
    ]


def test_a_tier_gives_back_what_the_device_evicted() -> None:
    """Each of two conversations fills the KV; the second turn of the first comes when the other has evicted it."""
    machine = replace(SLOW, num_kv_tokens=4_500)
    trace = [*conversation(0, 0.0), *conversation(100, 1.0, 2), *conversation(0, 4.0, 2)[1:]]
    plain, tiered, slow = (
        simulate_cluster(trace, machine, "prefix", 1, wires=Wires(**given))
        for given in ({}, {"tier_tokens": 50_000}, {"tier_tokens": 50_000, "tier_gbps": 0.1})
    )
    assert plain.num_read == 0
    num_left = plain.served[-1].num_cached
    assert num_left < 1_000
    assert tiered.served[-1].num_cached == 2_048
    assert tiered.num_read == 2_048 - num_left
    assert slow.num_read == 0  # it is sooner computed than read
    ttft_s = [result.served[-1].ttft_s for result in (plain, tiered)]
    read_s = Wires().read_s(2_048)
    assert ttft_s[0] is not None
    assert ttft_s[1] is not None
    assert read_s < ttft_s[1] < 0.7 * ttft_s[0]


def test_a_tier_forgets_what_was_used_longest_ago() -> None:
    machine = replace(SLOW, num_kv_tokens=4_500)
    others = [one for i in range(4) for one in conversation(100 * (i + 1), 1.0 + 3 * i, 2)]
    trace = [*conversation(0, 0.0), *others, *conversation(0, 15.0, 2)[1:]]
    small, large = (
        simulate_cluster(trace, machine, "prefix", 1, wires=Wires(tier_tokens=tokens)).num_read
        for tokens in (2_048, 50_000)
    )
    assert small == 0 < large


def test_a_prefix_is_taken_from_its_busy_home() -> None:
    """While its home computes a long prompt, the next turn begins elsewhere with the KV from there."""
    long = Arrival(2.0, 25_000, 2, Lane.STANDARD, hash_ids=(*range(4), 99))
    trace = [*conversation(0, 0.0), long, *conversation(0, 1.1, 2)[1:]]
    alone, pulled = (
        simulate_cluster(trace, SLOW, "prefix", 2, wires=Wires(pulls=on)) for on in (False, True)
    )
    assert alone.num_pulled == 0
    assert pulled.num_pulled == pulled.served[-1].num_cached == 2_048
