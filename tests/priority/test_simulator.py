"""The simulator: it conserves, repeats itself, and shows what lanes, shares, forecasts and budget are worth."""

from __future__ import annotations

from collections import Counter
from dataclasses import astuple, replace
from functools import cache
from itertools import pairwise
from statistics import mean

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.lengths import Lengths
from penstock.priority.shares import cost_of
from penstock.priority.simulator.result import Result, Served
from penstock.priority.simulator.run import POLICIES, Machine, simulate
from penstock.priority.simulator.trace import BLOCK_TOKENS, SCENARIOS, Arrival, Demand, sessions
from tests.few import examples
from tests.priority.simulated_engine import COEFFICIENTS

MACHINE = Machine(coefficients=COEFFICIENTS)
SMALL = replace(MACHINE, num_kv_tokens=8_000, max_num_seqs=6, max_batch_tokens=512, max_model_len=4_000)
TTFT_S = DEFAULT_POLICIES[Lane.INTERACTIVE].ttft_s
TPOT_S = DEFAULT_POLICIES[Lane.INTERACTIVE].tpot_s

traces = st.lists(
    st.builds(
        Arrival,
        at_s=st.floats(0.0, 3.0),
        num_prompt=st.integers(1, 5_000),
        num_output=st.integers(1, 60),
        lane=st.sampled_from([None, *Lane]),
        tenant=st.sampled_from("abc"),
        hash_ids=st.lists(st.integers(0, 2), max_size=4).map(tuple),
    ),
    min_size=1,
    max_size=25,
).map(lambda trace: sorted(trace, key=lambda arrival: arrival.at_s))


def slower(machine: Machine, factor: float) -> Machine:
    return replace(machine, coefficients={name: factor * c for name, c in machine.coefficients.items()})


def check_whole(served: Served, result: Result) -> None:
    """It got all its tokens, in time's order."""
    assert served.num_tokens == served.arrival.num_output
    assert served.first_token_s is not None
    assert served.finished_s is not None
    assert served.arrival.at_s < served.first_token_s <= served.finished_s <= result.duration_s
    assert served.longest_gap_s <= served.finished_s - served.first_token_s + 1e-9
    assert 0 <= served.num_cached < served.arrival.num_prompt


def outcome(result: Result) -> list[tuple[object, ...]]:
    """All that came of each request, but not what it was."""
    return [astuple(served)[1:] for served in result.served]


# Conservation


@given(trace=traces, policy=st.sampled_from(POLICIES), num_machines=st.integers(1, 3))
@settings(max_examples=examples(40))
def test_every_request_gets_all_its_tokens_or_a_reason(
    trace: list[Arrival], policy: str, num_machines: int
) -> None:
    """Invariant 1, and the times of each are in order."""
    result = simulate(trace, SMALL, policy, num_machines=num_machines)
    assert [served.arrival for served in result.served] == trace
    for served in result.served:
        if served.refused is not None:
            assert (served.num_tokens, served.first_token_s, served.finished_s) == (0, None, None)
            assert served.refused in ("too_long", "promise_out_of_reach", "queue_full", "queue_timeout")
            assert served.refused in ("too_long", "queue_timeout") or policy in ("fair", "penstock")
            assert served.retry_after_s == 0 or 1 <= served.retry_after_s <= 60
        else:
            check_whole(served, result)
    assert result.busy_s <= num_machines * result.duration_s + 1e-6
    assert (result.num_steps > 0) == any(served.num_tokens for served in result.served)


@given(trace=traces, policy=st.sampled_from(["fair", "penstock"]))
@settings(max_examples=examples(30))
def test_tenants_are_charged_for_what_they_got(trace: list[Arrival], policy: str) -> None:
    """Invariant 13, over a whole run: exact, unless somebody gave way and found less when it came back."""
    result = simulate(trace, SMALL, policy)
    least: Counter[str] = Counter()
    for served in result.served:
        if served.refused is None:
            cost = cost_of(served.arrival.num_prompt, served.num_cached, served.num_tokens)
            least[served.arrival.tenant] += cost
    for tenant, cost in result.charged.items():
        if result.num_preemptions:
            assert cost >= least[tenant]
        else:
            assert cost == least[tenant]


