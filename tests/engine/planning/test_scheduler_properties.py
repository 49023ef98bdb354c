"""Invariants of every plan, over random work: requests arrive at any time to an engine short of blocks and seats."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from itertools import pairwise

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.request import FinishReason, Request
from penstock.engine.planning.step import StepPlan
from tests.engine.fake_runner import expected_output, make_request
from tests.engine.workloads import BLOCK_SIZE, Key, Piece, Run, Workload, workloads
from tests.few import examples

modest = settings(max_examples=examples(30), deadline=None)


def pieces_of(run: Run) -> dict[Key, list[Piece]]:
    found: dict[Key, list[Piece]] = {}
    for step in run.steps:
        for piece in step.pieces:
            found.setdefault(piece.key, []).append(piece)
    return found


@modest
@given(workloads())
def test_a_step_has_no_more_tokens_than_the_budget(workload: Workload) -> None:
    def watch(_: Run, plan: StepPlan) -> None:
        assert plan.num_tokens == sum(chunk.num_tokens for chunk in plan.chunks)

    run = Run(workload, watch).finish()
    assert max(step.num_tokens for step in run.steps) <= workload.budget


@modest
@given(workloads())
def test_every_running_decode_gets_its_token_unless_it_gave_way(workload: Workload) -> None:
    for step in Run(workload).finish().steps:
        planned = {piece.key for piece in step.pieces}
        if len(step.decoding) <= workload.budget:
            assert step.decoding - planned <= step.decoding - step.running
        elif not step.num_preempted:
            assert len(planned) == workload.budget
            assert planned <= step.decoding


@modest
@given(st.integers(2, 6), st.integers(1, 5), st.integers(1, 7))
def test_no_decode_waits_longer_than_a_round_when_the_budget_is_short(
    choices: int, budget: int, length: int
) -> None:
    request = make_request("r", list(range(length)), max_tokens=20, n=choices)
    run = Run(
        Workload(
            requests=(request,),
            arrivals=(0,),
            num_blocks=100,
            budget=budget,
            max_num_seqs=choices,
            max_model_len=100,
            prefix_cache=True,
        )
    ).finish()
    waited: Counter[Key] = Counter()
    for step in run.steps:
        planned = {piece.key for piece in step.pieces}
        waited = Counter({key: waited[key] + 1 for key in step.decoding - planned})
        assert max(waited.values(), default=0) <= 2 * -(-choices // budget)


def test_a_decode_steps_in_for_one_that_gives_way_when_the_budget_is_short() -> None:
    """Else the step is empty, and the engine rests although there is work."""
    Run(
        Workload(
            requests=(make_request("r", [20, 20], max_tokens=14, n=2),),
            arrivals=(0,),
            num_blocks=8,
            budget=1,
            max_num_seqs=2,
            max_model_len=16,
            prefix_cache=False,
        )
    ).finish()


@modest
@given(workloads())
def test_the_chunks_of_a_sequence_are_in_order_and_without_gaps(workload: Workload) -> None:
    prompt_of = {request.request_id: len(request.prompt_token_ids) for request in workload.requests}
    for key, pieces in pieces_of(Run(workload).finish()).items():
        assert pieces[0].start % BLOCK_SIZE == 0 or pieces[0].start == prompt_of[key[0]] - 1
        for before, after in pairwise(pieces):
            if after.num_preemptions == before.num_preemptions:
                assert after.start == before.end
            else:
                assert after.start % BLOCK_SIZE == 0


@modest
@given(workloads())
def test_a_chunk_samples_exactly_if_it_reaches_the_last_known_token(workload: Workload) -> None:
    for step in Run(workload).finish().steps:
        for piece in step.pieces:
            assert piece.start < piece.end <= piece.num_known
            assert piece.samples == (piece.end == piece.num_known)


@modest
@given(workloads())
def test_a_sequence_is_in_a_step_once_and_has_a_seat(workload: Workload) -> None:
    for step in Run(workload).finish().steps:
        planned = Counter(piece.key for piece in step.pieces)
        assert set(planned.values()) <= {1}
        assert planned.keys() <= step.running
        assert len(step.running) <= workload.max_num_seqs


@modest
@given(workloads(), st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=5))
def test_a_plan_has_no_sequence_that_ended(workload: Workload, cancels: list[tuple[int, int]]) -> None:
    def watch(_: Run, plan: StepPlan) -> None:
        assert all(chunk.sequence.finish_reason is None for chunk in plan.chunks)

    def cancel(run: Run) -> None:
        for at, pick in cancels:
            if at == len(run.steps):
                run.cancel(workload.requests[pick % len(workload.requests)])

    run = Run(workload, watch).finish(cancel)
    over: set[Key] = set()
    for step in run.steps:
        assert not over & {piece.key for piece in step.pieces}
        over |= {(o.request_id, o.index) for o in step.outputs if o.finish_reason is not None}


@modest
@given(workloads())
def test_every_choice_ends_once_and_is_as_long_as_its_limits_allow(workload: Workload) -> None:
    run = Run(workload).finish()
    assert run.scheduler.max_len == workload.max_len
    for request in workload.requests:
        room = workload.max_len - len(request.prompt_token_ids)
        for index in range(request.n):
            last = run.ended[request.request_id, index]
            assert last.finish_reason is FinishReason.LENGTH
            assert len(run.tokens[request.request_id, index]) == min(request.sampling.max_tokens, room)
    assert len(run.ended) == sum(request.n for request in workload.requests)


@modest
@given(workloads(), st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=8))
def test_who_was_preempted_says_the_same_as_who_was_not(
    workload: Workload, preemptions: list[tuple[int, int]]
) -> None:
    def disturb(run: Run) -> None:
        for at, pick in preemptions:
            if at == len(run.steps):
                run.preempt(pick)

    run = Run(workload).finish(disturb)
    told = sum(o.timings.num_preemptions for o in run.ended.values() if o.timings)
    assert told == run.scheduler.sequences.counters.num_preemptions
    for request in workload.requests:
        for index in range(request.n):
            expected = expected_output(request, index, workload.max_len)
            assert run.tokens[request.request_id, index] == expected


def test_nobody_comes_in_from_the_queue_while_somebody_who_gave_way_waits() -> None:
    """`big` loses its blocks to `first`; `small` would fit at once, and waits for its return all the same."""
    requests = (
        make_request("first", [1] * 12, max_tokens=10),
        make_request("big", [2] * 16, max_tokens=4),
        make_request("small", [3], max_tokens=2),
    )
    run = Run(
        Workload(
            requests=requests,
            arrivals=(0, 0, 2),
            num_blocks=9,
            budget=64,
            max_num_seqs=4,
            max_model_len=100,
            prefix_cache=False,
        )
    ).finish()
    started = {key[0]: [p.num_preemptions for p in pieces] for key, pieces in pieces_of(run).items()}
    assert max(started["big"]) == 1
    steps_of = {
        name: [i for i, step in enumerate(run.steps) if name in {p.key[0] for p in step.pieces}]
        for name in ("big", "small")
    }
    assert steps_of["small"][0] >= steps_of["big"][started["big"].index(1)]


@modest
@given(workloads())
def test_with_room_for_everybody_nobody_gives_way(workload: Workload) -> None:
    roomy = replace(workload, num_blocks=400, max_num_seqs=400)
    run = Run(roomy).finish()
    assert run.scheduler.sequences.counters.num_preemptions == 0


@modest
@given(workloads())
def test_timings_are_in_order_and_of_the_sequence_itself(workload: Workload) -> None:
    run = Run(workload).finish()
    first_piece = {key: pieces[0] for key, pieces in pieces_of(run).items()}
    for key, last in run.ended.items():
        timings = last.timings
        assert timings is not None
        assert 0 <= timings.scheduled_s <= timings.first_token_s <= timings.finished_s
        assert timings.num_output_tokens == len(run.tokens[key])
        assert timings.num_cached_tokens < timings.num_prompt_tokens
        if key[1] == 0:
            assert timings.num_cached_tokens == first_piece[key].start


@modest
@given(workloads())
def test_what_is_charged_is_what_was_computed_and_said(workload: Workload) -> None:
    run = Run(workload)
    charged: list[list[tuple[Request, int, int, int]]] = []
    run.queue.charge = lambda work, _: charged.append(work)  # type: ignore[method-assign, assignment]
    run.finish()
    steps = [step for step in run.steps if step.pieces]
    assert len([work for work in charged if work]) == len(steps)
    said: Counter[str] = Counter()
    prompts: Counter[str] = Counter()
    for work in charged:
        for request, num_prompt, num_output, _ in work:
            said[request.request_id] += num_output
            prompts[request.request_id] += num_prompt
    computed: Counter[str] = Counter()
    for request in workload.requests:
        length = len(request.prompt_token_ids)
        for index in range(request.n):
            pieces = pieces_of(run).get((request.request_id, index), [])
            computed[request.request_id] += sum(max(0, min(p.end, length) - p.start) for p in pieces)
            said[request.request_id] -= len(run.tokens[request.request_id, index])
    assert prompts == computed
    assert not any(said.values())


@modest
@given(workloads(num_choices=(1,), prefix_cache=False))
def test_without_preemption_and_prefix_cache_every_token_is_computed_once(workload: Workload) -> None:
    roomy = replace(workload, num_blocks=400, max_num_seqs=400)
    run = Run(roomy).finish()
    expected = sum(len(r.prompt_token_ids) + len(run.tokens[r.request_id, 0]) - 1 for r in workload.requests)
    assert run.runner.num_tokens == expected


@modest
@given(workloads(num_choices=(1,)))
def test_the_requests_of_one_lane_start_in_the_order_in_which_they_came(workload: Workload) -> None:
    """Requests that wait for a prefix are excepted, which is why each has a salt of its own here."""
    alone = tuple(replace(r, salt=r.request_id.encode()) for r in workload.requests)
    run = Run(replace(workload, requests=alone)).finish()
    came = sorted(zip(workload.arrivals, alone, strict=True), key=lambda pair: pair[0])
    for lane in range(3):
        started = []
        for _, request in came:
            timings = run.ended[request.request_id, 0].timings
            assert timings is not None
            if request.lane == lane:
                started.append(timings.scheduled_s)
        assert started == sorted(started)
