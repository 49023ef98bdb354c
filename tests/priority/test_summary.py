"""The figures of a simulated run, against oracles that are too simple to be wrong."""

from __future__ import annotations

import json
from dataclasses import asdict
from statistics import quantiles

import pytest
from hypothesis import given
from hypothesis import strategies as st

from penstock.priority.lanes import Lane, LanePolicy
from penstock.priority.shares import COST_HIT, output_cost, prompt_cost
from penstock.priority.simulator.result import Result, Served
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.summary import (
    figures,
    is_kept,
    jain,
    percentile,
    percentiles,
    summarise,
    work,
)
from penstock.priority.simulator.trace import Arrival, Demand, mixed

LANES = {
    Lane.INTERACTIVE: LanePolicy(ttft_s=1.0, tpot_s=0.1),
    Lane.STANDARD: LanePolicy(ttft_s=5.0),
    Lane.BATCH: LanePolicy(),
}
MACHINE = Machine(coefficients={"alpha_s": 0.007, "beta_s": 28e-6, "gamma_s": 20e-6, "delta_s": 40e-9})
floats = st.floats(0, 1e6)


def served(
    ttft_s: float | None = 0.5,
    tpot_s: float = 0.05,
    *,
    at_s: float = 0.0,
    lane: Lane = Lane.INTERACTIVE,
    tenant: str = "a",
    refused: str | None = None,
    num_cached: int = 0,
) -> Served:
    """100 prompt tokens and, if there was a first token, 11 of output."""
    one = Served(Arrival(at_s, 100, 11, lane, tenant), refused=refused, num_cached=num_cached)
    if ttft_s is not None:
        one.first_token_s, one.num_tokens = at_s + ttft_s, 11
        one.last_token_s = one.finished_s = at_s + ttft_s + 10 * tpot_s
    return one


@given(st.lists(floats, min_size=2), st.integers(1, 99))
def test_percentiles_are_those_of_the_standard_library(values: list[float], percent: int) -> None:
    expected = quantiles(values, n=100, method="inclusive")[percent - 1]
    assert percentile(sorted(values), percent) == pytest.approx(expected)


def test_percentiles_of_one_value_are_that_value_and_of_nothing_none() -> None:
    assert percentile([7.0], 99) == 7.0
    assert percentile([], 50) is None
    assert percentiles([3.0, 1.0, 2.0]).p50 == 2.0


@given(st.lists(floats.map(lambda value: value + 1), min_size=1, max_size=20), st.floats(0.01, 100))
def test_jain_is_between_one_nth_and_one_and_knows_no_unit(values: list[float], unit: float) -> None:
    index = jain(values)
    assert index is not None
    assert 1 / len(values) - 1e-9 <= index <= 1 + 1e-9
    assert jain([value * unit for value in values]) == pytest.approx(index)
    # The other form of it: 1 / (1 + squared coefficient of variation).
    mean = sum(values) / len(values)
    variance = sum((value - mean) ** 2 for value in values) / len(values)
    assert index == pytest.approx(1 / (1 + variance / mean**2))


def test_jain_at_its_ends() -> None:
    assert jain([5, 5, 5]) == pytest.approx(1)
    assert jain([5, 0, 0, 0]) == pytest.approx(1 / 4)
    assert jain([]) is None
    assert jain([0, 0]) is None


@pytest.mark.parametrize(
    ("one", "kept"),
    [
        (served(1.0, 0.1), True),
        (served(1.01, 0.05), False),
        (served(0.5, 0.11), False),
        (served(4.9, 9.0, lane=Lane.STANDARD), True),
        (served(None, refused="queue_full"), False),
    ],
)
def test_both_promises_of_its_lane_have_to_be_kept(one: Served, kept: bool) -> None:
    assert is_kept(one, LANES) is kept


def test_what_promises_nothing_does_not_count_as_kept() -> None:
    both = figures([served(99.0), served(99.0, lane=Lane.BATCH)], LANES)
    assert (both.kept, both.attainment, both.offered) == (0, 0.0, 2)
    batch = figures([served(99.0, lane=Lane.BATCH)], LANES)
    assert (batch.kept, batch.attainment, batch.attainment_of_admitted) == (0, None, None)


