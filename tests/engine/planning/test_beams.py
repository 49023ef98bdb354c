"""Beam search on a fake runner: whatever happens to its sequences, it finds what it finds alone."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.beams import BeamSearch
from penstock.engine.planning.params import BeamParams
from penstock.engine.planning.request import FinishReason, Request, Sequence, TokenLogprobs
from penstock.engine.planning.step import Chunk, Sampled
from penstock.engine.planning.windows import most_tokens_of_forks
from tests.engine.fake_runner import VOCABULARY, FakeRunner, expected_output, make_request, next_token
from tests.engine.queued_runner import QueuedChunk, QueuedRunner
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads
from tests.few import examples

modest = settings(max_examples=examples(60), deadline=None)


def row_of(token_ids: list[int], request: Request) -> TokenLogprobs:
    """Returns the log probabilities that the fake model gives to the tokens that may follow."""
    state = next_token(token_ids, request, 0) + 1
    logits = [(state * (37 + 11 * token_id)) % 101 / 25 for token_id in range(VOCABULARY)]
    total = math.log(sum(map(math.exp, logits)))
    top = sorted(((token_id, logit - total) for token_id, logit in enumerate(logits)), key=lambda p: -p[1])
    return TokenLogprobs(top[0][1], tuple(top[: request.num_logprobs]))


def with_row(sampled: Sampled, sequence: Sequence, token_ids: list[int]) -> Sampled:
    if sequence.request.beams is not None and sampled.error is None:
        sampled.logprobs = [row_of(token_ids, sequence.request)]
    return sampled


class Runner(FakeRunner):
    def _sample(self, chunk: Chunk) -> Sampled:
        return with_row(super()._sample(chunk), chunk.sequence, chunk.sequence.token_ids)


class QueuedBeamRunner(QueuedRunner):
    def _draw(self, order: QueuedChunk) -> Sampled:
        return with_row(super()._draw(order), order.sequence, self._seen_by(order.table, order.end))


def found(request: Request, max_len: int) -> list[list[int]]:
    """Searches without an engine."""
    assert request.beams is not None
    prompt = list(request.prompt_token_ids)
    most = min(request.sampling.max_tokens, max_len - len(prompt))
    search = BeamSearch(request.n, request.beams, most)
    while not search.is_over:
        search.advance([row_of([*prompt, *beam.token_ids], request) for beam in search.beams])
    return [list(answer.token_ids) for answer in search.finished]


def check(run: Run, *left_out: str) -> None:
    for request in run.workload.requests:
        if request.request_id in left_out:
            continue
        answers = [run.tokens[request.request_id, index] for index in range(request.n)]
        max_len = run.workload.max_len
        if request.beams is None:
            assert answers == [expected_output(request, index, max_len) for index in range(request.n)]
        else:
            assert answers == found(request, max_len)
    assert not any(run.tables.pool.ref_counts)
    assert not run.scheduler.sequences.searches


@st.composite
def searches(draw: st.DrawFn) -> Workload:
    """Workloads in which some requests, those that have room, are searches."""
    workload = draw(workloads(num_choices=(1, 1, 2), num_blocks=(10, 30)))
    requests = []
    for request in workload.requests:
        width = draw(st.integers(0, 4))
        params = BeamParams(
            length_penalty=draw(st.sampled_from([1.0, 0.0, -0.5, 2.0])),
            early_stopping=draw(st.sampled_from([False, True, "never"])),
            end_token_ids=draw(st.frozensets(st.integers(0, VOCABULARY - 1), max_size=3)),
        )
        num_prompt = len(request.prompt_token_ids)
        longest = min(num_prompt + request.sampling.max_tokens, workload.max_len)
        most = most_tokens_of_forks(workload.num_blocks - 1, BLOCK_SIZE, num_prompt, max(1, width))
        if 0 < width <= workload.max_num_seqs and longest <= most:
            request = replace(request, n=width, beams=params)
        requests.append(request)
    return replace(workload, requests=tuple(requests))


@pytest.mark.parametrize("runner", [Runner, QueuedBeamRunner])
@modest
@given(
    searches(),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 9)), max_size=4),
    st.dictionaries(st.integers(0, 25), st.integers(1, 4), max_size=4),
)
def test_a_search_finds_the_same_in_any_company_and_whenever_it_gives_way(
    runner: type[FakeRunner], workload: Workload, preemptions: list[tuple[int, int]], rooms: dict[int, int]
) -> None:
    """`rooms` are the tokens that the device has memory for, where these are few."""

    def disturb(run: Run) -> None:
        run.scheduler.sequences.check()
        assert run.scheduler.sequences.num_seats_taken <= workload.max_num_seqs
        run.runner.room = rooms.get(len(run.steps), 1 << 30)
        run.runner.refuses_late = len(run.steps) % 2 == 0
        for at, pick in preemptions:
            if at == len(run.steps):
                run.preempt(pick)

    check(Run(workload, runner=runner(workload.num_blocks, BLOCK_SIZE)).finish(disturb))


@pytest.mark.parametrize("runner", [Runner, QueuedBeamRunner])
@modest
@given(searches(), st.integers(0, 5), st.integers(0, 20))
def test_a_search_that_is_cancelled_leaves_nothing(
    runner: type[FakeRunner], workload: Workload, pick: int, at: int
) -> None:
    request = workload.requests[pick % len(workload.requests)]

    def cancel(run: Run) -> None:
        if len(run.steps) == at:
            run.cancel(request)

    run = Run(workload, runner=runner(workload.num_blocks, BLOCK_SIZE)).finish(cancel)
    check(run, request.request_id)
    ended = [run.ended[key] for key in run.ended if key[0] == request.request_id]
    assert len(ended) in (0, request.n)


def search(name: str = "s", n: int = 3, max_tokens: int = 8, **params: object) -> Request:
    request = make_request(name, [1, 2, 3, 4, 5, 6], max_tokens=max_tokens, n=n)
    return replace(request, beams=BeamParams(**params))  # type: ignore[arg-type]


def workload_of(*requests: Request, num_blocks: int = 40, seats: int = 8, budget: int = 64) -> Workload:
    return Workload(
        requests=requests,
        arrivals=(0,) * len(requests),
        num_blocks=num_blocks,
        budget=budget,
        max_num_seqs=seats,
        max_model_len=64,
        prefix_cache=True,
    )


def test_beams_share_the_blocks_of_what_they_have_in_common() -> None:
    shared = []

    def watch(run: Run, _: object) -> None:
        tables = [sequence.block_table for sequence in run.scheduler.sequences.running]
        if len(tables) == 3:
            shared.append(len({table[0] for table in tables}) == 1)

    check(Run(workload_of(search()), watch, runner=Runner(40, BLOCK_SIZE)).finish())
    assert shared
    assert all(shared)


def test_no_seat_of_a_search_is_given_to_others() -> None:
    others = [make_request(f"r{i}", [7, i], max_tokens=4) for i in range(6)]
    run = Run(workload_of(search(n=3), *others, seats=4), runner=Runner(40, BLOCK_SIZE))
    run.finish(lambda run: run.scheduler.sequences.check())
    assert max(len(step.running) for step in run.steps) == 4
    check(run)


def test_what_is_charged_for_is_what_was_computed() -> None:
    charged: list[tuple[int, int]] = []
    run = Run(workload_of(search(n=3, max_tokens=5)), runner=Runner(40, BLOCK_SIZE))
    charge = run.queue.charge

    def note(work: list[tuple[Request, int, int, int]], now: float) -> None:
        charged.extend((num_prompt, num_output) for _, num_prompt, num_output, _ in work)
        charge(work, now)

    run.queue.charge = note  # type: ignore[method-assign]
    run.finish()
    assert charged == [(6, 1)] + [(0, 1)] * 3 * 4


@pytest.mark.parametrize("at", [0, 1, 3])
def test_a_beam_whose_logits_are_not_finite_fails_all_choices(at: int) -> None:
    runner = Runner(40, BLOCK_SIZE)

    def spoil(run: Run) -> None:
        if len(run.steps) == at:
            runner.bad.add(("s", 0))

    neighbour = make_request("r", [9, 9], max_tokens=6)
    run = Run(workload_of(search(), neighbour), runner=runner).finish(spoil)
    reasons = [run.ended["s", index].finish_reason for index in range(3)]
    assert reasons == [FinishReason.FAILED] * 3
    check(run, "s")


def test_a_step_that_the_device_has_no_room_for_is_made_smaller() -> None:
    runner = Runner(40, BLOCK_SIZE)

    def narrow(run: Run) -> None:
        runner.room = 1 if len(run.steps) in (2, 3) else 64

    check(Run(workload_of(search(n=4), make_request("r", [9, 9])), runner=runner).finish(narrow))
    assert runner.num_refused
