"""A team times its phases by kind: off until asked, within the time of the calls, and every phase counted."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import pytest
import torch

from penstock.engine.kernels.cpu.library import KINDS, KindTime
from penstock.engine.kernels.cpu.native import (
    NativeLibrary,
    NativeLinear,
    NativeUnavailable,
    Team,
    load_library,
)
from tests.engine.kernels.random_model import Checkpoint, Prompts, config

LAYERS = 3
PHASES = {
    "embed": 1,
    "norm": 2 * LAYERS + 1,
    "qkv": LAYERS,
    "place": LAYERS,
    "attention": LAYERS,
    "o": LAYERS,
    "gate_up": LAYERS,
    "down": LAYERS,
    "gather": 1,
    "head": 1,
}
"""How often each phase runs in one step of a model with LAYERS layers."""


@pytest.fixture(scope="module")
def library() -> NativeLibrary:
    try:
        return load_library(print)
    except NativeUnavailable as error:
        pytest.skip(str(error))


@pytest.fixture(params=[1, 2, 5])
def team(library: NativeLibrary, request: pytest.FixtureRequest) -> Iterator[Team]:
    team = library.start_team(request.param)
    yield team
    team.close()


def step(team: Team) -> Callable[[], object]:
    """A step of a short and a long prefill, with its output head."""
    model = Checkpoint(config(num_layers=LAYERS), torch.float32).native(team)
    batch = Prompts(config().vocab_size, [30, 150]).batch({0: (0, 30), 1: (0, 150)})
    return lambda: model(batch)


def test_a_team_is_not_timed_until_it_is_asked_to(team: Team) -> None:
    step(team)()
    assert set(team.times().values()) == {KindTime(0, 0, 0)}
    assert tuple(team.times()) == KINDS


def test_every_phase_of_a_step_is_counted_under_its_kind(team: Team) -> None:
    run = step(team)
    team.time(True)
    for _ in range(3):
        run()
    counts = {kind: spent.num_phases for kind, spent in team.times().items()}
    assert {kind: counts[kind] for kind in PHASES} == {kind: 3 * count for kind, count in PHASES.items()}
    assert counts["other"] == 0


def test_times_are_within_that_of_the_calls_and_chunks_within_that_of_their_phases(team: Team) -> None:
    run = step(team)
    started = time.perf_counter_ns()
    team.time(True)
    for _ in range(10):
        run()
    wall_ns = time.perf_counter_ns() - started
    times = team.times()
    assert 0 < sum(spent.open_ns for spent in times.values()) <= wall_ns
    for spent in times.values():
        assert 0 <= spent.busy_ns <= team.num_threads * spent.open_ns
    assert all(times[kind].busy_ns > 0 for kind in PHASES)


def test_times_grow_while_it_is_on_stay_when_it_is_off_and_start_from_zero_again(team: Team) -> None:
    run = step(team)
    team.time(True)
    run()
    first = team.times()
    run()
    second = team.times()
    assert all(second[kind].open_ns > first[kind].open_ns for kind in PHASES)
    team.time(False)
    run()
    assert team.times() == second
    team.time(True)
    assert set(team.times().values()) == {KindTime(0, 0, 0)}


def test_a_product_of_its_own_is_the_head(team: Team) -> None:
    linear = NativeLinear(team, torch.ones(40, 8), None, torch.float32)
    team.time(True)
    linear(torch.ones(2, 8))
    assert [kind for kind, spent in team.times().items() if spent.num_phases] == ["head"]


def test_timing_does_not_change_a_bit(team: Team) -> None:
    run = step(team)
    plain = run()
    team.time(True)
    timed = run()
    assert isinstance(plain, torch.Tensor)
    assert isinstance(timed, torch.Tensor)
    assert torch.equal(plain, timed)
