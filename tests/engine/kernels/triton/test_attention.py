"""Paged attention by Triton against attention written down query by query, on shapes that fit nothing."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from triton.runtime.interpreter import interpreter_builder

from penstock.engine.kernels.batch import Batch
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.reference import PagedAttention, write_kv
from penstock.engine.kernels.triton import attention
from penstock.engine.kernels.triton import attention_segments as segmenting
from penstock.engine.kernels.triton import attention_tiling as tilings
from penstock.engine.kernels.triton.attention import TritonAttention, Workspace
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from tests.engine.kernels import random_inputs
from tests.engine.kernels.random_inputs import Lengths, int32
from tests.engine.ranges import assert_within
from tests.few import examples

pytestmark = pytest.mark.combinations("combinations of what Triton's kernels take")

DTYPES = [torch.float32, torch.float16] + [torch.bfloat16] * torch.cuda.is_available()
"""The interpreter computes bfloat16 wrongly."""


@pytest.fixture(scope="module", autouse=True)
def _small_tiles() -> Iterator[None]:
    """Tiles of 16 tokens and 16 rows, so that short contexts have many."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tilings, "TILE_BYTES", 1)
        patch.setattr(tilings, "PREFILL_ROWS", 32)
        patch.setattr(segmenting, "MIN_SEGMENT_TILES", 1)
        patch.setattr(segmenting, "REDUCED_ELEMENTS", 1)
        yield


class AttentionInput(random_inputs.AttentionInput):
    """A case that Triton's kernels attend."""

    def workspace(self, **changes: Any) -> Workspace:
        options: dict[str, Any] = {"windows": (self.window,), "chip": Chip(num_sms=8)}
        options["is_quantized"] = self.kv_dtype is not None
        num_heads, slots = self.num_kv_heads * self.group, len(self.lengths) + 1
        return Workspace(self.shape, self.dtype, num_heads, slots, self.device, **options | changes)

    def attend(self, workspace: Workspace | None = None, max_queries: int | None = None) -> Tensor:
        workspace = workspace or self.workspace()
        attend = TritonAttention(replace(self.batch, max_query_len=max_queries), self.shape, workspace)
        queries = self.queries.to(self.device)
        attended = attend(queries, self.layer_kv, self.window, sinks=self.sinks, first=self.first).cpu()
        assert not workspace.num_stored.any()
        return attended

    def check(self, workspace: Workspace | None = None, max_queries: int | None = None) -> None:
        assert_within(self.attend(workspace, max_queries), self.expected())


MIXED: Lengths = [(0, 5), (37, 1), (9, 11), (40, 2), (0, 1)]
DECODE: Lengths = [(70, 1), (3, 1), (31, 1)]


@pytest.mark.parametrize("group", [1, 2, 4, 7, 8])
@pytest.mark.parametrize("lengths", [MIXED, DECODE], ids=["mixed", "decode"])
def test_heads_share_keys_and_values_in_groups(group: int, lengths: Lengths, device: torch.device) -> None:
    AttentionInput(lengths=lengths, group=group, device=device).check()


@pytest.mark.parametrize("lengths", [[(0, 17), (9, 21), (40, 18)], [(0, 17)]], ids=str)
def test_prompts_alone_need_no_kernel_of_decodes(
    lengths: Lengths, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    case = AttentionInput(lengths=lengths, device=device)
    with_decodes = case.attend()
    monkeypatch.setattr(attention, "decode_attention_kernel", None)
    case.batch.min_query_len = min(num for _, num in lengths)
    assert torch.equal(case.attend(), with_decodes)
    case.batch.min_query_len = 1
    with pytest.raises(TypeError):
        case.attend()


def test_more_heads_in_a_group_than_a_tile_has_rows(device: torch.device) -> None:
    AttentionInput(lengths=[(20, 1), (3, 6)], group=20, num_kv_heads=1, device=device).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("head_dim", [8, 64, 80, 96, 128, 256])
def test_heads_of_all_sizes(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    AttentionInput(
        lengths=[(17, 1), (3, 15)], head_dim=head_dim, num_kv_heads=1, dtype=dtype, device=device
    ).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {},
        {"head_dim": 80, "num_kv_heads": 1, "block_size": 32},
        {"head_dim": 128, "num_kv_heads": 1, "window": 20},
    ],
)
def test_scales_of_a_quantized_cache_belong_to_scores_and_weights(
    shape: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    for lengths in (MIXED, DECODE):
        AttentionInput(lengths=lengths, dtype=dtype, kv_dtype=torch.int8, device=device, **shape).check()


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "shape",
    [
        {"head_dim": 64},
        {"head_dim": 96, "num_kv_heads": 1, "block_size": 32},
        {"head_dim": 128, "num_kv_heads": 1, "window": 20, "has_sinks": True},
        {"head_dim": 32, "window": -16, "group": 7},
    ],
    ids=str,
)
def test_numbers_of_4_bits_are_read_as_the_reference_stores_them(
    shape: dict[str, Any], dtype: torch.dtype, device: torch.device
) -> None:
    for lengths in (MIXED, DECODE):
        AttentionInput(lengths=lengths, dtype=dtype, kv_dtype=torch.uint8, device=device, **shape).check()


