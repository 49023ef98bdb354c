"""Between lanes: shares by weight, a bounded lead for the urgent, nobody starves, and calls repeat."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.request import Request
from penstock.priority.lanes import Lane
from penstock.priority.queue import _AGED_MOST_TOKENS, AGED_PART, LaneQueue
from penstock.priority.shares import COST_PREFILL, output_cost, prompt_cost
from penstock.priority.waiting import LEAD_TOKENS
from tests.few import examples
from tests.priority.simulated_engine import (
    SimulatedEngine,
    ask,
    lines,
    make_queue,
    permissive,
    serve,
    take,
    take_all,
)

LONGEST = 1_500
MOST_OUTPUT = 200


def serve_backlogged(
    queue: LaneQueue, jobs: list[tuple[int, int]], num_jobs: int, contenders: list[Lane]
) -> dict[Lane, int]:
    """Every lane always has something waiting; what each was charged at the end."""
    number = 0

    def put(lane: Lane) -> None:
        nonlocal number
        number += 1
        queue.put(ask(str(number), jobs[number % len(jobs)][0], lane=lane, tenant=lane.label), 0.0)

    for lane in contenders * 2:
        put(lane)
    for turn in range(num_jobs):
        request = take(queue)
        assert request is not None
        put(Lane(request.lane))
        serve(queue, request, jobs[turn % len(jobs)][1])
    charged = queue.tenants()
    return {lane: charged[lane.label] for lane in contenders}


@given(
    weights=st.tuples(st.integers(1, 20), st.integers(1, 20), st.integers(1, 20)),
    jobs=st.lists(st.tuples(st.integers(1, LONGEST), st.integers(1, MOST_OUTPUT)), min_size=1, max_size=9),
    absent=st.sampled_from([None, *Lane]),
    num_jobs=st.integers(1, 300),
)
@settings(max_examples=examples(60))
def test_backlogged_lanes_share_by_weight(
    weights: tuple[int, int, int], jobs: list[tuple[int, int]], absent: Lane | None, num_jobs: int
) -> None:
    """Invariant 6: a lane gets its part of the work, but for one request and the lead of the more urgent."""
    contenders = [lane for lane in Lane if lane is not absent]
    charged = serve_backlogged(make_queue(permissive(weights)), jobs, num_jobs, contenders)
    unit = prompt_cost(0, LONGEST) + output_cost(LONGEST, LONGEST + MOST_OUTPUT)
    lead = 2 * COST_PREFILL * LEAD_TOKENS
    total, sum_of_weights = sum(charged.values()), sum(weights[lane] for lane in contenders)
    for lane in contenders:
        fair = total * weights[lane] / sum_of_weights
        assert charged[lane] >= fair - weights[lane] * lead - 2 * unit * max(1, weights[lane])


def test_in_the_long_run_the_lanes_get_sixteen_to_four_to_one() -> None:
    """Invariant 6, with the weights that are the default."""
    queue = make_queue(permissive())
    charged = serve_backlogged(queue, [(1_000, 50)], 4_000, list(Lane))
    served = {lane: line.share.charged for lane, line in zip(Lane, lines(queue), strict=True)}
    assert served == charged
    total = sum(charged.values())
    assert charged[Lane.STANDARD] / total == pytest.approx(4 / 21, abs=0.03)
    assert charged[Lane.BATCH] / total == pytest.approx(1 / 21, abs=0.015)


def test_the_lead_of_an_urgent_lane_is_what_it_says() -> None:
    """Invariant 6: interactive goes first for two leads at its weight, then takes turns with batch."""
    queue = make_queue(permissive((1, 1, 1)))
    for i in range(40):
        queue.put(ask(f"i{i}", 1_024), 0.0)
        queue.put(ask(f"b{i}", 1_024, lane=Lane.BATCH), 0.0)
    order = [name[0] for name in take_all(queue)]
    ahead = order.index("b")
    assert ahead == 2 * COST_PREFILL * LEAD_TOKENS // prompt_cost(0, 1_024) + 1
    assert order[ahead : ahead + 10] == ["b", "i"] * 5


@pytest.mark.parametrize("lane", [Lane.STANDARD, Lane.INTERACTIVE])
def test_a_lane_that_was_away_does_not_catch_up(lane: Lane) -> None:
    """Invariant 5 for lanes: what was not used while nobody asked is gone."""
    queue = make_queue(permissive((1, 1, 1)))
    for i in range(100):
        queue.put(ask(f"b{i}", 1_000, lane=Lane.BATCH), 0.0)
    for _ in range(60):
        request = take(queue)
        assert request is not None
        serve(queue, request, 10)
    for i in range(100):
        queue.put(ask(f"u{i}", 1_000, lane=lane), 0.0)
    order = [name[0] for name in take_all(queue)]
    lead = (Lane.BATCH - lane) * LEAD_TOKENS // 1_000 + 2
    assert order[: lead + 20].count("b") >= 9


# Nobody starves


def flood(queue: LaneQueue, number: int, now: float, size: int = 1_000) -> None:
    queue.put(ask(f"flood-{number}", size, tenant=f"t{number % 3}", at_s=now), now)


@dataclass
class Turn:
    name: str
    at_s: float
    num_tokens: int


def under_flood(queue: LaneQueue, late: dict[str, tuple[Lane, int]], rate: float, turns: int) -> list[Turn]:
    """Whose turn it was, with an interactive lane that never empties and `late`, all of which came at 0 s."""
    now, served = 0.0, []
    for number in range(10):
        flood(queue, number, now)
    for name, (lane, size) in late.items():
        queue.put(ask(name, size, lane=lane, tenant=name), now)
    for number in range(10, 10 + turns):
        flood(queue, number, now)
        request = take(queue)
        assert request is not None
        served.append(Turn(request.request_id, now, len(request.prompt_token_ids)))
        now += len(request.prompt_token_ids) / rate
        serve(queue, request, 1, now)
    return served


@given(
    sizes=st.lists(st.integers(1, 2_000), min_size=1, max_size=6),
    rate=st.sampled_from([2_000.0, 10_000.0]),
    lane=st.sampled_from([Lane.STANDARD, Lane.BATCH]),
)
@settings(max_examples=examples(30))
def test_nobody_waits_much_longer_than_the_ageing_time(sizes: list[int], rate: float, lane: Lane) -> None:
    """Invariant 7: A + (aged work ahead) / (a quarter of the rate) + one longest prompt, under an endless flood."""
    ageing_s = 30.0
    queue = make_queue(permissive((10**6, 1, 1), ageing_s=(inf, ageing_s, ageing_s)))
    late = {f"late-{i}": (lane, size) for i, size in enumerate(sizes)}
    served = under_flood(queue, late, rate, int((ageing_s + 5 * sum(sizes) / rate + 10) * rate / 1_000))
    ahead = 0
    at_s = {turn.name: turn.at_s for turn in served}
    for name, (_, size) in late.items():
        assert name in at_s, f"{name} starves"
        assert ageing_s < at_s[name] <= ageing_s + AGED_PART * (ahead + 2_000) / rate + 2 * 2_000 / rate
        ahead += size


@given(size=st.integers(10, 1_500), turns=st.integers(50, 250))
@settings(max_examples=examples(30))
def test_the_aged_get_a_quarter_and_no_more(size: int, turns: int) -> None:
    """Invariant 7, the other side: a backlog of the patient does not take over once it is old."""
    queue = make_queue(permissive((10**6, 1, 1), ageing_s=(inf, inf, 0.001)))
    late = {f"late-{i}": (Lane.BATCH, size) for i in range(turns)}
    served = under_flood(queue, late, 10_000.0, turns)
    aged = sum(turn.num_tokens for turn in served if turn.name.startswith("late"))
    total = sum(turn.num_tokens for turn in served)
    assert aged <= total / AGED_PART + _AGED_MOST_TOKENS + size
    assert aged >= min(turns * size, (total - 2_000) / AGED_PART / 1.5) - size


def test_a_tenant_that_is_served_is_not_aged_however_long_its_backlog_is() -> None:
    """Ageing is for tenants who were passed over: a backlog of hours alone is no reason."""
    queue = make_queue(permissive((9, 1, 1), ageing_s=(inf, inf, 10.0)))
    for i in range(400):
        queue.put(ask(f"i{i}", 1_000, tenant="i"), 0.0)
        queue.put(ask(f"b{i}", 1_000, lane=Lane.BATCH, tenant="b"), 0.0)
    now, order = 0.0, []
    for _ in range(300):
        request = take(queue)
        assert request is not None
        now += 0.1
        serve(queue, request, 1, now)
        order.append(request.request_id[0])
    assert order[100:].count("b") == pytest.approx(20, abs=3), "its tenth, and not a quarter"


@pytest.mark.parametrize("ageing_s", [inf, 5.0])
def test_batch_finishes_under_an_endless_interactive_flood(ageing_s: float) -> None:
    """Invariant 7, in the engine: by its share alone, too."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.priority.waiting.LEAD_TOKENS", 32)
        queue = make_queue(permissive(ageing_s=(inf, inf, ageing_s)))
        engine = SimulatedEngine(queue, budget=48, max_num_seqs=4)
        for i in range(3):
            engine.put(ask(f"batch-{i}", 40, lane=Lane.BATCH, tenant="b", max_tokens=12))
        number = 0
        while not all((f"batch-{i}", 0) in engine.ended for i in range(3)):
            assert engine.now < 40.0, "batch starves"
            while queue.depths()[Lane.INTERACTIVE] < 4:
                number += 1
                engine.put(ask(str(number), 20, tenant=f"t{number % 2}", max_tokens=3, at_s=engine.now))
            engine.step()
        assert number > 100, "and the flood was served meanwhile"
        assert queue.depths()[Lane.INTERACTIVE] > 0


