"""The measurements of the native kernels."""

from __future__ import annotations

import pytest
import torch

from app.bench import kernels
from app.bench.measures import measure_fma, measure_linear
from engine.kernels.cpu.native import NativeUnavailable, Team, load_library


@pytest.fixture(scope="module")
def team() -> Team:
    try:
        return load_library(lambda _: None).start_team(2)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def test_measurements_are_numbers(team: Team) -> None:
    assert measure_fma(team) > 0
    assert measure_linear(team, 64, 64, 4, torch.float16, repeats=1) > 0


def test_every_case_runs(team: Team) -> None:
    config = kernels.SHAPES["demo"]
    decoder = kernels.random_decoder(team, config, torch.float16)
    for case in kernels.CASES[:3]:
        logits = decoder(kernels.make_batch(config, case))
        assert logits.shape == (case.sequences, config.vocab_size)
        assert logits.isfinite().all()
