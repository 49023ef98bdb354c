"""Virtual time: what a contender is charged, when it comes back, and how far apart the backlogged ones can get."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from itertools import combinations

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from penstock.priority.lanes import Lane
from penstock.priority.queue import LaneQueue
from penstock.priority.shares import (
    COST_PREFILL,
    DEBT_HALF_LIFE_US,
    Share,
    cost_of,
    output_cost,
    prompt_cost,
    virtual,
)
from penstock.priority.turns import LOCALITY_TOKENS
from tests.few import examples
from tests.priority.simulated_engine import (
    SimulatedEngine,
    accounts,
    ask,
    lines,
    make_queue,
    permissive,
    serve,
    take,
    take_all,
)

costs = st.lists(st.integers(-(10**6), 10**7), max_size=30)


@given(costs=costs, weight=st.integers(1, 1_000))
def test_the_account_is_exact_and_the_clock_is_the_cost_over_the_weight(
    costs: list[int], weight: int
) -> None:
    """Invariant 13: integers, so nothing is lost; a clock is off by less than one unit per charge."""
    share = Share(weight)
    for cost in costs:
        share.charge(cost)
    assert share.charged == sum(costs)
    assert 0 <= virtual(sum(costs)) - share.clock * weight <= len(costs) * weight


@given(clock=st.integers(0, 10**12), floor=st.integers(0, 10**12), idle_us=st.integers(0, 10**9))
def test_nobody_comes_back_with_credit(clock: int, floor: int, idle_us: int) -> None:
    """Invariant 5: after the lift the clock is at least the floor."""
    share = Share(1)
    share.clock = clock
    share.join(floor, idle_us)
    assert share.clock >= floor
    if clock <= floor:
        assert share.clock == floor
    else:
        assert share.clock <= clock


@given(debt=st.integers(1, 10**12), floor=st.integers(0, 10**9), minutes=st.integers(0, 200))
@example(debt=10**12, floor=0, minutes=70)
def test_debt_halves_with_every_idle_minute(debt: int, floor: int, minutes: int) -> None:
    """Invariant 5."""
    share = Share(3)
    share.clock, share.idle_since_us = floor + debt, 17
    share.join(floor, 17 + minutes * DEBT_HALF_LIFE_US)
    assert share.clock - floor == debt // 2**minutes


@given(st.integers(0, 10**9), st.integers(0, 10**9))
def test_a_clock_that_goes_back_forgives_nothing(idle_since_us: int, back_us: int) -> None:
    share = Share(1)
    share.clock, share.idle_since_us = 1_000, idle_since_us
    share.join(10, idle_since_us - back_us)
    assert share.clock == 1_000


# Tenants within a lane


def contend(
    weights: list[int],
    jobs: Iterator[tuple[int, int, int]],
    num_jobs: int,
    *,
    locality: int = LOCALITY_TOKENS,
) -> Iterator[LaneQueue]:
    """All tenants always have something waiting; yields the queue after each job that was served to its end.

    A job is (prompt, of it cached, output).
    """
    names = [f"t{i}" for i in range(len(weights))]
    queue = make_queue(weights=dict(zip(names, weights, strict=True)))
    jobs_of: dict[str, tuple[int, int, int]] = {}
    number = 0

    def put(tenant: str) -> None:
        nonlocal number
        number += 1
        job = jobs_of[str(number)] = next(jobs)
        queue.put(ask(str(number), job[0], tenant=tenant), 0.0, num_cached=job[1])

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.priority.turns.LOCALITY_TOKENS", locality)
        for tenant in names * 2:
            put(tenant)
        for _ in range(num_jobs):
            request = take(queue)
            assert request is not None
            put(request.tenant)
            _, num_cached, num_output = jobs_of[request.request_id]
            serve(queue, request, num_output, num_hit=num_cached)
            yield queue


def largest_gap(queue: LaneQueue, weights: list[int]) -> float:
    """Between the services of two tenants, each over its weight."""
    charged = queue.tenants()
    shares = [charged[f"t{i}"] / weight for i, weight in enumerate(weights)]
    return max(abs(a - b) for a, b in combinations(shares, 2))


@pytest.mark.parametrize("locality", [0, 256, LOCALITY_TOKENS])
@given(weights=st.lists(st.integers(1, 8), min_size=2, max_size=4), data=st.data())
@settings(max_examples=examples(20))
def test_backlogged_tenants_get_service_by_their_weights(
    locality: int, weights: list[int], data: st.DataObject
) -> None:
    """Invariant 4: services over weights stay within the locality window and one request of each other."""
    job = st.tuples(st.integers(300, 1_500), st.integers(0, 299), st.integers(1, 200))
    sizes = data.draw(st.lists(job, min_size=1, max_size=12))

    def jobs() -> Iterator[tuple[int, int, int]]:
        while True:
            yield from sizes

    most = max(
        cost_of(prompt, 0, output) for prompt, _, output in sizes
    )  # at dispatch a hit costs as much as a computed token
    bound = COST_PREFILL * locality + most / min(weights)
    for queue in contend(weights, jobs(), 100, locality=locality):
        assert largest_gap(queue, weights) <= bound + 1


def test_the_weights_decide_and_not_how_much_is_asked_for() -> None:
    """Invariant 4, the long run: three to one is three to one."""
    weights = [3, 1]
    *_, queue = contend(weights, iter([(1_000, 0, 100)] * 1_000), 600)
    charged = queue.tenants()
    assert charged["t0"] / charged["t1"] == pytest.approx(3, rel=0.05)


def test_within_the_window_goes_who_has_more_in_the_cache_and_beyond_it_who_had_less() -> None:
    """Locality is bounded by fairness: invariant 4's window, used up and then closed."""
    queue = make_queue()
    for i in range(20):
        queue.put(ask(f"hot-{i}", 1_000, tenant="hot"), 0.0, num_cached=500)
        queue.put(ask(f"cold-{i}", 1_000, tenant="cold"), 0.0)
    order = []
    while (request := take(queue)) is not None:
        order.append(request.tenant)
        serve(queue, request, 1)
    ahead = next(i for i, tenant in enumerate(order) if tenant == "cold")
    assert ahead == COST_PREFILL * LOCALITY_TOKENS // (cost_of(1_000, 0, 1)) + 1
    assert order[: 2 * ahead + 2].count("cold") >= ahead - 1


