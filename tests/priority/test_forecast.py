"""Forecasts while KV is short: what is held, for how long, and how near the first tokens come to what was told."""

from __future__ import annotations

from dataclasses import replace
from math import exp
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.request import FinishReason, Request, Sequence
from penstock.priority.lanes import Lane
from penstock.priority.lengths import Lengths
from penstock.priority.queue import LaneQueue
from penstock.priority.room import Held, Need, grouped
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.summary import percentile
from penstock.priority.simulator.trace import Arrival
from tests.few import examples
from tests.priority.simulated_engine import ask, known_model, make_queue, take
from tests.priority.test_admission import IDLE

CPU = {"alpha_s": 8e-3, "beta_s": 9e-4, "gamma_s": 1.5e-3, "delta_s": 7e-7, "epsilon_s": 2.5e-7}
"""Two cores that serve a model of 135 million parameters, about."""
POOL = Machine(
    coefficients=CPU, num_kv_tokens=12_288, max_batch_tokens=512, max_num_seqs=64, max_model_len=12_000
)

# How long answers are


def lengths_of(answers: list[tuple[int, int, bool]]) -> Lengths:
    """`answers` are tokens, limit, and whether it ended by itself."""
    lengths = Lengths()
    for num_tokens, limit, is_whole in answers:
        lengths.add(num_tokens, limit, is_whole=is_whole)
    return lengths


def test_chats_that_set_no_limit_are_expected_to_be_as_long_as_those_before() -> None:
    lengths = lengths_of([(20 + number % 5, 100_000, True) for number in range(64)])
    assert lengths.left(0, 100_000) == pytest.approx(22, rel=0.01)
    assert lengths.left(22, 100_000) == pytest.approx(1.5, rel=0.05)
    assert lengths.left(500, 100_000) == 251, "longer than all before: half as long again"


def test_answers_that_were_cut_off_by_their_limit_are_expected_to_be_again() -> None:
    lengths = lengths_of([(limit, limit, False) for limit in range(520, 1_000, 20)])
    assert lengths.left(0, 800) == 800
    assert lengths.left(300, 800) == 500


def test_who_asks_for_what_is_needed_says_nothing_of_who_sets_no_limit() -> None:
    exact = [(60, 60, False)] * 30
    lengths = lengths_of([answer for each in exact for answer in (each, (500, 8_000, True))])
    assert lengths.left(0, 60) == 60
    assert lengths.left(0, 8_000) == pytest.approx(500)
    assert lengths.left(0, 1_000_000) is None, "nobody had a limit like that"


def test_a_budget_for_reasoning_says_nothing_of_who_has_none() -> None:
    lengths = lengths_of([(2_000, 8_000, True)] * 8)
    for _ in range(8):
        lengths.add(150, 8_000, 100, is_whole=True)
    assert lengths.left(0, 8_000) == pytest.approx(2_000)
    assert lengths.left(0, 8_000, 120) == pytest.approx(150)
    assert lengths.left(0, 8_000, 1_000) is None, "nobody had a budget like that"


@given(
    st.lists(st.tuples(st.integers(0, 200), st.just(255), st.booleans()), min_size=8, max_size=100),
    st.integers(0, 250),
)
@settings(max_examples=examples(60))
def test_what_is_left_is_something_and_within_the_limit(
    answers: list[tuple[int, int, bool]], so_far: int
) -> None:
    left = lengths_of(answers).left(so_far, 255)
    assert left is not None
    assert 0 < left <= 255 - so_far


# What is held


def running(queue: LaneQueue, *requests: Request, num_output: int = 0) -> list[Sequence]:
    """Lets requests in and starts their choices, each of which has so many tokens of output."""
    sequences = []
    for request in requests:
        queue.put(request, 0.0)
        assert take(queue) is request
        for index in range(request.n):
            sequence = Sequence(request, index)
            sequence.token_ids += [1] * num_output
            sequence.num_computed, sequence.block_table = len(sequence.token_ids) - 1, [1]
            sequences.append(sequence)
    queue.allowance(sequences, sequences, [])
    return sequences


def ended(queue: LaneQueue, num_output: int, limit: int, number: int) -> None:
    """One answer that ended by itself."""
    request = ask(f"ended-{number}", 8, max_tokens=limit)
    [sequence] = running(queue, request, num_output=num_output)
    sequence.finish_reason = FinishReason.STOP
    queue.settle(request, 0.0, sequence)


def test_memory_comes_back_when_answers_end_and_not_when_their_limit_would_be_reached() -> None:
    """Chats of 20 tokens that may have 100,000 give back what they hold soon, and that is not 50,000 tokens."""
    queue = make_queue(model=known_model())
    for number in range(20):
        ended(queue, 20, 100_000, number)
    running(queue, *(ask(f"chat-{n}", 100, max_tokens=100_000) for n in range(4)), num_output=10)
    queue.observe(replace(IDLE, num_running=4, num_kv_tokens=1_000, num_free_tokens=560))
    held = queue.admission.held()
    assert held.num_kv == 440
    assert sum(num_kv for _, num_kv, _ in held.endings) == pytest.approx(440)
    assert all(num_steps < 30 for num_steps, _, _ in held.endings)