@given(trace=traces, policy=st.sampled_from(POLICIES))
@settings(max_examples=examples(20))
def test_the_same_trace_gives_the_same_run(trace: list[Arrival], policy: str) -> None:
    """Invariant 14."""
    assert outcome(simulate(trace, SMALL, policy)) == outcome(simulate(trace, SMALL, policy))


@given(trace=traces)
@settings(max_examples=examples(20))
def test_other_names_in_the_same_order_give_the_same_run(trace: list[Arrival]) -> None:
    """Invariant 14: names break ties and do nothing else."""
    renamed = [replace(a, tenant={"a": "Q", "b": "R", "c": "Z"}[a.tenant]) for a in trace]
    assert outcome(simulate(trace, SMALL)) == outcome(simulate(renamed, SMALL))


def test_an_answer_that_ends_below_its_limit_has_ended_by_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    learnt = set[tuple[int, int, bool]]()

    def add(_: Lengths, num_tokens: int, limit: int, __: int | None, *, is_whole: bool) -> None:
        learnt.add((num_tokens, limit, is_whole))

    monkeypatch.setattr(Lengths, "add", add)
    simulate([Arrival(0.0, 100, 40, max_tokens=2_000), Arrival(0.0, 100, 50)], MACHINE)
    assert learnt == {(40, 2_000, True), (50, 50, False)}


@given(trace=traces, policy=st.sampled_from(POLICIES), num_machines=st.integers(1, 2))
@settings(max_examples=examples(25))
def test_steps_taken_at_once_are_those_taken_one_by_one(
    trace: list[Arrival], policy: str, num_machines: int
) -> None:
    """The shortcut over steps in which all streams just go on is only that: every figure is the same without it."""
    quick = simulate(trace, SMALL, policy, num_machines=num_machines)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.priority.simulator.run.SimulatedServer._num_alike", lambda *_: 0)
        slow = simulate(trace, SMALL, policy, num_machines=num_machines)
    assert (quick.num_steps, quick.num_preemptions) == (slow.num_steps, slow.num_preemptions)
    assert quick.charged == slow.charged
    assert quick.busy_s == pytest.approx(slow.busy_s)
    for a, b in zip(quick.served, slow.served, strict=True):
        assert (a.num_tokens, a.refused, a.num_cached) == (b.num_tokens, b.refused, b.num_cached)
        assert a.first_token_s == pytest.approx(b.first_token_s)
        assert a.finished_s == pytest.approx(b.finished_s)
        assert a.longest_gap_s == pytest.approx(b.longest_gap_s)


# Machines


@given(trace=traces, factor=st.sampled_from([1.5, 2.0, 4.0]))
@settings(max_examples=examples(20))
def test_a_slower_machine_is_never_better(trace: list[Arrival], factor: float) -> None:
    """First come, first served: nobody gains when every step takes longer."""
    trace = [replace(a, num_prompt=min(a.num_prompt, 3_500), hash_ids=()) for a in trace]
    fast = simulate(trace, SMALL, "fcfs")
    slow = simulate(trace, slower(SMALL, factor), "fcfs")
    assert slow.duration_s >= fast.duration_s
    assert ttft(slow) >= ttft(fast) - 1e-9


@given(trace=traces, factor=st.sampled_from([0.5, 2.0, 8.0]))
@settings(max_examples=examples(15))
def test_time_has_no_unit(trace: list[Arrival], factor: float) -> None:
    """Twice as slow steps and twice as rare arrivals: the same run, twice as long. By first come: no promises in it."""
    stretched = [replace(a, at_s=a.at_s * factor) for a in trace]
    one, other = simulate(trace, SMALL, "fcfs"), simulate(stretched, slower(SMALL, factor), "fcfs")
    assert other.num_steps == one.num_steps
    assert other.duration_s == pytest.approx(factor * one.duration_s)
    for a, b in zip(one.served, other.served, strict=True):
        assert b.finished_s == pytest.approx(None if a.finished_s is None else factor * a.finished_s)


def ttft(result: Result) -> float:
    return mean([s.ttft_s for s in result.served if s.ttft_s is not None] or [0.0])


