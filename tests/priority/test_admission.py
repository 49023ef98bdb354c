"""Letting in: bounds that always hold, forecasts that move the right way, refusals that say whose limit it is."""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import partial
from math import inf, isfinite

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.planning.request_queue import StepLoad
from penstock.priority.admission import Admission
from penstock.priority.lanes import DEFAULT_POLICIES, Lane, LanePolicy, Urgency
from penstock.priority.pacing import ALONE_SLACK
from penstock.priority.queue import LaneQueue
from penstock.priority.steptime import StepTimeModel
from penstock.priority.verdict import Forecast, Refusal
from penstock.priority.waiting import Size
from tests.few import examples
from tests.priority.simulated_engine import (
    COEFFICIENTS,
    ask,
    check_books,
    known_model,
    lines,
    make_queue,
    permissive,
    refusal_of,
    serve,
    take,
)

PROMISES = permissive(ttft_s=(1.0, 5.0, inf))
IDLE = StepLoad(
    num_prefill_tokens=0,
    num_decode_tokens=0,
    num_context_tokens=0,
    duration_s=0.01,
    num_running=0,
    max_num_seqs=10_000,
    max_batch_tokens=2_048,
    num_free_tokens=10**9,
)


@dataclass(frozen=True)
class Waiting:
    """One request of a situation; `computed` of those that run is how far their prompt is."""

    tenant: str
    lane: Lane
    num_prompt: int
    computed: int | None = None


situations = st.lists(
    st.builds(
        Waiting,
        tenant=st.sampled_from("abc"),
        lane=st.sampled_from(Lane),
        num_prompt=st.integers(1, 5_000),
        computed=st.none() | st.none() | st.integers(0, 5_000),
    ),
    max_size=12,
)
few = settings(max_examples=examples(50))
weightings = st.fixed_dictionaries({tenant: st.integers(1, 5) for tenant in "abc"})


def situation(
    others: list[Waiting],
    weights: dict[str, int],
    *,
    model: StepTimeModel | None = None,
    load: StepLoad = IDLE,
    promises: bool = False,
) -> LaneQueue:
    """A queue that has let these in; first those that run already."""
    queue = make_queue(PROMISES, weights=weights, promises=promises, model=model or known_model())
    for number, other in enumerate(others):
        if other.computed is None:
            continue
        queue.put(ask(f"run-{number}", other.num_prompt, lane=other.lane, tenant=other.tenant), 0.0)
        request = take(queue)
        assert request is not None
        queue.charge([(request, min(other.computed, other.num_prompt - 1), 0, other.num_prompt)], 0.0)
    for number, other in enumerate(others):
        if other.computed is None:
            queue.put(ask(f"wait-{number}", other.num_prompt, lane=other.lane, tenant=other.tenant), 0.0)
    queue.observe(load)
    return queue


def forecast(
    queue: LaneQueue, num_prompt: int, lane: Lane, *, cached: int = 0, at_s: float = 0.0
) -> Forecast:
    """Returns the forecast for a request of tenant `a`."""
    found = queue.put(ask("probe", num_prompt, lane=lane, at_s=at_s), at_s, cached)
    assert found is not None
    return found


# Invariant 9: a forecast is monotone


@given(situations, weightings, st.sampled_from(Lane), st.integers(1, 4_000), st.integers(0, 4_000))
@few
def test_a_longer_prompt_is_never_sooner(
    others: list[Waiting], weights: dict[str, int], lane: Lane, num_prompt: int, more: int
) -> None:
    """Invariant 9, in u. Within the last step, which others fill, it may be as soon."""
    short = forecast(situation(others, weights), num_prompt, lane)
    long = forecast(situation(others, weights), num_prompt + more, lane)
    assert 0 < short.seconds <= long.seconds
    assert short.raw_s <= long.raw_s
    if more > IDLE.max_batch_tokens:
        assert short.raw_s < long.raw_s


