"""The measurements of the native kernels."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.app.measures import INSTRUCTIONS, measure_linear, measure_memory, measure_peak
from penstock.engine.kernels.cpu.native import NativeUnavailable, Team, load_library


@pytest.fixture(scope="module")
def team() -> Team:
    try:
        return load_library(lambda _: None).start_team(2)
    except NativeUnavailable as error:
        pytest.skip(str(error))


def test_measurements_are_numbers(team: Team) -> None:
    assert measure_peak(team, "fma8") > 0
    assert measure_memory(team, rounds=1) > 0
    assert measure_linear(team, 64, 64, 4, torch.float16, repeats=1) > 0


def test_an_instruction_that_the_processor_lacks_has_no_rate(team: Team) -> None:
    flags = {
        "fma16": "avx512f",
        "pairs_bf16": "avx512_bf16",
        "vnni": "avx512_vnni",
        "tile_bf16": "amx_bf16",
        "tile_int8": "amx_int8",
        "bytes8": "avx2",
    }
    there = {instruction for instruction in INSTRUCTIONS if measure_peak(team, instruction) > 0}
    assert "fma8" in there
    assert {flags[instruction] for instruction in there - {"fma8"}} <= _processor_flags()
    if "tile_bf16" in there:  # a library that has tiles has all
        assert there == set(INSTRUCTIONS)


def _processor_flags() -> set[str]:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return set()
    return set(next((line for line in lines if line.startswith("flags")), "").split())