@pytest.mark.parametrize("policy", ["fcfs", "penstock"])
def test_more_machines_are_never_worse(policy: str) -> None:
    trace = SCENARIOS["mixed"](Demand(rate=25.0, duration_s=4.0))
    results = [simulate(trace, SMALL, policy, num_machines=n) for n in (1, 2, 4)]
    kept = [sum(is_kept(s) for s in result.served) for result in results]
    assert kept == sorted(kept)
    assert kept[0] < kept[-1]
    assert all(a.duration_s >= b.duration_s for a, b in pairwise(results))


def test_a_session_stays_on_the_machine_where_its_prefix_is() -> None:
    trace = sessions(Demand(rate=4.0, duration_s=60.0, seed=2))
    one, three = (simulate(trace, MACHINE, num_machines=n) for n in (1, 3))
    assert cached(three) > 0.8 * cached(one) > 0.5


def cached(result: Result) -> float:
    return sum(s.num_cached for s in result.served) / sum(s.arrival.num_prompt for s in result.served)


def test_a_request_that_never_fits_is_refused_and_the_others_run() -> None:
    trace = [Arrival(0.0, 5_000, 10), Arrival(0.1, 100, 10)]
    result = simulate(trace, SMALL)
    assert [served.refused for served in result.served] == ["too_long", None]


def test_what_waits_too_long_is_given_up() -> None:
    """Invariant 16."""
    lanes = {lane: replace(policy, ttl_s=1.0, ttft_s=100.0) for lane, policy in DEFAULT_POLICIES.items()}
    trace = [Arrival(0.0, 300, 50, tenant=str(i % 4)) for i in range(200)]
    result = simulate(trace, SMALL, lanes=lanes)
    waits = [s.ttft_s for s in result.served if s.ttft_s is not None]
    assert Counter(s.refused for s in result.served)["queue_timeout"] > 50
    assert max(waits) < 1.0 + 0.25 + 0.5, "looked for four times a second; then one start"


def test_an_equal_prefix_is_computed_once() -> None:
    """`hash_ids` mean what Mooncake means: equal from the start on, in blocks of 512."""
    shared = (7, 8)
    trace = [
        Arrival(0.0, 3 * BLOCK_TOKENS, 2, hash_ids=(*shared, 1)),
        Arrival(2.0, 3 * BLOCK_TOKENS, 2, hash_ids=(*shared, 2)),
        Arrival(4.0, 3 * BLOCK_TOKENS, 2, hash_ids=(9, *shared)),
        Arrival(6.0, 3 * BLOCK_TOKENS, 2, hash_ids=shared),
    ]
    result = simulate(trace, MACHINE)
    assert [served.num_cached for served in result.served] == [0, 1_024, 0, 1_024]
    assert simulate([replace(a, hash_ids=()) for a in trace], MACHINE).served[1].num_cached == 0
    first, second = result.served[0].ttft_s, result.served[1].ttft_s
    assert first is not None
    assert second is not None
    assert second < first


def test_the_weight_of_a_tenant_is_its_share() -> None:
    lanes = {lane: replace(policy, ttft_s=1e6, ttl_s=1e6) for lane, policy in DEFAULT_POLICIES.items()}
    trace = [Arrival(0.0, 400, 10, tenant="ab"[i % 2]) for i in range(200)]
    result = simulate(trace, SMALL, lanes=lanes, weights={"a": 3})
    order = sorted(result.served, key=lambda served: served.first_token_s or 0.0)
    assert [s.arrival.tenant for s in order[20:100]].count("a") == pytest.approx(60, abs=6)


def test_progress_is_told() -> None:
    told: list[int] = []
    simulate([Arrival(i / 100, 10, 1) for i in range(350)], MACHINE, progress=told.append)
    assert told == [100, 200, 300]


# What it is all for: the scenarios, at a reduced size


@cache
def run(scenario: str, policy: str) -> Result:
    rate, duration_s = {
        "noisy-tenant": (35.0, 24.0),
        "noisy-burst": (22.0, 30.0),
        "batch-flood": (12.0, 30.0),
        "flash-crowd": (150.0, 20.0),
    }[scenario]
    return simulate(SCENARIOS[scenario](Demand(rate, duration_s)), MACHINE, policy)


