"""Who gave its blocks back is told once, and then nothing keeps it."""

from __future__ import annotations

import gc

import pytest

from engine.planning.request import FinishReason, Sequence, TokenLogprobs
from engine.planning.step import Sampled, StepResult
from tests.engine.paper import make_request
from tests.engine.planning.test_scheduler import Bench


def names(sequences: list[Sequence]) -> list[str]:
    return [sequence.request.request_id for sequence in sequences]


def test_who_ended_or_gave_way_has_departed_once() -> None:
    bench = Bench()
    bench.submit(*(make_request(name, [i] * 5, max_tokens=9) for i, name in enumerate("abcd")))
    bench.submit(make_request("short", [9], max_tokens=1))
    bench.step()
    assert names(bench.scheduler.take_departed()) == ["short"]
    running = {s.request.request_id: s for s in bench.scheduler.running}
    bench.scheduler.preempt(running["a"])
    bench.scheduler.cancel("b", bench.now)
    bench.scheduler.fail([running["c"]], "broken", bench.now)
    assert names(bench.scheduler.take_departed()) == ["a", "b", "c"]
    assert bench.scheduler.take_departed() == []


def test_who_gave_way_twice_departs_twice_and_once_more_at_its_end() -> None:
    bench = Bench()
    bench.submit(make_request("r", [1] * 5, max_tokens=9))
    for _ in range(2):
        bench.step()
        bench.scheduler.preempt(bench.scheduler.running[0])
    assert names(bench.scheduler.take_departed()) == ["r", "r"]
    bench.scheduler.cancel("r", bench.now)
    assert names(bench.scheduler.take_departed()) == ["r"]


def test_a_failed_step_and_bad_logits_depart_too() -> None:
    bench = Bench()
    bench.submit(make_request("bad", [1]), make_request("broken", [2]))
    bench.runner.bad.add(("bad", 0))
    bench.step()
    assert names(bench.scheduler.take_departed()) == ["bad"]
    bench.scheduler.fail_step(bench.scheduler.plan(5.0), "broken", 5.0)
    assert names(bench.scheduler.take_departed()) == ["broken"]


def sequences_alive() -> set[str]:
    gc.collect()
    return {o.request.request_id for o in gc.get_objects() if type(o) is Sequence}


def test_nothing_keeps_a_sequence_that_has_ended() -> None:
    bench = Bench(num_blocks=12, budget=12, max_num_seqs=3)
    shared = list(range(8))
    for i in range(6):
        bench.submit(make_request(f"free-{i}", [*shared, 20 + i], max_tokens=2 + i, n=1 + i % 2, lane=i % 3))
    for step in range(40):
        bench.step()
        if step == 2:
            bench.scheduler.preempt(bench.scheduler.running[0])
        if step == 4:
            bench.receive(bench.scheduler.cancel("free-5", bench.now))
    bench.finish()
    bench.scheduler.take_departed()
    assert not {name for name in sequences_alive() if name.startswith("free-")}


def test_a_request_that_was_looked_at_and_cancelled_in_the_queue_is_not_kept() -> None:
    bench = Bench(num_blocks=9)
    bench.submit(make_request("kept-big", [1] * 16, max_tokens=8))
    bench.step()
    bench.submit(make_request("kept-wide", [2] * 24, max_tokens=1))
    bench.step()
    assert bench.queue.cancel("kept-wide")
    bench.step()
    assert "kept-wide" not in sequences_alive()
    bench.finish()


@pytest.mark.parametrize("max_tokens", [1, 2, 3])
def test_every_token_is_an_output_with_its_logprobs_and_none_comes_after_the_end(max_tokens: int) -> None:
    bench = Bench()
    bench.submit(make_request("r", [1, 2], max_tokens=max_tokens))
    plan = bench.scheduler.plan(1.0)
    logprobs = [TokenLogprobs(-0.5 * i, ((i, -0.1),)) for i in range(2)]
    outputs = bench.scheduler.commit(plan, StepResult([Sampled([7, 8], logprobs)]), 1.0)
    num_tokens = min(2, max_tokens)
    assert [output.token_ids for output in outputs] == [[7], [8]][:num_tokens]
    assert [output.logprobs for output in outputs] == [[one] for one in logprobs][:num_tokens]
    assert outputs[-1].finish_reason is (FinishReason.LENGTH if max_tokens < 3 else None)
