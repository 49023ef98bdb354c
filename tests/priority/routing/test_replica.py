"""A replica's forecast is admission's own, on what the replica's queue says of itself."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from priority.lanes import Lane
from priority.queue import LaneQueue
from priority.routing.replica import Replica
from priority.waiting import Account
from tests.few import examples
from tests.priority.routing.messages import snapshot
from tests.priority.simulated_engine import SimulatedEngine, ask, known_model, lines, make_queue, permissive

POLICIES = permissive(ttft_s=(1.0, 5.0, 60.0))

requests = st.lists(
    st.tuples(st.sampled_from(Lane), st.sampled_from("abc"), st.integers(1, 400)), min_size=0, max_size=12
)


def busy_queue(waiting: list[tuple[Lane, str, int]], num_steps: int) -> tuple[LaneQueue, SimulatedEngine]:
    queue = make_queue(POLICIES, model=known_model())
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
def test_the_forecast_is_made_of_what_admission_says(
    waiting: list[tuple[Lane, str, int]], num_steps: int, lane: Lane, num_prompt: int
) -> None:
    """For a new tenant, all others level, and with room: the pace and the tokens before it are admission's."""
    queue, engine = busy_queue(waiting, num_steps)
    load = queue.load(engine.now, num_free_kv=10**9)
    shot = replace(snapshot("a", load, policies=POLICIES), max_batch_tokens=64, max_num_seqs=10**9)
    replica = Replica(shot, 0, 0.0)
    for line in lines(queue):
        for account in line.accounts.values():
            account.share.clock = 0
    by_lane = {line.lane: line for line in lines(queue)}
    new = Account("new", 1, by_lane[lane])
    admission, step = queue.admission, queue.admission._load
    if step is None:
        return  # no step had anything to do
    decodes = {line.lane: line.num_running for line in by_lane.values() if line.num_running}
    num_context = int(admission.context_each * sum(decodes.values()))
    lively = {line.lane for line in by_lane.values() if line.is_lively(engine.now)} | {lane}
    pace = admission.pace(decodes, num_context, lively, step.max_batch_tokens)
    ahead = admission._ahead(by_lane, new, num_prompt)
    running = sum(line.num_prefill_left for line in by_lane.values() if line.lane <= lane)
    is_filled = any(line.num_tokens or line.num_prefill_left for line in by_lane.values() if line.lane > lane)
    wait_s = pace.seconds_for(running + ahead, is_filled=is_filled)
    found = replica.forecast_s(lane, "new", num_prompt, 0)
    assert found == pytest.approx(load.step_s / 2 + wait_s)


@given(waiting=requests.filter(bool), num_prompt=st.integers(1, 2_000), lane=st.sampled_from(Lane))
@settings(max_examples=examples(40), deadline=None)
def test_room_is_waited_for_as_admission_does(
    waiting: list[tuple[Lane, str, int]], num_prompt: int, lane: Lane
) -> None:
    """With seats and KV short: what it comes to is the difference to a replica that has plenty."""
    queue, engine = busy_queue(waiting, 2)
    load = queue.load(engine.now, num_free_kv=50)
    shot = replace(snapshot("a", load, policies=POLICIES), max_batch_tokens=64, max_num_seqs=4)
    roomy_shot = replace(shot, load=replace(load, num_free_kv=10**9), max_num_seqs=10**9)
    found_s = [
        Replica(one, 0, 0.0).forecast_s(lane, "new", num_prompt, num_prompt) for one in (shot, roomy_shot)
    ]
    by_lane = {line.lane: line for line in lines(queue)}
    ahead = sum(line.num_tokens for line in by_lane.values() if line.lane < lane) + num_prompt
    held = queue.admission.held(engine.now)
    least_s = held.wait_s(ahead + num_prompt - 50, 0, 2 * len(waiting) + 2)
    assert found_s[0] - found_s[1] >= least_s - 1e-9


def test_an_idle_replica_is_forecast_and_promised_as_its_admission_would() -> None:
    """But for admission's look ahead at what others send, which adds at most the fixed part of a step here."""
    queue, engine = busy_queue([(Lane.INTERACTIVE, "a", 20)], 40)
    engine.finish()
    later = engine.now + 1_000.0
    load = queue.load(later, num_free_kv=10**6)
    shot = replace(snapshot("a", load, policies=POLICIES), max_batch_tokens=64, max_num_seqs=4)
    replica = Replica(shot, 0, 0.0)
    by_lane = {line.lane: line for line in lines(queue)}
    account = by_lane[Lane.INTERACTIVE].account("b", 1)
    for num_prompt in (10, 100, 700):
        expected = queue.admission.forecast(by_lane, account, num_prompt, 0, later)
        assert expected is not None
        found = replica.forecast_s(Lane.INTERACTIVE, "b", num_prompt, 0)
        assert 0 <= expected.raw_s - found <= 0.007
        margin_s = replica.margin_s(Lane.INTERACTIVE, found, 0.0, num_prompt)
        assert margin_s == pytest.approx(expected.allowed_s - found * account.lane.factor)
