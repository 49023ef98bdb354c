"""The step time model: finds the coefficients, keeps what it knows, and is never negative."""

from __future__ import annotations

from random import Random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.priority.steptime import NAMES, StepTimeModel
from tests.few import examples
from tests.priority.simulated_engine import COEFFICIENTS, known_model

Shape = tuple[int, int, int]
"""Prompt tokens, decoded tokens and context tokens of a step."""

shapes = st.tuples(st.integers(0, 2_048), st.integers(0, 192), st.integers(0, 300_000))


def random_shape(rng: Random) -> Shape:
    return rng.randrange(2_048), rng.randrange(192), rng.randrange(300_000)


def truth(shape: Shape, factor: float = 1.0) -> float:
    return known_model(factor).seconds(*shape)


def taught(
    steps: int, *, factor: float = 1.0, seed: int = 0, model: StepTimeModel | None = None, noise: float = 0.0
) -> StepTimeModel:
    rng = Random(seed)
    model = model or StepTimeModel()
    for _ in range(steps):
        shape = random_shape(rng)
        model.observe(*shape, truth(shape, factor) * (1 + rng.uniform(-noise, noise)))
    return model


@given(seed=st.integers(0, 10_000))
@settings(max_examples=examples(15))
def test_it_predicts_what_it_was_shown(seed: int) -> None:
    model = taught(300, seed=seed, noise=0.05)
    rng = Random(seed + 1)
    for _ in range(20):
        shape = random_shape(rng)
        predicted = model.seconds(*shape)
        assert predicted == pytest.approx(truth(shape), rel=0.1)


def test_it_finds_the_coefficients_themselves() -> None:
    found = taught(600).as_dict()
    assert found["alpha_s"] == pytest.approx(COEFFICIENTS["alpha_s"], rel=0.1)
    assert found["beta_s"] == pytest.approx(COEFFICIENTS["beta_s"], rel=0.05)
    assert found["delta_s"] == pytest.approx(COEFFICIENTS["delta_s"], rel=0.2)


