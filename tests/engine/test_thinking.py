"""A budget for reasoning in a run: the tokens that end it follow, and then the answer that goes on after them."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.model.drafts import DraftSource
from penstock.engine.planning.params import SamplingParams
from penstock.engine.planning.request import Request, Sequence
from penstock.engine.text.thinking import Thinking, ThinkingBudget
from tests.engine.checkpoints import make_checkpoint
from tests.engine.driver import Driver
from tests.engine.fake_runner import FakeSink, drafting_always, next_token
from tests.engine.families import STATES
from tests.engine.test_drafts import AnswerProposer, count, num_accepted, prompt_of
from tests.engine.test_overlap import assert_all_is_given_back, queued_run
from tests.engine.workloads import Run, Workload, workloads
from tests.few import examples

FORCED = (9, 7, 8)
LENGTH = 24
NO_DRAFTS = "drafts are verified by the native kernels, and there is no compiler for them"


class Numbers(FakeSink):
    """Sequences that end by their length alone. Tokens are spelt as numbers, so that each of them can be a marker."""

    def thinking(self, sequence: Sequence) -> Thinking:
        if sequence.thinking is None:
            budget = sequence.request.sampling.thinking
            assert budget is not None
            known = sequence.token_ids[sequence.num_prompt_tokens :]
            sequence.thinking = Thinking(budget, lambda token_id: f"<{token_id}>".encode(), known)
        return sequence.thinking


def budget_of(num_tokens: int, closing: int = 7, forced: tuple[int, ...] = FORCED) -> ThinkingBudget:
    return ThinkingBudget(
        num_tokens=num_tokens, opening="<5>", closing=f"<{closing}>", is_open=True, forced=forced
    )


@pytest.fixture(scope="module", params=["llama", "Qwen 3.5"])
def driver(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Driver:
    folder: Path = tmp_path_factory.mktemp("thinking")
    states = STATES.get(request.param)
    folder = make_checkpoint(request.param, folder) if states is None else states.make(folder)
    return Driver(folder, sink=Numbers(), num_blocks=256)


def requests(**sampling: Any) -> list[Request]:
    """Requests of different budgets, one of which is used up by its first token, and one by none."""
    asked: dict[str, Any] = {"temperature": 0.8, "max_tokens": LENGTH, "ignore_eos": True, **sampling}
    return [
        Request(
            request_id=f"r{number}",
            prompt_token_ids=prompt_of(5 + 9 * number, number),
            sampling=SamplingParams(seed=number, thinking=budget_of(number_of_tokens), **asked),
            n=2 if number == 3 else 1,
        )
        for number, number_of_tokens in enumerate((0, 1, 6, 11, LENGTH - 2, LENGTH))
    ]


def answers(driver: Driver, asked: list[Request], **how: Any) -> dict[tuple[str, int], list[int]]:
    before_step = how.pop("before_step", lambda _: None)
    driver.fresh(**how)
    driver.run(*asked, before_step=before_step)
    return {key: driver.tokens(*key) for key in driver.outputs}


def without_budget(request: Request, **more: Any) -> Request:
    return replace(request, sampling=replace(request.sampling, thinking=None), **more)


@pytest.fixture(scope="module")
def expected(driver: Driver) -> dict[tuple[str, int], list[int]]:
    """What is thought without a budget, up to the budget; and what is said after that and after the forced tokens."""
    free = answers(driver, [without_budget(request) for request in requests()])
    rest = {}
    for request in requests():
        budget = request.sampling.thinking
        assert budget is not None
        for index in range(request.n):
            begun = [*free[request.request_id, index][: budget.num_tokens], *FORCED][:LENGTH]
            rest[request.request_id, index] = begun
            if len(begun) < LENGTH:
                going_on = without_budget(request, output_token_ids=tuple(begun), n=1, index=index)
                rest[request.request_id, index] = (
                    begun + answers(driver, [going_on])[request.request_id, index]
                )
    return rest


def test_the_answer_goes_on_after_the_forced_tokens(
    driver: Driver, expected: dict[tuple[str, int], list[int]]
) -> None:
    assert answers(driver, requests()) == expected


@pytest.mark.parametrize("accuracy", [1.0, 0.6])
def test_drafts_change_nothing(
    driver: Driver,
    expected: dict[tuple[str, int], list[int]],
    monkeypatch: pytest.MonkeyPatch,
    accuracy: float,
) -> None:
    monkeypatch.setattr("tests.engine.driver.Drafting", drafting_always)
    if not driver.facts.max_drafts:
        pytest.skip(NO_DRAFTS)
    assert answers(driver, requests(), proposer=AnswerProposer(expected, accuracy)) == expected
    assert num_accepted(driver) > 10


def test_giving_way_changes_nothing(driver: Driver, expected: dict[tuple[str, int], list[int]]) -> None:
    def preempt(step: int) -> None:
        sequences = driver.scheduler.sequences
        if step % 3 == 2 and sequences.running:
            sequences.preempt(sequences.running[step % len(sequences.running)])

    assert answers(driver, requests(), before_step=preempt) == expected


@pytest.mark.parametrize("num_known", range(4, 12))
def test_going_on_after_known_tokens_changes_nothing(
    driver: Driver, expected: dict[tuple[str, int], list[int]], num_known: int
) -> None:
    """As after a restart: before the budget is spent, at it, between forced tokens, and behind them."""
    request = requests()[2]
    known = expected["r2", 0][:num_known]
    [(_, rest)] = answers(driver, [replace(request, output_token_ids=tuple(known))]).items()
    assert known + rest == expected["r2", 0]


@pytest.mark.parametrize("sampling", [{"frequency_penalty": 1.0}, {"temperature": 0.0}])
def test_a_single_forced_token_is_the_one_that_is_computed(driver: Driver, sampling: dict[str, Any]) -> None:
    request = replace(requests(**sampling)[2], n=1)
    one = replace(request, sampling=replace(request.sampling, thinking=budget_of(6, forced=(7,))))
    [free] = answers(driver, [without_budget(request)]).values()
    begun = [*free[:6], 7]
    [rest] = answers(driver, [without_budget(request, output_token_ids=tuple(begun))]).values()
    assert list(answers(driver, [one]).values()) == [begun + rest]


def test_who_ends_its_reasoning_in_time_is_left_alone(driver: Driver) -> None:
    request = requests()[2]
    [free] = answers(driver, [without_budget(request)]).values()
    sampling = replace(request.sampling, thinking=budget_of(6, closing=free[4]))
    assert list(answers(driver, [replace(request, sampling=sampling)]).values()) == [free]
    late = replace(request.sampling, thinking=budget_of(4, closing=free[4]))
    assert list(answers(driver, [replace(request, sampling=late)]).values()) != [free]


def test_forced_tokens_have_log_probabilities(driver: Driver) -> None:
    driver.fresh()
    driver.run(requests(num_logprobs=2)[2])
    told = [output.logprobs for output in driver.outputs["r2", 0]]
    assert [len(one or ()) for one in told] == [1] * LENGTH
    assert [(one or [])[0].top for one in told[6:9]] == [()] * 3
    assert all(len((one or [])[0].top) == 2 for one in told[:6] + told[9:])


def expected_within_budget(request: Request, index: int, max_len: int) -> list[int]:
    """What an undisturbed run of the fake model brings."""
    budget, known = request.sampling.thinking, list(request.prompt_token_ids)
    assert budget is not None
    first, thinks = len(known), True
    most = min(max_len, first + request.sampling.max_tokens)
    while len(known) < most:
        if thinks and len(known) - first >= budget.num_tokens:
            known += FORCED
        else:
            known.append(next_token(known, request, index))
        thinks = thinks and 7 not in known[first:]
    return known[first:most]


@settings(max_examples=examples(60), deadline=None)
@given(
    workloads(),
    st.integers(0, 99),
    st.lists(st.integers(0, 8), min_size=6, max_size=6),
    st.lists(st.tuples(st.integers(0, 25), st.integers(0, 5)), max_size=6),
)
def test_steps_in_flight_change_nothing(
    workload: Workload, seed: int, budgets: list[int], preemptions: list[tuple[int, int]]
) -> None:
    def disturb(run: Run) -> None:
        for at, pick in preemptions:
            if at == len(run.steps):
                run.preempt(pick)

    requests = tuple(
        replace(request, sampling=replace(request.sampling, thinking=budget_of(number)))
        for request, number in zip(workload.requests, budgets, strict=False)
    )
    workload = replace(workload, requests=requests)
    run, _ = queued_run(workload, seed, sink=Numbers())
    run.finish(disturb)
    assert run.tokens == {
        (request.request_id, index): expected_within_budget(request, index, workload.max_len)
        for request in requests
        for index in range(request.n)
    }
    assert_all_is_given_back(run)


def test_a_draft_model_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model drafts for itself: all its drafts are right, for none is made where tokens are forced."""
    monkeypatch.setattr("tests.engine.driver.Drafting", drafting_always)
    folder = make_checkpoint("llama", tmp_path)
    driver = Driver(folder, sink=Numbers(), num_blocks=256, draft=DraftSource(folder))
    if not driver.facts.max_drafts:
        pytest.skip(NO_DRAFTS)
    expected = answers(driver, requests())
    assert answers(driver, requests(), model=True) == expected
    found = count(driver, "draft")
    assert found.num_accepted == found.num_drafted > 20