@given(situations, weightings, st.sampled_from(Lane), st.integers(1, 3_000), st.integers(1, 4_000))
@few
def test_ones_own_queue_never_makes_it_sooner(
    others: list[Waiting], weights: dict[str, int], lane: Lane, num_prompt: int, own: int
) -> None:
    """Invariant 9, in what the tenant itself has waiting; in the standard lane, a longer prompt is due later."""
    alone = forecast(situation(others, weights), num_prompt, lane)
    behind = forecast(situation([*others, Waiting("a", lane, own)], weights), num_prompt, lane)
    assert alone.raw_s <= behind.raw_s
    if own > IDLE.max_batch_tokens and (lane is not Lane.STANDARD or own <= num_prompt):
        assert alone.raw_s < behind.raw_s


@given(situations, weightings, st.sampled_from(Lane), st.integers(1, 3_000), st.data())
@few
def test_prefill_that_runs_never_makes_it_sooner(
    others: list[Waiting], weights: dict[str, int], lane: Lane, size: int, data: st.DataObject
) -> None:
    """Invariant 9, in the running prompts' tokens that are left."""
    assume(any(other.computed is not None for other in others))
    further = [
        replace(o, computed=o.computed + data.draw(st.integers(0, 3_000))) if o.computed is not None else o
        for o in others
    ]
    before = forecast(situation(others, weights), size, lane)
    after = forecast(situation(further, weights), size, lane)
    assert after.raw_s <= before.raw_s


@given(situations, weightings, st.sampled_from(Lane), st.integers(1, 3_000), st.data())
@few
def test_what_the_cache_holds_never_makes_it_later(
    others: list[Waiting], weights: dict[str, int], lane: Lane, num_prompt: int, data: st.DataObject
) -> None:
    """Invariant 9, in h."""
    few, many = sorted(data.draw(st.tuples(*[st.integers(0, num_prompt)] * 2)))
    hit = forecast(situation(others, weights), num_prompt, lane, cached=many)
    miss = forecast(situation(others, weights), num_prompt, lane, cached=few)
    assert hit.raw_s <= miss.raw_s


@given(situations, weightings, st.sampled_from(Lane), st.integers(1, 3_000), st.floats(1.0, 3.0))
@few
def test_a_slower_machine_is_never_sooner(
    others: list[Waiting], weights: dict[str, int], lane: Lane, num_prompt: int, factor: float
) -> None:
    """Invariant 9, in the step time; the budget is granted in sixteens, and that much may go the other way."""
    fast = forecast(situation(others, weights), num_prompt, lane)
    slow = forecast(situation(others, weights, model=known_model(factor)), num_prompt, lane)
    rounding_s = 2 * 16 * known_model(factor).coefficients[1]
    assert slow.raw_s >= fast.raw_s - rounding_s
    if factor > 1.5:
        assert slow.raw_s > fast.raw_s


@given(situations, weightings, st.integers(1, 3_000), st.integers(1, 20_000), st.integers(1, 20_000))
@few
def test_less_free_memory_is_never_sooner(
    others: list[Waiting], weights: dict[str, int], num_prompt: int, free: int, more: int
) -> None:
    """Invariant 9 for the wait for KV."""

    def with_free(num_free: int) -> float:
        queue = situation(others, weights, load=replace(IDLE, num_free_tokens=num_free))
        queue.admission.running = [
            Sequence(ask(f"running-{n}", 1_000, max_tokens=500 + n)) for n in range(20)
        ]
        return forecast(queue, num_prompt, Lane.INTERACTIVE).raw_s

    assert with_free(free + more) <= with_free(free)


