"""Paged attention on a GPU against plain torch in float32: all kinds of batches, lengths that fill no tile."""

from __future__ import annotations

from random import Random

import pytest
import torch
from torch import Tensor

from engine.kernels import gathered
from engine.kernels.batch import Batch
from engine.kernels.gathered import CUDNN, FLASH, ContiguousBackend, LongPrefillBackends
from engine.kernels.kv_cache import KVCache, KVShape
from engine.kernels.select import select
from engine.model.config import LoadOptions, ModelConfig
from tests.gpu.cuda import DEVICE, DTYPES, assert_close, both, needs_cuda
from tests.gpu.test_layers import config_of

pytestmark = needs_cuda

Lengths = list[tuple[int, int]]
"""Of each sequence its context, this step's tokens included, and how many these are."""

HEADS = [(32, 8, 128), (16, 8, 128), (9, 3, 64), (8, 1, 128), (4, 4, 80), (64, 8, 256)]
BATCHES: dict[str, Lengths] = {
    "one token of one": [(1, 1)],
    "decode, one long": [(20_003, 1)],
    "decode, lengths of all kinds": [(n, 1) for n in (1, 15, 16, 17, 127, 128, 129, 1000, 4097, 2, 31)],
    "decode, many": [(100 + 7 * i, 1) for i in range(200)],
    "prefill": [(1537, 1537)],
    "prefill of several": [(n, n) for n in (1, 5, 16, 63, 200, 333)],
    "the end of a prompt": [(5000, 129)],
    "mixed": [(700, 1), (300, 300), (1, 1), (2049, 17), (64, 1), (129, 128)],
    "drafts to be verified": [(n, 5) for n in (5, 6, 77, 1024, 3001)],
}


LONG_BATCHES: dict[str, Lengths] = {
    "a prompt": [(1537, 1537)],
    "the end of a prompt, and a decode": [(700, 1), (5000, 1100)],
    "long ones among others": [(9, 9), (1200, 1200), (3001, 1), (2049, 1500), (300, 17), (1, 1)],
}