def test_long_prompts_are_learnt_apart_from_short_ones() -> None:
    """A prompt token takes the longer the more tokens it attends to: twice as long at 28,000 on this machine."""
    rng, model = Random(0), StepTimeModel()
    for _ in range(600):
        shape, num_before = random_shape(rng), rng.randrange(30_000)
        attended = shape[0] * (num_before + shape[0] // 2)
        model.observe(*shape, known_model().seconds(*shape, attended), attended)
    for num_before in (0, 28_000):
        amounts = 512, 10, 30_000, 512 * (num_before + 256)
        assert model.seconds(*amounts) == pytest.approx(known_model().seconds(*amounts), rel=0.05)
    assert model.attended_each == pytest.approx(1 / 28_000, rel=0.1)


def test_it_is_not_relied_on_before_enough_was_measured() -> None:
    model = StepTimeModel()
    rng = Random(3)
    for number in range(20):
        assert not model.is_known, f"after {number} steps"
        shape = random_shape(rng)
        model.observe(*shape, truth(shape))
    assert model.is_known


@given(steps=st.lists(st.tuples(shapes, st.floats(0.0, 30.0)), max_size=80))
@settings(max_examples=examples(40))
def test_no_coefficient_is_ever_negative_whatever_was_measured(steps: list[tuple[Shape, float]]) -> None:
    """Else more work would look faster, and the forecast would not be monotone (invariant 9)."""
    model = StepTimeModel()
    for shape, seconds in steps:
        model.observe(*shape, seconds)
        assert min(model.coefficients) >= 0.0
        assert max(model.coefficients) < 1e6


@given(shape=shapes, more=shapes, seed=st.integers(0, 50))
@settings(max_examples=examples(50))
def test_more_work_never_takes_less_time(shape: Shape, more: Shape, seed: int) -> None:
    """Invariant 9, in its model."""
    model = taught(40, seed=seed, noise=0.9)
    least = model.seconds(*shape)
    assert least <= model.seconds(*(a + b for a, b in zip(shape, more, strict=True)))


def test_it_follows_a_machine_that_has_become_slower() -> None:
    model = taught(300)
    taught(1_500, factor=2.0, seed=1, model=model)
    shape = (1_000, 100, 100_000)
    assert model.seconds(1_000, 100, 100_000) == pytest.approx(truth(shape, 2.0), rel=0.1)


def test_it_knows_within_twenty_steps_that_all_takes_longer() -> None:
    """A crowd comes and is gone in a few seconds, and the steps that it slows are seen in them."""
    model = taught(1_000)
    shape = (64, 40, 10_000)
    for _ in range(20):
        model.observe(*shape, truth(shape, 1.2))
    for other in (shape, (0, 40, 10_000), (512, 0, 0)):
        predicted = model.seconds(*other)
        assert predicted == pytest.approx(truth(other, 1.2), rel=0.1)


def test_what_is_not_seen_any_more_keeps_its_estimate() -> None:
    """An hour of decodes alone says nothing about prefill, and must not change what is known of it."""
    model = taught(300)
    beta_s = model.as_dict()["beta_s"]
    rng = Random(1)
    for _ in range(3_000):
        shape = (0, rng.randrange(1, 192), rng.randrange(1_000, 300_000))
        model.observe(*shape, truth(shape))
    assert model.as_dict()["beta_s"] == pytest.approx(beta_s, rel=0.1)


def test_one_disturbed_step_is_not_believed() -> None:
    """The machine was suspended for a minute: a step that took that long counts as three times the expected."""
    model = taught(400)
    shape = (512, 64, 50_000)
    before = model.seconds(512, 64, 50_000)
    for _ in range(8):
        model.observe(*shape, 60.0)
    assert model.seconds(512, 64, 50_000) < 1.5 * before


def test_a_model_that_was_given_is_known_at_once_and_stays() -> None:
    model = known_model()
    assert model.is_known
    taught(100, factor=3.0, model=model)
    assert model.as_dict() == COEFFICIENTS


def test_a_model_that_was_given_goes_on_learning_if_it_may() -> None:
    model = StepTimeModel(COEFFICIENTS)
    assert model.is_known
    taught(1_500, factor=2.0, model=model)
    assert model.as_dict()["beta_s"] == pytest.approx(2 * COEFFICIENTS["beta_s"], rel=0.1)


def test_what_it_saves_it_can_be_given_again() -> None:
    model = taught(100, noise=0.1)
    again = StepTimeModel(model.as_dict())
    assert tuple(model.as_dict()) == NAMES
    assert again.coefficients == model.coefficients


@given(seconds=st.floats(0.0, 2.0), num_decode=st.integers(0, 192), num_context=st.integers(0, 300_000))
def test_the_prefill_that_fits_takes_just_so_long(seconds: float, num_decode: int, num_context: int) -> None:
    """Invariant 19: the budget is the model turned around."""
    model = known_model()
    fitting = model.prefill_within(seconds, num_decode, num_context)
    attended = fitting * max(0.0, fitting) / 2
    assert model.seconds(fitting, num_decode, num_context, attended) == pytest.approx(seconds, abs=1e-9)


def test_where_prefill_costs_nothing_any_amount_fits() -> None:
    model = StepTimeModel({**COEFFICIENTS, "beta_s": 0.0, "epsilon_s": 0.0}, learns=False)
    assert model.prefill_within(0.001, 100, 0) == float("inf")


def test_a_long_prompt_leaves_its_tokens_a_time_of_their_own() -> None:
    """Where noise is larger than all but the time of attending; else no budget and no forecast would be finite."""
    model, source = taught(100, noise=0.1), Random(1)
    for start in range(0, 400_000, 512):
        attended = 512 * start + 512 * 513 // 2
        seconds = 512 * -1e-5 + 6e-8 * attended * source.uniform(0.7, 1.4)
        model.observe(512, 1, start + 512, max(1e-3, seconds), attended)
        assert model.coefficients[1] >= model.coefficients[2] / 16 > 0
    assert model.attended_each > 0
    assert model.prefill_within(0.2, 1, 1_000) < 10_000


def test_where_only_attending_takes_time_so_many_fit_as_attend_to_so_many() -> None:
    model = StepTimeModel({**COEFFICIENTS, "beta_s": 0.0}, learns=False)
    fitting = model.prefill_within(0.1, 1, 0)
    assert model.seconds(fitting, 1, 0, fitting**2 / 2) == pytest.approx(0.1)
