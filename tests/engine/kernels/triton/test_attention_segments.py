"""How contexts of decoding sequences are cut, with the figures of an H100."""

from __future__ import annotations

import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from penstock.engine.kernels.batch import blank_batch
from penstock.engine.kernels.kv_cache import KVShape
from penstock.engine.kernels.triton import attention_segments as segmenting
from penstock.engine.kernels.triton.attention import TritonAttention, Workspace
from penstock.engine.kernels.triton.attention_tiling import Chip, TensorCores
from tests.few import examples

H100 = Chip(132, TensorCores.WGMMA, 227 << 10)
WAVE = 2 * 132 // 8
"""Decode programs of one key-value head that run at once."""
LLAMA = KVShape(num_kv_heads=8, head_dim=128, block_size=16)


def workspace_bytes(workspace: Workspace) -> int:
    """The bytes of device memory that a workspace takes."""
    plans = workspace.segments.values()
    tables = [t for s in plans for t in (s.item_sequences, s.first_items, s.first_stored)]
    own = workspace.segment_outputs, workspace.segment_scales, workspace.num_stored
    return sum(t.nbytes for t in (*own, *tables))


def planned(
    contexts: list[int], device: torch.device, *, num_padding: int = 0
) -> tuple[list[int], Workspace]:
    """How many segments each sequence has, of which some without queries are added."""
    workspace = Workspace(LLAMA, torch.float16, 32, len(contexts) + num_padding, device, chip=H100)
    tables = torch.zeros(len(contexts) + num_padding, 1, dtype=torch.int32)
    num_tokens = [1] * len(contexts) + [0] * num_padding
    batch = blank_batch(num_tokens, contexts + [0] * num_padding, tables).to(device)
    TritonAttention(batch, LLAMA, workspace)
    return workspace.segments[0].first_items.diff().tolist(), workspace


def test_a_long_context_among_short_ones_is_cut_as_if_all_were_one(device: torch.device) -> None:
    """63k tokens in a wave of 33 programs for each head are about 2k tokens for each."""
    counts, workspace = planned([32 << 10] + [1 << 10] * 31, device)
    total = (32 << 10) + 31 * (1 << 10)
    assert counts == [17] + [1] * 31
    assert 0.9 * total / WAVE < (32 << 10) / counts[0] <= total / WAVE + workspace.decode_tiling(1).tile
    assert workspace.num_items(32) == 32 + WAVE


def test_one_context_has_all_of_the_wave(device: torch.device) -> None:
    assert planned([32 << 10], device)[0] == [32]
    assert planned([100 << 10], device)[0] == [WAVE]


def test_sequences_without_queries_change_no_cut(device: torch.device) -> None:
    contexts = [32 << 10, 5000, 1 << 10, 77]
    counts, _ = planned(contexts, device)
    assert planned(contexts, device, num_padding=9)[0] == counts + [0] * 9


@settings(max_examples=examples(20))
@given(st.lists(st.integers(1, 1 << 17), min_size=1, max_size=32))
def test_no_segment_is_longer_than_its_share(device: torch.device, contexts: list[int]) -> None:
    counts, workspace = planned(contexts, device)
    tile = workspace.decode_tiling(1).tile
    tiles = [-(-context // tile) for context in contexts]
    share = max(segmenting.MIN_SEGMENT_TILES, -(-sum(tiles) // WAVE))
    assert all(-(-length // count) <= share for length, count in zip(tiles, counts, strict=True))
    assert sum(counts) <= workspace.num_items(len(contexts))


def test_the_workspace_of_256_sequences_is_small() -> None:
    """In bytes, for the heads of an 8 B Llama on an H100."""
    meta = torch.device("meta")
    assert workspace_bytes(Workspace(LLAMA, torch.bfloat16, 32, 256, meta, chip=H100)) < 20 << 20
    drafts = Workspace(LLAMA, torch.bfloat16, 32, 256, meta, max_decode_queries=5, chip=H100)
    assert workspace_bytes(drafts) < 40 << 20