def test_drafts_that_are_right_bring_room_sooner() -> None:
    """Each of eight streams has 3 drafts in every step; the rest of each takes fewer steps if they are right."""
    drafted = replace(
        IDLE, num_decode_tokens=32, num_drafts=24, num_context_tokens=800, max_num_seqs=8, num_running=8
    )
    waits = []
    for num_accepted in (0, 24):
        queue = situation([], {}, load=replace(drafted, num_accepted=num_accepted))
        request = replace(ask("running", 100, lane=Lane.STANDARD), sampling=SamplingParams(max_tokens=1000))
        queue.admission.running = [Sequence(request) for _ in range(8)]
        for _ in range(300):
            queue.observe(replace(drafted, num_accepted=num_accepted))
        waits.append(forecast(queue, 100, Lane.STANDARD).raw_s)
    assert waits[1] < 0.5 * waits[0]


def test_seats_that_are_taken_are_waited_for() -> None:
    def with_seats(num_running: int) -> float:
        queue = situation([], {}, load=replace(IDLE, max_num_seqs=8, num_running=num_running))
        queue.admission.running = [
            Sequence(ask(f"running-{n}", 100, max_tokens=100 + n)) for n in range(num_running)
        ]
        return forecast(queue, 100, Lane.INTERACTIVE).raw_s

    assert with_seats(7) == with_seats(0) < with_seats(8) < with_seats(9)


def test_more_urgent_work_counts_fully_and_less_urgent_work_by_its_share() -> None:
    alone = forecast(situation([], {}), 1_000, Lane.STANDARD).raw_s
    urgent = forecast(situation([Waiting("b", Lane.INTERACTIVE, 5_000)] * 4, {}), 1_000, Lane.STANDARD).raw_s
    patient = forecast(situation([Waiting("b", Lane.BATCH, 5_000)] * 4, {}), 1_000, Lane.STANDARD).raw_s
    assert urgent - alone > 0.8 * 20_000 * 28e-6
    rest_of_the_step_s = (IDLE.max_batch_tokens - 1_000) * COEFFICIENTS["beta_s"]
    assert 0 < patient - alone < rest_of_the_step_s + 2 * 250 * 35e-6


# Invariant 10: tenants are isolated


@given(
    flood=st.integers(0, 60),
    sizes=st.lists(st.integers(1, 5_000), min_size=1, max_size=5),
    weights=weightings,
    own=st.lists(st.integers(1, 2_000), max_size=3),
    num_prompt=st.integers(1, 3_000),
)
@few
def test_others_cost_a_tenant_no_more_than_their_fair_share(
    flood: int, sizes: list[int], weights: dict[str, int], own: list[int], num_prompt: int
) -> None:
    """Invariant 10: T <= (own + u) / (mu w / sum of the weights) + two steps, whatever the others send."""
    others = [Waiting("bc"[i % 2], Lane.INTERACTIVE, sizes[i % len(sizes)]) for i in range(flood)]
    mine = [Waiting("a", Lane.INTERACTIVE, size) for size in own]
    queue = situation([*others[::2], *mine, *others[1::2]], weights)
    step_s = known_model().seconds(IDLE.max_batch_tokens, 0, 0)
    fair_rate = IDLE.max_batch_tokens / step_s * weights["a"] / sum(weights.values())
    told = forecast(queue, num_prompt, Lane.INTERACTIVE).raw_s
    assert told <= (sum(own) + num_prompt) / fair_rate + 2 * step_s + 1e-6


@given(sizes=st.lists(st.integers(1, 4_000), min_size=1, max_size=4), lane=st.sampled_from(list(Lane)[:2]))
@settings(max_examples=examples(10))
def test_whatever_a_noisy_tenant_sends_a_quiet_one_is_let_in(sizes: list[int], lane: Lane) -> None:
    """Invariant 10: the noisy one is refused what is out of reach; that leaves the quiet one's share untouched."""
    queue = situation([], {}, promises=True)
    refused = 0
    for i in range(300):
        request = ask(f"n{i}", sizes[i % len(sizes)], lane=lane, tenant="noisy", at_s=i / 100)
        refusal = refusal_of(partial(queue.put, request, i / 100))
        assert refusal is None or refusal.reason == "promise_out_of_reach"
        refused += refusal is not None
    assert refused > 0 or sum(sizes) * 300 / len(sizes) < 200_000
    told = forecast(queue, 500, lane, at_s=3.0)
    assert told.seconds <= told.allowed_s


