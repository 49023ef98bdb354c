from __future__ import annotations

import logging
import random

import pytest

from engine.planning.block_tables import BlockTables
from engine.planning.drafting import _LONGEST_REST, _TRIAL_STEPS, Drafting, StepCosts, _Pace
from engine.planning.request import FinishReason, Sequence
from engine.planning.step import Chunk, Plan
from tests.engine.paper import drafting_always, make_request


class Echo:
    """Proposes as many tokens as may be."""

    name = "echo"

    def __init__(self) -> None:
        self.fault: Exception | None = None

    def propose(self, sequence: Sequence, most: int) -> list[int]:  # noqa: ARG002
        if self.fault is not None:
            raise self.fault
        return [1] * most

    def forget(self, sequence: Sequence) -> None: ...


def running(tables: BlockTables, num: int, max_tokens: int = 100) -> list[Sequence]:
    found = []
    for i in range(num):
        sequence = Sequence(make_request(f"r{i}", [1, 2, 3], max_tokens=max_tokens))
        tables.start(sequence, [])
        sequence.token_ids.append(4)
        sequence.num_computed = sequence.num_committed = 3
        found.append(sequence)
    return found


def step_of(sequences: list[Sequence]) -> Plan:
    plan = Plan([Chunk(s, s.num_computed, 1, samples=True) for s in sequences], num_tokens=len(sequences))
    for sequence in sequences:
        sequence.num_computed += 1
        sequence.num_pending = 1
    return plan


def counts(plan: Plan) -> list[int]:
    return [len(chunk.drafts) for chunk in plan.chunks]


def drafting_at(cost: dict[int, float]) -> Drafting:
    drafting = drafting_always(Echo(), 8)
    for num_tokens, seconds in cost.items():
        drafting.costs.observe(num_tokens, seconds)
    return drafting


def test_what_is_free_is_taken_and_what_costs_is_left() -> None:
    for cost, expected in (({1: 1.0, 16: 1.0}, [8]), ({1: 1.0, 2: 2.0, 16: 16.0}, [0])):
        tables = BlockTables(64, 4)
        plan = step_of(running(tables, 1))
        drafting_at(cost).extend(plan, tables, 100)
        assert counts(plan) == expected
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks) == 1 + expected[0]


def test_drafts_go_where_they_are_likeliest_to_be_right() -> None:
    tables = BlockTables(64, 4)
    good, bad = running(tables, 2)
    drafting = drafting_at({2: 1.0, 4: 1.2, 8: 1.6, 16: 2.4})
    for sequence, num_brought in ((good, 9), (bad, 1)):
        for _ in range(20):
            drafting.note(Chunk(sequence, 3, 9, samples=True, drafts=[1] * 8), num_brought)
    plan = step_of([good, bad])
    drafting.extend(plan, tables, 100)
    assert counts(plan)[0] == 8
    assert counts(plan)[1] == 0
    assert (good.num_draft_tokens, good.num_accepted_tokens) == (160, 160)
    assert (bad.num_draft_tokens, bad.num_accepted_tokens) == (160, 0)


@pytest.mark.parametrize("room", [1, 3, 8, 20])
def test_a_step_never_has_more_tokens_than_it_may(room: int) -> None:
    tables = BlockTables(64, 4)
    plan = step_of(running(tables, 3))
    drafting_at({1: 1.0, 64: 1.0}).extend(plan, tables, 3 + room)
    assert plan.num_tokens == min(3 + room, 27)


def test_nobody_gets_more_drafts_than_tokens_are_wanted_or_blocks_are_free() -> None:
    tables = BlockTables(64, 4)
    plan = step_of(running(tables, 1, max_tokens=4))
    drafting_at({1: 1.0, 64: 1.0}).extend(plan, tables, 100)
    assert counts(plan) == [2], "3 are left, and the last is sampled after the last draft"
    small = BlockTables(2, 4)
    plan = step_of(running(small, 1))
    drafting_at({1: 1.0, 64: 1.0}).extend(plan, small, 100)
    assert counts(plan) == [0]
    assert not small.pool.num_free


