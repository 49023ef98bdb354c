"""Steps that are launched before one with drafts has come back: nobody who reads what comes out can tell."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.launching import launch_fitting
from penstock.engine.planning.request import Output, Request
from penstock.engine.planning.step import StepPlan
from tests.engine.fake_runner import FakeProposer, UnpricedDrafting, expected_output, make_request
from tests.engine.queued_runner import QueuedRunner
from tests.engine.test_overlap import StoppingSink, answers, assert_all_is_given_back
from tests.engine.workloads import BLOCK_SIZE, Run, Step, Workload, workloads
from tests.few import examples

modest = settings(max_examples=examples(60), deadline=None)


class Following(Run):
    """A draft model on the device drafts for all, now and then beside a lookup that the host asks."""

    def __init__(self, workload: Workload, seed: int, *windows: int, stops: bool = True) -> None:
        pace = random.Random(seed)
        self.late = late = QueuedRunner(
            workload.num_blocks, BLOCK_SIZE, lambda: pace.random() < 0.5, windows or (0,)
        )
        accuracy = pace.choice([0.2, 0.7, 1.0])
        late.draws = lambda: 0 if pace.random() < accuracy else pace.randrange(1, 50)
        super().__init__(workload, runner=late, sink=StoppingSink() if stops else None)
        lookup = FakeProposer(pace, 0.7, late.window) if pace.random() < 0.5 else None
        self.drafting = UnpricedDrafting(
            lookup, pace.choice([1, 3, 6]), pace, has_model=True, may_follow=True
        )
        self.scheduler.drafting = self.drafting
        late.watch(self.tables)

    def step(self) -> Step:
        if self.flights and self.scheduler.awaits_tokens:
            self.land_all()
        return super().step()

    def _execute(self, plan: StepPlan) -> list[Output]:
        if plan.chunks:
            step = launch_fitting(self.runner, self.scheduler, plan, land=self.land_all)
            self.flights.append((plan, step))
        is_followed = plan.chunks and self.scheduler.may_be_followed(plan)
        outputs: list[Output] = []
        while len(self.flights) > (self.runner.num_ahead if is_followed else 0):
            outputs += self.land()
        return outputs

    def land_all(self) -> None:
        while self.flights:
            self.land()


@modest
@given(workloads(num_choices=(1, 1, 2)), st.integers(0, 10**6))
def test_answers_are_those_of_one_step_after_another(workload: Workload, seed: int) -> None:
    run = Following(workload, seed)
    run.finish()
    assert answers(run) == answers(Run(workload, sink=StoppingSink()).finish())
    assert_all_is_given_back(run)
    assert not run.drafting.failed


@modest
@given(
    workloads(),
    st.integers(0, 10**6),
    st.lists(
        st.tuples(st.integers(0, 25), st.sampled_from(["preempt", "room"]), st.integers(1, 20)), max_size=8
    ),
)
def test_who_gives_way_and_what_finds_no_room_says_the_same(
    workload: Workload, seed: int, troubles: list[tuple[int, str, int]]
) -> None:
    def disturb(run: Run) -> None:
        for at, trouble, number in troubles:
            if at == len(run.steps) and trouble == "preempt":
                run.preempt(number)
            elif at == len(run.steps):
                run.runner.room = number

    run = Following(workload, seed)
    run.finish(disturb)
    assert answers(run) == answers(Run(workload, sink=StoppingSink()).finish())
    assert_all_is_given_back(run)


@modest
@given(workloads(num_blocks=(40, 60)), st.integers(0, 10**6), st.sampled_from([(6,), (0, 6), (3, 9)]))
def test_a_window_keeps_what_a_sequence_sees_that_goes_back(
    workload: Workload, seed: int, windows: tuple[int, ...]
) -> None:
    """Wrong drafts were supposed to be right: blocks behind the window of the token after them may be needed."""
    run, other = (Following(workload, seed + i, *windows, stops=False) for i in range(2))
    other.drafting.most = 0
    assert answers(run.finish()) == answers(other.finish())
    run.scheduler.sequences.check()


def workload_of(requests: tuple[Request, ...], arrivals: tuple[int, ...]) -> Workload:
    """With room for all of them."""
    return Workload(
        requests=requests,
        arrivals=arrivals,
        num_blocks=80,
        budget=40,
        max_num_seqs=4,
        max_model_len=80,
        prefix_cache=True,
    )


def test_many_steps_follow_and_are_wrong() -> None:
    requests = tuple(make_request(f"r{i}", [i, 2, 3], max_tokens=60, seed=i) for i in range(3))
    workload = workload_of(requests, (0, 0, 4))
    run = Following(workload, 3, stops=False)
    run.drafting._random.seed(1)
    run.finish()
    assert run.late.num_wrong > 10
    assert run.late.num_unknown > 40


@pytest.mark.parametrize("windows", [(6,), (0, 6), (3, 9)])
def test_blocks_are_kept_for_where_a_sequence_goes_back_to(windows: tuple[int, ...]) -> None:
    """All of six drafts are wrong now and then, and the window is no longer than that."""
    requests = tuple(make_request(f"r{i}", [i, 2, 3], max_tokens=60, seed=i) for i in range(3))
    num_wrong = 0
    for seed in range(8):
        run = Following(workload_of(requests, (0, 0, 4)), seed, *windows, stops=False)
        run.drafting.most, pace = 6, random.Random(seed)
        run.late.draws = lambda pace=pace: pace.randrange(2)
        run.finish()
        for request in requests:
            expected = expected_output(request, 0, run.scheduler.max_len, run.late.window)
            assert run.tokens[request.request_id, 0] == expected
        num_wrong += run.late.num_wrong
    assert num_wrong > 20


@pytest.mark.parametrize("most", [3, 7])
def test_a_step_waits_now_and_then_for_all_proposers(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("penstock.engine.planning.drafting._MOST_FOLLOWING", most)
    run = Following(workload_of((make_request("r", [1, 2, 3], max_tokens=60),), (0,)), 5, stops=False)
    run.drafting._proposers, run.late.draws, plan = [], lambda: 0, run.scheduler.plan
    steps = ""

    def noted(now: float) -> StepPlan:
        nonlocal steps
        steps += "follows " if run.flights else "waits "
        return plan(now)

    monkeypatch.setattr(run.scheduler, "plan", noted)
    monkeypatch.setattr(run.drafting, "_best_length", lambda *_: 2)
    monkeypatch.setattr(UnpricedDrafting, "is_due", property(lambda drafting: not drafting.is_followed))
    run.finish()
    lengths = [part.count("follows") for part in steps.split("waits")]
    assert max(lengths) == most
    assert lengths.count(most) >= 3