def test_small_weights_of_small_values_do_not_vanish(device: torch.device) -> None:
    """All but one have weights of 2^-15 and scales of 1/127: float16 would round their products by tenths."""
    case = AttentionInput(
        lengths=[(127, 1)], dtype=torch.float16, kv_dtype=torch.int8, group=1, num_kv_heads=1, device=device
    )
    keys, values = torch.zeros(2, 128, 1, 16, dtype=torch.float16)
    keys[0, :, 0], values[1:, :, 1] = 8.0, 1.0
    case.queries.zero_()
    case.queries[:, :, 0] = 15 * math.log(2) * 16**0.5 / 8
    slots = case._slots(case.batch.block_tables[0].cpu(), torch.arange(128))
    write_kv(case.layer_kv, keys.to(device), values.to(device), slots.to(device))
    found = float(case.attend()[0, 1])
    assert found == pytest.approx(127 * 2**-15 / (1 + 127 * 2**-15), rel=0.004)


@pytest.mark.parametrize("window", [1, 2, 15, 16, 17, 33, 200])
@pytest.mark.parametrize("lengths", [[(9, 29), (60, 2)], DECODE], ids=["mixed", "decode"])
def test_windows_hide_what_lies_before_them(window: int, lengths: Lengths, device: torch.device) -> None:
    AttentionInput(lengths=lengths, window=window, num_kv_heads=1, device=device).check()


@pytest.mark.parametrize("first", [1, 20])
@pytest.mark.parametrize(
    "lengths", [[(0, 37), (60, 2), (0, 1)], [(70, 1), (0, 1), (31, 1)]], ids=["mixed", "decode"]
)
def test_nobody_but_themselves_sees_the_first_tokens(
    first: int, lengths: Lengths, device: torch.device
) -> None:
    AttentionInput(lengths=lengths, first=first, num_kv_heads=1, device=device).check()


@pytest.mark.parametrize("chunk", [1, 16, 24, 50])
@pytest.mark.parametrize("lengths", [[(9, 29), (60, 2)], DECODE], ids=["mixed", "decode"])
def test_chunks_are_apart(chunk: int, lengths: Lengths, device: torch.device) -> None:
    AttentionInput(lengths=lengths, window=-chunk, num_kv_heads=1, device=device).check()


@pytest.mark.parametrize("window", [0, 20])
@pytest.mark.parametrize("group", [1, 8])
@pytest.mark.parametrize("lengths", [MIXED, DECODE, [(150, 1)]], ids=["mixed", "decode", "segments"])
def test_a_sink_has_a_share_of_the_weights(
    lengths: Lengths, group: int, window: int, device: torch.device
) -> None:
    """However many segments a context has, it has one."""
    AttentionInput(lengths=lengths, group=group, window=window, has_sinks=True, device=device).check()


def test_sinks_beside_a_quantized_cache(device: torch.device) -> None:
    AttentionInput(
        lengths=MIXED, dtype=torch.float16, kv_dtype=torch.int8, has_sinks=True, device=device
    ).check()


@pytest.mark.parametrize("lengths", [[(150, 1), (99, 2)], [(70, 20)]], ids=["decode", "prefill"])
def test_a_tile_may_begin_with_blocks_that_the_window_has_left(
    lengths: Lengths, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tilings, "TILE_BYTES", 64 * 16 * 4)
    AttentionInput(lengths=lengths, window=20, num_kv_heads=1, device=device).check()