def test_a_proposer_that_is_always_wrong_is_hardly_asked_and_still_probed() -> None:
    tables = BlockTables(64, 4)
    (sequence,) = running(tables, 1)
    drafting = drafting_at({1: 1.0, 2: 1.1, 4: 1.3, 8: 1.7, 16: 2.5})
    num_drafts = []
    for _ in range(400):
        sequence.num_computed = 3
        plan = step_of([sequence])
        drafting.extend(plan, tables, 100)
        num_drafts.append(counts(plan)[0])
        if counts(plan)[0]:
            drafting.note(plan.chunks[0], 1)
    assert sum(num_drafts[100:]) <= 0.05 * 300
    assert sum(num_drafts[100:]) >= 5


def test_a_proposer_that_fails_is_switched_off(caplog: pytest.LogCaptureFixture) -> None:
    tables = BlockTables(64, 4)
    sequences = running(tables, 2)
    drafting = drafting_at({1: 1.0, 64: 1.0})
    proposer = drafting._proposer
    assert isinstance(proposer, Echo)
    proposer.fault = RuntimeError("broken")
    with caplog.at_level(logging.ERROR, "penstock.engine"):
        for _ in range(3):
            for sequence in sequences:
                sequence.num_computed = 3
            plan = step_of(sequences)
            drafting.extend(plan, tables, 100)
            assert counts(plan) == [0, 0]
    assert [record.getMessage() for record in caplog.records] == [
        "drafting by echo failed and is off from now on"
    ]


def test_who_ended_is_forgotten_and_who_gave_way_is_not() -> None:
    tables = BlockTables(64, 4)
    ended, waiting = running(tables, 2)
    drafting = drafting_at({1: 1.0, 64: 1.0})
    drafting.extend(step_of([ended, waiting]), tables, 100)
    ended.finish_reason = FinishReason.STOP
    drafting.forget([ended, waiting])
    assert list(drafting._records) == [waiting]


def test_costs_never_fall_with_more_tokens_and_forget_a_bad_start() -> None:
    costs = StepCosts()
    assert costs.seconds(10) == 0.0
    costs.observe(2, 50.0)  # a cold start
    numbers = random.Random(1)
    for _ in range(300):
        num_tokens = numbers.choice([1, 8, 64])
        costs.observe(num_tokens, (1 + num_tokens / 32) * numbers.uniform(1.0, 1.2))
    estimates = [costs.seconds(n) for n in range(1, 200)]
    assert estimates == sorted(estimates)
    for n in (1, 2, 8, 30, 64):
        assert costs.seconds(n) == pytest.approx(1 + n / 32, rel=0.2)


def turns(pace: _Pace, plain_s: float, drafted_s: float, num_steps: int) -> float:
    """The share of steps with drafts, each of which brings 2 tokens where one without brings 1."""
    num_drafted = 0
    for _ in range(num_steps):
        num_drafted += pace.drafts
        pace.observe(2 if pace.drafts else 1, drafted_s if pace.drafts else plain_s)
    return num_drafted / num_steps


def test_what_pays_is_kept_and_what_does_not_is_tried_now_and_then() -> None:
    assert turns(_Pace(), 1.0, 1.5, 4_000) > 0.85
    assert 0.005 < turns(_Pace(), 1.0, 2.5, 8_000) < 0.03
    pace = _Pace()
    turns(pace, 1.0, 2.5, 4_000)
    turns(pace, 1.0, 1.5, 2 * _LONGEST_REST * _TRIAL_STEPS)
    assert turns(pace, 1.0, 1.5, 1_000) > 0.85, "it comes back"
    turns(pace, 1.0, 2.5, 1_000)
    assert turns(pace, 1.0, 2.5, 2_000) < 0.05, "and goes again"