def is_kept(served: Served) -> bool:
    """The first token in time, and then the pace."""
    return served.ttft_s is not None and served.ttft_s <= TTFT_S and served.tpot_s <= TPOT_S


def goodput(result: Result) -> float:
    """Interactive requests per second whose promise was kept."""
    kept = sum(1 for s in result.served if s.arrival.lane is Lane.INTERACTIVE and is_kept(s))
    return kept / result.duration_s


def quiet_attainment(result: Result) -> float:
    """Returns the share of promises kept to the quiet tenants, refused requests included."""
    quiet = [s for s in result.served if s.arrival.tenant.startswith("quiet")]
    return sum(map(is_kept, quiet)) / len(quiet)


@pytest.mark.parametrize("scenario", ["noisy-tenant", "noisy-burst", "batch-flood"])
def test_quiet_tenants_keep_their_promise_whatever_the_others_do(scenario: str) -> None:
    """Invariant 10, end to end."""
    assert quiet_attainment(run(scenario, "penstock")) >= 0.95


@pytest.mark.parametrize(("scenario", "times"), [("noisy-tenant", 3), ("noisy-burst", 3), ("batch-flood", 2)])
def test_many_more_promises_are_kept_than_first_come_first_served_keeps(scenario: str, times: int) -> None:
    assert goodput(run(scenario, "penstock")) >= times * goodput(run(scenario, "fcfs"))


@pytest.mark.parametrize("scenario", ["noisy-burst", "batch-flood"])
def test_batch_finishes_all_the_same(scenario: str) -> None:
    """Invariant 7, end to end."""
    batch = [s for s in run(scenario, "penstock").served if s.arrival.lane is Lane.BATCH]
    assert batch
    assert all(served.finished_s is not None for served in batch)


def test_fairness_to_batch_costs_next_to_nothing() -> None:
    """Strict lanes are the most that can be had for the urgent ones."""
    assert goodput(run("batch-flood", "penstock")) >= 0.97 * goodput(run("batch-flood", "strict"))


@pytest.mark.parametrize("scenario", ["long-prompts", "long-first", "long-tenants"])
def test_short_prompts_wait_for_no_long_ones(scenario: str) -> None:
    """Alone, the eleven short prompts would take 0.7 s, and first come, first served, they wait for twenty."""

    def slowest_s(policy: str, num_prompt: int) -> float:
        result = simulate(SCENARIOS[scenario](Demand(29.0, 1.0)), MACHINE, policy)
        served = [one for one in result.served if one.arrival.num_prompt == num_prompt]
        assert num_prompt == 24_000 or all(one.refused is None for one in served)
        return max(one.ttft_s for one in served if one.ttft_s is not None)

    assert slowest_s("penstock", 2_000) < 1.0
    assert slowest_s("fcfs", 2_000) > 15.0
    assert slowest_s("penstock", 24_000) < 1.05 * slowest_s("fcfs", 24_000)


@pytest.mark.parametrize("scenario", ["noisy-tenant", "noisy-burst", "flash-crowd"])
def test_what_was_let_in_was_worth_letting_in(scenario: str) -> None:
    """The forecast: of those who were let in, nine in ten have their first token in time."""
    result = run(scenario, "penstock")
    let_in = [s for s in result.served if s.arrival.lane is Lane.INTERACTIVE and s.refused is None]
    assert sum(map(is_kept, let_in)) >= 0.9 * len(let_in)
    assert all(s.predicted_s is not None for s in let_in[1:])


@pytest.mark.parametrize("scenario", ["noisy-tenant", "noisy-burst", "batch-flood", "flash-crowd"])
def test_who_is_refused_is_told_when_to_come_back(scenario: str) -> None:
    """Invariant 18."""
    refused = [s for s in run(scenario, "penstock").served if s.refused is not None]
    assert all(1.0 <= served.retry_after_s <= 60.0 for served in refused)
    if scenario.startswith("noisy"):
        assert Counter(served.arrival.tenant for served in refused).most_common(1)[0][0] == "noisy"
