"""Attention alone: what a step has to compute and to read is counted, and its time is that of its phase."""

from __future__ import annotations

import pytest
import torch

from lab.bench.attention import AttentionBench
from penstock.engine.kernels.cpu.native import NativeUnavailable, load_library


@pytest.fixture(scope="module")
def bench() -> AttentionBench:
    try:
        team = load_library(print).start_team(2)
    except NativeUnavailable as error:
        pytest.skip(str(error))
    return AttentionBench(team, (4, 2, 16), torch.float16, 640)


def test_every_pair_of_tokens_counts_once(bench: AttentionBench) -> None:
    pairs = sum(position + 1 for position in range(600, 640))
    assert bench.flop(40, 640) == 4 * 4 * 16 * pairs


def test_every_key_and_value_is_read_once(bench: AttentionBench) -> None:
    assert bench.bytes(640) == 2 * 2 * 16 * 640 * 2


@pytest.mark.parametrize("tokens", [1, 40])
def test_a_step_takes_time(bench: AttentionBench, tokens: int) -> None:
    assert bench.median_s(tokens, 640, 0) > 0
