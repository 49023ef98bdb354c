"""How keys and values share their memory with the states of sequences and snapshots."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import NotEnoughMemory
from penstock.engine.execution.memory import SMALLEST_STATES, Budget, MemoryPlan, plan_memory
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.kernels.state_cache import StateLayout
from penstock.engine.model.parse import read_config
from penstock.engine.sizes import GIB
from tests.engine.families import STATES
from tests.few import examples

KERNELS = reference_kernels(torch.device("cpu"), torch.float32)
SMALLEST_BLOCKS = 1 + 512 // 16
"""Of the 512 positions that these models have."""


@pytest.fixture(scope="module")
def config(tmp_path_factory: pytest.TempPathFactory) -> ModelConfig:
    return read_config(STATES["Qwen 3.5"].make(tmp_path_factory.mktemp("states")))


def plan(config: ModelConfig, options: LoadOptions, available: int = GIB) -> MemoryPlan:
    return plan_memory(config, KERNELS, options, Budget(available, 1.0))


@settings(max_examples=examples(200))
@given(st.integers(0, 1 << 27), st.integers(1, 300))
def test_keys_and_states_have_half_each_and_what_the_other_has_no_use_for(
    config: ModelConfig, limit: int, max_num_seqs: int
) -> None:
    found = plan(config, LoadOptions(device="cpu", max_num_seqs=max_num_seqs, kv_bytes=limit))
    most_states, most_blocks = 1 + 4 * max(8, max_num_seqs), 1 + 32 * max_num_seqs
    assert SMALLEST_STATES <= found.num_states <= most_states
    assert SMALLEST_BLOCKS <= found.num_blocks <= most_blocks
    is_smallest = found.num_states == SMALLEST_STATES or found.num_blocks == SMALLEST_BLOCKS
    assert found.kv + found.states <= limit or is_smallest
    assert found.num_states == most_states or found.kv + found.states + found.state > limit
    assert found.num_states == most_states or found.states + found.state > limit // 2 or is_smallest
    assert found.num_blocks == most_blocks or found.kv + found.block > limit // 2


@pytest.mark.parametrize("num_blocks", [2, 5000, 9000])
def test_states_have_what_the_operators_blocks_leave(config: ModelConfig, num_blocks: int) -> None:
    limit = 40 << 20
    found = plan_memory(config, KERNELS, LoadOptions(num_blocks=num_blocks), Budget(GIB, 1.0, limit))
    assert found.num_blocks == num_blocks
    assert found.num_states == max(SMALLEST_STATES, (limit - num_blocks * found.block) // found.state)


def test_a_slot_has_a_state_and_rows_behind_it(config: ModelConfig) -> None:
    slots = [plan(config, LoadOptions(max_drafts=drafts)).state for drafts in (0, 8)]
    assert slots == [StateLayout.of(config, 8).slot_bytes] * 2


def test_what_is_planned_is_told_and_counted(config: ModelConfig) -> None:
    found = plan(config, LoadOptions(device="cpu", num_blocks=9, max_num_seqs=10))
    assert found.num_states == 41
    assert found.needed == found.weights + found.kv + found.states + found.workspace
    assert ", states 2.0 MiB (40 of 0.0 MiB), workspace" in found.text
    with pytest.raises(NotEnoughMemory, match=r"states 0\.4 MiB \(8 of 0\.0 MiB\)"):
        plan(config, LoadOptions(device="cpu"), 1 << 20).check()


def test_a_model_of_attention_alone_has_no_slots(config: ModelConfig) -> None:
    layers = tuple(layer for layer in config.layers if layer.attention is not None)
    dense = replace(config, spec=replace(config.spec, layers=layers))
    found = plan(dense, LoadOptions(device="cpu"))
    assert (found.state, found.num_states) == (0, 0)
    assert "states" not in found.text


def test_a_model_without_keys_and_values_has_blocks_for_a_million_tokens(tmp_path: Path) -> None:
    """They take no memory on the device, and some on the host."""
    config = read_config(STATES["Mamba 2"].make(tmp_path))
    found = plan(replace(config, max_position=1 << 18), LoadOptions(device="cpu", kv_bytes=1 << 22))
    assert (found.block, found.num_blocks) == (0, 1 << 16)
    assert found.states <= 1 << 22 < found.states + found.state
