"""What a model would take, and the memory of a card as a table; no card is needed."""

from __future__ import annotations

import re

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from penstock.app.estimate import card_rows, card_table, estimate
from penstock.engine.config import LoadOptions
from penstock.engine.errors import CheckpointError
from penstock.engine.execution.memory import (
    DraftSize,
    GpuMemory,
    Measured,
    MemoryPlan,
    card_budget,
    plan_memory,
    weight_bytes,
)
from penstock.engine.fields import Fields
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.parse import parse_config
from penstock.engine.model.tensors import Recipe
from penstock.engine.quant.quantization import Quantization
from penstock.engine.sizes import GIB
from tests.engine.checkpoints import make_config
from tests.engine.kernel_tables import stored_in

CONFIG = parse_config(Fields("config.json", make_config("llama")))
KERNELS = reference_kernels(torch.device("cuda", 0), torch.bfloat16)


def plan(total: int, free_share: float, max_num_seqs: int) -> MemoryPlan:
    card = GpuMemory(total=total, free=int(total * free_share))
    measured, draft = Measured(resident=total // 8, workspace=total // 64), DraftSize(total // 128, 64)
    options = LoadOptions(max_num_seqs=max_num_seqs)
    return plan_memory(CONFIG, KERNELS, options, card_budget(card, 0.9), measured, draft=draft)


@pytest.mark.parametrize("kv_dtype", ["int8", "fp8"])
def test_an_estimate_needs_no_kernels_and_a_cache_in_fp8_is_one_in_int8(kv_dtype: str) -> None:
    options = LoadOptions(device="cpu", dtype="float16", quantize="int8", kv_dtype=kv_dtype)
    sizes = estimate(CONFIG, options)
    assert (sizes.dtype, sizes.kv_dtype) == ("float16", "int8")
    assert sizes.weights == weight_bytes(
        CONFIG, stored_in(torch.float16), Recipe(quantization=Quantization("int8"))
    )
    assert sizes.kv_of_a_token == 3 * 2 * 2 * (16 + 4)


def test_a_cache_of_4_bits_has_a_scale_of_16_bits_for_each_group() -> None:
    options = LoadOptions(device="cpu", dtype="float16", kv_dtype="int4")
    sizes = estimate(parse_config(Fields("config.json", make_config("mistral"))), options)
    assert sizes.kv_dtype == "int4"
    assert sizes.kv_of_a_token == 3 * 2 * 2 * (32 // 2 + 2 * 2)
    with pytest.raises(
        CheckpointError, match="--kv-dtype int4 is served for heads of a multiple of 32 numbers"
    ):
        estimate(CONFIG, options)


@given(st.integers(1, 1 << 38), st.floats(0.3, 1), st.integers(1, 300))
def test_the_rows_add_up_to_the_card(total: int, free_share: float, max_num_seqs: int) -> None:
    *parts, (name, size, _) = card_rows(plan(total, free_share, max_num_seqs))
    assert (name, size) == ("in all", total)
    assert sum(part for _, part, _ in parts) == total


def test_the_table_adds_up() -> None:
    made = plan(80 * GIB, 79 / 80, 256)
    lines = card_table(made)
    assert len({line.index("iB") for line in lines}) == 1, "in columns"
    names = [
        "in use before",
        "weights",
        "draft",
        "KV cache",
        "workspace",
        "tables",
        "graphs",
        "free",
        "in all",
    ]
    assert [line[12:25].strip() for line in lines] == names
    *parts, total = [
        float(found[1]) / (1 if found[2] == "G" else 1024)
        for line in lines
        if (found := re.search(r"([\d.]+) ([GM])iB", line))
    ]
    assert total == 80
    assert sum(parts) == pytest.approx(total, abs=0.05)
    assert f"{made.num_tokens} tokens" in lines[3]
