"""Paged attention on a GPU within what arithmetic allows: all kinds of batches, lengths that fill no tile."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from penstock.engine.config import LoadOptions
from penstock.engine.kernels.ops import Kernels
from penstock.engine.kernels.select import select
from tests.engine.kernels.random_inputs import AttentionInput, Lengths
from tests.engine.ranges import assert_within
from tests.gpu.cuda import DEVICE, DTYPES, config_of, needs_cuda, table

pytestmark = needs_cuda

HEADS = [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 1, 128), (4, 4, 80), (64, 8, 256)]
BATCHES: dict[str, Lengths] = {
    "one token of one": [(0, 1)],
    "decode, one long": [(20_002, 1)],
    "decode, lengths of all kinds": [(n, 1) for n in (0, 14, 15, 16, 126, 127, 128, 999, 4096, 1, 30)],
    "decode, many": [(99 + 7 * i, 1) for i in range(200)],
    "prefill": [(0, 1537)],
    "prefill of several": [(0, n) for n in (1, 5, 16, 63, 200, 333)],
    "the end of a prompt": [(4871, 129)],
    "the end of a long prompt, and a decode": [(699, 1), (3900, 1100)],
    "long chunks among others": [(0, 9), (0, 1200), (3000, 1), (549, 1500), (283, 17), (0, 1)],
    "mixed": [(699, 1), (0, 300), (0, 1), (2032, 17), (63, 1), (1, 128)],
    "drafts to be verified": [(n, 5) for n in (0, 1, 72, 1019, 2996)],
}


def input_of(
    lengths: Lengths,
    dtype: torch.dtype = torch.bfloat16,
    heads: tuple[int, int, int] = (32, 8, 128),
    block_size: int = 16,
    window: int = 0,
    kv_dtype: torch.dtype | None = None,
) -> AttentionInput:
    """A case on the GPU."""
    num_heads, num_kv_heads, head_dim = heads
    return AttentionInput(
        lengths=lengths,
        device=DEVICE,
        group=num_heads // num_kv_heads,
        num_kv_heads=num_kv_heads,
        head_dim=head_dim,
        block_size=block_size,
        dtype=dtype,
        window=window,
        kv_dtype=kv_dtype,
    )


def table_for(case: AttentionInput) -> Kernels:
    config = config_of(case.num_heads, case.num_kv_heads, case.head_dim, case.window)
    return table(config, case.dtype, case.block_size)


def attend(case: AttentionInput, kernels: Kernels) -> Tensor:
    attention = kernels.attention(case.batch, case.shape)
    return attention(case.queries.to(DEVICE), case.layer_kv, case.window, None, 0.0, None)


def check(case: AttentionInput) -> Tensor:
    found = attend(case, table_for(case))
    assert_within(found, case.expected())
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_every_kind_of_batch(dtype: torch.dtype, lengths: Lengths) -> None:
    check(input_of(lengths, dtype))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_every_kind_of_batch_with_a_quantized_cache(dtype: torch.dtype, lengths: Lengths) -> None:
    check(input_of(lengths, dtype, kv_dtype=torch.int8))


def test_what_is_chosen_for_the_card_can_be_used_at_once() -> None:
    case = input_of(BATCHES["long chunks among others"])
    said: list[str] = []
    options = LoadOptions(max_batch_tokens=2048)
    kernels = select(config_of(32, 8, 128), DEVICE, case.dtype, options, said.append)
    assert_within(attend(case, kernels), case.expected())
    assert said == []


@pytest.mark.parametrize("heads", HEADS, ids=str)
@pytest.mark.parametrize("name", ["mixed", "decode, lengths of all kinds"])
def test_every_shape_of_heads(heads: tuple[int, int, int], name: str) -> None:
    check(input_of(BATCHES[name], heads=heads))


@pytest.mark.parametrize("window", [1, 16, 100, 4096])
@pytest.mark.parametrize("name", ["mixed", "decode, lengths of all kinds", "prefill"])
def test_a_sliding_window(window: int, name: str) -> None:
    check(input_of(BATCHES[name], window=window))


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_of_any_size(block_size: int) -> None:
    check(input_of(BATCHES["mixed"], heads=(16, 8, 128), block_size=block_size))


def test_the_same_step_gives_the_same_bits() -> None:
    case = input_of(BATCHES["mixed"])
    first, kernels = check(case), table_for(case)
    assert all(torch.equal(attend(case, kernels), first) for _ in range(5))


def test_a_captured_step_follows_the_lengths_of_its_batch() -> None:
    """Captured with contexts of one token, replayed with others: no grid depends on what only the device knows."""
    case = input_of(BATCHES["decode, lengths of all kinds"])
    kernels, queries = table_for(case), case.queries.to(DEVICE)
    context_lens = torch.ones_like(case.batch.context_lens)
    batch = replace(case.batch, context_lens=context_lens)

    def run() -> Tensor:
        return kernels.attention(batch, case.shape)(queries, case.layer_kv, 0, None, 0.0, None)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    context_lens.copy_(case.batch.context_lens)
    graph.replay()
    assert_within(found, case.expected())
