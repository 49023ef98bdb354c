"""A step in flight while the next is planned: nobody who reads what comes out can tell."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.request import FinishReason, Sequence
from penstock.engine.planning.scheduler import TokenSink
from penstock.engine.planning.step import StepPlan
from penstock.engine.text.stop_strings import TextStream
from tests.engine.fake_runner import expected_output, make_request
from tests.engine.queued_runner import QueuedRunner
from tests.engine.workloads import BLOCK_SIZE, Key, Run, Workload, workloads
from tests.few import examples

modest = settings(max_examples=examples(60), deadline=None)

END_TOKENS = (3, 17)
STOPS = ("4 1", "22 ", "9 9")


class Spelled:
    """A detokenizer whose text is the token's number."""

    def push(self, token_id: int) -> str:
        return f"{token_id} "

    def flush(self) -> str:
        return "."


class StoppingSink(TokenSink):
    """Ends at tokens, at stop strings that go over several tokens, and at the length."""

    def accept(self, sequence: Sequence, token_id: int, is_last: bool) -> tuple[str, FinishReason | None]:
        if sequence.text is None:
            sequence.text = TextStream(Spelled(), STOPS)
        stream = sequence.text
        assert isinstance(stream, TextStream)
        if token_id in END_TOKENS:
            return stream.flush(), FinishReason.STOP
        text = stream.push(token_id)
        if stream.stopped or not is_last:
            return text, FinishReason.STOP if stream.stopped else None
        return text + stream.flush(), FinishReason.STOP if stream.stopped else FinishReason.LENGTH


def queued_run(
    workload: Workload, seed: int, *, stops: bool = True, sink: TokenSink | None = None
) -> tuple[Run, QueuedRunner]:
    """The device is as fast or slow as chance will have it."""
    pace = random.Random(seed)
    runner = QueuedRunner(workload.num_blocks, BLOCK_SIZE, runs_early=lambda: pace.random() < 0.5)
    run = Run(workload, runner=runner, sink=sink or (StoppingSink() if stops else None))
    runner.watch(run.tables)
    return run, runner


def answers(run: Run) -> dict[Key, tuple[list[int], str, FinishReason | None]]:
    return {key: (run.tokens[key], run.texts[key], last.finish_reason) for key, last in run.ended.items()}


def assert_all_is_given_back(run: Run) -> None:
    run.scheduler.sequences.check()
    assert run.tables.pool.num_free == run.tables.pool.num_blocks - 1
    assert run.tables.index.num_pending == 0


@modest
@given(workloads(), st.integers(0, 99))
def test_answers_are_those_of_one_step_after_another(workload: Workload, seed: int) -> None:
    queued, _ = queued_run(workload, seed)
    queued.finish()
    assert answers(queued) == answers(Run(workload, sink=StoppingSink()).finish())
    assert_all_is_given_back(queued)


@modest
@given(
    workloads(), st.integers(0, 99), st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=8)
)
def test_who_was_preempted_in_flight_says_the_same(
    workload: Workload, seed: int, preemptions: list[tuple[int, int]]
) -> None:
    def disturb(run: Run) -> None:
        for at, pick in preemptions:
            if at == len(run.steps):
                run.preempt(pick)

    queued, _ = queued_run(workload, seed)
    queued.finish(disturb)
    assert answers(queued) == answers(Run(workload, sink=StoppingSink()).finish())
    assert_all_is_given_back(queued)


@modest
@given(workloads(), st.booleans(), st.lists(st.tuples(st.integers(0, 25), st.integers(1, 20)), max_size=8))
def test_a_device_that_is_short_of_memory_says_the_same(
    workload: Workload, is_queued: bool, shortages: list[tuple[int, int]]
) -> None:
    """From step `at` on it has room for so many tokens."""

    def disturb(run: Run) -> None:
        for at, room in shortages:
            if at == len(run.steps):
                run.runner.room = room

    run = queued_run(workload, 0)[0] if is_queued else Run(workload, sink=StoppingSink())
    run.finish(disturb)
    assert answers(run) == answers(Run(workload, sink=StoppingSink()).finish())
    assert_all_is_given_back(run)