def test_those_who_keep_sending_are_counted_on() -> None:
    """The share looks ahead: what others sent a moment ago they will send again, though nothing of it waits now."""
    queue = situation([], {})
    for i in range(200):
        queue.put(ask(f"b{i}", 1_000, tenant="b"), 0.0)
        request = take(queue)
        assert request is not None
        serve(queue, request, 1)
    just_after = forecast(queue, 5_000, Lane.INTERACTIVE).raw_s
    assert queue.cancel("probe")
    long_after = forecast(queue, 5_000, Lane.INTERACTIVE, at_s=60.0).raw_s
    assert just_after > 1.5 * long_after


def test_those_who_will_overtake_are_counted_on() -> None:
    """Whoever has had much waits for others who have had less, as fast as they send, until they have had their due."""
    queue = situation([], {})
    for tenant, num_requests in (("a", 600), ("b", 150), ("c", 150)):
        for i in range(num_requests):
            queue.put(ask(f"{tenant}{i}", 1_000, tenant=tenant), 0.0)
    while (request := take(queue)) is not None:
        serve(queue, request, 1)
    just_after = forecast(queue, 100, Lane.INTERACTIVE).raw_s
    assert queue.cancel("probe")
    long_after = forecast(queue, 100, Lane.INTERACTIVE, at_s=60.0).raw_s
    third_of_the_machine = 3.0
    assert just_after > 1.2 * third_of_the_machine * long_after


# The promise


@given(situations, weightings, st.sampled_from(Lane))
@few
def test_what_is_shown_of_a_lane_is_what_a_newcomer_would_be_told(
    others: list[Waiting], weights: dict[str, int], lane: Lane
) -> None:
    queue = situation(others, weights)
    shown = queue.predict(lane, 64, 0.0)
    told = queue.put(ask("probe", 64, lane=lane, tenant="somebody new"), 0.0)
    assert told is not None
    assert shown == told


def test_nothing_is_promised_while_too_little_was_measured() -> None:
    queue = make_queue(PROMISES, promises=True)
    for i in range(50):
        assert queue.put(ask(str(i), 5_000), 0.0) is None


@given(situations, weightings, st.sampled_from(Lane), st.integers(1, 5_000), st.floats(0.0, 3.0))
@few
def test_what_is_let_in_is_expected_in_time_and_what_is_refused_is_not(
    others: list[Waiting], weights: dict[str, int], lane: Lane, num_prompt: int, waited_s: float
) -> None:
    expected = forecast(situation(others, weights), num_prompt, lane)
    queue = situation(others, weights)
    queue._promises = True
    request = ask("probe", num_prompt, lane=lane, at_s=-waited_s)
    refusal = refusal_of(partial(queue.put, request, 0.0))
    if refusal is not None:
        assert waited_s + expected.late_s > expected.allowed_s
        assert refusal.reason == "promise_out_of_reach"
        assert not refusal.tenant_limit
        assert 1.0 <= refusal.retry_after_s <= 60.0
        assert f"{lane.label} lane" in str(refusal)
        assert queue.position("probe") is None
    else:
        assert waited_s + expected.late_s <= expected.allowed_s
    check_books(queue)


