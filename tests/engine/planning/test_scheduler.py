"""The scheduler's promises, one by one."""

from __future__ import annotations

from random import Random
from threading import Lock

import pytest

from penstock.engine.planning.blocks import PoolViolation
from penstock.engine.planning.drafting import Drafting
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.request import FinishReason, Output, Request
from penstock.engine.planning.request_queue import Allowance
from penstock.engine.planning.scheduler import Scheduler, SchedulerLimits
from penstock.engine.planning.step import StepPlan
from penstock.engine.planning.timings import MAX_MARKS
from penstock.priority.queue import LaneQueue
from tests.engine.fake_runner import (
    FakeProposer,
    FakeRunner,
    FakeSink,
    drafting_always,
    expected_output,
    make_request,
)

ROOMY = {"a": 100, "b": 200, "c": 300}
"""Prompts that begin with these tokens have nothing in common."""


class SchedulerHarness:
    """A scheduler with its queue and a fake runner, stepped by hand."""

    def __init__(
        self,
        *,
        num_blocks: int = 64,
        budget: int = 64,
        max_num_seqs: int = 8,
        max_model_len: int = 200,
        drafting: Drafting | None = None,
    ) -> None:
        self.runner = FakeRunner(num_blocks, 4)
        self.queue = LaneQueue(Lock())
        self.tables = SequenceMemory(num_blocks, 4)
        limits = SchedulerLimits(
            max_batch_tokens=budget, max_num_seqs=max_num_seqs, max_model_len=max_model_len
        )
        self.scheduler = Scheduler(self.queue, self.tables, FakeSink(), limits, drafting)
        self.now = 0.0
        self.tokens: dict[tuple[str, int], list[int]] = {}
        self.last: dict[tuple[str, int], Output] = {}

    def submit(self, *requests: Request) -> None:
        for request in requests:
            self.queue.put(request, self.now)

    def step(self) -> StepPlan:
        self.now += 1.0
        plan = self.scheduler.plan(self.now)
        self.receive(self.scheduler.commit(plan, self.runner.execute(plan), self.now))
        return plan

    def receive(self, outputs: list[Output]) -> None:
        for output in outputs:
            self.tokens.setdefault((output.request_id, output.index), []).extend(output.token_ids)
            self.last[output.request_id, output.index] = output

    def finish(self) -> None:
        for _ in range(1_000):
            if self.scheduler.sequences.is_idle and not any(self.queue.depths().values()):
                return
            self.step()
        raise AssertionError("the work does not end")


def work(plan: StepPlan) -> list[tuple[str, int, int]]:
    return [(c.sequence.request.request_id, c.start, c.num_tokens) for c in plan.chunks]