# The step is not idle


@given(
    jobs=st.lists(
        st.tuples(st.integers(1, 60), st.integers(1, 8), st.sampled_from(Lane), st.integers(0, 4)),
        min_size=1,
        max_size=12,
    ),
    seats=st.integers(1, 4),
    blocks=st.integers(20, 60),
)
@settings(max_examples=examples(50))
def test_who_could_start_now_is_not_left_waiting(
    jobs: list[tuple[int, int, Lane, int]], seats: int, blocks: int
) -> None:
    """Invariant 3: after planning, the head whose turn it is does not fit, or the step is full."""
    queue = make_queue()
    engine = SimulatedEngine(
        queue, num_blocks=blocks, max_num_seqs=seats, budget=24, kv_shares=(1.0, 0.9, 0.6)
    )
    for number, (size, output, lane, _) in enumerate(jobs):
        engine.put(ask(str(number), size, lane=lane, tenant="ab"[number % 2], max_tokens=output))
    scheduler = engine.scheduler
    while not engine.is_done:
        plan = scheduler.plan(engine.now)
        assert plan.chunks
        if plan.num_tokens < 24 and not scheduler.sequences.waiting and any(queue.depths().values()):
            could_start: list[bool] = []

            def fits(request: Request, could_start: list[bool] = could_start) -> bool:
                could_start.append(scheduler._fits(request))
                return False

            queue.take(fits)
            assert could_start, "somebody waits, and it is nobody's turn"
            assert not any(could_start), "it was its turn, it fits, and it waits"
        engine.run(plan)
    engine.check_tokens()
    assert set(engine.ended) == {(str(number), 0) for number in range(len(jobs))}