@given(situations, weightings, st.sampled_from(Lane), st.data(), st.floats(0.0, 3.0))
@few
def test_once_somebody_was_too_late_those_who_would_be_too_whatever_they_ask_are_told_at_once(
    others: list[Waiting], weights: dict[str, int], lane: Lane, data: st.DataObject, waited_s: float
) -> None:
    queue = situation(others, weights)
    queue._promises = True
    most_tokens = data.draw(st.integers(1, 5_000))
    num_prompt, num_cached = data.draw(st.integers(1, most_tokens)), data.draw(st.integers(0, 5_000))
    lines(queue)[lane].account("a", 1)
    early_at_first = refusal_of(partial(queue.check_open, Urgency(lane), "a", -waited_s, 0.0, most_tokens))
    assert early_at_first is None, "nobody was refused before"
    refusal_of(partial(queue.put, ask("first", 1, lane=lane, tenant="a", at_s=-waited_s), 0.0))
    was_late = lines(queue)[lane].is_late
    early = refusal_of(partial(queue.check_open, Urgency(lane), "a", -waited_s, 0.0, most_tokens))
    late = refusal_of(
        partial(queue.put, ask("probe", num_prompt, lane=lane, tenant="a", at_s=-waited_s), 0.0, num_cached)
    )
    if early is not None:
        assert was_late
        assert late is not None
        assert late.reason == early.reason == "promise_out_of_reach"
        assert early.retry_after_s <= late.retry_after_s
    elif was_late and num_prompt == most_tokens == 1:
        assert late is None


@given(num_prompt=st.integers(1, 400_000), lane=st.sampled_from(Lane))
@few
def test_an_empty_server_refuses_nobody(num_prompt: int, lane: Lane) -> None:
    """A prompt that takes longer than the promise by itself gets half as much again, not a refusal for ever."""
    queue = make_queue(PROMISES, promises=True, model=known_model())
    queue.observe(IDLE)
    found = queue.put(ask("long", min(num_prompt, 7_900), lane=lane), 0.0)
    assert found is not None
    assert found.seconds <= found.allowed_s
    admission = queue.admission
    account = lines(queue)[lane].account("other", 1)
    alone = admission.forecast(account, Size.of(num_prompt), 1_000.0)
    assert alone is not None
    assert alone.allowed_s >= min(DEFAULT_POLICIES[lane].ttft_s, ALONE_SLACK * alone.raw_s / 2)
    assert isfinite(alone.seconds)


def come_true(queue: LaneQueue, at_s: float, ratio: float, tenant: str = "a") -> tuple[float, float]:
    """Has a request's first token come after `ratio` times its forecast; returns the factors it was forecast with."""
    told = queue.put(ask(str(at_s), 100, at_s=at_s, tenant=tenant), at_s)
    request = take(queue)
    assert told is not None
    assert request is not None
    serve(queue, request, 1, at_s + ratio * told.raw_s)
    return told.seconds / told.raw_s, told.late_s / told.raw_s


@given(st.lists(st.floats(0.05, 10.0), min_size=100, max_size=100))
@settings(max_examples=examples(10))
def test_the_factors_stay_within_their_bounds_whatever_happens(ratios: list[float]) -> None:
    queue = situation([], {})
    for number, ratio in enumerate(ratios):
        told, late = come_true(queue, float(number), ratio)
        assert 0.5 <= told <= late <= 3.0


def test_the_factors_find_the_quantiles() -> None:
    queue = situation([], {})
    for number in range(300):
        # Evenly between nothing and twice what was forecast.
        factors = come_true(queue, float(number), 2 * (number * 0.618 % 1))
    assert factors == pytest.approx((4 / 3, 1.8), abs=0.1)
    newcomer = come_true(queue, 300.0, 1.0, tenant="newcomer")
    assert newcomer == pytest.approx((4 / 3, 1.8), abs=0.3), "as for the lane's last sixteen"


def test_a_tenant_of_whom_little_was_learnt_is_forecast_as_its_lane() -> None:
    """A lane's forecasts come late; so may this tenant's, whose only one came true, until more of its own did."""
    queue = situation([], {})
    come_true(queue, 0.0, 1.0)
    for number in range(1, 100):
        come_true(queue, float(number), 2.5, tenant="b")
    told = [come_true(queue, 100.0 + number, 0.6)[0] for number in range(40)]
    assert told[0] == pytest.approx(2.5, abs=0.1)
    assert told == pytest.approx(sorted(told, reverse=True))
    assert told[-1] == pytest.approx(0.6)


