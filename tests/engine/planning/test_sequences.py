"""Who gave its blocks back is told once, and then nothing keeps it."""

from __future__ import annotations

import gc

import pytest

from penstock.engine.planning.request import FinishReason, Sequence, TokenLogprobs
from penstock.engine.planning.step import Sampled, StepResult
from tests.engine.fake_runner import make_request
from tests.engine.planning.test_scheduler import SchedulerHarness


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def test_who_ended_or_gave_way_has_departed_once() -> None:
    harness = SchedulerHarness()
    harness.submit(*(make_request(name, [i] * 5, max_tokens=9) for i, name in enumerate("abcd")))
    harness.submit(make_request("short", [9], max_tokens=1))
    harness.step()
    assert names(harness.scheduler.sequences.take_departed()) == ["short"]
    running = {s.request.request_id: s for s in harness.scheduler.sequences.running}
    harness.scheduler.sequences.preempt(running["a"])
    harness.scheduler.sequences.cancel("b", harness.now)
    harness.scheduler.sequences.fail([running["c"]], "broken", harness.now)
    assert names(harness.scheduler.sequences.take_departed()) == ["a", "b", "c"]
    assert harness.scheduler.sequences.take_departed() == []


def test_who_gave_way_twice_departs_twice_and_once_more_at_its_end() -> None:
    harness = SchedulerHarness()
    harness.submit(make_request("r", [1] * 5, max_tokens=9))
    for _ in range(2):
        harness.step()
        harness.scheduler.sequences.preempt(harness.scheduler.sequences.running[0])
    assert names(harness.scheduler.sequences.take_departed()) == ["r", "r"]
    harness.scheduler.sequences.cancel("r", harness.now)
    assert names(harness.scheduler.sequences.take_departed()) == ["r"]


def test_a_failed_step_and_bad_logits_depart_too() -> None:
    harness = SchedulerHarness()
    harness.submit(make_request("bad", [1]), make_request("broken", [2]))
    harness.runner.bad.add(("bad", 0))
    harness.step()
    assert names(harness.scheduler.sequences.take_departed()) == ["bad"]
    harness.scheduler.fail_step(harness.scheduler.plan(5.0), "broken", 5.0)
    assert names(harness.scheduler.sequences.take_departed()) == ["broken"]


def sequences_alive() -> set[str]:
    gc.collect()
    return {o.request.request_id for o in gc.get_objects() if type(o) is Sequence}


def test_nothing_keeps_a_sequence_that_has_ended() -> None:
    harness = SchedulerHarness(num_blocks=12, budget=12, max_num_seqs=3)
    shared = list(range(8))
    for i in range(6):
        harness.submit(
            make_request(f"free-{i}", [*shared, 20 + i], max_tokens=2 + i, n=1 + i % 2, lane=i % 3)
        )
    for step in range(40):
        harness.step()
        if step == 2:
            harness.scheduler.sequences.preempt(harness.scheduler.sequences.running[0])
        if step == 4:
            harness.receive(harness.scheduler.sequences.cancel("free-5", harness.now))
    harness.finish()
    harness.scheduler.sequences.take_departed()
    assert not {name for name in sequences_alive() if name.startswith("free-")}


def test_a_request_that_was_looked_at_and_cancelled_in_the_queue_is_not_kept() -> None:
    harness = SchedulerHarness(num_blocks=9)
    harness.submit(make_request("kept-big", [1] * 16, max_tokens=8))
    harness.step()
    harness.submit(make_request("kept-wide", [2] * 24, max_tokens=1))
    harness.step()
    assert harness.queue.cancel("kept-wide")
    harness.step()
    assert "kept-wide" not in sequences_alive()
    harness.finish()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_every_token_is_an_output_with_its_logprobs_and_none_comes_after_the_end(max_tokens: int) -> None:
    harness = SchedulerHarness()
    harness.submit(make_request("r", [1, 2], max_tokens=max_tokens))
    plan = harness.scheduler.plan(1.0)
    logprobs = [TokenLogprobs(-0.5 * i, ((i, -0.1),)) for i in range(2)]
    outputs = harness.scheduler.commit(plan, StepResult([Sampled([7, 8], logprobs)]), 1.0)
    num_tokens = min(2, max_tokens)
    assert [output.token_ids for output in outputs] == [[7], [8]][:num_tokens]
    assert [output.logprobs for output in outputs] == [[one] for one in logprobs][:num_tokens]
    assert outputs[-1].finish_reason is (FinishReason.LENGTH if max_tokens < 3 else None)
