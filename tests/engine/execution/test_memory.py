from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from penstock.engine.config import LoadOptions, ModelConfig
from penstock.engine.errors import NotEnoughMemory
from penstock.engine.execution.memory import (
    Budget,
    MemoryPlan,
    plan_memory,
    weight_bytes,
)
from penstock.engine.fields import Fields
from penstock.engine.kernels.ops import reference_kernels
from penstock.engine.model.parse import parse_config
from penstock.engine.model.tensors import Recipe
from penstock.engine.planning.windows import Windows
from penstock.engine.quant.quantization import Quantization
from penstock.engine.sizes import GIB
from tests.engine.checkpoints import make_config, random_tensors
from tests.engine.kernel_tables import stored_in

CONFIG = parse_config(Fields("config.json", make_config("llama")))
KERNELS = replace(
    reference_kernels(torch.device("cpu"), torch.float32),
    embedding_dtype=torch.float16,
    kv_dtype=torch.float32,
)
BLOCK = 3 * 2 * 2 * 16 * 16 * 4


def plan(available: int, config: ModelConfig = CONFIG, cap: int | None = None, **options: Any) -> MemoryPlan:
    return plan_memory(config, KERNELS, LoadOptions(**options), Budget(available, 0.25, cap)).check()


def test_weights_take_the_bytes_of_all_their_tensors() -> None:
    elements = sum(tensor.numel() for tensor in random_tensors(make_config("llama"), 0).values())
    assert weight_bytes(CONFIG, stored_in(torch.float16)) == 2 * elements
    assert weight_bytes(CONFIG, stored_in(torch.float32)) == 4 * elements


@pytest.mark.parametrize("tied", [True, False])
def test_quantized_weights_take_their_integers_scales_and_the_rest_in_16_bits(tied: bool) -> None:
    config = parse_config(
        Fields("config.json", make_config("llama", tie_word_embeddings=tied, intermediate_size=96))
    )
    hidden, inner, vocab = 64, 96, 512
    outputs = [(2 * hidden, hidden), (hidden, hidden), (2 * inner, hidden), (hidden, inner)]
    eight_bits = sum(rows * (columns + 4) for rows, columns in outputs)
    four_bits = sum(
        rows * (columns // 2 + 8 * columns // (32 if columns == 96 else 64)) for rows, columns in outputs
    )  # plain torch widens scales and offsets
    rest = 2 * (vocab * hidden + 7 * hidden) + vocab * (hidden + 4)  # embedding, norms; the head
    assert (
        weight_bytes(config, stored_in(torch.float16), Recipe(quantization=Quantization("int8")))
        == rest + 3 * eight_bits
    )
    assert (
        weight_bytes(config, stored_in(torch.float16), Recipe(quantization=Quantization("int4")))
        == rest + eight_bits + 2 * four_bits
    )


def test_a_plan_reckons_with_the_types_of_weights_and_cache() -> None:
    kernels = replace(KERNELS, kv_dtype=torch.int8)
    recipe = Recipe(quantization=Quantization("int8"))
    found = plan_memory(CONFIG, kernels, LoadOptions(num_blocks=9), Budget(GIB, 0.25), recipe=recipe)
    assert found.weights == weight_bytes(CONFIG, stored_in(torch.float16), recipe)
    assert found.block == 3 * 2 * 2 * 16 * (16 + 4)


def test_a_share_of_what_is_left_becomes_kv_cache() -> None:
    first = plan(GIB // 16, max_num_seqs=10_000)
    left = first.available - first.weights - first.workspace
    assert first.block == BLOCK
    assert first.num_blocks == left // 4 // BLOCK
    assert first.num_tokens == (first.num_blocks - 1) * 16


def test_no_more_than_could_ever_be_in_use() -> None:
    assert plan(8 * GIB, max_num_seqs=3, max_model_len=100).num_blocks == 1 + 3 * 7
    assert plan(8 * GIB, max_num_seqs=2).num_blocks == 1 + 2 * 32


def test_a_cap_holds_however_much_is_left() -> None:
    assert plan(64 * GIB, cap=100 * BLOCK, max_num_seqs=10_000).num_blocks == 100


def test_the_operators_number_of_blocks_or_bytes_is_taken() -> None:
    assert plan(GIB, num_blocks=7).num_blocks == 7
    assert plan(GIB, kv_bytes=50 * BLOCK).num_blocks == 50
    assert plan(GIB, kv_bytes=1).num_blocks == 33, "a sequence of all 512 positions, and block 0"


@pytest.mark.parametrize(
    ("available", "options"), [(100_000, {}), (1 << 30, {"num_blocks": 1 << 20}), (0, {})]
)
def test_what_does_not_fit_is_one_line_with_the_numbers(available: int, options: dict[str, Any]) -> None:
    with pytest.raises(
        NotEnoughMemory, match=r"not enough memory: weights .*, KV cache .*, of .* available"
    ) as caught:
        plan(available, **options)
    assert "\n" not in str(caught.value)


def test_the_report_has_every_number() -> None:
    text = MemoryPlan(
        weights=3 * GIB,
        workspace=1 << 20,
        block=1 << 20,
        num_blocks=2049,
        windows=Windows((0,), 16),
        chunk=512,
        available=10 * GIB,
    ).text
    assert text == (
        "weights 3.00 GiB, KV cache 2.00 GiB (32768 tokens), workspace 1.0 MiB, of 10.00 GiB available"
    )
