"""A model in stages, each with a step of other sequences: nobody who reads what comes out can tell."""

from __future__ import annotations

import random
from dataclasses import replace

from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.planning.scheduler import TokenSink
from penstock.engine.planning.step import StepPlan
from tests.engine.fake_runner import FakeSink, make_request
from tests.engine.queued_runner import QueuedRunner
from tests.engine.test_overlap import StoppingSink, alone, answers, assert_all_is_given_back
from tests.engine.workloads import BLOCK_SIZE, Run, Workload, workloads
from tests.few import examples

modest = settings(max_examples=examples(60), deadline=None)


def check_flights(run: Run, plan: StepPlan) -> None:
    """No step has a sequence whose token is in flight, nor more than a stage's share of those that decode."""
    num_stages = run.runner.num_stages
    waiting = [c.sequence for flown, _ in run.flights if flown is not plan for c in flown.chunks if c.samples]
    assert not {chunk.sequence for chunk in plan.chunks} & set(waiting)
    decodes = [c for c in plan.chunks if c.start >= c.sequence.num_prompt_tokens and c.num_tokens == 1]
    num_running = len({*run.scheduler.sequences.running, *(chunk.sequence for chunk in plan.chunks)})
    assert len(decodes) <= -(-num_running // num_stages)


def staged_run(
    workload: Workload, num_stages: int, seed: int, sink: TokenSink | None = None
) -> tuple[Run, QueuedRunner]:
    """The stages are as fast or slow as chance will have it."""
    pace = random.Random(seed)
    runner = QueuedRunner(workload.num_blocks, BLOCK_SIZE, runs_early=lambda: pace.random() < 0.5)
    runner.num_ahead, runner.num_stages = num_stages - 1, num_stages
    run = Run(workload, check_flights, runner=runner, sink=sink or StoppingSink())
    runner.watch(run.tables)
    return run, runner


@modest
@given(
    workloads(),
    st.integers(2, 4),
    st.integers(0, 99),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=6),
)
def test_answers_are_those_of_one_step_after_another(
    workload: Workload, num_stages: int, seed: int, preemptions: list[tuple[int, int]]
) -> None:
    def disturb(run: Run) -> None:
        for at, pick in preemptions:
            if at == len(run.steps):
                run.preempt(pick)

    run, runner = staged_run(workload, num_stages, seed)
    run.finish(disturb)
    assert answers(run) == answers(Run(workload, sink=StoppingSink()).finish())
    assert runner.num_unknown == 0, "the host knows every token before a step computes it"
    assert_all_is_given_back(run)


def test_every_sequence_has_its_turn() -> None:
    """Five on three stages: a step has two at most, and of any three steps one has each sequence."""
    requests = tuple(make_request(f"r{i}", [i] * 3, max_tokens=30, seed=i) for i in range(5))
    workload = replace(
        alone(max_tokens=1, num_blocks=80), requests=requests, arrivals=(0,) * 5, max_num_seqs=5
    )
    run, _ = staged_run(workload, 3, 0, FakeSink())
    run.finish()
    prompts, *decodes = (step.pieces for step in run.steps if step.pieces)
    assert len(prompts) == 5
    for steps in zip(decodes, decodes[1:], decodes[2:60], strict=False):
        assert [len(step) for step in steps] in ([2, 2, 1], [2, 1, 2], [1, 2, 2])
        assert len({piece.key for step in steps for piece in step}) == 5
