from __future__ import annotations

import logging

import pytest

from penstock.engine.planning.drafting import Drafting, Proposer
from penstock.engine.planning.memory import SequenceMemory
from penstock.engine.planning.pace import _MOST_BEHIND, Pace
from penstock.engine.planning.price import value
from penstock.engine.planning.request import FinishReason, Sequence
from penstock.engine.planning.step import Chunk, StepPlan
from penstock.engine.planning.timings import DraftCount
from tests.engine.fake_runner import drafting_always, make_request

COST = (0.9, 0.1)
"""Seconds of a step, and of each token in it."""


class Echo:
    """Proposes as many tokens as may be."""

    is_behind = False

    def __init__(self, name: str = "echo") -> None:
        self.name = name
        self.fault: Exception | None = None
        self.asked: list[int] = []
        """For how many sequences, each time."""

    def propose(self, sequences: list[Sequence], lengths: list[int]) -> list[list[int]]:
        if self.fault is not None:
            raise self.fault
        self.asked.append(len(sequences))
        return [[1] * length for length in lengths]

    def forget(self, sequence: Sequence) -> None: ...


class EchoModel:
    """A draft model that knows a token for each sequence, and as many of them as may be."""

    def __init__(self, pass_s: float) -> None:
        self.pass_s = pass_s
        self.known: dict[Sequence, int] = {}
        """The tokens that it knows, where they are others than 1."""
        self.asked: list[int] = []
        """For how many sequences, each time."""

    def extend(self, drafting: Drafting, plan: StepPlan, tables: SequenceMemory) -> None:
        """Adds drafts to a plan, its own included."""
        drafting.extend(plan, tables, 100)
        chunks = [chunk for chunk in plan.chunks if chunk.is_open]
        if chunks:
            self.asked.append(len(chunks))
            made = [[self.known.get(chunk.sequence, 1)] * len(chunk.drafts) for chunk in chunks]
            drafting.fill(plan, made, self.seconds(max(map(len, made)), len(chunks)))

    def seconds(self, length: int, num: int) -> float:
        return self.pass_s * (1 + length) * (1 + num / 32)


def running(tables: SequenceMemory, num: int, max_tokens: int = 100) -> list[Sequence]:
    found = []
    for i in range(num):
        sequence = Sequence(make_request(f"r{i}", [1, 2, 3], max_tokens=max_tokens))
        tables.start(sequence)
        sequence.token_ids.append(4)
        sequence.num_computed = sequence.num_committed = 3
        found.append(sequence)
    return found


def step_of(sequences: list[Sequence]) -> StepPlan:
    plan = StepPlan([Chunk(s, s.num_computed, 1, samples=True) for s in sequences], num_tokens=len(sequences))
    for sequence in sequences:
        sequence.num_computed += 1
        sequence.num_pending = 1
    return plan


def counts(plan: StepPlan) -> list[int]:
    return [len(chunk.drafts) for chunk in plan.chunks]


def say(sequence: Sequence, *token_ids: int) -> None:
    """The step came back with these tokens, of which the last is yet to be computed."""
    sequence.token_ids += token_ids
    sequence.num_computed = len(sequence.token_ids) - 1
    sequence.num_pending = 0


def drafting_at(
    fixed_s: float, each_s: float, lookup: Proposer | None = None, model: EchoModel | None = None
) -> Drafting:
    """Steps take a fixed time and some for each token that is decoded, drafts included."""
    drafting = drafting_always(lookup or (None if model else Echo()), 8, has_model=model is not None)
    drafting._step_seconds = lambda _, num_decode, *__: fixed_s + each_s * num_decode
    drafting._model_share = 0.0 if model is None else model.pass_s
    return drafting


def test_what_is_free_is_taken_and_what_costs_is_left() -> None:
    for cost, expected in (((1.0, 0.0), [8]), ((0.0, 1.0), [0])):
        tables = SequenceMemory(64, 4)
        plan = step_of(running(tables, 1))
        drafting_at(*cost).extend(plan, tables, 100)
        assert counts(plan) == expected
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks) == 1 + expected[0]


@pytest.mark.parametrize("num_streams", [1, 4, 12])
def test_with_experts_every_draft_is_priced_by_those_that_it_adds(num_streams: int) -> None:
    """The first draft adds most of them: were all to cost as much, there would be fewer drafts than pay."""

    def seconds(num_tokens: int) -> float:
        return 0.01 + 0.001 * num_tokens + (1.0 - (1 - 1 / 16) ** num_tokens)

    def worth(num_drafts: int) -> float:
        kept = sorted((0.6**position for position in range(1, 9) for _ in range(num_streams)), reverse=True)
        return value(num_streams + sum(kept[:num_drafts]), seconds(num_streams + num_drafts))

    found = []
    for has_experts in (True, False):
        tables = SequenceMemory(512, 4)
        plan = step_of(running(tables, num_streams))
        drafting = drafting_always(Echo(), 8)
        drafting._step_seconds = lambda _, num_decode, *__: seconds(num_decode)
        drafting._has_experts = has_experts
        drafting.extend(plan, tables, 1000)
        found.append(sum(counts(plan)))
    assert found[0] == max(range(8 * num_streams + 1), key=worth)
    assert found[0] >= found[1]
    assert (found[0] > found[1]) == (num_streams == 12)