def test_hopper_has_wider_tiles_of_keys(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Where two warp groups share them, and there are registers for the scores."""
    monkeypatch.setattr(tilings, "TILE_BYTES", 64 * 16 * 4)
    monkeypatch.setattr(tilings, "PREFILL_TOKENS", 40)
    hopper, blackwell = Chip(8, TensorCores.WGMMA, 227 << 10), Chip(8, TensorCores.TCGEN05, 227 << 10)
    case = AttentionInput(lengths=[(150, 50), (3, 20)], num_kv_heads=1, device=device)
    workspace = case.workspace(chip=hopper)
    assert (workspace.prefill_tiling(70).tile, workspace.prefill_tiling(30).tile) == (128, 64)
    assert case.workspace(chip=blackwell).prefill_tiling(70).tile == 64
    assert case.workspace().prefill_tiling(70).tile == 32
    case.check(workspace)


@pytest.mark.parametrize("block_size", [16, 32, 48])
def test_blocks_need_not_be_tiles(block_size: int, device: torch.device) -> None:
    AttentionInput(lengths=[(50, 12), (100, 1)], block_size=block_size, num_kv_heads=1, device=device).check()


@pytest.mark.parametrize("num_queries", [1, 2, 5, 8, 16])
def test_drafts_are_verified_in_segments(num_queries: int, device: torch.device) -> None:
    case = AttentionInput(
        lengths=[(75, num_queries), (0, num_queries), (20, 1)], num_kv_heads=1, device=device
    )
    workspace = case.workspace(max_decode_queries=num_queries)
    case.check(workspace, num_queries)
    assert workspace.segments[0].first_items[1] > 2


@pytest.mark.parametrize("seed", range(4))
def test_segments_may_end_in_any_order(
    seed: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever program is the last, it leaves the same bits, and the counters to the next layer."""
    case = AttentionInput(lengths=[(150, 1), (3, 1), (99, 2), (0, 1)], has_sinks=True, device=device)
    workspace = case.workspace(max_decode_queries=2, chip=Chip(20))
    expected = case.attend(workspace)
    assert_within(expected, case.expected())
    _shuffle_programs(monkeypatch, random.Random(seed))
    for _ in range(2):
        workspace.segment_outputs.fill_(torch.nan)
        assert torch.equal(case.attend(workspace), expected)
    assert workspace.segments[0].first_items.diff().tolist()[:4] == [10, 1, 7, 1]


def _shuffle_programs(monkeypatch: pytest.MonkeyPatch, generator: random.Random) -> None:
    """From now on the interpreter runs the programs of each grid in an order of its own, as a GPU does anyway."""
    set_grid_idx, order = interpreter_builder.set_grid_idx, list[tuple[int, int]]()

    def set_other(x: int, y: int, z: int) -> None:
        if x == y == z == 0:
            width, height, _ = interpreter_builder.grid_dim
            order[:] = [(i, j) for i in range(width) for j in range(height)]
            generator.shuffle(order)
        set_grid_idx(*order.pop(), z)

    monkeypatch.setattr(interpreter_builder, "set_grid_idx", set_other)


def test_few_queries_of_a_mixed_batch_are_cut_into_segments_too(device: torch.device) -> None:
    case = AttentionInput(lengths=[(0, 30), (90, 3)], num_kv_heads=1, device=device)
    workspace = case.workspace(max_decode_queries=3)
    case.check(workspace)
    first_items = workspace.segments[0].first_items
    assert first_items[1] == 0
    assert first_items[2] > 2


@pytest.mark.parametrize("kv_dtype", [None, torch.int8, torch.uint8])
def test_it_agrees_with_the_reference(kv_dtype: torch.dtype | None, device: torch.device) -> None:
    case = AttentionInput(lengths=MIXED, head_dim=32, kv_dtype=kv_dtype, device=device)
    num_scales, floats = case.num_kv_heads * case.block_size, case.layer_kv
    if kv_dtype is not None:
        floats = floats.view(torch.float32)[..., -num_scales:]
    floats.nan_to_num_()
    attended = PagedAttention(case.batch, case.shape)(case.queries.to(device), case.layer_kv, 0)
    for found in (case.attend(), attended):
        assert_within(found, case.expected())


@settings(max_examples=examples(8))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 50), st.integers(1, 20)), min_size=1, max_size=3),
    group=st.sampled_from([1, 3, 4]),
    window=st.sampled_from([0, 0, 5, 18, -7]),
    max_decode_queries=st.integers(1, 16),
    num_sms=st.sampled_from([1, 3, 20]),
    seed=st.integers(0, 99),
)
def test_any_step(
    lengths: Lengths,
    group: int,
    window: int,
    max_decode_queries: int,
    num_sms: int,
    seed: int,
    device: torch.device,
) -> None:
    case = AttentionInput(
        lengths=lengths,
        group=group,
        num_kv_heads=1,
        window=window,
        seed=seed,
        device=device,
    )
    workspace = case.workspace(
        max_decode_queries=max_decode_queries,
        chip=Chip(num_sms),
    )
    case.check(workspace)