@modest
@given(
    workloads(), st.integers(0, 99), st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=4)
)
def test_a_cancel_in_flight_concerns_nobody_else(
    workload: Workload, seed: int, cancels: list[tuple[int, int]]
) -> None:
    gone: set[str] = set()

    def cancel(run: Run) -> None:
        for at, pick in cancels:
            if at == len(run.steps):
                request = workload.requests[pick % len(workload.requests)]
                run.cancel(request)
                gone.add(request.request_id)

    queued, _ = queued_run(workload, seed)
    queued.finish(cancel)
    expected = answers(Run(workload, sink=StoppingSink()).finish())
    for key, answer in expected.items():
        if key[0] not in gone:
            assert answers(queued)[key] == answer
        elif key in queued.tokens:
            assert answer[0][: len(queued.tokens[key])] == queued.tokens[key]
    assert_all_is_given_back(queued)


def alone(*, max_tokens: int, num_blocks: int = 60, length: int = 5, n: int = 1, seed: int = 0) -> Workload:
    return Workload(
        requests=(make_request("r", list(range(length)), max_tokens=max_tokens, n=n, seed=seed),),
        arrivals=(0,),
        num_blocks=num_blocks,
        budget=16,
        max_num_seqs=4,
        max_model_len=100,
        prefix_cache=True,
    )


def test_a_decode_is_planned_before_its_token_is_known() -> None:
    run, runner = queued_run(alone(max_tokens=8), 0, stops=False)
    run.finish()
    assert runner.num_unknown == 7, "every token but the last is computed before the host sees it"
    assert len([step for step in run.steps if step.pieces]) == 8


@modest
@given(workloads(num_choices=(1,), prefix_cache=False), st.integers(0, 99))
def test_no_token_is_computed_beyond_a_limit_that_is_known(workload: Workload, seed: int) -> None:
    roomy = replace(workload, num_blocks=400, max_num_seqs=400)
    run, runner = queued_run(roomy, seed, stops=False)
    run.finish()
    expected = sum(len(r.prompt_token_ids) + len(run.tokens[r.request_id, 0]) - 1 for r in workload.requests)
    assert runner.num_tokens == expected


@modest
@given(workloads(num_choices=(1,), prefix_cache=False), st.integers(0, 99))
def test_an_end_that_nobody_could_know_costs_one_token(workload: Workload, seed: int) -> None:
    roomy = replace(workload, num_blocks=400, max_num_seqs=400)
    run, runner = queued_run(roomy, seed)
    run.finish()
    least = sum(len(r.prompt_token_ids) + len(run.tokens[r.request_id, 0]) - 1 for r in workload.requests)
    assert least <= runner.num_tokens <= least + len(workload.requests)


def test_the_token_after_the_end_is_told_to_nobody_and_never_found() -> None:
    """The sequence ends with the token before its block would be full; the one in flight fills it."""
    for seed in range(200):
        request = make_request("r", [1, 2, 3, 4, 5], max_tokens=30, seed=seed)
        tokens = expected_output(request, 0, 100)
        if tokens[2] in END_TOKENS and not set(tokens[:2]) & set(END_TOKENS):
            break
    workload = replace(alone(max_tokens=30), requests=(request,))
    run, runner = queued_run(workload, 1)
    run.finish()
    assert (run.tokens["r", 0], run.ended["r", 0].finish_reason) == (tokens[:3], FinishReason.STOP)
    assert runner.num_tokens == 5 + 3, "the end itself was computed, in vain"
    assert len(run.tables.index) == 1, "[1, 2, 3, 4]; the second block was never confirmed"


