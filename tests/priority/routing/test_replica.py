"""A replica's forecast is admission's own, on what the replica's queue says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority.lanes import Lane
from penstock.priority.queue import LaneQueue
from penstock.priority.routing.replica import Replica
from penstock.priority.steptime import EXPERTS, StepTimeModel
from penstock.priority.waiting import Account, Size
from tests.few import examples
from tests.priority.routing.messages import snapshot
from tests.priority.simulated_engine import (
    COEFFICIENTS,
    SimulatedEngine,
    ask,
    known_model,
    lines,
    make_queue,
    permissive,
)

POLICIES = permissive(ttft_s=(1.0, 5.0, 60.0))

requests = st.lists(
    st.tuples(st.sampled_from(Lane), st.sampled_from("abc"), st.integers(1, 400)), min_size=0, max_size=12
)


def busy_queue(
    waiting: list[tuple[Lane, str, int]], num_steps: int, model: StepTimeModel | None = None
) -> tuple[LaneQueue, SimulatedEngine]:
    queue = make_queue(POLICIES, model=model or known_model())
    engine = SimulatedEngine(queue, num_blocks=400, max_num_seqs=4)
    for number, (lane, tenant, num_prompt) in enumerate(waiting):
        engine.put(ask(str(number), num_prompt, lane=lane, tenant=tenant, max_tokens=30))
    for _ in range(num_steps):
        engine.step()
    return queue, engine


@given(
    waiting=requests,
    num_steps=st.integers(1, 6),
    lane=st.sampled_from(Lane),
    num_prompt=st.integers(1, 2_000),
)
@settings(max_examples=examples(60), deadline=None)
def test_the_outlook_is_admissions(
    waiting: list[tuple[Lane, str, int]], num_steps: int, lane: Lane, num_prompt: int
) -> None:
    """For a new tenant, all others level, and with room: the pace and the work before it are admission's."""
    queue, engine = busy_queue(waiting, num_steps)
    load = queue.load(engine.now, num_free_kv=10**9)
    shot = replace(snapshot("a", load, policies=POLICIES), max_batch_tokens=64, max_num_seqs=10**9)
    replica = Replica(shot, 0, 0.0)
    for line in lines(queue):
        line.share.clock -= line.turn  # the turns of lanes are level, as a router takes them to be
        for account in line.accounts.values():
            account.share.clock = 0
    new, step = Account("new", 1, lines(queue)[lane]), queue.admission._load
    if step is None:
        return  # no step had anything to do
    outlook = queue.admission._outlook(new.lane, step, engine.now, overtaken=0.0)
    each = queue.admission.model.attended_each
    own = Size.of(num_prompt).work(each)
    work = outlook.work(own, [(other.work(each), own) for other in new.lane.active.values()])
    found = replica.forecast_s(lane, "new", num_prompt, num_prompt)
    # A router is told whole tokens of each lane, which may end two steps earlier or later in all.
    expected, step_s = load.step_s / 2 + outlook.seconds_for(work), outlook.pace.fixed_s
    assert found == pytest.approx(expected, rel=0.02, abs=1e-4 + 2 * step_s)


@given(waiting=requests.filter(bool), num_prompt=st.integers(1, 2_000), lane=st.sampled_from(Lane))
@settings(max_examples=examples(40), deadline=None)
def test_room_is_waited_for(waiting: list[tuple[Lane, str, int]], num_prompt: int, lane: Lane) -> None:
    """A replica that is short of seats and KV is never sooner than one that has plenty."""
    queue, engine = busy_queue(waiting, 2)
    load = queue.load(engine.now, num_free_kv=50)
    shot = replace(snapshot("a", load, policies=POLICIES), max_batch_tokens=64, max_num_seqs=4)
    roomy_shot = replace(shot, load=replace(load, num_free_kv=10**9), max_num_seqs=10**9)
    short_s, roomy_s = (
        Replica(one, 0, 0.0).forecast_s(lane, "new", num_prompt, num_prompt) for one in (shot, roomy_shot)
    )
    assert short_s >= roomy_s


def test_room_that_long_answers_hold_is_waited_for_until_they_end() -> None:
    queue, engine = busy_queue([(Lane.STANDARD, "a", 300)] * 4, 12)
    assert len(engine.scheduler.sequences.running) == 4
    load = queue.load(engine.now, num_free_kv=engine.tables.num_free_tokens)
    shot = replace(snapshot("a", load, policies=POLICIES), max_batch_tokens=64, max_num_seqs=4)
    last_step = load.held.endings[-1][0]
    assert 0 < last_step <= 30
    found_s = Replica(shot, 0, 0.0).forecast_s(Lane.STANDARD, "new", 10, 10)
    assert found_s >= load.held.endings[0][0] * queue.admission.model.seconds(0, 4, 1_200)


@pytest.mark.parametrize("chosen_share", [0.0, 1 / 16])
def test_an_idle_replica_is_forecast_and_promised_as_its_admission_would(chosen_share: float) -> None:
    """But for admission's look ahead at what others send, which adds at most the fixed part of a step here."""
    model = StepTimeModel(COEFFICIENTS | {EXPERTS: 0.03}, learns=False, chosen_share=chosen_share)
    queue, engine = busy_queue([(Lane.INTERACTIVE, "a", 20)], 40, model)
    engine.finish()
    later = engine.now + 1_000.0
    load = queue.load(later, num_free_kv=10**6)
    shot = replace(snapshot("a", load, policies=POLICIES), max_batch_tokens=64, max_num_seqs=4)
    replica = Replica(shot, 0, 0.0)
    account = lines(queue)[Lane.INTERACTIVE].account("b", 1)
    for num_prompt in (10, 100, 700):
        expected = queue.admission.forecast(account, Size.of(num_prompt), later)
        assert expected is not None
        found = replica.forecast_s(Lane.INTERACTIVE, "b", num_prompt, num_prompt)
        assert found >= model.fixed_seconds(0, 0)
        assert 0 <= expected.raw_s - found <= model.fixed_seconds(0, 0) + 1e-4
        margin_s = replica.margin_s(Lane.INTERACTIVE, found, 0.0, num_prompt)
        factor = load.lanes[Lane.INTERACTIVE].factor
        assert margin_s == pytest.approx(expected.allowed_s - found * factor, abs=0.01)