# Bounds

BOUNDS = LanePolicy(max_requests=6, max_tokens=60, max_bytes=36 * 60, tenant_share=0.5, ttl_s=100.0)
moves = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "take", "cancel"]),
        st.sampled_from(Lane),
        st.sampled_from("abc"),
        st.integers(1, 40),
        st.integers(0, 40),
    ),
    max_size=50,
)


@given(moves)
@few
def test_no_bound_is_exceeded_at_any_instant(script: list[tuple[str, Lane, str, int, int]]) -> None:
    """Invariant 2: requests, tokens, bytes, and a tenant's part of them; `put` checks and takes the place at once."""
    queue = make_queue(dict.fromkeys(Lane, BOUNDS))
    names: list[str] = []
    for number, (what, lane, tenant, size, cached) in enumerate(script):
        if what == "put":
            shared = len(set(lines(queue)[lane].accounts) | {tenant}) > 1
            request = ask(str(number), size, lane=lane, tenant=tenant)
            refusal = offer(queue, request, cached)
            if refusal is not None:
                check_refusal(queue, refusal, lane, tenant, max(1, size - cached), size)
            else:
                names.append(str(number))
                account = lines(queue)[lane].accounts[tenant]
                if shared and len(account.tickets) > 1 and lines(queue)[lane].num_requests > 1:
                    assert len(account.tickets) <= BOUNDS.tenant_share * BOUNDS.max_requests
                    assert account.num_tokens <= BOUNDS.tenant_share * BOUNDS.max_tokens
        elif what == "take":
            take(queue)
        elif names:
            queue.cancel(names[size % len(names)])
        for line in lines(queue):
            assert line.num_requests <= BOUNDS.max_requests
            if line.num_requests > 1:  # one that is larger than the bounds may wait alone
                assert line.num_tokens <= BOUNDS.max_tokens
                assert line.num_bytes <= BOUNDS.max_bytes


def offer(queue: LaneQueue, request: Request, num_cached: int) -> Refusal | None:
    """Why it was not let in, if it was not, with no more of its prompt in the cache than there is."""
    return refusal_of(partial(queue.put, request, 0.0, min(num_cached, len(request.prompt_token_ids))))


def check_refusal(
    queue: LaneQueue, refusal: Refusal, lane: Lane, tenant: str, num_uncached: int, size: int
) -> None:
    """It is true: the place is really not there, and it is said whose fault that is."""
    line = lines(queue)[lane]
    own = len(line.accounts[tenant].tickets)
    tokens = line.accounts[tenant].num_tokens + num_uncached
    if refusal.tenant_limit:
        assert refusal.reason == "tenant_queue_full"
        assert own >= 3 or (own > 0 and tokens > 30)
    else:
        assert refusal.reason == "queue_full"
        assert (
            line.num_requests == BOUNDS.max_requests
            or line.num_tokens + num_uncached > BOUNDS.max_tokens
            or line.num_bytes + 36 * size > BOUNDS.max_bytes
        )


@given(moves)
@few
def test_the_early_check_refuses_only_what_would_be_refused(
    script: list[tuple[str, Lane, str, int, int]],
) -> None:
    """`check_open` spares the work on a prompt; it may let through what `put` refuses, never the reverse."""
    queue = make_queue(dict.fromkeys(Lane, BOUNDS))
    for number, (what, lane, tenant, size, cached) in enumerate(script):
        if what != "put":
            take(queue)
            continue
        is_known = tenant in lines(queue)[lane].accounts
        early = refusal_of(partial(queue.check_open, Urgency(lane), tenant, 0.0, 0.0, size))
        request = ask(str(number), size, lane=lane, tenant=tenant)
        late = offer(queue, request, cached)
        if early is not None:
            assert late is not None
            # The first request of a tenant makes it one of several, and that is when its part begins.
            assert late.tenant_limit or late.reason == early.reason
        elif late is not None and is_known:
            assert "requests" not in str(late), "the places were looked at before"