def test_what_several_share_is_held_once() -> None:
    queue = make_queue(model=known_model())
    running(queue, *(ask(f"chat-{n}", 1_000, max_tokens=100) for n in range(4)), num_output=10)
    shared = replace(IDLE, num_running=4, num_kv_tokens=10_000, num_free_tokens=10_000 - 1_240)
    queue.observe(shared)
    assert queue.admission.held().num_kv == 1_240
    assert sum(num_kv for _, num_kv, _ in queue.admission.held().endings) == pytest.approx(1_240)


def test_the_choices_of_a_request_hold_its_prompt_once_and_a_seat_each() -> None:
    queue = make_queue(model=known_model())
    running(queue, ask("choices", 1_000, max_tokens=100, n=4), num_output=10)
    queue.observe(replace(IDLE, num_running=4))
    held = queue.admission.held()
    assert held.num_kv == 1_000 + 4 * 10
    assert sum(num_seats for _, _, num_seats in held.endings) == 4


def waits(queue: LaneQueue, **load: object) -> float:
    queue.observe(replace(IDLE, num_kv_tokens=10_000, **load))  # type: ignore[arg-type]
    told = queue.put(ask("probe", 100, lane=Lane.STANDARD), 0.0)
    assert told is not None
    queue.cancel("probe")
    return told.raw_s


def test_those_that_gave_way_go_on_first() -> None:
    """Their prompts are computed again, and until then they need the room that they had."""
    queue = make_queue(model=known_model())
    running(queue, *(ask(f"s{n}", 1_000, lane=Lane.STANDARD, max_tokens=200) for n in range(2)))
    alone = waits(queue, num_running=2, num_free_tokens=4_000)
    behind = waits(queue, num_running=2, num_free_tokens=4_000, preempted=[(1, 5_000)])
    elsewhere = waits(queue, num_running=2, num_free_tokens=4_000, preempted=[(2, 5_000)])
    assert behind > alone + 150 * known_model().seconds(0, 2, 2_000)
    assert elsewhere == alone


needs = st.builds(Need, st.floats(1, 500), st.floats(1, 500), st.integers(1, 4), st.just(0.0))


@given(
    endings=st.lists(st.tuples(st.floats(0, 100), st.floats(1, 300), st.just(1.0)), max_size=20),
    ahead=st.lists(needs, max_size=8),
    own=needs,
    free=st.floats(0, 500),
    more=st.floats(0, 500),
    seats=st.integers(0, 8),
)
@settings(max_examples=examples(100))
def test_more_room_is_never_later(
    endings: list[tuple[float, float, float]],
    ahead: list[Need],
    own: Need,
    free: float,
    more: float,
    seats: int,
) -> None:
    held = Held(num_running=len(endings), num_kv=0, endings=sorted(endings), growth=1.0, life_steps=20.0)
    short, roomy, plenty = (
        held.idle_steps(Need(64, kv, num), 0.0, ahead, own)
        for kv, num in ((free, seats), (free + more, seats), (10**6, 10**6))
    )
    assert short >= roomy >= plenty == 0.0


@given(st.lists(st.tuples(st.floats(0, 1e4), st.floats(1, 1e4), st.just(1.0)), max_size=200))
@settings(max_examples=examples(50))
def test_endings_that_are_taken_together_give_back_all(endings: list[tuple[float, float, float]]) -> None:
    found = grouped(endings)
    assert len(found) <= 32
    assert found == sorted(found)
    for column in (1, 2):
        assert sum(one[column] for one in found) == pytest.approx(sum(one[column] for one in endings))


# How near they come


def pressing(seed: int, *, rate: float = 0.45, duration_s: float = 600.0) -> list[Arrival]:
    """Prompts of 128 to 8,000 tokens, every sixth with four choices; half of the clients set no limit."""
    rng, at_s, arrivals = Random(seed), 0.0, list[Arrival]()
    while at_s < duration_s:
        at_s += rng.expovariate(rate)
        num_prompt = int(min(8_000, max(128, exp(rng.gauss(6.5, 1.0)))))
        num_output = max(8, min(800, int(150 * exp(rng.gauss(0, 0.6)))))
        arrivals.append(
            Arrival(
                at_s, num_prompt, num_output, Lane.STANDARD, f"tenant-{rng.randrange(3)}",
                n=4 if rng.random() < 1 / 6 else 1, max_tokens=4_096 * (rng.random() < 0.5),
            )
        )  # fmt: skip
    return arrivals


@pytest.mark.parametrize("seed", range(3))
def test_first_tokens_come_about_when_they_were_told_to_in_a_pool_that_is_too_small(seed: int) -> None:
    """Half of what 16 of these streams hold, offered more than it can serve."""
    result = simulate(pressing(seed), POOL)
    ratios = sorted(
        served.ttft_s / served.predicted_s
        for served in result.served
        if served.ttft_s and served.predicted_s and served.arrival.at_s > 60
    )
    waited = [served.ttft_s for served in result.served if served.ttft_s]
    assert sum(wait_s > 2 for wait_s in waited) > 0.2 * len(waited), "the pool is too small"
    median, p90 = percentile(ratios, 50), percentile(ratios, 90)
    assert median is not None
    assert p90 is not None
    assert 0.8 <= median <= 1.25
    assert p90 <= 1.55
    assert all(wait_s <= 45 for wait_s in waited)
    assert sum(wait_s <= 30 for wait_s in waited) >= 0.97 * len(waited)
