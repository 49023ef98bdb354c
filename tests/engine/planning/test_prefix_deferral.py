"""Who waits for a prefix that another sequence computes, for how long, and whom it lets pass meanwhile."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.engine.fake_runner import make_request
from tests.engine.planning.test_scheduler import SchedulerHarness, work
from tests.few import examples


def test_a_follower_waits_for_a_prefix_of_several_steps_and_it_is_computed_once() -> None:
    """It waits for `first`, then for `second`, whose last step has tokens to spare while half can be found."""
    harness = SchedulerHarness(budget=12)
    shared = list(range(24))
    harness.submit(make_request("first", [*shared[:8], 50], max_tokens=1))
    harness.submit(make_request("second", [*shared, 51], max_tokens=1))
    harness.submit(make_request("follower", [*shared, 52], max_tokens=1))
    assert work(harness.step()) == [("first", 0, 9)]
    assert [s.request.request_id for s in harness.scheduler.sequences.waiting] == ["second", "follower"]
    assert work(harness.step()) == [("second", 8, 12)]
    assert work(harness.step()) == [("second", 20, 5)]
    assert work(harness.step()) == [("follower", 24, 1)]


def test_a_follower_of_a_less_urgent_lane_waits_too() -> None:
    harness = SchedulerHarness(budget=10)
    shared = list(range(16))
    harness.submit(make_request("owner", [*shared, 20], max_tokens=1, lane=0))
    harness.step()
    harness.submit(make_request("follower", [*shared, 21], max_tokens=1, lane=2))
    harness.finish()
    assert harness.runner.num_tokens == 16 + 2


def test_an_urgent_request_does_not_wait_for_what_a_less_urgent_one_computes() -> None:
    """Newcomers of the urgent lane would hold up the owner, and the owner the one that waits for it."""
    harness = SchedulerHarness(num_blocks=600, budget=64, max_num_seqs=16, max_model_len=600)
    shared = [i % 50 for i in range(512)]
    harness.submit(make_request("owner", [*shared, 1], max_tokens=2, lane=2))
    harness.step()
    harness.submit(make_request("urgent", [*shared, 2], max_tokens=2, lane=0, arrival_s=harness.now))
    num_later = 0
    while not harness.tokens.get(("urgent", 0)):
        later = [50 + num_later % 50, *range(60 + num_later % 7)]
        harness.submit(make_request(f"later-{num_later}", later, max_tokens=1, lane=0, arrival_s=harness.now))
        num_later += 1
        harness.step()
        assert num_later < 50, "it starves"
    assert num_later <= 10, "512 tokens take 8 steps of 64"
    assert not harness.tokens.get(("owner", 0)), "the owner still has its turn to wait for"


def test_others_wait_for_the_most_urgent_of_those_that_compute_a_prefix() -> None:
    harness = SchedulerHarness(budget=8)
    shared = list(range(20))
    harness.submit(make_request("batch", [*shared, *range(60, 90)], max_tokens=1, lane=2))
    assert work(harness.step()) == [("batch", 0, 8)]
    harness.submit(make_request("urgent", [*shared, 50], max_tokens=1, lane=0))
    assert work(harness.step()) == [("urgent", 8, 8)]
    harness.submit(make_request("follower", [*shared, 51], max_tokens=1, lane=0))
    assert work(harness.step()) == [("urgent", 16, 5), ("batch", 8, 3)]
    assert [s.request.request_id for s in harness.scheduler.sequences.waiting] == ["follower"]
    assert work(harness.step())[0] == ("follower", 20, 1)


def test_who_waited_for_a_prefix_goes_before_newcomers_of_its_lane_beside_a_long_less_urgent_prompt() -> None:
    harness = SchedulerHarness(budget=8)
    shared = list(range(8))
    harness.submit(make_request("batch", list(range(100, 180)), max_tokens=1, lane=2))
    harness.step()
    harness.submit(make_request("owner", [*shared, 20], max_tokens=1))
    harness.submit(make_request("follower", [*shared, 21], max_tokens=1))
    newcomers = 0
    while ("follower", 0) not in harness.last:
        harness.submit(make_request(f"newcomer-{newcomers}", [40 + newcomers] * 8, max_tokens=1))
        newcomers += 1
        harness.step()
        assert newcomers < 20, "it starves"
    overtook = [name for name, _ in harness.last if name.startswith("newcomer")]
    assert len(overtook) <= 1


@settings(max_examples=examples(60), deadline=None)
@given(
    owner_lane=st.integers(0, 2),
    lane=st.integers(0, 2),
    budget=st.integers(2, 12),
    seats=st.integers(2, 8),
    num_blocks=st.integers(20, 60),
    prefix=st.integers(1, 8),
    newcomer=st.tuples(st.integers(1, 10), st.integers(1, 3), st.integers(1, 3)),
    background=st.integers(0, 40),
    cancel_at=st.integers(1, 12) | st.none(),
)
def test_later_work_of_its_lane_overtakes_who_waits_for_a_prefix_only_so_often(
    owner_lane: int,
    lane: int,
    budget: int,
    seats: int,
    num_blocks: int,
    prefix: int,
    newcomer: tuple[int, int, int],
    background: int,
    cancel_at: int | None,
) -> None:
    """However many come: those that had their place before, and those that a step had tokens to spare for."""
    harness = SchedulerHarness(num_blocks=num_blocks, budget=budget, max_num_seqs=seats)
    length, max_tokens, at_a_time = newcomer
    shared = [i % 11 for i in range(4 * prefix)]
    if background:
        harness.submit(make_request("background", [12] * background, max_tokens=1, lane=2))
    harness.submit(make_request("owner", [*shared, 20], max_tokens=3, lane=owner_lane))
    harness.step()
    harness.submit(make_request("follower", [*shared, 21], max_tokens=1, lane=lane, arrival_s=harness.now))
    count = 0
    for step in range(400):
        if ("follower", 0) in harness.last:
            break
        if step == cancel_at and not harness.queue.cancel("owner"):
            harness.receive(harness.scheduler.sequences.cancel("owner", harness.now))
        for _ in range(at_a_time):
            prompt = [30 + count % 20] * length
            request = make_request(
                f"later-{count}", prompt, max_tokens=max_tokens, lane=lane, arrival_s=harness.now
            )
            harness.submit(request)
            count += 1
        harness.step()
    assert ("follower", 0) in harness.last, "it starves"
    overtook = sum(1 for name, _ in harness.tokens if name.startswith("later"))
    assert overtook <= budget + seats


@pytest.mark.parametrize("seats", [1, 3])
def test_no_more_followers_are_taken_from_the_queue_than_can_run(seats: int) -> None:
    """The rest keep their place in the queue, where lanes, tenants and deadlines decide."""
    harness = SchedulerHarness(budget=6, max_num_seqs=seats + 1)
    shared = list(range(40))
    harness.submit(*(make_request(f"r{i}", [*shared, 50 + i], max_tokens=1) for i in range(12)))
    harness.submit(make_request("other", [99, 98], max_tokens=1))
    for _ in range(7):
        harness.step()
    assert len(harness.scheduler.sequences.waiting) <= seats + 1