@given(moves, st.sampled_from("abc"))
@few
def test_429_is_for_the_tenants_own_limit_alone(
    script: list[tuple[str, Lane, str, int, int]], tenant: str
) -> None:
    """Invariant 18: without what the others have waiting the same request meets the same limit."""
    script = [step for step in script if step[0] == "put"]
    queue = make_queue(dict.fromkeys(Lane, BOUNDS))
    only_own = make_queue(dict.fromkeys(Lane, BOUNDS))
    for line in lines(queue) + lines(only_own):
        line.account(
            "somebody else", 1
        )  # known, and with nothing waiting: so there is somebody to share with
    for number, (_, lane, whose, size, cached) in enumerate(script):
        request = ask(str(number), size, lane=lane, tenant=whose)
        refusal = offer(queue, request, cached)
        assert refusal is None or 1.0 <= refusal.retry_after_s <= 60.0
        if whose == tenant and (refusal is None or refusal.tenant_limit):
            own = offer(only_own, request, cached)
            assert (own is None) == (refusal is None)
            assert own is None or own.tenant_limit


@given(seconds=st.floats(allow_nan=False) | st.integers(-(10**9), 10**9))
@few
def test_when_to_come_back_is_between_a_second_and_a_minute(seconds: float) -> None:
    """Invariant 18."""
    refusal = Refusal("queue_full", "full", seconds)
    assert 1.0 <= refusal.retry_after_s <= 60.0
    if 1 <= seconds <= 60:
        assert refusal.retry_after_s == seconds


def test_a_tenant_alone_may_fill_the_lane_and_among_others_its_part() -> None:
    """Invariant 2: the tenant's share is of use only when there is somebody to share with."""
    queue = make_queue(dict.fromkeys(Lane, BOUNDS))
    for i in range(6):
        queue.put(ask(f"a{i}", 1), 0.0)
    with pytest.raises(Refusal) as full:
        queue.put(ask("a6", 1), 0.0)
    assert not full.value.tenant_limit, "it is the lane that is full"
    for i in range(6):
        queue.cancel(f"a{i}")
    queue.put(ask("b", 1, tenant="b"), 0.0)
    for i in range(3):
        queue.put(ask(f"a{i}", 1), 0.0)
    with pytest.raises(Refusal) as mine:
        queue.put(ask("a3", 1), 0.0)
    assert mine.value.tenant_limit
    queue.put(ask("b2", 1, tenant="b"), 0.0)


def test_each_choice_is_a_place() -> None:
    """Else 128 answers would wait, and run, for one."""
    queue = make_queue(dict.fromkeys(Lane, BOUNDS))
    queue.put(ask("large", 1, n=9), 0.0)  # alone, one may be larger than the lane
    assert refusal_of(partial(queue.put, ask("one", 1), 0.0)) is not None
    queue.cancel("large")
    queue.put(ask("b", 1, tenant="b"), 0.0)
    queue.put(ask("a0", 1, n=2), 0.0)
    refusal = refusal_of(partial(queue.put, ask("a1", 1, n=2), 0.0))
    assert refusal is not None
    assert refusal.tenant_limit
    queue.put(ask("a2", 1), 0.0)
    refusal = refusal_of(partial(queue.put, ask("c", 1, n=3, tenant="c"), 0.0))
    assert refusal is not None
    assert not refusal.tenant_limit
    queue.put(ask("c", 1, n=2, tenant="c"), 0.0)
    check_books(queue)


def test_the_rate_of_admission_is_kept_by_a_queue_that_knows_no_step_times() -> None:
    admission = Admission(PROMISES, StepTimeModel(), {}, {})
    assert admission.finish_rate(0.0) == 0.0
    for i in range(1_000):
        admission.note_finished(i / 10)
    assert admission.finish_rate(100.0) == pytest.approx(10, rel=0.05)
    assert admission.finish_rate(105.0) == pytest.approx(5, rel=0.05)