def test_attainment_of_offered_and_of_admitted() -> None:
    some = [served(), served(), served(2.0), served(None, refused="promise_out_of_reach")]
    found = figures(some, LANES)
    assert (found.offered, found.refused, found.kept) == (4, 1, 2)
    assert found.attainment == 0.5
    assert found.attainment_of_admitted == pytest.approx(2 / 3)
    assert found.ttft_s.p50 == 0.5


def test_a_tenants_percentiles_are_those_of_its_promised_requests() -> None:
    some = [served(0.5), served(100.0, lane=Lane.BATCH)]
    assert figures(some, LANES, of_promised=True).ttft_s.p99 == 0.5
    assert figures(some[1:], LANES, of_promised=True).ttft_s.p99 == 100.0
    assert figures(some, LANES).ttft_s.p99 == pytest.approx(99.0, abs=0.1)


def test_work_is_what_the_queue_charges() -> None:
    assert work(served()) == prompt_cost(0, 100) + output_cost(100, 111)
    assert work(served(num_cached=40)) == prompt_cost(40, 100) + COST_HIT * 40 + output_cost(100, 111)
    assert work(served(None, refused="queue_full")) == 0


def test_a_whole_run() -> None:
    some = [
        served(at_s=10.0),
        served(at_s=12.0, tenant="b", lane=Lane.BATCH),
        served(None, at_s=13.0, tenant="b", refused="queue_full"),
        served(at_s=14.0, tenant="b"),
    ]
    summary = summarise(Result("fcfs", some, duration_s=18.0, busy_s=4.0), LANES, {"b": 2})
    assert (summary.span_s, summary.duration_s) == (4.0, 8.0)
    assert summary.goodput == 2 / 4
    assert summary.batch_share == pytest.approx(1 / 3)
    assert summary.jain == pytest.approx(1)  # b has twice the weight and had twice the work
    assert summary.refused == {"queue_full": 1}
    assert summary.output_tokens_per_s == 33 / 8
    assert summary.tokens_per_s == 333 / 8
    assert summary.busy_share == 0.5
    assert list(summary.lanes) == ["interactive", "batch"]
    assert {tenant: one.offered for tenant, one in summary.tenants.items()} == {"a": 1, "b": 3}


def test_a_trace_of_one_instant_counts_as_a_second() -> None:
    summary = summarise(Result("fcfs", [served(), served()], duration_s=1.0), LANES)
    assert summary.goodput == 2.0


@pytest.mark.parametrize("policy", ["fcfs", "strict", "fair", "penstock"])
def test_parts_add_up_and_json_brings_it_all_back(policy: str) -> None:
    result = simulate(mixed(Demand(20, 10, kind="chat")), MACHINE, policy, lanes=LANES)
    summary = summarise(result, LANES)
    for parts in (summary.lanes, summary.tenants):
        assert sum(one.offered for one in parts.values()) == len(result.served)
        assert sum(one.work for one in parts.values()) == summary.total.work
        assert sum(one.kept for one in parts.values()) == summary.total.kept
    fields = asdict(summary)
    assert json.loads(json.dumps(fields, allow_nan=False)) == fields


def test_the_work_is_what_was_charged() -> None:
    result = simulate(mixed(Demand(20, 10, kind="chat")), MACHINE, "penstock", lanes=LANES)
    tenants = summarise(result, LANES).tenants
    assert {tenant: one.work for tenant, one in tenants.items()} == result.charged


def test_short_and_long_prompts_are_told_apart() -> None:
    result = simulate(
        [Arrival(0.0, 8_000, 1), Arrival(0.0, 2_000, 1), Arrival(0.0, 2_001, 1)], MACHINE, "fcfs"
    )
    groups = summarise(result, LANES).lengths
    assert {name: group.offered for name, group in groups.items()} == {
        "up to 2,000 tokens": 1,
        "longer prompts": 2,
    }
    assert groups["up to 2,000 tokens"].ttft_s.p50 == result.served[1].ttft_s
