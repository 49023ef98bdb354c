"""The measurements of the native kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from app.bench import kernels
from app.bench.measures import INSTRUCTIONS, measure_fma, measure_linear, measure_memory, measure_peak
from engine.kernels.cpu.native import NativeUnavailable, Team, load_library


@pytest.fixture(scope="module")
def team() -> Team:
    try:
        return load_library(lambda _: None).start_team(2)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def test_measurements_are_numbers(team: Team) -> None:
    assert measure_fma(team) > 0
    assert measure_memory(team, repeats=1) > 0
    assert measure_linear(team, 64, 64, 4, torch.float16, repeats=1) > 0


@pytest.mark.parametrize("instruction", INSTRUCTIONS)
def test_an_instruction_has_a_rate_where_the_processor_has_it(team: Team, instruction: str) -> None:
    flags = {"fma16": "avx512f", "vnni": "avx512_vnni", "tile_bf16": "amx_bf16", "tile_int8": "amx_int8"}
    is_there = instruction == "fma8" or flags[instruction] in _processor_flags()
    assert (measure_peak(team, instruction) > 0) == is_there


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())


def test_every_case_runs(team: Team) -> None:
    config = kernels.SHAPES["demo"]
    decoder = kernels.random_decoder(team, config, torch.float16)
    for case in kernels.CASES[:3]:
        logits = decoder(kernels.make_batch(config, case))
        assert logits.shape == (case.sequences, config.vocab_size)
        assert logits.isfinite().all()