@given(share=st.integers(1, 20), seed=st.integers(0, 1_000))
@settings(max_examples=examples(15))
def test_the_service_gap_stays_bounded_while_many_run_at_once(share: int, seed: int) -> None:
    """Invariant 4 with the engine: 2 U + Q, where U is what may be in flight, however much more one of them sends."""
    seats, longest, q = 4, (24, 10), 8
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.priority.turns.LOCALITY_TOKENS", q)
        engine = SimulatedEngine(make_queue(), budget=32, max_num_seqs=seats, prefix_cache=False)
        in_flight = seats * cost_of(longest[0], 0, longest[1])
        number = 0
        for _ in range(150):
            for tenant, most in (("greedy", 1 + share), ("modest", 2)):
                while sum(len(a.tickets) for a in accounts(engine.queue) if a.tenant == tenant) < most:
                    number += 1
                    size = 1 + (number * 7 + seed) % longest[0]
                    output = 1 + (number * 5 + seed) % longest[1]
                    engine.put(ask(str(number), size, tenant=tenant, max_tokens=output))
            engine.step()
            charged = engine.queue.tenants()
            assert abs(charged["greedy"] - charged["modest"]) <= 2 * in_flight + COST_PREFILL * q
        assert min(charged.values()) > 2 * in_flight, "else it shows nothing"


# Coming and going


def returning(go: Callable[[LaneQueue], None], idle_s: float) -> list[str]:
    """Who is served after `b` was away for so long while `a` was served all the time."""
    queue = make_queue()
    go(queue)
    for i in range(200):
        queue.put(ask(f"a{i}", 1_000, tenant="a"), idle_s)
        if i < 100:
            request = take(queue)
            assert request is not None
            serve(queue, request, 10, idle_s)
    for i in range(50):
        queue.put(ask(f"b{i}", 1_000, tenant="b"), idle_s)
    return [name[0] for name in take_all(queue)]


def test_a_tenant_that_was_away_does_not_catch_up() -> None:
    """Invariant 5: a hundred requests of `a` do not entitle `b` to a hundred in a row."""
    for idle_s in (0.0, 3_600.0):
        order = returning(lambda _: None, idle_s)
        assert 15 <= order[:40].count("b") <= 25