@pytest.mark.parametrize(("group", "max_decode_queries"), [(2, 1), (2, 16), (3, 4)])
def test_rows_of_unused_seats_and_of_no_sequence_are_0(
    group: int, max_decode_queries: int, device: torch.device
) -> None:
    """A graph's batch: a seat with a row and no context, one with neither, and rows beyond the last sequence."""
    case = AttentionInput(lengths=[(40, 1), (11, 3)], group=group, num_kv_heads=1, device=device)
    expected = case.expected()
    batch = case.batch
    num_unused = 7
    end = len(case.queries)
    case.queries = torch.cat((case.queries, torch.randn(num_unused, group, 16)))
    case.batch = replace(
        batch,
        positions=torch.cat((batch.positions, batch.positions.new_zeros(num_unused))),
        query_starts=torch.cat((batch.query_starts, int32([end + 1, end + 1]).to(device))),
        context_lens=torch.cat((batch.context_lens, int32([0, 0]).to(device))),
        block_tables=torch.cat((batch.block_tables, torch.zeros_like(batch.block_tables))),
    )
    workspace = Workspace(
        case.shape, case.dtype, group, 4, device, max_decode_queries=max_decode_queries, chip=Chip(8)
    )
    found = case.attend(workspace, max_queries=3)
    assert_within(found[:end], expected)
    assert not found[end:].any()


def test_one_workspace_serves_steps_and_layers_in_any_order(device: torch.device) -> None:
    steps = [(MIXED, 0), (DECODE, 20), (MIXED, 20), (DECODE, 0), ([(0, 20)], 0)]
    cases = [AttentionInput(lengths=ls, window=window, num_kv_heads=1, device=device) for ls, window in steps]
    workspace = cases[0].workspace(windows=(0, 20), max_decode_queries=2)
    for case in cases:
        case.check(workspace)


def test_queries_may_lie_between_keys_and_values(device: torch.device) -> None:
    case = AttentionInput(lengths=[(9, 4), (40, 1)], device=device)
    expected = case.expected()
    qkv = torch.randn(5, 8, 16)
    qkv[:, :4] = case.queries
    case.queries = qkv[:, :4]
    assert_within(case.attend(), expected)


def test_fewer_sequences_are_cut_into_more_segments(device: torch.device) -> None:
    alone = AttentionInput(lengths=[(90, 1)], num_kv_heads=1, device=device)
    crowd = AttentionInput(lengths=[(90, 1)] * 9, num_kv_heads=1, device=device)
    counts = []
    for case in (alone, crowd):
        workspace = case.workspace()
        case.attend(workspace)
        counts.append(int(workspace.segments[0].first_items[1]))
    assert counts[0] > counts[1]


@settings(max_examples=examples(25))
@given(
    lengths=st.lists(st.tuples(st.integers(0, 5000), st.integers(0, 6)), min_size=1, max_size=40),
    window=st.sampled_from([0, 100]),
    num_sms=st.integers(1, 132),
)
def test_every_sequence_has_its_segments_and_no_item_is_dealt_twice(
    lengths: Lengths, window: int, num_sms: int, device: torch.device
) -> None:
    shape = KVShape(num_kv_heads=2, head_dim=16, block_size=16)
    workspace = Workspace(
        shape,
        torch.float32,
        8,
        40,
        device,
        windows=(window,),
        chip=Chip(num_sms),
    )
    starts = [sum(new for _, new in lengths[:row]) for row in range(len(lengths) + 1)]
    lens = int32([done + new for done, new in lengths]).to(device)
    tables = torch.zeros(len(lengths), 1, dtype=torch.int32, device=device)
    tokens = torch.zeros(starts[-1], dtype=torch.int32, device=device)
    batch = Batch(tokens, tokens, int32(starts).to(device), lens, tables, tokens[:0])
    TritonAttention(replace(batch, max_query_len=6), shape, workspace)
    num_items = workspace.num_items(len(lengths))
    segments = workspace.segments[window]
    counts = segments.first_items[: len(lengths) + 1].diff().tolist()
    owners = segments.item_sequences[:num_items].tolist()
    expected = [row for row, count in enumerate(counts) for _ in range(count)]
    assert owners == expected + [-1] * (num_items - len(expected))
    assert [count > 0 for count in counts] == [0 < new <= 4 for _, new in lengths]
