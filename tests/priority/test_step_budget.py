"""The step budget: running streams keep their pace whatever arrives, and prefill never stands still."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from math import inf, isfinite

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.request import Sequence
from penstock.engine.planning.request_queue import UNLIMITED, Allowance
from penstock.priority.lanes import DEFAULT_POLICIES, Lane
from penstock.priority.pacing import NO_STREAMS, StepPlanner, Streams
from penstock.priority.simulator.run import Machine, simulate
from penstock.priority.simulator.trace import Arrival
from penstock.priority.steptime import StepTimeModel
from tests.few import examples
from tests.priority.simulated_engine import (
    COEFFICIENTS,
    SimulatedEngine,
    ask,
    known_model,
    make_queue,
    permissive,
)

MACHINE = Machine(coefficients=COEFFICIENTS)
models = st.builds(
    lambda coefficients, share: StepTimeModel(coefficients, learns=False, chosen_share=share),
    st.fixed_dictionaries(
        {
            "alpha_s": st.floats(0.0, 0.05),
            "beta_s": st.floats(1e-6, 1e-3),
            "gamma_s": st.floats(0.0, 2e-3),
            "delta_s": st.floats(0.0, 1e-6),
            "zeta_s": st.floats(0.0, 0.2),
        }
    ),
    st.sampled_from([0.0, 1 / 16, 1 / 4, 1.0]),
)
decodes = st.dictionaries(st.sampled_from(Lane), st.integers(1, 100), max_size=3)


def tightest(by_lane: dict[Lane, int]) -> float:
    return min((DEFAULT_POLICIES[lane].tpot_s for lane in by_lane), default=inf)


@given(model=models, by_lane=decodes, each=st.integers(0, 3_000), lively=st.sets(st.sampled_from(Lane)))
def test_a_step_keeps_the_pace_of_those_who_run(
    model: StepTimeModel, by_lane: dict[Lane, int], each: int, lively: set[Lane]
) -> None:
    """Invariant 19: if more than the least prefill is granted, the step is within the tightest promise."""
    num_context = each * sum(by_lane.values())
    granted = StepPlanner(DEFAULT_POLICIES, model).allowance(Streams(by_lane, num_context), lively)
    least = max(16, int(model.fixed_seconds(0, 0) / model.coefficients[1]))
    if granted.num_prefill > least:
        part = granted.num_decodes / max(1, sum(by_lane.values()))
        seconds = model.seconds(
            granted.num_prefill, granted.num_decodes if by_lane else 0, num_context * part
        )
        alone_s = model.seconds(0, 1, each)  # a promise that not even one stream could be kept does not bind
        kept = {lane: num for lane, num in by_lane.items() if DEFAULT_POLICIES[lane].tpot_s >= alone_s}
        assert seconds <= tightest(kept) or granted.num_prefill == UNLIMITED.num_prefill


@given(model=models, by_lane=decodes, each=st.integers(0, 3_000), lively=st.sets(st.sampled_from(Lane)))
def test_prefill_and_every_promised_stream_always_go_on(
    model: StepTimeModel, by_lane: dict[Lane, int], each: int, lively: set[Lane]
) -> None:
    """Invariants 3 and 19: however slow the machine, and a stream without a promise is not left out for ever."""
    granted = StepPlanner(DEFAULT_POLICIES, model).allowance(
        Streams(by_lane, each * sum(by_lane.values())), lively
    )
    assert granted.num_prefill >= 16
    promised = sum(n for lane, n in by_lane.items() if lane is not Lane.BATCH)
    patient = by_lane.get(Lane.BATCH, 0)
    assert granted.num_decodes >= max(1, promised + patient / 8)
    if not patient:
        assert granted.num_decodes == max(1, promised)


@given(model=models, by_lane=decodes, each=st.integers(0, 3_000), lively=st.sets(st.sampled_from(Lane)))
def test_drafts_get_no_more_time_than_what_is_promised(
    model: StepTimeModel, by_lane: dict[Lane, int], each: int, lively: set[Lane]
) -> None:
    """Whatever is promised, to those who run and to those who come, bounds a step with drafts as one with prompts."""
    granted = StepPlanner(DEFAULT_POLICIES, model).allowance(
        Streams(by_lane, each * sum(by_lane.values())), lively
    )
    alone_s = model.seconds(0, 1, each)
    kept = {lane: num for lane, num in by_lane.items() if DEFAULT_POLICIES[lane].tpot_s >= alone_s}
    ttft_s = min((DEFAULT_POLICIES[lane].ttft_s for lane in lively), default=inf)
    assert granted.most_s <= min(tightest(kept), ttft_s / 8)
    assert isfinite(granted.most_s) == isfinite(min(tightest(kept), ttft_s))


@given(model=models, lively=st.sets(st.sampled_from(Lane)))
def test_a_step_is_never_so_long_that_a_newcomer_misses_its_promise(
    model: StepTimeModel, lively: set[Lane]
) -> None:
    """With nobody running there is no pace to keep, but somebody may come at any moment."""
    granted = StepPlanner(DEFAULT_POLICIES, model).allowance(NO_STREAMS, lively)
    ttft_s = min((DEFAULT_POLICIES[lane].ttft_s for lane in lively), default=inf)
    if ttft_s == inf:
        assert granted.num_prefill == UNLIMITED.num_prefill
    elif granted.num_prefill > max(16, int(model.fixed_seconds(0, 0) / model.coefficients[1])):
        assert model.seconds(granted.num_prefill, 0, 0) <= ttft_s / 8 + 1e-9


@given(by_lane=decodes, each=st.integers(0, 1_000), lively=st.sets(st.sampled_from(Lane)))
def test_the_tighter_the_promise_the_shorter_the_step(
    by_lane: dict[Lane, int], each: int, lively: set[Lane]
) -> None:
    num_context = each * sum(by_lane.values())
    loose = StepPlanner(DEFAULT_POLICIES, known_model())
    tight = StepPlanner(
        {lane: replace(p, tpot_s=p.tpot_s / 2) for lane, p in DEFAULT_POLICIES.items()}, loose.model
    )
    assert (
        tight.allowance(Streams(by_lane, num_context), lively).num_prefill
        <= loose.allowance(Streams(by_lane, num_context), lively).num_prefill
    )


def test_nothing_is_held_back_while_too_little_was_measured() -> None:
    planner = StepPlanner(DEFAULT_POLICIES, StepTimeModel())
    assert planner.allowance(Streams({Lane.INTERACTIVE: 50}, 10_000), list(Lane)) == UNLIMITED


def test_the_queue_counts_those_that_decode_and_what_they_read() -> None:
    """A prompt that is being computed is no stream yet."""
    queue = make_queue(dict(DEFAULT_POLICIES), model=known_model())
    decoding, prefilling = Sequence(ask("d", 1_000)), Sequence(ask("p", 1_000))
    decoding.num_computed = 999
    expected = queue.admission.planner.allowance(Streams({Lane.INTERACTIVE: 1}, 1_000), [])
    assert queue.allowance([decoding, prefilling], [decoding], [prefilling]) == expected
    alone = queue.allowance([prefilling], [], [prefilling])
    assert (alone.num_decodes, alone.num_prefill) == (1, UNLIMITED.num_prefill)


allowances = st.builds(
    Allowance,
    num_decodes=st.just(1),
    num_prefill=st.integers(16, 10_000),
    attended_each=st.sampled_from([0.0, 1e-5, 1e-3]),
    context_each=st.sampled_from([0.0, 1e-6, 1e-3]),
)


@given(allowance=allowances, start=st.integers(0, 300_000), part=st.floats(0.0, 1.0))
def test_the_tokens_within_some_work_are_the_most_that_are(
    allowance: Allowance, start: int, part: float
) -> None:
    work = part * allowance.prefill_work
    num = allowance.tokens_within(work, start)
    if num >= 0:
        assert allowance.work(start, num) <= work * (1 + 1e-9) + 1e-4 * (1 + allowance.attended_each * start)
    assert allowance.work(start, max(0, num) + 1) > work
    assert allowance.tokens_within(allowance.prefill_work, 0) == allowance.num_prefill


# In the engine


@pytest.mark.parametrize("num_cached", [0, 5_000])
def test_a_step_is_as_short_behind_a_long_context_as_at_the_beginning(num_cached: int) -> None:
    """Also the first chunk of a request whose beginning is cached, and one beside a prompt that has just begun.

    Attending to 5,000 tokens takes eighteen times as long as the rest of a prompt token.
    """
    policies = {lane: replace(p, tpot_s=0.05) for lane, p in permissive().items()}
    model = StepTimeModel({**COEFFICIENTS, "epsilon_s": 1e-7}, learns=False)
    engine = SimulatedEngine(make_queue(policies, model=model), num_blocks=5_000, budget=10_000)
    engine.model = model
    if num_cached:
        engine.put(ask("before", num_cached, max_tokens=1))
        engine.finish()
    engine.put(ask("stream", 10, max_tokens=60))
    engine.step()
    engine.put(ask("long", num_cached + 1_000, tenant="b", max_tokens=2))
    chunks, times = [], []
    for number in range(40):
        if number == 2:
            engine.put(ask("other", 300, tenant="c", max_tokens=2, first=7))
        before = engine.now
        plan = engine.step()
        times.append(engine.now - before)
        chunks += [chunk for chunk in plan.chunks if chunk.sequence.request.request_id == "long"]
    assert max(times) <= 0.05
    prompt = [chunk for chunk in chunks if chunk.start < num_cached + 1_000]
    assert prompt[0].start >= num_cached - 4
    assert prompt[-1].start + prompt[-1].num_tokens >= num_cached + 1_000
    assert all(chunk.num_tokens >= 16 for chunk in prompt[:-1])


def test_a_long_prompt_is_computed_in_chunks_beside_a_running_stream() -> None:
    """Invariant 19, in the engine: no chunk is longer than the budget, and the stream gets a token in every step."""
    policies = {lane: replace(p, tpot_s=0.01) for lane, p in permissive().items()}
    engine = SimulatedEngine(make_queue(policies, model=known_model()), num_blocks=600, budget=2_048)
    engine.put(ask("stream", 10, max_tokens=40))
    engine.step()
    engine.put(ask("long", 1_000, tenant="b", max_tokens=2))
    chunks = []
    for _ in range(20):
        before = engine.now
        plan = engine.step()
        names = [chunk.sequence.request.request_id for chunk in plan.chunks]
        assert "stream" in names
        assert engine.now - before <= 0.01
        chunks += [chunk.num_tokens for chunk in plan.chunks if chunk.start < 1_000 and "long" in names]
    assert len(chunks) > 8
    engine.finish()
    engine.check_tokens()


def test_patient_streams_take_turns_when_decoding_alone_is_too_slow() -> None:
    """Streams with a promise decode in every step, those without at least once in eight."""
    policies = {
        lane: replace(p, tpot_s=inf if lane is Lane.BATCH else 0.0075) for lane, p in permissive().items()
    }
    model = StepTimeModel({**COEFFICIENTS, "gamma_s": 2e-4}, learns=False)
    engine = SimulatedEngine(make_queue(policies, model=model), max_num_seqs=24, num_blocks=600, budget=512)
    for i in range(16):
        engine.put(ask(f"batch-{i}", 4, lane=Lane.BATCH, max_tokens=200))
    engine.step()
    engine.put(ask("urgent", 4, max_tokens=100))
    for _ in range(3):
        engine.step()
    seen = [{chunk.sequence.request.request_id for chunk in engine.step().chunks} for _ in range(48)]
    assert all("urgent" in names for names in seen)
    assert max(len(names) for names in seen) <= 4
    turns = Counter(name for names in seen for name in names)
    assert all(turns[f"batch-{i}"] >= 48 // 8 - 1 for i in range(16))
    assert max(turns[f"batch-{i}"] for i in range(16)) - min(turns[f"batch-{i}"] for i in range(16)) <= 1


# In simulation


@given(
    lane=st.sampled_from(Lane),
    streams=st.integers(1, 40),
    num_prompt=st.integers(1_000, 12_000),
    times=st.lists(st.floats(1.0, 6.0), min_size=1, max_size=4),
)
@settings(max_examples=examples(12))
def test_no_prompt_however_long_makes_a_running_stream_stutter(
    lane: Lane, streams: int, num_prompt: int, times: list[float]
) -> None:
    """Invariant 19: the longest gap of every interactive stream stays within its promise."""
    quiet = [Arrival(i * 0.01, 60, 120, tenant=f"q{i % 3}") for i in range(streams)]
    long = [Arrival(at_s, num_prompt, 2, lane, "long") for at_s in times]
    result = simulate(sorted(quiet + long, key=lambda arrival: arrival.at_s), MACHINE)
    promise_s = DEFAULT_POLICIES[Lane.INTERACTIVE].tpot_s
    served = [s for s in result.served if s.arrival.tenant.startswith("q")]
    assert all(s.num_tokens == 120 for s in served)
    assert max(s.longest_gap_s for s in served) <= promise_s


@pytest.mark.parametrize(("policy", "is_kept"), [("penstock", True), ("fair", False)])
def test_it_is_the_budget_that_keeps_the_pace(policy: str, is_kept: bool) -> None:
    """A machine whose full step takes longer than the promise: with the budget the gap is kept, without it is not."""
    slow = replace(MACHINE, coefficients={**COEFFICIENTS, "beta_s": 70e-6})
    arrivals = [Arrival(0.0, 50, 200), Arrival(1.0, 4_000, 2, Lane.STANDARD, "long")]
    result = simulate(arrivals, slow, policy)
    assert all(s.finished_s is not None for s in result.served)
    assert (result.served[0].longest_gap_s <= 0.1) is is_kept