def test_drafts_go_where_they_are_likeliest_to_be_right() -> None:
    tables = SequenceMemory(64, 4)
    good, bad = running(tables, 2, max_tokens=1000)
    drafting = drafting_at(0.8, 0.1)
    for _ in range(20):
        drafting.extend(step_of([good, bad]), tables, 100)
        say(good, *[1] * 8, 4)
        say(bad, 4)
    plan = step_of([good, bad])
    drafting.extend(plan, tables, 100)
    assert counts(plan) == [8, 0]


def test_drafts_are_counted_by_who_proposed_them() -> None:
    tables = SequenceMemory(64, 4)
    (sequence,) = running(tables, 1)
    for proposer, num_brought in (("lookup", 9), ("draft", 1), ("lookup", 3)):
        sequence.timings.note_drafts(proposer, 8, num_brought - 1, 1.0)
    assert sequence.timings.drafts == {
        "lookup": DraftCount([2] * 8, [2, 2, *[1] * 6]),
        "draft": DraftCount([1] * 8, [0] * 8),
    }
    assert (
        sequence.timings.drafts["lookup"].num_drafted,
        sequence.timings.drafts["lookup"].num_accepted,
    ) == (16, 10)


def test_how_many_drafts_there_are_follows_how_often_each_position_was_right() -> None:
    """The first three are always right, the fourth never: less than three would be a waste, and more, too."""
    tables = SequenceMemory(4096, 4)
    (sequence,) = running(tables, 1, max_tokens=8000)
    drafting = drafting_at(*COST)
    for _ in range(400):
        drafting.extend(step_of([sequence]), tables, 100)
        say(sequence, 1, 1, 1, 4)
    plan = step_of([sequence])
    drafting.extend(plan, tables, 100)
    assert counts(plan) == [3]


def test_beside_a_prompt_only_what_is_known_to_pay_is_drafted() -> None:
    """A trial there would not be measured."""
    for pays, expected in ((False, [0, 0]), (True, [8, 0])):
        tables = SequenceMemory(64, 4)
        decode, prompt = running(tables, 2)
        plan = step_of([decode])
        plan.chunks.append(Chunk(prompt, 0, 3, samples=False))
        plan.num_tokens += 3
        drafting = drafting_at(1.0, 0.0)
        if pays:
            drafting._pace(1).begin_paying()
        drafting.extend(plan, tables, 100)
        assert counts(plan) == expected
        assert drafting.is_due == pays, "no step is waited for in vain"


def test_rows_are_bounded_as_tokens_are() -> None:
    tables = SequenceMemory(64, 4)
    drafting = drafting_at(1.0, 0.0)
    drafting._max_rows = 7
    plan = step_of(running(tables, 3))
    drafting.extend(plan, tables, 100)
    assert sum(counts(plan)) == 4


def test_nothing_follows_a_token_that_the_host_does_not_know() -> None:
    tables = SequenceMemory(64, 4)
    sequences = running(tables, 2)
    plan = step_of(sequences)
    sequences[1].num_pending = 2
    drafting = drafting_at(1.0, 0.0)
    drafting.extend(plan, tables, 100)
    assert counts(plan) == [0, 0]
    assert plan.turn != drafting._pace(2).turn


def test_a_step_counts_in_the_turn_that_it_was_planned_in_and_in_no_other() -> None:
    tables, drafting = SequenceMemory(64, 4), Drafting(Echo(), 3)
    sequences, pace = running(tables, 1), drafting._pace(1)
    before, after = step_of(sequences), step_of(sequences)
    drafting.extend(before, tables, 100)
    assert drafting.is_due, "what is free and was never wrong is tried at once"
    drafting.extend(after, tables, 100)
    drafting.observe(before, 1.0)
    assert not pace._plain
    drafting.observe(after, 1.0)
    assert pace._drafted


