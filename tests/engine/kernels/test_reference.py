from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from penstock.engine.kernels import reference
from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVCache, KVLayout, KVShape, is_quantized
from penstock.engine.kernels.linear import DenseLinear
from penstock.engine.kernels.reference import (
    PagedAttention,
    TokenPlaces,
    add_rms_norm,
    glu,
    kv_places,
    quantize_groups,
    quantize_kv,
    rms_norm,
    rotary,
    rotate_and_write,
    spread_back,
    write_kv,
)
from tests.engine import ranges
from tests.engine.ranges import assert_within, concatenated, exactly
from tests.few import examples

CPU = torch.device("cpu")
HEADS, KV_HEADS, HEAD_DIM, BLOCK_SIZE = 4, 2, 8, 4
SHAPE = KVShape(num_kv_heads=KV_HEADS, head_dim=HEAD_DIM, block_size=BLOCK_SIZE)

SEQUENCES = st.lists(st.tuples(st.integers(0, 12), st.integers(1, 9)), min_size=1, max_size=6)
"""(tokens computed before, tokens of this step)"""


def int32(values: list[int]) -> Tensor:
    return torch.tensor(values, dtype=torch.int32)


def make_batch(sequences: list[tuple[int, int]]) -> Batch:
    """Sequences in blocks of their own, dealt out backwards so that no block is where its number suggests."""
    positions: list[int] = []
    starts, tables, free = [0], [], 1000
    width = max(-(-(done + new) // BLOCK_SIZE) for done, new in sequences)
    for done, new in sequences:
        starts.append(starts[-1] + new)
        positions += range(done, done + new)
        num_blocks = -(-(done + new) // BLOCK_SIZE)
        tables.append([free - i for i in range(num_blocks)] + [0] * (width - num_blocks))
        free -= num_blocks
    return Batch(
        token_ids=int32([0] * starts[-1]),
        positions=int32(positions),
        query_starts=int32(starts),
        context_lens=int32([done + new for done, new in sequences]),
        block_tables=torch.tensor(tables, dtype=torch.int32),
        sample_rows=int32([]),
    )


@pytest.mark.parametrize("bound", [1, reference.MAX_TILE_ELEMENTS])
@given(
    sequences=SEQUENCES,
    window=st.sampled_from([0, 1, 3, 7, -3, -8]),
    has_sinks=st.booleans(),
    first=st.sampled_from([0, 1, 3]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=examples(60))
def test_paged_attention_is_dense_attention(
    bound: int, sequences: list[tuple[int, int]], window: int, has_sinks: bool, first: int, seed: int
) -> None:
    generator = torch.Generator().manual_seed(seed)
    batch, kv = make_batch(sequences), KVCache(KVLayout.even(SHAPE, 1), 1001, torch.float32, CPU)
    kv.data.uniform_(-50, 50, generator=generator)  # what nobody wrote must not matter
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(reference, "MAX_TILE_ELEMENTS", bound)
        patch.setattr(reference, "MAX_QUERIES", 4)
        attention = PagedAttention(batch, SHAPE)
    expected, queries = [], torch.randn(len(batch.positions), HEADS, HEAD_DIM, generator=generator)
    sinks = torch.randn(HEADS, generator=generator) if has_sinks else None
    for row, (done, new) in enumerate(sequences):
        keys, values = torch.randn(2, done + new, KV_HEADS, HEAD_DIM, generator=generator)
        write_kv(kv.layer(0), keys, values, own_slots(batch, row, done + new))
        start = int(batch.query_starts[row])
        expected.append(ranges.attention(queries[start : start + new], keys, values, window, sinks, first))
    found = attention(queries, kv.layer(0), window, sinks=sinks, first=first)
    assert_within(found, concatenated(expected, 0))


def own_slots(batch: Batch, row: int, num_tokens: int) -> Tensor:
    table = batch.block_tables[row].tolist()
    return torch.tensor([table[p // BLOCK_SIZE] * BLOCK_SIZE + p % BLOCK_SIZE for p in range(num_tokens)])


@given(SEQUENCES)
def test_slots_follow_the_block_tables(sequences: list[tuple[int, int]]) -> None:
    batch = make_batch(sequences)
    expected = [own_slots(batch, row, done + new)[done:] for row, (done, new) in enumerate(sequences)]
    assert kv_places(batch, BLOCK_SIZE).tolist() == torch.cat(expected).tolist()


def test_rows_that_pad_a_batch_have_no_slot() -> None:
    """Padding is past the last sequence, of sequences without rows, or at a negative position."""
    batch = make_batch([(2, 2), (0, 1), (7, 1)])
    slots = kv_places(batch, BLOCK_SIZE).tolist()
    batch.positions = torch.cat((batch.positions, int32([3, 90])))
    batch.positions[1] = -1
    batch.query_starts = torch.cat((batch.query_starts, batch.query_starts[-1:].expand(2)))
    batch.block_tables = torch.cat((batch.block_tables, torch.zeros(2, 2, dtype=torch.int32)))
    assert kv_places(batch, BLOCK_SIZE).tolist() == [slots[0], -1, *slots[2:], -1, -1]


def test_keys_and_values_land_in_their_slots_and_nowhere_else() -> None:
    kv = KVCache(KVLayout.even(SHAPE, 1), 4, torch.float32, CPU)
    keys, values = torch.randn(2, 4, KV_HEADS, HEAD_DIM)
    write_kv(kv.layer(0), keys, values, torch.tensor([5, 15, 8, -1]))
    blocks = kv.data.view(2, 4, KV_HEADS, BLOCK_SIZE, HEAD_DIM).clone()
    for row, (block, offset) in enumerate([(1, 1), (3, 3), (2, 0)]):
        assert torch.equal(blocks[0, block, :, offset], keys[row])
        assert torch.equal(blocks[1, block, :, offset], values[row])
        blocks[:, block, :, offset] = 0
    assert not blocks.any()


def test_integers_land_in_their_slots_and_their_scales_behind_them() -> None:
    """The layout of an int8 cache, byte by byte: [heads, tokens, head_dim] integers, then [heads, tokens] float32."""
    kv = KVCache(KVLayout.even(SHAPE, 1), 4, torch.int8, CPU)
    keys, values = torch.randn(2, 3, KV_HEADS, HEAD_DIM)
    keys[1, 0] = 0
    write_kv(kv.layer(0), keys, values, torch.tensor([5, -1, 15]))
    num_integers = KV_HEADS * BLOCK_SIZE * HEAD_DIM
    for side, written in enumerate((keys, values)):
        expected = torch.zeros(4, kv.data.shape[-1], dtype=torch.int8).numpy()
        for row, block, offset in [(0, 1, 1), (2, 3, 3)]:
            integers = expected[block, :num_integers].reshape(KV_HEADS, BLOCK_SIZE, HEAD_DIM)
            scales = expected[block, num_integers:].view("float32").reshape(KV_HEADS, BLOCK_SIZE)
            for head in range(KV_HEADS):
                x = written[row, head].numpy()
                scales[head, offset] = abs(x).max() / 127
                integers[head, offset] = (x / scales[head, offset]).round()
        assert torch.equal(kv.data[0, side], torch.from_numpy(expected))


def test_a_head_of_zeros_has_no_scale_and_what_is_no_number_stays_none() -> None:
    x = torch.zeros(2, 1, HEAD_DIM)
    x[1, 0, 3] = torch.nan
    integers, scale = quantize_kv(x)
    assert not integers.any()
    assert scale[0] == 0
    assert scale[1].isnan()


def test_numbers_of_4_bits_lie_in_pairs_and_the_scales_of_groups_behind_them() -> None:
    """The layout of an int4 cache: bytes [heads, tokens, head_dim / 2], then float16 [heads, tokens, groups]."""
    shape = KVShape(num_kv_heads=2, head_dim=96, block_size=4)  # halves of 48 have groups of 16
    kv = KVCache(KVLayout.even(shape, 1), 4, torch.uint8, CPU)
    keys, values = torch.randn(2, 3, 2, 96)
    keys[2, 0, :16] = 0
    keys[2, 0, 16:18] = torch.tensor([-80.0, 80.0])  # the numbers end at -8 and 7
    write_kv(kv.layer(0), keys, values, torch.tensor([5, -1, 15]))
    num_bytes = 2 * 4 * 48
    for side, written in enumerate((keys, values)):
        expected = torch.zeros(4, kv.data.shape[-1], dtype=torch.uint8).numpy()
        for row, block, offset in [(0, 1, 1), (2, 3, 3)]:
            pairs = expected[block, :num_bytes].reshape(2, 4, 48)
            scales = expected[block, num_bytes:].view("float16").reshape(2, 4, 6)
            for head, group in itertools.product(range(2), range(6)):
                x = written[row, head, 16 * group : 16 * group + 16].numpy()
                scale = np.float32(max(x, key=lambda number: (abs(number), number)) / -8).astype("float16")
                numbers = 8 + (np.clip((x / np.float32(scale)).round(), -8, 7) if scale else 0 * x)
                scales[head, offset, group] = scale
                pairs[head, offset, 8 * group : 8 * group + 8] = numbers[::2] + 16 * numbers[1::2]
        assert torch.equal(kv.data[0, side], torch.from_numpy(expected))


def test_a_group_of_zeros_stays_so_and_what_is_no_number_or_too_large_for_its_scale_becomes_none() -> None:
    x = torch.zeros(3, 1, 64)
    x[1, 0, 3], x[2, 0, 40] = torch.nan, 1e6
    numbers, scales = quantize_groups(x, 32)
    read = (numbers * scales.unsqueeze(-1)).flatten(-2)
    assert not read[0].any()
    assert read.isnan().nonzero().tolist() == [[1, 0, i] for i in range(32)] + [
        [2, 0, i] for i in range(32, 64)
    ]


def test_attention_to_4_bits_is_within_their_error_of_exact_attention() -> None:
    """A step of 4 bits is an eighth of the largest number of 32, which is about 2.5 deviations."""
    shape, num_tokens = KVShape(num_kv_heads=2, head_dim=128, block_size=16), 48
    generator = torch.Generator().manual_seed(0)
    heads = torch.randn(num_tokens, 8, 128, generator=generator)
    batch = make_batch([(0, num_tokens)])
    batch.block_tables = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    angles = torch.zeros(num_tokens, 64)
    places = TokenPlaces(batch.positions, kv_places(batch, 16), angles.cos(), angles.sin())
    found = {}
    for dtype in (torch.float32, torch.uint8, torch.int8):
        kv = KVCache(KVLayout.even(shape, 1), 4, dtype, CPU)
        spreads = is_quantized(dtype)
        turned = rotate_and_write(
            heads.flatten(1), None, None, 0.0, places, kv.layer(0), shape, spreads=spreads
        )
        found[dtype] = PagedAttention(batch, shape)(turned, kv.layer(0), 0)
    exact = found.pop(torch.float32)
    in_4, in_8 = ((each - exact).norm() / exact.norm() for each in found.values())
    assert 0.05 < in_4 < 0.15
    assert in_8 < in_4 / 8


@pytest.mark.parametrize("dtype", [torch.int8, torch.uint8])
@pytest.mark.parametrize("block_size", [1, 3, 16])
def test_attention_reads_what_a_quantized_cache_stands_for(block_size: int, dtype: torch.dtype) -> None:
    head_dim = 96 if dtype == torch.uint8 else 6
    shape = KVShape(num_kv_heads=1, head_dim=head_dim, block_size=block_size)
    num_tokens = 5
    keys, values = torch.randn(2, num_tokens, 1, head_dim)
    queries = torch.randn(num_tokens, 2, head_dim)
    num_blocks = -(-num_tokens // block_size)
    batch = make_batch([(0, num_tokens)])
    batch.block_tables = torch.arange(1, 1 + num_blocks, dtype=torch.int32).unsqueeze(0)
    found = []
    for stored in (dtype, torch.float32):
        kv = KVCache(KVLayout.even(shape, 1), 1 + num_blocks, stored, CPU)
        written = [keys, values]
        if stored == torch.float32 and dtype == torch.int8:
            numbers = [quantize_kv(each) for each in written]
            written = [scale.unsqueeze(-1) * number for number, scale in numbers]
        elif stored == torch.float32:
            groups = [quantize_groups(each, 16) for each in written]
            written = [(scale.unsqueeze(-1) * number).flatten(-2) for number, scale in groups]
        write_kv(kv.layer(0), written[0], written[1], kv_places(batch, block_size))
        attended = PagedAttention(batch, shape)(queries, kv.layer(0), 0)
        is_plain = dtype == torch.uint8 and stored == torch.float32
        found.append(spread_back(attended.view(5, 2, head_dim)).flatten(1) if is_plain else attended)
    assert torch.equal(*found)


def test_channels_of_keys_that_stand_out_leave_bits_to_the_others() -> None:
    """Two channels of keys are 50 times the rest: only spread keys keep what integers of 8 bits can tell of scores."""
    shape, num_tokens = KVShape(num_kv_heads=1, head_dim=64, block_size=16), 48
    generator = torch.Generator().manual_seed(0)
    queries, keys, values = torch.randn(3, num_tokens, 1, 64, generator=generator)
    keys[..., [5, 40]] = 50 + keys[..., [5, 40]] / 50
    queries[..., [5, 40]] /= 50
    qkv = torch.cat([queries, keys, values], 1).flatten(1)
    batch = make_batch([(0, num_tokens)])
    batch.block_tables = torch.tensor([[1, 2, 3]], dtype=torch.int32)
    angles = torch.zeros(num_tokens, 32)
    places = TokenPlaces(batch.positions, kv_places(batch, 16), angles.cos(), angles.sin())
    attended = {}
    for dtype, spreads in ((torch.float32, False), (torch.int8, False), (torch.int8, True)):
        kv = KVCache(KVLayout.even(shape, 1), 4, dtype, CPU)
        turned = rotate_and_write(qkv, None, None, 0.0, places, kv.layer(0), shape, spreads=spreads)
        attended[dtype, spreads] = PagedAttention(batch, shape)(turned, kv.layer(0), 0)
    exact = attended.pop((torch.float32, False))
    plain, spread = ((found - exact).norm() / exact.norm() for found in attended.values())
    assert plain > 0.06, spread
    assert spread < 0.02


@pytest.mark.parametrize("norms", [False, True])
def test_queries_and_keys_are_normed_and_rotated_and_values_are_not(norms: bool) -> None:
    kv, num_tokens = KVCache(KVLayout.even(SHAPE, 1), 3, torch.float32, CPU), 3
    queries = torch.randn(num_tokens, HEADS, HEAD_DIM)
    keys, values = torch.randn(2, num_tokens, KV_HEADS, HEAD_DIM)
    q_norm, k_norm = torch.rand(2, HEAD_DIM) if norms else (None, None)
    angles = torch.randn(9, HEAD_DIM // 2)
    places = TokenPlaces(int32([8, 0, 3]), torch.tensor([4, 11, 6]), angles.cos(), angles.sin())
    qkv = torch.cat([part.flatten(1) for part in (queries, keys, values)], dim=1)
    found = rotate_and_write(qkv, q_norm, k_norm, 1e-6, places, kv.layer(0), SHAPE)
    if q_norm is not None and k_norm is not None:
        queries, keys = rms_norm(queries, q_norm, 1e-6), rms_norm(keys, k_norm, 1e-6)
    cos, sin = places.cos[[8, 0, 3]], places.sin[[8, 0, 3]]
    assert torch.equal(found, rotary(queries, cos, sin))
    expected = KVCache(KVLayout.even(SHAPE, 1), 3, torch.float32, CPU)
    write_kv(expected.layer(0), rotary(keys, cos, sin), values, places.in_cache)
    assert torch.equal(kv.data, expected.data)


def test_rotary_turns_pairs_as_complex_numbers_turn() -> None:
    x, angles = torch.randn(5, 3, HEAD_DIM), torch.randn(5, HEAD_DIM // 2)
    cos, sin = angles.cos(), angles.sin()
    pairs = torch.complex(*x.double().chunk(2, dim=-1)) * torch.complex(cos.double(), sin.double())[:, None]
    expected = ranges.rotary(exactly(x), cos, sin)
    assert_within(torch.cat((pairs.real, pairs.imag), -1), expected)
    assert_within(rotary(x, cos, sin), expected)


def test_rms_norm_makes_the_mean_square_one() -> None:
    x = 100 * torch.randn(4, 3, 64)
    normed = rms_norm(x, torch.ones(64), 0.0)
    assert_within(normed, ranges.rms_norm(exactly(x), torch.ones(64), 0.0))
    mean_square = normed.double().square().mean(-1)
    assert (mean_square - 1).abs().max() < 2 * ranges.gamma(64 // 2 + ranges.FUNCTION + 5)
    assert torch.equal(rms_norm(x, torch.full((64,), 2.0), 0.0), 2 * normed)
    assert rms_norm(torch.zeros(1, 64), torch.ones(64), 1e-6).eq(0).all()


def test_rms_norm_of_half_precision_is_computed_in_float32() -> None:
    x = torch.full((1, 64), 300.0, dtype=torch.float16)  # 300 squared is beyond float16
    assert rms_norm(x, torch.ones(64, dtype=torch.float16), 0.0).tolist() == [[1.0] * 64]


def test_the_residual_stream_is_normed_with_what_is_added_to_it() -> None:
    hidden, delta = torch.randn(2, 3, 64, dtype=torch.float16)
    weight = torch.rand(64, dtype=torch.float16)
    total, normed = add_rms_norm(hidden, delta, weight, 1e-6)
    assert torch.equal(total, hidden + delta)
    assert torch.equal(normed, rms_norm(hidden + delta, weight, 1e-6))


def test_glu_gates_the_second_half_with_the_first() -> None:
    gate, up = torch.randn(2, 4, 6)
    assert_within(glu(torch.cat((gate, up), -1)), ranges.silu_mul(exactly(gate), exactly(up)))


def test_linear_is_a_matrix_and_a_bias() -> None:
    weight, bias, x = torch.randn(3, 5), torch.randn(3), torch.randn(2, 4, 5)
    assert_within(DenseLinear(weight, bias)(x), ranges.linear(exactly(x), weight, bias))
    assert_within(DenseLinear(weight, None)(x), ranges.linear(exactly(x), weight))