# The same calls, the same turns

events = st.lists(
    st.tuples(
        st.sampled_from(["put", "put", "put", "take", "cancel", "expire", "wait"]),
        st.sampled_from(Lane),
        st.integers(0, 4),
        st.integers(1, 900),
    ),
    max_size=60,
)


def replay(
    script: list[tuple[str, Lane, int, int]], *, tenants: str = "abcde", stem: str = "r"
) -> list[tuple[str, int]]:
    """Who was taken, as (what, number of the event that brought it)."""
    queue = make_queue(
        permissive((3, 2, 1), ttft_s=(1.0, 5.0, inf), ageing_s=(inf, 40.0, 30.0)),
        weights={tenants[i]: 1 + i for i in range(5)},
    )
    now, log = 0.0, []
    number_of: dict[str, int] = {}
    for number, (what, lane, pick, size) in enumerate(script):
        if what == "put":
            # Names in another order than the events, so that an order by name would show.
            name = f"{stem}{hash_like(number, stem)}"
            number_of[name] = number
            queue.put(ask(name, size, lane=lane, tenant=tenants[pick], at_s=now), now, size // 2)
        elif what == "take" and (request := take(queue)) is not None:
            log.append(("take", number_of[request.request_id]))
            serve(queue, request, 1 + pick, now)
        elif what == "cancel" and number_of:
            name = list(number_of)[size % len(number_of)]
            log.append(("cancel" if queue.cancel(name) else "late", number_of[name]))
        elif what == "expire":
            log += [("expire", number_of[r.request_id]) for r in queue.expire(now)]
        else:
            now += size / 100
    return log + [("take", number_of[name]) for name in take_all(queue)]


def hash_like(number: int, stem: str) -> int:
    return (number * 7_919 + len(stem) * 104_729) % 1_000_003


@given(script=events)
def test_the_same_calls_give_the_same_schedule(script: list[tuple[str, Lane, int, int]]) -> None:
    """Invariant 14."""
    assert replay(script) == replay(script)


@given(script=events)
def test_the_names_of_requests_decide_nothing(script: list[tuple[str, Lane, int, int]]) -> None:
    """Invariant 14: ids are random; an order that came from them could not be repeated."""
    assert replay(script, stem="r") == replay(script, stem="zzzzz")


@given(script=events)
def test_the_names_of_tenants_decide_nothing(script: list[tuple[str, Lane, int, int]]) -> None:
    """Invariant 14: other names in any order, the same schedule."""
    assert replay(script, tenants="abcde") == replay(script, tenants="tKzXV")


@given(sizes=st.permutations([101, 211, 307, 401, 503]))
def test_a_tie_between_tenants_goes_by_arrival_and_a_difference_does_not(sizes: list[int]) -> None:
    """Invariant 14: with equal clocks whoever came first; after that, whoever has had least."""
    queue = make_queue()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("penstock.priority.turns.LOCALITY_TOKENS", 0)
        for i, size in enumerate(sizes):
            for turn in range(2):
                queue.put(ask(f"{i}.{turn}", size, tenant="ecadb"[i]), 0.0)
        order = take_all(queue)
    first, second = order[:5], order[5:]
    assert [name[2:] for name in order] == ["0"] * 5 + ["1"] * 5
    assert [name[0] for name in first] == list("01234")
    assert [sizes[int(name[0])] for name in second] == sorted(sizes)