def test_a_trial_waits_for_a_proposer_that_is_behind_and_not_for_ever() -> None:
    for num_behind in (0, 40, _MOST_BEHIND, 10 * _MOST_BEHIND):
        tables, lookup = SequenceMemory(4096, 4), Echo()
        drafting, pace = Drafting(lookup, 8), Pace()
        drafting._paces[1] = pace
        (sequence,) = running(tables, 1, max_tokens=10_000)
        while pace.turn < 2:  # a step without drafts, then one of them is measured
            lookup.is_behind = len(lookup.asked) < num_behind
            plan, seconds = step_of([sequence]), 2.0 if pace.drafts else 1.0
            drafting.extend(plan, tables, 64)
            say(sequence, 2)
            drafting.observe(plan, seconds)
        assert len(lookup.asked) == min(num_behind, _MOST_BEHIND) + 1, num_behind


@pytest.mark.parametrize("room", [1, 3, 8, 20])
def test_a_step_never_has_more_tokens_than_it_may(room: int) -> None:
    tables = SequenceMemory(64, 4)
    plan = step_of(running(tables, 3))
    drafting_at(1.0, 0.0).extend(plan, tables, 3 + room)
    assert plan.num_tokens == min(3 + room, 27)


def test_nobody_gets_more_drafts_than_tokens_are_wanted_or_blocks_are_free() -> None:
    tables = SequenceMemory(64, 4)
    plan = step_of(running(tables, 1, max_tokens=4))
    drafting_at(1.0, 0.0).extend(plan, tables, 100)
    assert counts(plan) == [2], "3 are left, and the last is sampled after the last draft"
    small = SequenceMemory(2, 4)
    plan = step_of(running(small, 1))
    drafting_at(1.0, 0.0).extend(plan, small, 100)
    assert counts(plan) == [0]
    assert not small.pool.num_free


def test_what_is_always_wrong_is_not_computed_and_comes_back_when_it_is_right() -> None:
    tables = SequenceMemory(4096, 4)
    (sequence,) = running(tables, 1, max_tokens=4000)
    drafting = drafting_at(*COST)
    num_drafts = []
    for step in range(400):
        plan = step_of([sequence])
        drafting.extend(plan, tables, 100)
        num_drafts.append(counts(plan)[0])
        say(sequence, *([1, 4] if step >= 300 else [4]))
    assert sum(num_drafts[30:300]) == 0
    assert min(num_drafts[350:]) >= 1, "that it was right was seen without computing any"


def test_a_model_that_is_always_wrong_is_asked_now_and_then_and_comes_back() -> None:
    tables = SequenceMemory(4096, 4)
    sequences = running(tables, 4, max_tokens=4000)
    model = EchoModel(0.05)
    drafting = drafting_at(*COST, model=model)
    num_drafts = []
    for step in range(1_400):
        plan = step_of(sequences)
        model.extend(drafting, plan, tables)
        num_drafts.append(sum(counts(plan)))
        for sequence in sequences:
            say(sequence, *([1, 4] if step >= 400 else [4]))
        if step == 399:
            assert set(num_drafts[100:]) == {0, 1}, "one draft at a time"
            assert 8 <= sum(num_drafts[100:]) <= 1 + 300 // 32
            assert set(model.asked[-8:]) == {1}, "of one sequence only"
    assert min(num_drafts[1_300:]) >= 4


def test_the_better_proposer_drafts() -> None:
    tables = SequenceMemory(4096, 4)
    repeating, writing = running(tables, 2, max_tokens=4000)
    lookup, model = Echo("lookup"), EchoModel(0.05)
    model.known = {repeating: 3, writing: 2}
    drafting = drafting_at(*COST, lookup, model)
    for _ in range(60):
        plan = step_of([repeating, writing])
        model.extend(drafting, plan, tables)
        say(repeating, *[1] * 8, 4)
        say(writing, 2, 2, 4)
    assert [chunk.proposer for chunk in plan.chunks] == ["lookup", "draft"]
    assert len(plan.chunks[0].drafts) == 8
    assert 1 <= len(plan.chunks[1].drafts) < 8, "the third is never right"


def test_a_model_that_costs_more_than_it_brings_is_not_asked() -> None:
    for pass_s, is_asked in ((0.05, True), (2.0, False)):
        tables = SequenceMemory(64, 4)
        model = EchoModel(pass_s)
        plan = step_of(running(tables, 1))
        model.extend(drafting_at(*COST, model=model), plan, tables)
        assert bool(model.asked) == is_asked == (counts(plan) != [0])


def test_drafts_are_open_until_the_model_has_made_them_and_places_that_it_leaves_go() -> None:
    tables = SequenceMemory(64, 4)
    sequences, model = running(tables, 3), EchoModel(0.05)
    drafting, plan = drafting_at(*COST, model=model), step_of(sequences)
    drafting.extend(plan, tables, 100)
    assert [chunk.is_open for chunk in plan.chunks] == [True] * 3
    wanted = counts(plan)
    assert plan.num_tokens == 3 + sum(wanted)
    drafting.fill(plan, [[1] * wanted[0], [1], []], 0.5)
    assert counts(plan) == [wanted[0], 1, 0]
    assert [chunk.proposer for chunk in plan.chunks] == ["draft", "draft", ""]
    assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks) == 4 + wanted[0]
    assert [sequence.num_computed for sequence in sequences] == [4 + wanted[0], 5, 4]
    assert plan.drafting_s == 0.5