def test_a_tenant_with_one_long_request_running_does_not_catch_up_either() -> None:
    """Invariant 5: what runs does not wait, and credit is for who waits."""

    def one_runs(queue: LaneQueue) -> None:
        queue.put(ask("long", 10, tenant="b"), 0.0)
        assert take(queue) is not None

    order = returning(one_runs, 60.0)
    assert 15 <= order[:40].count("b") <= 25


def test_debt_is_remembered_for_a_while_but_not_for_ever() -> None:
    """Invariant 5: leaving and coming back at once does not wash anybody clean."""

    def first_after(idle_s: float) -> list[str]:
        queue = make_queue()
        queue.put(ask("first", 1_000, tenant="debtor"), 0.0)
        request = take(queue)
        assert request is not None
        queue.charge([(request, 0, 15, 15)] * 1_000, 0.0)  # worth thirty prompts of a thousand tokens
        serve(queue, request, 1)
        for i in range(60):
            queue.put(ask(f"b{i}", 1_000, tenant="b"), idle_s)
            queue.put(ask(f"d{i}", 1_000, tenant="debtor"), idle_s)
        return [name[0] for name in take_all(queue)]

    at_once = first_after(0.0)
    later = first_after(60.0)
    long_after = first_after(590.0)
    assert at_once[:20].count("d") < later[:20].count("d") <= long_after[:20].count("d")
    assert at_once[:25].count("d") == 0
    assert 7 <= long_after[:20].count("d") <= 13


@given(
    steps=st.lists(
        st.tuples(st.sampled_from(["put", "put", "take", "wait"]), st.integers(0, 3), st.integers(1, 900)),
        max_size=60,
    ),
    by=st.integers(1, 10**12),
)
def test_moving_all_clocks_changes_no_decision(steps: list[tuple[str, int, int]], by: int) -> None:
    """Invariant 5: only differences count, so clocks may be rebased whenever they grow large."""

    def run(offset: int) -> list[str]:
        queue = make_queue(permissive(ageing_s=(20.0, 20.0, 20.0)), weights={"t0": 3, "t1": 2})
        for line in lines(queue):
            line.share.clock += offset
            line.last_clock += offset
        order, now = [], 0.0
        for number, (what, pick, size) in enumerate(steps):
            if what == "put":
                lane, tenant = Lane(size % 3), f"t{pick}"
                queue.put(ask(str(number), size, lane=lane, tenant=tenant, at_s=now), now, size // 3)
            elif what == "take" and (request := take(queue)) is not None:
                order.append(request.request_id)
                serve(queue, request, 1 + pick, now)
            elif what == "wait":
                now += size / 10
        return order + take_all(queue)

    assert run(0) == run(by)


# Costs


@given(st.integers(0, 200_000), st.integers(0, 200_000), st.integers(0, 200_000))
def test_costs_of_parts_add_up_to_that_of_the_whole(first: int, second: int, third: int) -> None:
    for cost in (prompt_cost, output_cost):
        assert cost(0, first + second + third) == (
            cost(0, first) + cost(first, first + second) + cost(first + second, first + second + third)
        )


def test_tokens_cost_the_more_the_more_they_attend_to() -> None:
    """A token after 100,000 cached ones reads the KV of all of them, and is charged for it."""
    short, long = cost_of(100, 96, 500), cost_of(100_000, 99_984, 500)
    assert long > 20 * short
    assert cost_of(100, 96, 500, n=8) - cost_of(100, 96, 500) == 7 * output_cost(100, 600)


def test_a_tenant_with_long_contexts_gets_fewer_tokens_than_one_with_short_ones() -> None:
    """What shares are by is what steps take, and not how many tokens they bring."""
    queue, num_output = make_queue(), Counter[str]()
    sizes = {"long": 8_000, "short": 80}
    for tenant, num_prompt in sizes.items():
        for i in range(300):
            queue.put(ask(f"{tenant}-{i}", num_prompt, tenant=tenant), 0.0, num_cached=num_prompt - 1)
    for _ in range(300):
        request = take(queue)
        assert request is not None
        serve(queue, request, 100, num_hit=len(request.prompt_token_ids) - 1)
        num_output[request.tenant] += 100
    per_token = {tenant: cost_of(n, n - 1, 100) for tenant, n in sizes.items()}
    expected = per_token["short"] / per_token["long"]
    assert num_output["long"] / num_output["short"] == pytest.approx(expected, rel=0.15)
    assert expected < 0.25