def test_who_starts_has_a_part_of_the_step(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tokens that attend to others take more than their number, and less than a token may be left over."""
    harness = SchedulerHarness(num_blocks=128)
    granted = Allowance(64, 64, attended_each=0.001)
    monkeypatch.setattr(harness.queue, "allowance", lambda *_: granted)
    harness.submit(
        *(make_request(name, [*range(base, base + 100)], max_tokens=1) for name, base in ROOMY.items())
    )
    assert work(harness.step()) == [("a", 0, 64)]
    plan = harness.step()
    assert work(plan) == [("a", 64, 36), ("b", 0, 26)]
    assert 0 < granted.prefill_work - sum(granted.work(c.start, c.num_tokens) for c in plan.chunks) < 1
    assert [s.request.request_id for s in harness.scheduler.sequences.running] == ["b"], (
        "c would have no token"
    )


def test_a_long_prompt_is_computed_in_chunks_beside_a_running_decode() -> None:
    harness = SchedulerHarness(budget=8)
    harness.submit(make_request("short", [1, 2, 3], max_tokens=9))
    harness.step()
    harness.submit(make_request("long", list(range(20)), max_tokens=2))
    assert work(harness.step()) == [("short", 3, 1), ("long", 0, 7)]
    assert work(harness.step()) == [("short", 4, 1), ("long", 7, 7)]
    assert work(harness.step()) == [("short", 5, 1), ("long", 14, 6)]
    assert len(harness.tokens["long", 0]) == 1


def test_decodes_take_turns_when_the_budget_is_short_of_them() -> None:
    harness = SchedulerHarness(budget=2, max_num_seqs=5)
    harness.submit(make_request("r", [1, 2], max_tokens=50, n=5))
    for _ in range(30):
        harness.step()
    counts = [len(tokens) for tokens in harness.tokens.values()]
    assert len(counts) == 5
    assert max(counts) - min(counts) <= 2


def test_a_repeated_prompt_is_a_prefix_hit_but_its_last_token_is_computed() -> None:
    harness = SchedulerHarness()
    prompt = list(range(16))
    harness.submit(make_request("a", prompt, max_tokens=1))
    harness.finish()
    harness.submit(make_request("b", prompt, max_tokens=1))
    assert work(harness.step()) == [("b", 12, 4)]
    timings = harness.last["b", 0].timings
    assert timings is not None
    assert timings.num_cached_tokens == 12
    assert harness.tokens["a", 0] == harness.tokens["b", 0]


def test_another_salt_never_hits() -> None:
    harness = SchedulerHarness()
    harness.submit(make_request("a", list(range(16)), max_tokens=1, salt=b"alice"))
    harness.finish()
    harness.submit(make_request("b", list(range(16)), max_tokens=1, salt=b"bob"))
    assert work(harness.step()) == [("b", 0, 16)]


def test_output_tokens_can_be_hit_by_the_next_turn() -> None:
    harness = SchedulerHarness()
    first = make_request("a", [1, 2, 3, 4], max_tokens=9)
    harness.submit(first)
    harness.finish()
    turn = [1, 2, 3, 4, *harness.tokens["a", 0], 7, 8]
    harness.submit(make_request("b", turn, max_tokens=1))
    assert work(harness.step()) == [("b", 12, len(turn) - 12)]


def test_a_prefix_that_is_being_computed_is_waited_for_not_computed_twice() -> None:
    harness = SchedulerHarness(budget=8)
    shared = list(range(16))
    harness.submit(*(make_request(f"r{i}", [*shared, 20 + i], max_tokens=1) for i in range(3)))
    harness.submit(make_request("other", [40], max_tokens=1))
    harness.finish()
    assert harness.runner.num_tokens == 16 + 3 + 1


def test_whoever_waits_for_a_prefix_goes_on_when_its_owner_is_cancelled() -> None:
    harness = SchedulerHarness(budget=8)
    shared = list(range(16))
    harness.submit(make_request("a", [*shared, 20]), make_request("b", [*shared, 21]))
    harness.step()
    harness.receive(harness.scheduler.sequences.cancel("a", harness.now))
    harness.finish()
    assert harness.tokens["b", 0] == expected_output(make_request("b", [*shared, 21]), 0, 200)


def test_choices_share_the_prompt_and_copy_on_write() -> None:
    harness = SchedulerHarness()
    request = make_request("r", list(range(10)), max_tokens=6, n=3, seed=5)
    harness.submit(request)
    harness.step()
    assert harness.runner.num_tokens == 10
    tables = [s.block_table for s in harness.scheduler.sequences.running]
    assert tables[0][:2] == tables[1][:2] == tables[2][:2]
    harness.finish()
    for index in range(3):
        assert harness.tokens["r", index] == expected_output(request, index, 200)


def test_choices_beyond_the_seats_wait_and_hit_the_prompt() -> None:
    harness = SchedulerHarness(max_num_seqs=1)
    request = make_request("r", list(range(10)), max_tokens=3, n=3)
    harness.submit(request)
    harness.finish()
    assert [harness.tokens["r", i] for i in range(3)] == [expected_output(request, i, 200) for i in range(3)]
    assert harness.runner.num_tokens < 3 * (10 + 2)


def test_choices_are_made_even_if_the_first_ends_with_its_first_token() -> None:
    harness = SchedulerHarness()
    harness.submit(make_request("r", [1, 2], max_tokens=1, n=3))
    harness.finish()
    assert {key: len(tokens) for key, tokens in harness.tokens.items()} == {("r", i): 1 for i in range(3)}


def test_when_blocks_run_out_the_newest_of_the_least_urgent_lane_gives_way() -> None:
    harness = SchedulerHarness(num_blocks=9)
    harness.submit(make_request("urgent", [1] * 8, max_tokens=8, lane=0))
    harness.submit(make_request("batch", [2] * 8, max_tokens=8, lane=2))
    harness.step()
    for _ in range(8):
        harness.step()
    harness.finish()
    preemptions = {key[0]: out.timings.num_preemptions for key, out in harness.last.items() if out.timings}
    assert preemptions["urgent"] == 0
    assert harness.tokens["batch", 0] == expected_output(make_request("batch", [2] * 8, max_tokens=8), 0, 200)


def test_a_preempted_sequence_keeps_its_place_and_goes_on() -> None:
    harness = SchedulerHarness(max_num_seqs=2)
    requests = [make_request(f"r{i}", [i] * 6, max_tokens=6) for i in range(3)]
    harness.submit(*requests)
    harness.step()
    harness.scheduler.sequences.preempt(harness.scheduler.sequences.running[0])
    plan = harness.step()
    assert [c.sequence.request.request_id for c in plan.chunks] == ["r1", "r0"]
    harness.finish()
    assert [harness.tokens[r.request_id, 0] for r in requests] == [
        expected_output(r, 0, 200) for r in requests
    ]


def test_a_sequence_remembers_when_its_prompt_was_computed_and_when_it_gave_way_and_went_on() -> None:
    harness = SchedulerHarness(budget=8, max_num_seqs=1)
    harness.submit(make_request("r", list(range(20)), max_tokens=3))
    for _ in range(3):
        harness.step()
    harness.scheduler.sequences.preempt(harness.scheduler.sequences.running[0])
    harness.finish()
    timings = harness.last["r", 0].timings
    assert timings is not None
    # Its blocks are found again, but the tokens of the last one are computed once more.
    assert timings.prefills[:3] == [(1.0, 8), (2.0, 8), (3.0, 4)]
    assert (timings.preempted_s, timings.resumed_s) == ([3.0], [4.0])
    assert timings.draft_steps == []


def test_a_sequence_remembers_its_first_steps_with_drafts() -> None:
    harness = SchedulerHarness(
        drafting=drafting_always(FakeProposer(Random(1), 0.5), 4), max_model_len=2000, num_blocks=600
    )
    harness.submit(
        make_request("short", [1, 2, 3], max_tokens=40), make_request("long", [4], max_tokens=1500)
    )
    harness.finish()
    short, long = (harness.last[name, 0].timings for name in ("short", "long"))
    assert short is not None
    assert long is not None
    (count,) = short.drafts.values()
    assert [sum(numbers) for numbers in zip(*short.draft_steps, strict=True)][1:] == [
        count.num_drafted,
        count.num_accepted,
    ]
    assert 0 < count.num_accepted < count.num_drafted
    assert len(long.draft_steps) == MAX_MARKS
    assert [at_s for at_s, *_ in long.draft_steps] == sorted({at_s for at_s, *_ in long.draft_steps})


def test_a_sequence_ends_when_the_pool_can_hold_no_more_of_it() -> None:
    harness = SchedulerHarness(num_blocks=4)
    harness.submit(make_request("r", [1, 2, 3], max_tokens=500))
    harness.finish()
    assert len(harness.tokens["r", 0]) == 3 * 4 - 3
    assert harness.last["r", 0].finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("num_steps", [0, 1, 2, 3])
def test_cancel_ends_every_choice_once_and_frees_all(num_steps: int) -> None:
    harness = SchedulerHarness(budget=8)
    harness.submit(
        make_request("r", list(range(20)), max_tokens=50, n=2), make_request("other", [3], max_tokens=2)
    )
    for _ in range(1 + num_steps):
        harness.step()
    outputs = harness.scheduler.sequences.cancel("r", harness.now)
    assert sorted(o.index for o in outputs) == [0, 1]
    assert {o.finish_reason for o in outputs} == {FinishReason.CANCELLED}
    assert harness.scheduler.sequences.cancel("r", harness.now) == []
    harness.finish()
    harness.scheduler.sequences.check()
    assert harness.tables.pool.num_free == 63


def test_one_sequence_with_bad_logits_fails_alone() -> None:
    harness = SchedulerHarness()
    good = make_request("good", [1, 2], max_tokens=3)
    harness.submit(make_request("bad", [5, 6], max_tokens=3), good)
    harness.runner.bad.add(("bad", 0))
    harness.finish()
    assert harness.last["bad", 0].finish_reason is FinishReason.FAILED
    assert harness.last["bad", 0].error == "logits were not finite"
    assert harness.tokens["good", 0] == expected_output(good, 0, 200)


def test_a_head_that_does_not_fit_is_not_overtaken() -> None:
    harness = SchedulerHarness(num_blocks=9)
    harness.submit(make_request("big", [1] * 16, max_tokens=8))
    harness.step()
    harness.submit(make_request("wide", [2] * 24, max_tokens=1), make_request("small", [3], max_tokens=1))
    assert work(harness.step()) == [("big", 16, 1)]
    harness.finish()
    assert list(harness.tokens) == [("big", 0), ("wide", 0), ("small", 0)]


# Steps that the device has no room for


def test_long_chunks_are_cut_before_decodes_and_the_least_urgent_first() -> None:
    harness = SchedulerHarness()
    harness.submit(make_request("a", [1] * 3), make_request("b", [2] * 3))
    harness.step()
    harness.submit(make_request("late", [3] * 10, lane=2), make_request("urgent", [4] * 10, lane=0))
    plan = harness.scheduler.plan(2.0)
    assert sorted(work(plan)) == [("a", 3, 1), ("b", 3, 1), ("late", 0, 10), ("urgent", 0, 10)]
    cuts = []
    while harness.scheduler.size.halve(plan):
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks)
        for chunk in plan.chunks:
            assert chunk.start + chunk.num_tokens == chunk.sequence.num_computed
            assert chunk.samples == (chunk.sequence.num_computed == len(chunk.sequence.token_ids))
            assert chunk.sequence.num_pending == chunk.samples
        harness.scheduler.sequences.check()
        cuts.append(sorted(work(plan)))
    assert cuts == [
        [("a", 3, 1), ("b", 3, 1), ("urgent", 0, 9)],
        [("a", 3, 1), ("b", 3, 1), ("urgent", 0, 4)],
        [("a", 3, 1), ("b", 3, 1), ("urgent", 0, 1)],
        [("a", 3, 1), ("urgent", 0, 1)],
        [("urgent", 0, 1)],
    ]
    harness.receive(harness.scheduler.commit(plan, harness.runner.execute(plan), 2.0))
    harness.finish()
    assert harness.scheduler.sequences.counters.num_preemptions == 0
    assert harness.runner.num_tokens == 2 * (3 + 3) + 2 * (10 + 3), "every token once"
    assert all(len(tokens) == 4 for tokens in harness.tokens.values())


def test_who_awaits_a_copy_and_is_left_out_gives_way() -> None:
    """The step may yet fail, and then the copy was never made."""
    harness = SchedulerHarness()
    request = make_request("r", [1, 2, 3, 4, 5], n=3)
    harness.submit(request)
    harness.step()
    plan = harness.scheduler.plan(2.0)
    assert (len(plan.chunks), len(plan.copies)) == (3, 2)
    while harness.scheduler.size.halve(plan):
        pass
    assert (work(plan), len(plan.copies)) == ([("r", 5, 1)], 1)
    assert [s.index for s in harness.scheduler.sequences.waiting] == [1]
    assert [s.index for s in harness.scheduler.sequences.running] == [0, 2], (
        "the last one has the block that the others copy"
    )
    harness.receive(harness.scheduler.fail_step(plan, "no room", 2.0))
    harness.finish()
    assert harness.last["r", 0].error == "no room"
    assert [harness.tokens["r", i] for i in (1, 2)] == [expected_output(request, i, 200) for i in (1, 2)]


def test_steps_are_small_for_a_while_and_grow_again_more_and_more_slowly() -> None:
    harness = SchedulerHarness(budget=64)
    harness.submit(make_request("r", [1] * 150, max_tokens=1))
    plan = harness.scheduler.plan(1.0)
    assert plan.num_tokens == 64
    assert [harness.scheduler.size.halve(plan) for _ in range(5)] == [True] * 5
    harness.receive(harness.scheduler.commit(plan, harness.runner.execute(plan), 1.0))
    sizes = [harness.step().num_tokens for _ in range(35)]
    assert sizes == [2] * 31 + [4] * 4
    harness.finish()
    for number in range(8):
        harness.submit(make_request(f"slow {number}", [2], max_tokens=150))
        harness.finish()
    assert harness.scheduler.most_tokens == 64
    harness.submit(make_request("next", [3] * 100))
    assert harness.step().num_tokens == 64


def test_charges_add_up_to_the_work_done() -> None:
    charged: list[tuple[str, int, int]] = []
    harness = SchedulerHarness(budget=8)
    harness.queue.charge = lambda work, _: charged.extend((r.request_id, p, o) for r, p, o, _ in work)  # type: ignore[method-assign, assignment]
    harness.submit(make_request("r", list(range(20)), max_tokens=5))
    harness.finish()
    assert sum(p for _, p, _ in charged) == 20
    assert sum(o for _, _, o in charged) == 5


def test_check_finds_a_reference_nobody_holds() -> None:
    harness = SchedulerHarness()
    harness.submit(make_request("r", [1, 2], max_tokens=9))
    harness.step()
    harness.scheduler.sequences.running[0].block_table.pop()
    with pytest.raises(PoolViolation):
        harness.scheduler.sequences.check()