def test_a_model_that_fails_takes_its_drafts_away_and_rests() -> None:
    tables = SequenceMemory(64, 4)
    sequences, model = running(tables, 2), EchoModel(0.05)
    drafting, plan = drafting_at(*COST, model=model), step_of(sequences)
    drafting.extend(plan, tables, 100)
    drafting.give_up(plan)
    assert counts(plan) == [0, 0]
    assert plan.num_tokens == 2
    assert drafting.failed == ["draft"]
    for sequence in sequences:
        say(sequence)
    plan = step_of(sequences)
    drafting.extend(plan, tables, 100)
    assert counts(plan) == [0, 0]


def test_what_the_model_has_to_catch_up_counts_in_what_drafting_takes() -> None:
    """A pass takes 1 s and 0.1 s for each token; five drafts and what the host does are six passes."""
    tables, drafting = SequenceMemory(256, 4), Drafting(None, 8, has_model=True)
    drafting._step_seconds = lambda prefill, decode, *_: 10.0 + 1.0 * (prefill + decode)
    late, known = Sequence(make_request("late", [1] * 400)), Sequence(make_request("known", [1, 2]))
    chunks = {s: Chunk(s, len(s.token_ids) - 1, 1, samples=True) for s in (late, known)}
    drafting.extend(step_of(running(tables, 1)), tables, 1000)
    for sequence in (late, known):
        assert drafting._guess(step_of([sequence]).chunks[0], is_known=True) is not None

    def seconds(sequence: Sequence, num_read: int) -> float:
        drafting._records[sequence].num_read = num_read
        return drafting._model_seconds(1, 5, drafting._num_late([chunks[sequence]]))

    assert seconds(late, 0) == 0.0, "nobody knows"
    drafting._records[known].num_read = 2
    chunks[known].drafts = chunks[late].drafts = [1] * 5
    for _ in range(8):
        drafting._learn_costs([chunks[known]], 6 * 1.1)
    assert seconds(known, 2) == pytest.approx(6 * 1.1)
    assert seconds(late, 0) > 1.1 * 6 * 1.1
    for _ in range(3):
        drafting._records[late].num_read = 0
        drafting._learn_costs([chunks[late]], 6 * 1.1 + 0.1 * 398)
    assert seconds(late, 400) == pytest.approx(6 * 1.1, rel=0.05)


def test_a_proposer_that_fails_rests_for_longer_each_time(caplog: pytest.LogCaptureFixture) -> None:
    tables = SequenceMemory(64, 4)
    sequences = running(tables, 2)
    drafting = drafting_at(1.0, 0.0)
    (proposer,) = drafting._proposers
    assert isinstance(proposer, Echo)

    def steps(number: int) -> list[list[int]]:
        found = []
        for _ in range(number):
            for sequence in sequences:
                sequence.num_computed = 3
            plan = step_of(sequences)
            drafting.extend(plan, tables, 100)
            found.append(counts(plan))
        return found

    proposer.fault = RuntimeError("broken")
    with caplog.at_level(logging.ERROR, "penstock.engine"):
        assert steps(1 + 256 + 511) == [[0, 0]] * 768
    assert [record.getMessage() for record in caplog.records] == [
        "drafting by echo failed, and rests for 256 steps",
        "drafting by echo failed, and rests for 512 steps",
    ]
    assert drafting.failed == ["echo", "echo"]
    proposer.fault = None
    (asked,) = steps(1)
    assert min(asked) > 0


def test_a_proposer_that_rests_forgets_who_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = SequenceMemory(64, 4)
    (sequence,) = running(tables, 1)
    drafting = drafting_at(1.0, 0.0)
    (proposer,) = drafting._proposers
    assert isinstance(proposer, Echo)
    proposer.fault = RuntimeError("broken")
    drafting.extend(step_of([sequence]), tables, 100)
    forgotten: list[Sequence] = []
    monkeypatch.setattr(proposer, "forget", forgotten.append)
    sequence.finish_reason = FinishReason.STOP
    drafting.forget([sequence])
    assert forgotten == [sequence]


def test_who_ended_is_forgotten_and_who_gave_way_is_not() -> None:
    tables = SequenceMemory(64, 4)
    ended, waiting = running(tables, 2)
    drafting = drafting_at(1.0, 0.0)
    drafting.extend(step_of([ended, waiting]), tables, 100)
    ended.finish_reason = FinishReason.STOP
    drafting.forget([ended, waiting])
    assert list(drafting._records) == [waiting]