def test_who_gave_way_starts_again_when_its_token_in_flight_is_known() -> None:
    """Its seat on the device, where the token is, may be another's by then."""
    run, _ = queued_run(alone(max_tokens=4), 0, stops=False)
    run.step()
    run.preempt(0)
    assert run.step().pieces == ()
    (again,) = run.step().pieces
    assert (again.start, again.end, again.num_known) == (0, 6, 6)
    run.finish()
    assert run.tokens["r", 0] == expected_output(run.workload.requests[0], 0, 100)


def test_a_first_token_that_comes_to_one_who_gave_way_brings_forth_the_other_choices() -> None:
    run, _ = queued_run(alone(max_tokens=4, n=3), 0, stops=False)
    run.step()
    run.preempt(0)
    run.finish()
    for index in range(3):
        assert run.tokens["r", index] == expected_output(run.workload.requests[0], index, 100)
    assert_all_is_given_back(run)


def test_who_lacks_only_what_is_on_its_way_back_waits_and_nobody_gives_way() -> None:
    """`short` ends just before `long` needs a block, and there is none but those that `short` gave up."""
    requests = (
        make_request("short", [1] * 5, max_tokens=4),
        make_request("long", [2] * 8, max_tokens=9),
    )
    workload = replace(
        alone(max_tokens=1, num_blocks=6), requests=requests, arrivals=(0, 0), prefix_cache=False
    )
    run, _ = queued_run(workload, 0, stops=False)
    run.finish()
    assert run.scheduler.sequences.counters.num_preemptions == 0
    assert any(not step.pieces and "long" in {key[0] for key in step.running} for step in run.steps[:-1])
    assert run.tokens["long", 0] == expected_output(requests[1], 0, 100)


def test_nobody_gives_way_to_an_urgent_request_for_which_enough_is_on_its_way_back() -> None:
    """Three are free and five on their way back; it needs five, and `patient` has what it lacks."""
    requests = (
        make_request("patient", [1] * 8, max_tokens=12, lane=2),
        make_request("ended", [2] * 17, max_tokens=4, lane=1),
        make_request("urgent", [3] * 20, max_tokens=2, lane=0),
    )
    workload = replace(
        alone(max_tokens=1, num_blocks=12),
        requests=requests,
        arrivals=(0, 0, 5),
        prefix_cache=False,
        budget=64,
    )
    run, _ = queued_run(workload, 0, stops=False)
    run.finish()
    assert run.scheduler.sequences.counters.num_preemptions == 0
    started = [i for i, step in enumerate(run.steps) if "urgent" in {p.key[0] for p in step.pieces}]
    assert started[0] == 6


def test_what_was_given_up_for_an_urgent_request_is_not_taken_back_by_who_gave_it_up() -> None:
    requests = (
        make_request("patient", [1] * 20, max_tokens=20, lane=2),
        make_request("urgent", [2] * 20, max_tokens=4, lane=0),
    )
    workload = replace(
        alone(max_tokens=1, num_blocks=9), requests=requests, arrivals=(0, 4), prefix_cache=False, budget=64
    )
    run, _ = queued_run(workload, 0, stops=False)
    run.finish()
    assert run.scheduler.sequences.counters.num_preemptions == 1
    assert [step.num_preempted for step in run.steps].index(1) < 6
    for request in requests:
        assert run.tokens[request.request_id, 0] == expected_output(request, 0, run.scheduler.max_len)


@pytest.mark.parametrize("runs_early", [True, False])
def test_a_plan_that_is_empty_waits_for_the_step_in_flight(runs_early: bool) -> None:
    """The last token is on its way: there is nothing to plan, and the work is not over."""
    run = Run(alone(max_tokens=1), runner=QueuedRunner(60, BLOCK_SIZE, lambda: runs_early))
    seen: list[StepPlan] = []
    run._watch = lambda _, plan: seen.append(plan)
    run.finish()
    assert [len(plan.chunks) for plan in seen] == [1, 0]
    assert run.scheduler.sequences.is_idle
