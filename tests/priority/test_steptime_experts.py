"""The step time of models with experts: each token more adds fewer of them, and the model knows it."""

from __future__ import annotations

from math import inf
from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority.steptime import EXPERTS, NAMES, StepTimeModel
from tests.few import examples
from tests.priority.simulated_engine import COEFFICIENTS

SHARE = 8 / 128
"""Of Qwen3-30B-A3B."""
SPARSE = COEFFICIENTS | {EXPERTS: 0.12}
"""A machine that reads all experts in 0.12 s."""

tokens = st.integers(0, 300)
shares = st.floats(0.01, 1.0)


def machine(chosen_share: float = SHARE, **coefficients: float) -> StepTimeModel:
    return StepTimeModel(SPARSE | coefficients, learns=False, chosen_share=chosen_share)


def truth(num_prefill: int, num_decode: int, num_context: int) -> float:
    return machine().seconds(num_prefill, num_decode, num_context)


def taught(model: StepTimeModel, num_steps: int = 400) -> StepTimeModel:
    """Shows the steps of few streams, with drafts and now and then with a piece of a prompt."""
    rng = Random(0)
    for _ in range(num_steps):
        num_streams = rng.choice((1, 2, 4, 8, 16))
        num_prefill = rng.choice((0, 0, 0, 16, 512))
        shape = num_prefill, num_streams * rng.randrange(1, 5), 500 * num_streams
        model.observe(*shape, truth(*shape) * rng.uniform(0.98, 1.02))
    return model


def error(model: StepTimeModel) -> float:
    """The largest relative error of steps without prompts."""
    steps = [(0, num, 500) for num in (1, 2, 3, 5, 8, 16, 32)]
    return max(abs(model.seconds(*step) / truth(*step) - 1) for step in steps)


def test_a_linear_model_is_wrong_where_one_with_experts_is_right() -> None:
    assert error(taught(StepTimeModel(chosen_share=SHARE))) < 0.08
    assert error(taught(StepTimeModel())) > 0.5


def test_the_time_of_all_experts_is_found() -> None:
    assert taught(StepTimeModel(chosen_share=SHARE)).experts_s == pytest.approx(0.12, rel=0.1)


@given(num=tokens, more=tokens, share=shares)
def test_more_tokens_take_longer_and_each_of_them_adds_less(num: int, more: int, share: float) -> None:
    model = machine(share, gamma_s=0.0)
    times = [model.seconds(0, count, 0) for count in (num, num + 1, num + 1 + more, num + 2 + more)]
    assert times == sorted(times)
    assert times[3] - times[2] <= times[1] - times[0] + 1e-12
    assert times[3] <= model.fixed_seconds(0, 0) + 1e-12


@given(share=shares)
def test_a_step_of_one_token_reads_the_experts_that_it_chose(share: float) -> None:
    model = machine(share)
    none, one = model.seconds(0, 0, 0), model.seconds(0, 1, 0)
    assert one - none == pytest.approx(SPARSE["gamma_s"] + share * SPARSE[EXPERTS])


@given(seconds=st.floats(0.0, 2.0), num_decode=st.integers(0, 192), num_context=st.integers(0, 300_000))
@settings(max_examples=examples(100))
def test_the_prefill_that_fits_takes_just_so_long(seconds: float, num_decode: int, num_context: int) -> None:
    """Invariant 19: the budget is the model turned around."""
    model = machine()
    fitting = model.prefill_within(seconds, num_decode, num_context)
    if fitting <= 0:
        assert model.seconds(0, num_decode, num_context) >= seconds
        return
    attended = fitting**2 / 2
    assert model.seconds(fitting, num_decode, num_context, attended) == pytest.approx(seconds, abs=1e-5)
    assert model.seconds(fitting, num_decode, num_context, attended) <= seconds + 1e-9


@given(num_decode=st.integers(0, 192), num_prefill=st.integers(200, 4_000))
def test_beside_many_prompt_tokens_the_fixed_part_has_all_experts(num_decode: int, num_prefill: int) -> None:
    model = machine()
    each_s = num_prefill * SPARSE["beta_s"]
    assert model.fixed_seconds(num_decode, 0) + each_s == pytest.approx(
        model.seconds(num_prefill, num_decode, 0), abs=1e-5
    )


@given(steps=st.lists(st.tuples(tokens, tokens, st.integers(0, 9_999), st.floats(0.0, 30.0)), max_size=60))
@settings(max_examples=examples(30))
def test_no_coefficient_is_ever_negative_whatever_was_measured(
    steps: list[tuple[int, int, int, float]],
) -> None:
    model = StepTimeModel(chosen_share=SHARE)
    for num_prefill, num_decode, num_context, seconds in steps:
        model.observe(num_prefill, num_decode, num_context, seconds)
        assert min(model.coefficients) >= 0.0


def test_a_dense_model_has_no_such_term() -> None:
    dense = StepTimeModel(SPARSE, learns=False)
    assert dense.experts_s == 0.0
    assert dense.as_dict() == COEFFICIENTS
    assert dense.fixed_seconds(3, 500) == dense.seconds(0, 3, 500)
    assert tuple(taught(StepTimeModel()).as_dict()) == NAMES


def test_where_prefill_costs_nothing_any_amount_fits() -> None:
    assert machine(beta_s=0.0, epsilon_s=0.0).prefill_within(0.001, 100, 0) == inf