class Step:
    """Random keys, values and queries; the cache in the layout of each table."""

    def __init__(
        self, config: ModelConfig, lengths: Lengths, dtype: torch.dtype, block_size: int = 16
    ) -> None:
        self.shape = KVShape(
            num_layers=1, num_kv_heads=config.num_kv_heads, head_dim=config.head_dim, block_size=block_size
        )
        per_sequence = [-(-context // block_size) for context, _ in lengths]
        blocks = list(range(1, 1 + sum(per_sequence)))
        Random(0).shuffle(blocks)
        tables = torch.zeros(len(lengths), max(per_sequence), dtype=torch.int32)
        for row, count in enumerate(per_sequence):
            tables[row, :count] = torch.tensor([blocks.pop() for _ in range(count)], dtype=torch.int32)
        starts = torch.tensor([0, *(num for _, num in lengths)], dtype=torch.int32).cumsum(
            0, dtype=torch.int32
        )
        positions = torch.cat(
            [torch.arange(context - num, context, dtype=torch.int32) for context, num in lengths]
        )
        self.batch = Batch(
            token_ids=torch.zeros_like(positions),
            positions=positions,
            query_starts=starts,
            context_lens=torch.tensor([context for context, _ in lengths], dtype=torch.int32),
            block_tables=tables,
            sample_rows=starts[1:] - 1,
            host_lengths=[(num, context) for context, num in lengths],
        ).to(DEVICE)
        generator = torch.Generator(DEVICE).manual_seed(0)
        self.kv = KVCache(self.shape, 1 + sum(per_sequence), dtype, DEVICE)
        self.kv.data.normal_(generator=generator)
        size = (positions.numel(), config.num_heads, config.head_dim)
        self.queries = torch.randn(size, device=DEVICE, generator=generator).to(dtype)


def check(config: ModelConfig, step: Step, dtype: torch.dtype, window: int = 0) -> Tensor:
    kernels, reference = both(config, dtype, step.shape.block_size)
    found = kernels.attention(step.batch, step.shape)(step.queries, step.kv.layer(0), window)
    layer = step.kv.layer(0).float()
    expected = reference.attention(step.batch, step.shape)(step.queries.float(), layer, window)
    assert_close(found, expected, dtype)
    return found


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
def test_every_kind_of_batch(dtype: torch.dtype, lengths: Lengths) -> None:
    config = config_of(32, 8, 128)
    check(config, Step(config, lengths, dtype), dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("backends", [(FLASH, FLASH), (CUDNN, None)], ids=["flash", "cuDNN"])
@pytest.mark.parametrize("lengths", LONG_BATCHES.values(), ids=LONG_BATCHES)
def test_long_chunks_by_torch(
    lengths: Lengths, backends: tuple[ContiguousBackend, ContiguousBackend | None], dtype: torch.dtype
) -> None:
    config = config_of(32, 8, 128)
    step = Step(config, lengths, dtype)
    kernels, reference = both(config, dtype)
    first, later = backends
    attend = gathered.prepare_attention(
        step.batch,
        step.shape,
        prepare_paged=kernels.attention,
        backends=LongPrefillBackends(min_queries=1024, first_chunk=first, later_chunk=later),
    )
    found = attend(step.queries, step.kv.layer(0), 0)
    layer = step.kv.layer(0).float()
    expected = reference.attention(step.batch, step.shape)(step.queries.float(), layer, 0)
    assert_close(found, expected, dtype)


def test_the_fastest_way_is_found_on_the_card() -> None:
    """Whichever it is: nothing fails, and what is chosen can be used at once."""
    config = config_of(32, 8, 128)
    said: list[str] = []
    kernels = select(config, DEVICE, torch.bfloat16, LoadOptions(max_batch_tokens=2048), said.append)
    step = Step(config, LONG_BATCHES["long ones among others"], torch.bfloat16)
    found = kernels.attention(step.batch, step.shape)(step.queries, step.kv.layer(0), 0)
    expected = check(config, step, torch.bfloat16)
    assert_close(found, expected, torch.bfloat16)
    assert len(said) <= 1


@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_every_shape_of_heads(heads: tuple[int, int, int]) -> None:
    config = config_of(*heads)
    for name in ("mixed", "decode, lengths of all kinds"):
        check(config, Step(config, BATCHES[name], torch.bfloat16), torch.bfloat16)


@pytest.mark.parametrize("window", [1, 16, 100, 4096])
@pytest.mark.parametrize("name", ["mixed", "decode, lengths of all kinds", "prefill"])
def test_a_sliding_window(window: int, name: str) -> None:
    config = config_of(32, 8, 128, window)
    check(config, Step(config, BATCHES[name], torch.bfloat16), torch.bfloat16, window)


@pytest.mark.parametrize("block_size", [16, 32, 64])
def test_blocks_of_any_size(block_size: int) -> None:
    config = config_of(16, 8, 128)
    check(config, Step(config, BATCHES["mixed"], torch.bfloat16, block_size), torch.bfloat16)


def test_the_same_step_gives_the_same_bits() -> None:
    config = config_of(32, 8, 128)
    step = Step(config, BATCHES["mixed"], torch.bfloat16)
    first = check(config, step, torch.bfloat16)
    assert all(torch.equal(check(config, step, torch.bfloat16), first) for _ in range(5))


def test_a_captured_step_follows_the_lengths_of_its_batch() -> None:
    """Captured with contexts of one token, replayed with others: no grid depends on what only the device knows."""
    config = config_of(32, 8, 128)
    step = Step(config, BATCHES["decode, lengths of all kinds"], torch.bfloat16)
    kernels, reference = both(config, torch.bfloat16)
    real = step.batch.context_lens.clone()
    step.batch.context_lens.fill_(1)

    def run() -> Tensor:
        return kernels.attention(step.batch, step.shape)(step.queries, step.kv.layer(0), 0)

    run()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    step.batch.context_lens.copy_(real)
    graph.replay()
    layer = step.kv.layer(0).float()
    expected = reference.attention(step.batch, step.shape)(step.queries.float(), layer, 0)
    assert_close(found, expected, torch.bfloat16)
